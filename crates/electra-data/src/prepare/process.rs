//! Tracks the processes that work in a folder. Uses no locks, which many network file systems emulate or lack, and no
//! expiry.
//!
//! Each run leaves a file that identifies its process. A run is refused only if another run is certainly alive, on the same
//! machine, or could be harmed by it. All others may share the folder: files appear complete or not at all, and runs of
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

/// A process, distinguished from processes of other hosts, containers and boots, and from later ones with the same pid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    pub host: String,
    /// Hash of the boot id and the pid namespace, within which `pid` is meaningful; empty if the system
    /// does not provide them (macOS).
    machine: String,
    pub pid: u32,
    /// Its start, in ticks since the boot; 0 if the system does not report it.
    started: u64,
}

impl Process {
    pub fn current() -> Self {
        let pid = std::process::id();
        let (machine, started) = machine().zip(started(pid)).unwrap_or_default();
        Self { host: host(), machine, pid, started }
    }

    /// Whether the process has certainly ended. `None` if this is unknown, because it ran on another machine.
    pub fn has_ended(&self) -> Option<bool> {
        machine().filter(|machine| *machine == self.machine)?;
        Some(self.is_over(started(self.pid)))
    }

    /// Whether it has ended. `started` is the start of the process that has its pid now, if it is visible: the system
    /// may hide processes of other users in /proc, but not whether a pid is in use.
    fn is_over(&self, started: Option<u64>) -> bool {
        started.map_or_else(|| !exists(self.pid), |started| started != self.started)
    }

    /// A unique name for the temporary files of one attempt of this process.
    pub fn attempt(&self) -> String {
        format!("{}-{}-{}-{:016x}", self.machine, self.pid, self.started, nonce())
    }

    /// The process of an attempt; `None` if `name` does not begin with an attempt's name.
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
    /// Records that a run with this tag works in a folder. Fails if another run does, unless they do different partitions.
    /// Without `may_share`, also fails if a run on another machine may still be alive.
    pub fn create(dir: &Path, tag: &str, may_share: bool) -> Result<Self> {
        let process = Process::current();
        let name = format!("{PROCESS_FILE}{tag}.{:016x}", nonce());
        let bytes = serde_json::to_vec(&process).map_err(|e| Error::io(dir, e.into()))?;
        write_atomically(dir, &name, &process.attempt(), &bytes)?;
        let created = Self { path: dir.join(&name), pid: process.pid };
        // Writes before it looks: if two runs begin at the same time, at least one sees the other.
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
    let remedy =
        unless_ended.map_or(String::new(), |path| format!(", or remove {} if it has ended", path.display()));
    let message =
        format!("another prepare is running in this folder ({by}); wait for it or choose another --out");
    Error::at(dir, message + &remedy)
}

/// Whether this is the name of a [`ProcessFile`], including names of older releases.
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

/// The start of a process; 0 for a zombie; `None` if the process is not visible.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the command in parentheses, which may contain spaces and parentheses.
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
    fn dead_process_is_distinguished_from_a_live_one() {
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
    fn attempt_name_identifies_its_process() {
        let process = Process::current();
        let attempt = process.attempt();
        assert_ne!(attempt, process.attempt());
        let parsed = Process::of_attempt(&format!("{attempt}-shard-000001-000.tokens")).unwrap();
        assert_eq!(Process { host: process.host.clone(), ..parsed }, process);
        let others = ["all-vocab.txt", "0123456789abcdef-1-2-notes", "notes-1-2-0123456789abcdef"];
        assert!(others.iter().all(|name| Process::of_attempt(name).is_none()));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn run_is_refused_next_to_a_live_or_vulnerable_run() {
        let here = Process::current();
        let (dead, elsewhere) =
            (Process { started: 1, ..here.clone() }, Process { machine: String::new(), ..here.clone() });
        // The other run's tag and process; then whether "all", "1-of-2", and a run that may not share are refused.
        for (tag, process, expected) in [
            ("all", &here, [true, true, true]),
            ("1-of-2", &here, [true, true, true]),
            ("2-of-2", &here, [true, false, true]),
            ("all", &dead, [false, false, false]),
            ("all", &elsewhere, [false, false, true]),
        ] {
            // Also with the name of older releases.
            for name in [format!(".lock-{tag}.0123456789abcdef"), format!(".lock-{tag}")] {
                let dir = tempfile::tempdir().unwrap();
                std::fs::write(dir.path().join(&name), serde_json::to_vec(process).unwrap()).unwrap();
                let runs = [("all", true), ("1-of-2", true), ("all", false)];
                let refusals = runs.map(|(tag, shares)| ProcessFile::create(dir.path(), tag, shares).err());
                assert_eq!(refusals.each_ref().map(Option::is_some), expected, "{name}");
                let is_clear = |error: &Error| error.to_string().contains("another prepare is running");
                assert!(refusals.iter().flatten().all(is_clear));
                assert_eq!(dir.path().join(&name).exists(), process.has_ended() != Some(true));
                let claimed = ProcessFile::create(dir.path(), "2-of-3", true).ok();
                let num_others = 1 - usize::from(process == &dead);
                assert_eq!(names_in(dir.path()).unwrap().len(), num_others + usize::from(claimed.is_some()));
            }
        }
    }
}
