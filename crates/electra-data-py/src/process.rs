//! Values that belong to the process that created them, and the handler of SIGBUS.
//!
//! A fork copies memory but not threads: in the child, locks held by other threads of the parent stay locked,
//! values that these threads were initializing stay incomplete, and joining them never returns.

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

    /// The value of this process. In a forked child, `reopen` creates it from the parent's value and may release the GIL.
    pub fn get(&self, py: Python<'_>, reopen: impl FnOnce(&T) -> PyResult<T>) -> PyResult<Arc<T>> {
        let parent = match &*self.lock(py) {
            current if current.process == std::process::id() => return Ok(Arc::clone(&current.value)),
            parent => Arc::clone(&parent.value),
        };
        let new = Owned::new(reopen(&parent)?);
        let mut current = self.lock(py);
        if current.process != new.process {
            *current = new; // unless another thread was faster
        }
        Ok(Arc::clone(&current.value))
    }

    /// Both the lock and a fork require the GIL, so a child never finds the lock taken.
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
        // Otherwise it leaks: dropping the parent's value could wait for threads that do not exist in this process.
    }
}

const EXIT_CODE: i32 = 2;
const MESSAGE: &[u8] =
    b"electra-fast: error: a memory-mapped file cannot be read: it was truncated while in use, or its disk is full \
or failing; `electra-fast verify` finds it in a corpus; restore the file and run again\n";

/// Ends this process with a message after SIGBUS, unless the signal has a handler. For programs that own their process.
#[pyfunction]
pub(crate) fn explain_bus_errors() {
    // SAFETY: the structures are plain data that may be zero; the handler makes only system calls.
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

/// Runs in the thread that read the page. If no page is missing, the same fault ends the process by the default action.
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
