//! SIGBUS, which silently ends a process that reads a mapped file after that was cut off or its disk failed.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;

/// The exit code of errors in a user's files.
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
