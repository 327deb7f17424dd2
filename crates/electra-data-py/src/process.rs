//! Values that belong to the process that made them, and what ends it: SIGBUS.
//!
//! A fork copies memory but not threads: in the child, locks held by other threads of the parent stay locked,
//! values that they were initializing stay incomplete, and joining them never returns.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
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

const EXIT_CODE: i32 = 2;
const MESSAGE: &[u8] =
    b"electra-fast: error: a file cannot be read where it is mapped into memory: it was cut off while it was in use, \
or its disk is full or failing; `electra-fast verify` finds it in a corpus: restore it and run again\n";

/// Makes SIGBUS end this process with a message, unless it has a handler. For programs that own their process.
#[pyfunction]
pub(crate) fn explain_bus_errors() {
    // SAFETY: the structures are plain data, of which zeros are a valid value; the handler makes system calls only.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut action) == 0
            && action.sa_sigaction == libc::SIG_DFL
        {
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
        }
    }
}

/// Runs in the thread that read the page. If no page is missing, the default action ends the process by the same fault.
extern "C" fn handle(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    static ENDING: AtomicBool = AtomicBool::new(false);
    // SAFETY: the system passes a valid structure, and all calls are async-signal-safe.
    unsafe {
        if (*info).si_code != libc::BUS_ADRERR {
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
            return;
        }
        while ENDING.swap(true, Ordering::Relaxed) {
            libc::pause();
        }
        libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len());
        libc::_exit(EXIT_CODE);
    }
}
