//! Values that belong to the process that made them.
//!
//! A fork copies memory but not threads: in the child, locks held by other threads of the parent stay locked,
//! values that they were initializing stay incomplete, and joining them never returns.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;

/// A value that a forked child opens again on first use.
pub(crate) struct PerProcess<T> {
    current: Mutex<Owned<T>>,
}

impl<T> PerProcess<T> {
    pub fn new(value: T) -> Self {
        Self { current: Mutex::new(Owned::new(value)) }
    }

    /// The value of this process. In a forked child, `reopen` makes it from the parent's.
    ///
    /// Holding the GIL is required to take the lock and to fork, so a child never finds it locked.
    pub fn get(&self, _py: Python<'_>, reopen: impl FnOnce(&T) -> PyResult<T>) -> PyResult<Arc<T>> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.is_foreign() {
            *current = Owned::new(reopen(&current.value)?);
        }
        Ok(current.value.clone())
    }
}

struct Owned<T> {
    process: u32,
    value: Arc<T>,
}

impl<T> Owned<T> {
    fn new(value: T) -> Self {
        Self { process: std::process::id(), value: Arc::new(value) }
    }

    fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.is_foreign() {
            // Leak one reference: dropping the parent's value could wait for its threads.
            std::mem::forget(self.value.clone());
        }
    }
}
