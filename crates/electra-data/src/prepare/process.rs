//! Which processes work in a folder: without locks, which many network file systems emulate or lack, and without expiry.
//!
//! Each run leaves a file that names its process. A run is kept out only by one that is certainly alive, on the same
//! machine, or that it could harm. All others may share the folder: files appear complete or not at all, and runs of
//! equal fingerprints write the same bytes.

use std::ffi::CStr;
use std::io::ErrorKind::NotFound;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::place::{names_in, remove_if_exists};
use crate::error::{Error, Result};
use crate::format::write_atomically;
use crate::threads::nonce;

const PROCESS_FILE: &str = ".lock-";

/// A process, distinguished from those of other hosts, containers and boots, and from later ones with the same pid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    pub host: String,
    /// Hash of the boot's id and the namespace of process numbers, in which `pid` has a meaning; empty where the system
    /// does not provide them (macOS).
    machine: String,
    pub pid: u32,
    /// When it was started, in ticks since the boot; 0 where the system does not say.
    started: u64,
}

impl Process {
    pub fn current() -> Self {
        let pid = std::process::id();
        let (machine, started) = machine().zip(started(pid)).unwrap_or_default();
        Self { host: host(), machine, pid, started }
    }

    /// Whether it has certainly ended. `None` if this process cannot tell, because it ran on another machine.
    pub fn has_ended(&self) -> Option<bool> {
        machine().filter(|machine| *machine == self.machine)?;
        Some(self.is_over(started(self.pid)))
    }

    /// Whether it has ended, given when the process with its number was started. The system may hide processes of other
    /// users in /proc, but not whether their number is in use.
    fn is_over(&self, started: Option<u64>) -> bool {
        started.map_or_else(|| !exists(self.pid), |started| started != self.started)
    }

    /// A name for the temporary files of one attempt of this process, unique among all attempts.
    pub fn attempt(&self) -> String {
        format!("{}-{}-{}-{:016x}", self.machine, self.pid, self.started, nonce())
    }

    /// The process that made an attempt; `None` if this name does not begin with that of one.
    pub fn of_attempt(name: &str) -> Option<Self> {
        let mut parts = name.splitn(5, '-');
        let machine = parts.next().filter(|part| part.is_empty() || is_nonce(part))?.to_owned();
        let (pid, started) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        parts.next().filter(|part| is_nonce(part))?;
        Some(Self { host: String::new(), machine, pid, started })
    }
}

#[derive(Debug)]
pub(super) struct ProcessFile {
    path: PathBuf,
    pid: u32,
}

impl ProcessFile {
    /// Says that a run with this tag works in a folder. Fails if another one does, unless they do different parts.
    /// Where `may_share` is false, also if it cannot tell whether a run on another machine has ended.
    pub fn create(dir: &Path, tag: &str, may_share: bool) -> Result<Self> {
        let process = Process::current();
        let name = format!("{PROCESS_FILE}{tag}.{:016x}", nonce());
        let bytes = serde_json::to_vec(&process).map_err(|e| Error::io(dir, e.into()))?;
        write_atomically(dir, &name, &process.attempt(), &bytes)?;
        let created = Self { path: dir.join(&name), pid: process.pid };
        // Written first, then looked: of two that begin at the same time, at least one sees the other.
        for other in names_in(dir)?.iter().filter(|other| is_process_file(other) && **other != name) {
            let path = dir.join(other);
            let bytes = match std::fs::read(&path) {
                Err(error) if error.kind() == NotFound => continue,
                read => read.unwrap_or_default(),
            };
            let process = serde_json::from_slice::<Process>(&bytes).ok();
            let has_ended = process.as_ref().and_then(Process::has_ended);
            let parts = [other, &name].map(|name| name.split('.').nth(1).unwrap_or_default());
            let is_apart = parts[0] != parts[1] && parts.iter().all(|part| part.contains("-of-"));
            match has_ended {
                Some(true) => remove_if_exists(&path)?,
                Some(false) if !(may_share && is_apart) => return Err(occupied(dir, process, None)),
                None if !may_share => return Err(occupied(dir, process, Some(&path))),
                _ => {}
            }
        }
        Ok(created)
    }
}

impl Drop for ProcessFile {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            let _ = std::fs::remove_file(&self.path); // a forked child leaves it
        }
    }
}

fn occupied(dir: &Path, process: Option<Process>, unless_ended: Option<&Path>) -> Error {
    let by = process.map_or("unknown".to_owned(), |by| format!("process {} on {}", by.pid, by.host));
    let remedy = unless_ended
        .map_or(String::new(), |path| format!(", or remove {} if that has ended", path.display()));
    let message =
        format!("another prepare is running in this folder ({by}); wait for it or choose another --out");
    Error::at(dir, message + &remedy)
}

/// Whether this is the name of a [`ProcessFile`], also as older releases named it.
pub(super) fn is_process_file(file: &str) -> bool {
    let Some(rest) = file.strip_prefix(PROCESS_FILE) else { return false };
    let (tag, nonce) = rest.split_once('.').map_or((rest, None), |(tag, nonce)| (tag, Some(nonce)));
    let numbers = tag.split_once("-of-");
    nonce.is_none_or(is_nonce)
        && (tag == "all" || numbers.is_some_and(|(index, count)| is_number(index, 1) && is_number(count, 1)))
}

pub(super) fn is_number(text: &str, digits: usize) -> bool {
    text.len() >= digits && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_nonce(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn host() -> String {
    let mut name = [0_u8; 256];
    // SAFETY: the call writes at most 255 bytes, and the last one stays 0.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned()
}

fn machine() -> Option<String> {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = std::fs::read_link("/proc/self/ns/pid").ok()?;
    let both = [&boot, namespace.as_os_str().as_encoded_bytes()].concat();
    Some(format!("{:016x}", xxh3_64(&both)))
}

/// When a process was started; 0 if it has ended and its parent has not waited for it yet; `None` if it cannot be seen.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the command in parentheses, which may have blanks and parentheses of its own.
    let mut fields = stat.rsplit(')').next()?.split_ascii_whitespace();
    match fields.next()? {
        "Z" | "X" => Some(0),
        _ => fields.nth(18)?.parse().ok(),
    }
}

fn exists(pid: u32) -> bool {
    let number = pid.try_into().unwrap_or(i32::MAX);
    // SAFETY: the signal 0 only checks.
    let is_allowed = unsafe { libc::kill(number, 0) } == 0;
    is_allowed || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_dead_process_is_told_from_a_live_one() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let sleeper =
            Process { pid: child.id(), started: started(child.id()).unwrap(), ..Process::current() };
        assert_eq!([Process::current().has_ended(), sleeper.has_ended()], [Some(false); 2]);
        assert_eq!(Process { started: sleeper.started + 1, ..sleeper.clone() }.has_ended(), Some(true));
        assert_eq!(Process { machine: "of another host".to_owned(), ..sleeper.clone() }.has_ended(), None);
        assert!(!sleeper.is_over(None), "a process that /proc hides");
        child.kill().unwrap();
        while started(child.id()) != Some(0) {
            std::thread::yield_now(); // until it is a zombie
        }
        assert_eq!(sleeper.has_ended(), Some(true));
        child.wait().unwrap();
        assert!(sleeper.has_ended() == Some(true) && sleeper.is_over(None));
    }

    #[test]
    fn an_attempt_names_its_process() {
        let ours = Process::current();
        let attempt = ours.attempt();
        assert_ne!(attempt, ours.attempt());
        let found = Process::of_attempt(&format!("{attempt}-shard-000001-000.tokens")).unwrap();
        assert_eq!(Process { host: ours.host.clone(), ..found }, ours);
        let others = ["all-vocab.txt", "0123456789abcdef-1-2-notes", "notes-1-2-0123456789abcdef"];
        assert!(others.iter().all(|name| Process::of_attempt(name).is_none()));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_run_is_kept_out_by_one_that_lives_or_that_it_could_harm() {
        let here = Process::current();
        let (dead, elsewhere) =
            (Process { started: 1, ..here.clone() }, Process { machine: String::new(), ..here.clone() });
        // The other's tag and process; then whether "all", "1-of-2", and a run that may not share are kept out.
        for (tag, process, expected) in [
            ("all", &here, [true, true, true]),
            ("1-of-2", &here, [true, true, true]),
            ("2-of-2", &here, [true, false, true]),
            ("all", &dead, [false, false, false]),
            ("all", &elsewhere, [false, false, true]),
        ] {
            // Also as older releases named it.
            for name in [format!(".lock-{tag}.0123456789abcdef"), format!(".lock-{tag}")] {
                let dir = tempfile::tempdir().unwrap();
                std::fs::write(dir.path().join(&name), serde_json::to_vec(process).unwrap()).unwrap();
                let runs = [("all", true), ("1-of-2", true), ("all", false)];
                let refusals = runs.map(|(tag, shares)| ProcessFile::create(dir.path(), tag, shares).err());
                assert_eq!(refusals.each_ref().map(Option::is_some), expected, "{name}");
                let is_clear = |error: &Error| error.to_string().contains("another prepare is running");
                assert!(refusals.iter().flatten().all(is_clear));
                assert_eq!(dir.path().join(&name).exists(), process.has_ended() != Some(true));
                let ours = ProcessFile::create(dir.path(), "2-of-3", true).ok();
                let num_others = 1 - usize::from(process == &dead);
                assert_eq!(names_in(dir.path()).unwrap().len(), num_others + usize::from(ours.is_some()));
            }
        }
    }
}
