//! Identifies processes and tells whether they are alive, for leases and for names of temporary files.

use std::collections::hash_map::RandomState;
use std::ffi::CStr;
use std::hash::{BuildHasher, Hasher};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// A process, distinguished from those of other hosts, containers and boots, and from later ones with the same pid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    /// The host's name, for messages.
    pub host: String,
    /// Hash of the boot's id and the namespace of process numbers, in which `pid` has a meaning; empty where the system
    /// does not provide them (macOS).
    machine: String,
    pub pid: u32,
    /// When it was started, in ticks since the boot; 0 where the system does not say.
    started: u64,
}

impl Process {
    /// The calling process.
    pub fn current() -> Self {
        let pid = std::process::id();
        Self { host: host(), machine: machine().unwrap_or_default(), pid, started: started(pid) }
    }

    /// Whether it runs, or ran, on the same host and in the same namespace, so that this process can tell whether it
    /// has ended.
    pub fn is_neighbor(&self) -> bool {
        machine().is_some_and(|machine| machine == self.machine)
    }

    /// Whether it has certainly ended.
    pub fn is_certainly_dead(&self) -> bool {
        self.is_neighbor() && (self.started == 0 || started(self.pid) != self.started)
    }

    /// A name for the temporary files of one attempt of this process, unique among all attempts.
    pub fn attempt(&self) -> String {
        format!("{}-{}-{}-{:016x}", self.machine, self.pid, self.started, nonce())
    }

    /// The process that made an attempt; `None` if this is not the name of one.
    pub fn of_attempt(name: &str) -> Option<Self> {
        let mut parts = name.splitn(4, '-');
        let machine = parts.next().filter(|machine| machine.len() == 16)?.to_owned();
        let (pid, started) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        parts.next().map(|_| Self { host: String::new(), machine, pid, started })
    }
}

/// A random number.
pub(super) fn nonce() -> u64 {
    RandomState::new().build_hasher().finish()
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

/// When a process was started; 0 if it has ended, even if its parent has not waited for it yet.
fn started(pid: u32) -> u64 {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return 0 };
    // The second field is the command in parentheses, which may have blanks and parentheses of its own.
    let mut fields = stat.rsplit(')').next().unwrap_or_default().split_ascii_whitespace();
    match fields.next() {
        None | Some("Z" | "X") => 0,
        Some(_) => fields.nth(18).and_then(|field| field.parse().ok()).unwrap_or(0),
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;

    #[test]
    fn a_dead_process_is_told_from_a_live_one() {
        let ours = Process::current();
        assert!(ours.started > 0 && !ours.is_certainly_dead());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let sleeper = Process { pid: child.id(), started: started(child.id()), ..ours.clone() };
        assert!(!sleeper.is_certainly_dead());
        assert!(Process { started: sleeper.started + 1, ..sleeper.clone() }.is_certainly_dead());
        child.kill().unwrap();
        while started(child.id()) != 0 {
            std::thread::yield_now(); // until it is a zombie
        }
        assert!(sleeper.is_certainly_dead());
        assert!(!Process { machine: "of another host".to_owned(), ..sleeper }.is_certainly_dead());
        child.wait().unwrap();
    }

    #[test]
    fn an_attempt_names_its_process() {
        let ours = Process::current();
        let attempt = ours.attempt();
        assert_ne!(attempt, ours.attempt());
        let found = Process::of_attempt(&format!("{attempt}-shard-000001-000.tokens")).unwrap();
        assert_eq!(Process { host: ours.host.clone(), ..found }, ours);
        assert!(Process::of_attempt("all-vocab.txt").is_none());
    }
}
