//! The folder of a cache that the readers of a node share.
//!
//! ```text
//! DIR/cached-CHECKSUM/          one folder for each manifest; a copy of the tokenizer is here, too
//!     runs/FILE.RUN             a run of a file: fetched blocks are in their places, the others are holes
//!     runs/FILE.RUN.lock        empty; locked by the reader that fetches the run
//! ```
//! A run is written under a temporary name, renamed into place and never changed; a run with more blocks replaces it. So
//! any reader may remove any file at any time: readers that have mapped it keep the bytes. Locks only save requests.

use std::fs::{File, TryLockError};
use std::io::{Error as IoError, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use tempfile::NamedTempFile;

use super::CacheOptions;
use crate::error::{Error, Result};
use crate::threads::lock;

/// Time that a reader waits for another reader without progress: as long as a request may take without a byte.
pub(super) const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 30 });
/// Fraction of the free space that a reader fills before it counts again, because others fill it as well.
const SHARE: u64 = 16;
/// Fraction of the limit that is freed in addition, so that not every fetch has to count.
const SLACK: u64 = 64;

#[derive(Debug)]
pub(super) struct Folder {
    pub dir: PathBuf,
    pub limit: u64,
    runs: PathBuf,
    /// Bytes that may be written before the files are counted again.
    budget: Mutex<u64>,
}

/// The right to fetch a run, until it is dropped or its process ends.
#[derive(Debug)]
pub(super) struct Claim(Option<(File, PathBuf)>);

impl Folder {
    pub fn open(options: &CacheOptions, checksum: &str) -> Result<Self> {
        check_file_system(&options.dir)?;
        // By the manifest's checksum, because the content hash does not cover lengths.
        let dir = options.dir.join(format!("cached-{checksum}"));
        let folder = Self { runs: dir.join("runs"), dir, limit: options.bytes, budget: Mutex::new(0) };
        if !folder.runs.exists() {
            std::fs::create_dir_all(&folder.runs).map_err(|error| folder.cannot_write(error))?;
            mention_earlier(&options.dir);
        }
        Ok(folder)
    }

    fn path(&self, run: &str) -> PathBuf {
        self.runs.join(run)
    }

    /// A run's file, which counts as used now.
    pub fn find(&self, run: &str) -> Option<File> {
        let file = File::open(self.path(run)).ok()?;
        let _ = file.set_modified(SystemTime::now()); // fails for another user's file, which is then evicted sooner
        Some(file)
    }

    /// Claims a run for fetching; `None` while another reader that was active within `PATIENCE` has it.
    pub fn claim(&self, run: &str, waited: Duration) -> Option<Claim> {
        let path = self.path(&format!("{run}.lock"));
        let lock = File::options().create(true).append(true).open(&path);
        // If locks do not work, every reader fetches for itself.
        let Ok(lock) = lock else { return Some(Claim(None)) };
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            let touched = lock.metadata().and_then(|metadata| metadata.modified()).ok();
            let age = touched.and_then(|time| time.elapsed().ok()).unwrap_or_default();
            return (age.max(waited) > PATIENCE).then_some(Claim(None));
        }
        let claim = Claim(Some((lock, path)));
        claim.touch();
        Some(claim)
    }

    pub fn temporary(&self) -> std::io::Result<NamedTempFile> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(".tmp-").permissions(PermissionsExt::from_mode(0o666)); // less the umask
        match builder.tempfile_in(&self.runs) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                std::fs::create_dir_all(&self.runs)?; // it was removed while in use
                builder.tempfile_in(&self.runs)
            }
            outcome => outcome,
        }
    }

    pub fn publish(&self, file: NamedTempFile, run: &str) -> std::io::Result<()> {
        match file.persist(self.path(run)) {
            Err(error) if error.error.kind() != ErrorKind::NotFound => Err(error.error),
            _ => Ok(()), // if another reader has removed the temporary file, only this one has the run
        }
    }

    /// Removes the least recently used files until there is room for `bytes`.
    pub fn make_room(&self, bytes: u64) {
        let mut budget = lock(&self.budget);
        if let Some(rest) = budget.checked_sub(bytes) {
            *budget = rest;
            return;
        }
        let mut files = self.files();
        let mut total = files.iter().map(|(_, bytes, _)| bytes).sum::<u64>().saturating_add(bytes);
        if total > self.limit {
            files.sort();
            for (_, bytes, path) in files {
                if total <= self.limit - self.limit / SLACK {
                    break;
                }
                if std::fs::remove_file(path).is_ok() {
                    total -= bytes;
                }
            }
        }
        *budget = self.limit.saturating_sub(total) / SHARE;
    }

    /// All files: last use, and bytes on disk.
    fn files(&self) -> Vec<(SystemTime, u64, PathBuf)> {
        let entries = std::fs::read_dir(&self.runs).into_iter().flatten().flatten();
        let described = |entry: std::fs::DirEntry| {
            let metadata = entry.metadata().ok()?; // not if another reader has just removed it
            Some((metadata.modified().ok()?, 512 * metadata.blocks(), entry.path()))
        };
        entries.filter_map(described).collect()
    }

    pub fn cannot_write(&self, error: IoError) -> Error {
        use ErrorKind::{PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
        let advice = match error.kind() {
            StorageFull | QuotaExceeded => {
                format!("lower data.cache_bytes ({} now) or choose another data.cache_dir", self.limit)
            }
            PermissionDenied | ReadOnlyFilesystem => "choose another data.cache_dir".to_owned(),
            _ => return Error::io(&self.runs, error),
        };
        Error::io(&self.runs, IoError::new(error.kind(), format!("{error}: {advice}")))
    }
}

impl Claim {
    pub fn private() -> Self {
        Self(None)
    }

    pub fn touch(&self) {
        if let Some((lock, _)) = &self.0 {
            let _ = lock.set_modified(SystemTime::now());
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some((lock, path)) = &self.0 {
            // A reader that has just opened the file locks an unlinked one, and then sees that the run exists.
            let _ = std::fs::remove_file(path);
            let _ = lock.unlock(); // a forked child may have the file open
        }
    }
}

/// Lists the folders that an earlier version of this program left, once per new folder.
fn mention_earlier(dir: &Path) {
    use std::io::Write;
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let earlier = entries.filter(|path| path.join("state").is_file() && path.join("lock").is_file());
    let names: String = earlier.map(|path| format!(" {}", path.display())).collect();
    if !names.is_empty() {
        let note = format!("note: caches of an earlier version are no longer used; delete{names}");
        let _ = writeln!(std::io::stderr(), "{note}"); // `eprintln` panics where standard error is closed
    }
}

/// Refuses a folder, which need not exist yet, on a file system that other machines may share.
fn check_file_system(dir: &Path) -> Result<()> {
    let parents =
        dir.ancestors().map(|parent| if parent.as_os_str().is_empty() { Path::new(".") } else { parent });
    match parents.filter_map(kind_of).next().flatten() {
        None => Ok(()),
        Some(kind) => {
            let dir = dir.display();
            Err(Error::Input(format!(
                "{dir} is on {kind}, which other machines may share; set data.cache_dir to a folder on a local disk"
            )))
        }
    }
}

fn kind_of(path: &Path) -> Option<Option<&'static str>> {
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).ok()?;
    // SAFETY: all bytes 0 are a valid `statfs`.
    let mut stats: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path ends with a zero, and the call writes only `stats`; both outlive it.
    (unsafe { libc::statfs(path.as_ptr(), &mut stats) } == 0).then(|| shared_kind(&stats))
}

#[cfg(target_os = "linux")]
fn shared_kind(stats: &libc::statfs) -> Option<&'static str> {
    name_of(stats.f_type as u32)
}

#[cfg(target_os = "linux")]
fn name_of(magic: u32) -> Option<&'static str> {
    Some(match magic {
        0x6969 => "NFS",
        0x0BD0_0BD0 => "Lustre",
        0x4750_4653 => "GPFS",
        0x517B | 0xFF53_4D42 | 0xFE53_4D42 => "CIFS",
        0x6573_5546 => "FUSE",
        0x0102_1997 => "9p",
        0x00C3_6400 => "Ceph",
        0x1983_0326 => "BeeGFS",
        0x5346_414F | 0x6B41_4653 => "AFS",
        0x0116_1970 => "GFS2",
        0x7461_636F => "OCFS2",
        0x2003_0528 => "OrangeFS",
        0x786F_4256 => "a shared folder of VirtualBox",
        _ => return None,
    })
}

#[cfg(not(target_os = "linux"))]
fn shared_kind(stats: &libc::statfs) -> Option<&'static str> {
    (stats.f_flags & libc::MNT_LOCAL as u32 == 0).then_some("a network file system")
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn shared_file_systems_are_refused() {
        // ext4, XFS, Btrfs, tmpfs, overlayfs, ZFS, F2FS
        let local = [0xEF53, 0x5846_5342, 0x9123_683E, 0x0102_1994, 0x794C_7630, 0x2FC1_2FC1, 0xF2F5_2010];
        assert_eq!(name_of(0xFE53_4D42), Some("CIFS"));
        assert!(local.iter().all(|&magic| name_of(magic).is_none()));
        // A folder that does not exist yet is on the file system of its nearest parent.
        let dir = tempfile::tempdir().unwrap();
        check_file_system(&dir.path().join("a/b")).unwrap();
        assert_eq!(kind_of(&dir.path().join("a")), None);
    }
}
