//! Explains SIGBUS, which silently ends a process that reads a mapped file after it was truncated or its disk failed.

use std::ffi::{c_int, c_void};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static EXPLAINED: Once = Once::new();
/// Whether a thread is about to end the process.
static ENDING: AtomicBool = AtomicBool::new(false);
const STANDARD_ERROR: c_int = 2;
/// The exit code of errors in a user's files.
const EXIT_CODE: c_int = 2;
const BEGINNING: &[u8] = b"electra-fast: error: ";
const REASON: &[u8] =
    b": cannot be read where it is mapped into memory: it was cut off while it was in use, or its disk \
is full or failing; restore the file from a copy and run again\n";

/// Makes the process name the file before it ends. An existing handler is left in place.
pub(super) fn explain() {
    // SAFETY: the structures are plain data, of which zeros are a valid value; the handler makes system calls only.
    EXPLAINED.call_once(|| unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut action) != 0
            || action.sa_sigaction != libc::SIG_DFL
        {
            return;
        }
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
    });
}

/// Runs in the thread that read the page. If the page belongs to no file, the default action is restored, and the same
/// fault ends the process.
extern "C" fn handle(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the system passes a valid structure, and all calls are async-signal-safe.
    unsafe {
        while ENDING.swap(true, Ordering::Relaxed) {
            libc::pause();
        }
        let maps = libc::open(c"/proc/self/maps".as_ptr(), libc::O_RDONLY);
        let (mut line, mut length, mut byte) = ([0_u8; 4_600], 0, 0_u8); // for the fields and a path of up to 4,096 bytes
        while libc::read(maps, (&raw mut byte).cast(), 1) == 1 {
            if byte != b'\n' {
                line[length.min(line.len() - 1)] = byte;
                length += 1;
                continue;
            }
            let line = &line[..length.min(line.len())];
            length = 0;
            if (*info).si_code == libc::BUS_ADRERR
                && let Some(path) = path_at((*info).si_addr() as usize, line)
            {
                for text in [BEGINNING, path, REASON] {
                    libc::write(STANDARD_ERROR, text.as_ptr().cast(), text.len());
                }
                libc::_exit(EXIT_CODE);
            }
        }
        libc::signal(libc::SIGBUS, libc::SIG_DFL);
    }
}

/// The path in a line of proc(5)'s maps, such as `7f00-7f10 r--s 00000000 08:02 1234   /path`, if the address is in it.
fn path_at(address: usize, line: &[u8]) -> Option<&[u8]> {
    let mut ends = line.split(|&byte| byte == b'-' || byte == b' ').map(hexadecimal);
    let (start, end) = (ends.next()??, ends.next()??);
    let path = line.iter().position(|&byte| byte == b'/').map(|at| &line[at..]);
    path.filter(|_| (start..end).contains(&address))
}

fn hexadecimal(digits: &[u8]) -> Option<usize> {
    digits
        .iter()
        .try_fold(0_usize, |value, &digit| Some(value << 4 | char::from(digit).to_digit(16)? as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_an_address_is_found() {
        let line = b"7f0a2000-7f0a4000 r--s 00000000 08:02 173521     /data/a b-c.tokens";
        assert_eq!(path_at(0x7f0a_3fff, line), Some(&b"/data/a b-c.tokens"[..]));
        assert_eq!(path_at(0x7f0a_4000, line), None);
        assert_eq!(path_at(0x7f0a_3fff, b"7f0a2000-7f0a4000 rw-p 00000000 00:00 0"), None);
        assert_eq!(path_at(0, b"nonsense"), None);
    }
}
