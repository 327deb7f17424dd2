//! System calls of the cache on Linux: locks of bytes, which end with their process, and holes in files.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// How long a reader waits for another one that makes no progress before it counts that one as suspended: as long as a
/// request may take without a byte.
pub(super) const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 30 });

/// Locks bytes of a file for this open file; `false` if another one has any of them.
pub(super) fn try_lock(file: &File, bytes: Range<u64>) -> Result<bool> {
    match control(file, libc::F_OFD_SETLK, libc::F_WRLCK, bytes) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::PermissionDenied) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Waits for the lock of a byte, which others hold only briefly. If it takes longer, the error is `TimedOut`.
pub(super) fn lock(file: &File, byte: u64) -> Result<()> {
    let start = Instant::now();
    while !try_lock(file, byte..byte + 1)? {
        if start.elapsed() > PATIENCE {
            let seconds = PATIENCE.as_secs();
            let reason = format!(
                "another process has held it for {seconds} s; if it is suspended, resume it (kill -CONT) or end it"
            );
            return Err(Error::new(ErrorKind::TimedOut, reason));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// Releases the locks of bytes.
pub(super) fn unlock(file: &File, bytes: Range<u64>) -> Result<()> {
    control(file, libc::F_OFD_SETLK, libc::F_UNLCK, bytes).map(drop)
}

/// Whether another open file has the lock of a byte.
pub(super) fn is_locked(file: &File, byte: u64) -> Result<bool> {
    Ok(control(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte..byte + 1)?.l_type
        != libc::F_UNLCK as libc::c_short)
}

fn control(file: &File, command: libc::c_int, kind: libc::c_int, bytes: Range<u64>) -> Result<libc::flock> {
    // SAFETY: all bytes 0 are a valid `flock`, and open file descriptions need its process id to be 0.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = bytes.start as libc::off_t;
    lock.l_len = (bytes.end - bytes.start) as libc::off_t;
    // SAFETY: the descriptor is open, and the kernel reads and writes only `lock`, which outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) } {
        -1 => Err(Error::last_os_error()),
        _ => Ok(lock),
    }
}

/// Allocates disk space for a range, if the file system can: a full disk is an error here, but kills a process that
/// writes to a mapped hole.
pub(super) fn allocate(file: &File, bytes: Range<u64>) -> Result<()> {
    match fallocate(file, 0, bytes) {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
        outcome => outcome,
    }
}

/// Frees the disk space of a range, which then reads as zeros.
pub(super) fn punch_hole(file: &File, bytes: Range<u64>) -> Result<()> {
    fallocate(file, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, bytes)
}

fn fallocate(file: &File, mode: libc::c_int, bytes: Range<u64>) -> Result<()> {
    let (start, length) = (bytes.start as libc::off_t, (bytes.end - bytes.start) as libc::off_t);
    loop {
        // SAFETY: the descriptor is open; no memory is passed.
        if unsafe { libc::fallocate(file.as_raw_fd(), mode, start, length) } == 0 {
            return Ok(());
        }
        let error = Error::last_os_error();
        if error.kind() != ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn a_lock_is_of_its_bytes_and_of_one_open_file() {
        let dir = tempfile::tempdir().unwrap();
        let open = || File::options().create(true).append(true).open(dir.path().join("lock")).unwrap();
        let (ours, theirs) = (open(), open());
        assert!(try_lock(&ours, 5..8).unwrap() && try_lock(&ours, 5..8).unwrap());
        assert!(!try_lock(&theirs, 4..6).unwrap() && !try_lock(&theirs, 7..9).unwrap());
        assert!(try_lock(&theirs, 8..9).unwrap());
        assert!(is_locked(&theirs, 5).unwrap() && !is_locked(&ours, 5).unwrap());
        unlock(&ours, 5..8).unwrap();
        lock(&theirs, 5).unwrap();
        drop(theirs);
        assert!(try_lock(&ours, 8..9).unwrap());
    }

    #[test]
    fn a_hole_reads_as_zeros_and_takes_no_space() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 1 << 18], 0).unwrap();
        let before = file.metadata().unwrap().blocks();
        punch_hole(&file, 1 << 16..3 << 16).unwrap();
        assert!(file.metadata().unwrap().blocks() < before);
        let mut bytes = [1; 4];
        file.read_exact_at(&mut bytes, (1 << 16) - 2).unwrap();
        assert_eq!(bytes, [7, 7, 0, 0]);
        assert_eq!(file.metadata().unwrap().len(), 1 << 18);
    }
}
