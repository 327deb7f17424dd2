//! Leases: who is working in a folder, without locks, which many network file systems emulate or lack.
//!
//! A lease is a file that is created exclusively and names its process. A thread rewrites it every few
//! seconds; how old that makes it is judged by the modification time of a file written now on the same file
//! system, so that clocks need not agree. Leases keep two runs from doing the same work and from taking a
//! folder away from each other. Nothing else depends on them: files appear complete or not at all, under names
//! that say what is in them.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use serde::{Deserialize, Serialize};

use super::process::{Process, nonce};
use crate::error::{Error, Result};
use crate::format::write_error;

/// How often a lease is rewritten.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// A lease that was not rewritten for this long has lost its process. Longer than network file systems cache
/// attributes.
const EXPIRY: Duration = Duration::from_secs(60);

/// The content of a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    #[serde(flatten)]
    process: Process,
    nonce: u64,
}

/// A lease that is held until it is dropped.
#[derive(Debug)]
pub(super) struct Lease {
    path: PathBuf,
    holder: Holder,
    heart: Option<(Sender<()>, JoinHandle<()>)>,
}

/// The state of somebody's lease.
enum Found {
    Gone,
    Held(String),
    /// The lease's content, to recognize it.
    Abandoned(Vec<u8>),
}

impl Lease {
    /// Takes the lease at `path`, unless its holder may be alive.
    pub fn take(path: &Path) -> Result<Self> {
        let holder = Holder { process: Process::current(), nonce: nonce() };
        let bytes = serde_json::to_vec(&holder).map_err(|e| Error::io(path, e.into()))?;
        loop {
            match File::options().write(true).create_new(true).open(path) {
                Ok(file) => return Self::write(path, file, holder, bytes),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(write_error(path, error)),
            }
            match examine(path)? {
                Found::Gone => {}
                Found::Held(by) => return Err(occupied(path, &by)),
                Found::Abandoned(said) => remove_abandoned(path, &said)?,
            }
        }
    }

    fn write(path: &Path, mut file: File, holder: Holder, bytes: Vec<u8>) -> Result<Self> {
        if let Err(error) = file.write_all(&bytes).and_then(|()| file.sync_all()) {
            let _ = std::fs::remove_file(path);
            return Err(write_error(path, error));
        }
        let (stop, stopped) = bounded::<()>(0);
        let beat = move || {
            while stopped.recv_timeout(HEARTBEAT) == Err(RecvTimeoutError::Timeout) {
                // Written, not touched, so that the server sets the time. If it fails, the lease expires.
                let _ = file.write_all_at(&bytes, 0).and_then(|()| file.sync_all());
            }
        };
        let thread = std::thread::Builder::new().name("lease".to_owned()).spawn(beat);
        let thread = thread.map_err(|error| Error::io(path, error))?;
        Ok(Self { path: path.to_owned(), holder, heart: Some((stop, thread)) })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.holder.process.pid != std::process::id() {
            // A forked child has neither the thread nor the lease.
            std::mem::forget(self.heart.take());
            return;
        }
        if let Some((stop, thread)) = self.heart.take() {
            drop(stop);
            let _ = thread.join();
        }
        let said = std::fs::read(&self.path).unwrap_or_default();
        if serde_json::from_slice::<Holder>(&said).is_ok_and(|found| found == self.holder) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Fails if the lease at `path` is held.
pub(super) fn refuse_held(path: &Path) -> Result<()> {
    match examine(path)? {
        Found::Held(by) => Err(occupied(path, &by)),
        Found::Gone | Found::Abandoned(_) => Ok(()),
    }
}

fn examine(path: &Path) -> Result<Found> {
    // Opened, not only looked up, which makes a network file system ask the server.
    let mut file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::Gone),
        file => file.map_err(|e| Error::io(path, e))?,
    };
    let mut said = Vec::new();
    file.read_to_end(&mut said).map_err(|e| Error::io(path, e))?;
    let holder = serde_json::from_slice::<Holder>(&said).ok();
    if let Some(Holder { process, .. }) = &holder
        && process.is_certainly_dead()
    {
        return Ok(Found::Abandoned(said));
    }
    let is_neighbor = holder.as_ref().is_some_and(|holder| holder.process.is_neighbor());
    let written = file.metadata().and_then(|found| found.modified()).map_err(|e| Error::io(path, e))?;
    let age = now_beside(path)?.duration_since(written).unwrap_or_default();
    if age > EXPIRY && !is_neighbor {
        return Ok(Found::Abandoned(said));
    }
    let by = holder.map(|Holder { process: Process { pid, host, .. }, .. }| match is_neighbor {
        true => format!("process {pid} on {host}"),
        false => format!("process {pid} on {host}, unless it was killed less than a minute ago"),
    });
    Ok(Found::Held(by.unwrap_or_else(|| "a process that has just begun".to_owned())))
}

/// The time by the clock that stamps the files beside this one.
fn now_beside(path: &Path) -> Result<std::time::SystemTime> {
    let probe = path.with_file_name(format!(".tmp-{}-now", Process::current().attempt()));
    let written = File::create_new(&probe).and_then(|mut file| {
        file.write_all(b"now").and_then(|()| file.sync_all())?;
        file.metadata()?.modified()
    });
    let _ = std::fs::remove_file(&probe);
    written.map_err(|e| write_error(&probe, e))
}

/// Removes an abandoned lease. If several processes try, one succeeds; if it removes a lease that another process has
/// just taken, it puts it back.
fn remove_abandoned(path: &Path, said: &[u8]) -> Result<()> {
    let aside = path.with_file_name(format!(".tmp-{}-lease", Process::current().attempt()));
    match std::fs::rename(path, &aside) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        moved => moved.map_err(|e| write_error(path, e))?,
    }
    if std::fs::read(&aside).map_err(|e| Error::io(&aside, e))? != said {
        // The link fails if a third process was faster; then the one in between is not warned, but nothing is lost.
        let _ = std::fs::hard_link(&aside, path);
    }
    std::fs::remove_file(&aside).map_err(|e| write_error(&aside, e))
}

fn occupied(path: &Path, by: &str) -> Error {
    let dir = path.parent().unwrap_or(path).display();
    Error::Input(format!(
        "{dir}: another prepare is running in this folder ({by}); wait for it or choose another --out"
    ))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    /// A lease of a process on another host, last rewritten this many seconds ago.
    fn forge(path: &Path, seconds_ago: u64) {
        let ours = serde_json::to_value(Holder { process: Process::current(), nonce: 1 }).unwrap();
        let mut theirs = ours;
        (theirs["host"], theirs["machine"]) = ("elsewhere".into(), "0000000000000000".into());
        std::fs::write(path, theirs.to_string()).unwrap();
        let then = SystemTime::now() - Duration::from_secs(seconds_ago);
        File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
    }

    #[test]
    fn one_holds_it_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lease");
        let lease = Lease::take(&path).unwrap();
        let error = Lease::take(&path).unwrap_err().to_string();
        let pid = std::process::id();
        assert!(error.contains(&format!("another prepare is running in this folder (process {pid} on ")));
        assert!(refuse_held(&path).is_err());
        drop(lease);
        assert!(!path.exists());
        drop(Lease::take(&path).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_old_lease_of_another_host_is_taken_over_and_a_fresh_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lease");
        forge(&path, 50);
        assert!(Lease::take(&path).unwrap_err().to_string().contains("on elsewhere, unless it was killed"));
        forge(&path, 70);
        refuse_held(&path).unwrap();
        let lease = Lease::take(&path).unwrap();
        forge(&path, 0); // somebody took it from us while we were suspended
        drop(lease);
        assert!(path.exists());
        std::fs::write(&path, "").unwrap(); // its process has only just created it
        assert!(Lease::take(&path).unwrap_err().to_string().contains("just begun"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_dead_process_of_this_host_frees_it_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lease");
        let mut dead = serde_json::to_value(Holder { process: Process::current(), nonce: 1 }).unwrap();
        dead["started"] = 1.into();
        std::fs::write(&path, dead.to_string()).unwrap();
        drop(Lease::take(&path).unwrap());
    }

    #[test]
    fn of_two_takers_one_gets_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lease");
        for _ in 0..100 {
            forge(&path, 100);
            let start = std::sync::Barrier::new(2);
            let take = || {
                start.wait();
                Lease::take(&path).ok()
            };
            let leases: Vec<Lease> = std::thread::scope(|scope| {
                let takers = [scope.spawn(take), scope.spawn(take)];
                takers.into_iter().filter_map(|taker| taker.join().unwrap()).collect()
            });
            assert_eq!(leases.len(), 1);
        }
    }

    #[test]
    fn a_lease_taken_by_another_meanwhile_is_put_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lease");
        forge(&path, 100);
        let said = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let lease = Lease::take(&path).unwrap();
        remove_abandoned(&path, &said).unwrap(); // what the slower of two takers does
        assert!(Lease::take(&path).is_err());
        drop(lease);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
