//! Files that appear complete or not at all: write to a temporary name, fsync, rename, fsync the folder.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Prefix of temporary names. The tag of the attempt that writes the file follows.
const TEMP: &str = ".tmp-";

#[derive(Debug)]
pub(super) struct AtomicFile {
    pub file: File,
    temp: PathBuf,
    target: PathBuf,
    committed: bool,
}

impl AtomicFile {
    pub fn create(dir: &Path, name: &str, tag: &str) -> Result<Self> {
        let temp = temp_path(dir, name, tag);
        let file = File::create(&temp).map_err(|e| write_error(&temp, e))?;
        Ok(Self { file, temp, target: dir.join(name), committed: false })
    }

    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Makes the file durable and renames it to its final name.
    pub fn commit(self) -> Result<()> {
        self.sync()?;
        self.put()
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|e| write_error(&self.target, e))
    }

    fn put(mut self) -> Result<()> {
        std::fs::rename(&self.temp, &self.target).map_err(|e| write_error(&self.target, e))?;
        self.committed = true;
        sync_folder_of(&self.target)
    }

    /// Gives a durable file its final name, unless a file of that name exists.
    fn put_new(self) -> Result<()> {
        match std::fs::hard_link(&self.temp, &self.target) {
            Ok(()) => sync_folder_of(&self.target),
            Err(_) if self.target.symlink_metadata().is_ok() => {
                Err(Error::at(&self.target, "exists and would be overwritten; choose another --out"))
            }
            Err(_) => self.put(), // the file system has no hard links
        }
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.committed {
            let _ = std::fs::remove_file(&self.temp);
        }
    }
}

pub(crate) fn write_atomically(dir: &Path, name: &str, tag: &str, bytes: &[u8]) -> Result<()> {
    let mut output = AtomicFile::create(dir, name, tag)?;
    output.file.write_all(bytes).map_err(|e| write_error(&output.target, e))?;
    output.commit()
}

/// Writes new small files: all, or none if the disk is full or one of the names is taken.
pub(crate) fn write_all_new(dir: &Path, tag: &str, files: &[(&str, &[u8])]) -> Result<()> {
    let written = |(name, bytes): &(&str, &[u8])| {
        let mut output = AtomicFile::create(dir, name, tag)?;
        output.file.write_all(bytes).map_err(|e| write_error(&output.target, e))?;
        output.sync().map(|()| output)
    };
    let outputs = files.iter().map(written).collect::<Result<Vec<_>>>()?;
    let mut targets = Vec::new();
    for output in outputs {
        let target = output.target.clone();
        if let Err(error) = output.put_new() {
            targets.iter().for_each(|path: &PathBuf| drop(std::fs::remove_file(path)));
            return Err(error);
        }
        targets.push(target);
    }
    Ok(())
}

/// Creates a folder with its parents and makes their entries durable.
pub(crate) fn create_folder(dir: &Path) -> Result<()> {
    let num_new = dir.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists()).count();
    std::fs::create_dir_all(dir).map_err(|e| write_error(dir, e))?;
    // At least the folder's entry: another process may have just created the folder.
    dir.ancestors().take(num_new.max(1)).try_for_each(sync_folder_of)
}

pub(crate) fn temp_path(dir: &Path, name: &str, tag: &str) -> PathBuf {
    dir.join(format!("{TEMP}{tag}-{name}"))
}

pub(crate) fn write_error(path: &Path, error: std::io::Error) -> Error {
    use std::io::ErrorKind::{
        FileTooLarge, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull,
    };
    let advice = match error.kind() {
        StorageFull | QuotaExceeded | FileTooLarge => {
            "free some space and run the same command again; finished work is kept"
        }
        PermissionDenied | ReadOnlyFilesystem => "not writable; choose another --out",
        _ => return Error::io(path, error),
    };
    Error::io(path, std::io::Error::new(error.kind(), format!("{error}: {advice}")))
}

fn sync_folder_of(path: &Path) -> Result<()> {
    let parent = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => return Ok(()),
    };
    File::open(parent).and_then(|folder| folder.sync_all()).map_err(|e| write_error(parent, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn abandoned_file_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        drop(AtomicFile::create(dir.path(), "a", "t").unwrap());
        std::fs::create_dir(dir.path().join(".tmp-t-b")).unwrap(); // has the effect of a full disk
        write_all_new(dir.path(), "t", &[("a", b""), ("b", b"")]).unwrap_err();
        std::fs::remove_dir(dir.path().join(".tmp-t-b")).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn only_one_of_two_writers_creates_new_files() {
        for _ in 0..50 {
            let dir = tempfile::tempdir().unwrap();
            let write = |tag: &str| {
                let names = ["a", "b", "c"];
                write_all_new(dir.path(), tag, &names.map(|name| (name, tag.as_bytes()))).is_ok()
            };
            let (write, dir) = (&write, dir.path());
            let outcomes = std::thread::scope(|scope| {
                ["1", "2"].map(|tag| scope.spawn(move || write(tag))).map(|writer| writer.join().unwrap())
            });
            assert_ne!(outcomes[0], outcomes[1]);
            let written = ["a", "b", "c"].map(|name| std::fs::read_to_string(dir.join(name)).unwrap());
            assert_eq!(written, [if outcomes[0] { "1" } else { "2" }; 3]);
            std::fs::remove_file(dir.join("a")).unwrap();
            assert!(!write("3") && !dir.join("a").exists()); // it would belong to another run than the rest
            assert_eq!(std::fs::read_dir(dir).unwrap().count(), 2);
        }
    }

    #[test]
    fn failed_sync_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/null", temp_path(dir.path(), "a", "t")).unwrap();
        write_atomically(dir.path(), "a", "t", b"content").unwrap_err();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn failed_folder_sync_is_an_error() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        // Files can be created in this folder, but it cannot be opened.
        std::fs::set_permissions(dir, PermissionsExt::from_mode(0o300)).unwrap();
        let outcomes = std::thread::scope(|scope| {
            let attempt = || {
                // Drops this thread's capabilities, because they let root open any folder.
                let (header, none) = ([0x2008_0522_u32, 0], [0_u32; 6]);
                // SAFETY: version 3 of the call reads a header of two words and sets of six.
                assert_eq!(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) }, 0);
                let folder = |name| create_folder(&dir.join(name));
                [write_atomically(dir, "a", "t", b""), folder("b"), folder("c/d")]
            };
            scope.spawn(attempt).join().unwrap()
        });
        std::fs::set_permissions(dir, PermissionsExt::from_mode(0o700)).unwrap();
        assert!(outcomes.iter().all(Result::is_err) && dir.join("a").exists() && dir.join("c/d").exists());
    }
}
