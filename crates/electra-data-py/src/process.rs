//! Values that belong to the process that made them.
//!
//! A fork copies memory but not threads: in the child, locks held by other threads of the parent stay locked,
//! values that they were initializing stay incomplete, and joining them never returns.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

/// A value that a forked child opens again on first use.
pub(crate) struct PerProcess<T: Send + Sync> {
    current: Mutex<Owned<T>>,
}

impl<T: Send + Sync> PerProcess<T> {
    pub fn new(value: T) -> Self {
        Self { current: Mutex::new(Owned::new(value)) }
    }

    /// The value of this process. In a forked child, `reopen` makes it from the parent's and may release the GIL.
    pub fn get(&self, py: Python<'_>, reopen: impl FnOnce(&T) -> PyResult<T>) -> PyResult<Arc<T>> {
        let parent = match &*self.lock(py) {
            ours if ours.process == std::process::id() => return Ok(Arc::clone(&ours.value)),
            theirs => Arc::clone(&theirs.value),
        };
        let new = Owned::new(reopen(&parent)?);
        let mut current = self.lock(py);
        if current.process != new.process {
            *current = new; // unless another thread was faster
        }
        Ok(Arc::clone(&current.value))
    }

    /// Holding the GIL is required to take the lock and to fork, so a child never finds it locked.
    fn lock(&self, _py: Python<'_>) -> MutexGuard<'_, Owned<T>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Owned<T: Send + Sync> {
    process: u32,
    value: ManuallyDrop<Arc<T>>,
}

impl<T: Send + Sync> Owned<T> {
    fn new(value: T) -> Self {
        Self { process: std::process::id(), value: ManuallyDrop::new(Arc::new(value)) }
    }
}

impl<T: Send + Sync> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // SAFETY: nothing uses the value afterwards.
            let value = unsafe { ManuallyDrop::take(&mut self.value) };
            Python::attach(|py| py.detach(|| drop(value))); // it may wait for its threads
        }
        // Otherwise it leaks: dropping the parent's value could wait for threads that are not here.
    }
}
