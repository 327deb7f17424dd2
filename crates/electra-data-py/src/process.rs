//! Values that belong to the process that made them.
//!
//! A fork copies memory but no threads: in the child, locks that the parent's other threads held
//! stay locked, what they were initialising stays half-made, and joining them never ends.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;

/// A value that a forked child opens anew when it first asks for it.
pub(crate) struct PerProcess<T> {
    current: Mutex<Owned<T>>,
}

impl<T> PerProcess<T> {
    pub fn new(value: T) -> Self {
        Self { current: Mutex::new(Owned::new(value)) }
    }

    /// The value of this process; in a child, `reopen` makes it from the parent's.
    ///
    /// The lock is taken with the GIL only and Python forks with the GIL only, so no child finds it locked.
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
            // One owner that never lets go: dropping the parent's value could wait for its threads.
            std::mem::forget(self.value.clone());
        }
    }
}
