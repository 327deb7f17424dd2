//! Removes what a finished corpus no longer needs, and what dead processes have left.

use std::collections::HashSet;
use std::io::ErrorKind::NotFound;
use std::io::Write;
use std::path::Path;

use super::place::{FINGERPRINT, LEASE, remove_if_exists};
use super::process::Process;
use crate::error::{Error, Result};
use crate::format::{Manifest, PARTS, VALIDATION, create_folder, is_temp, temp_path, write_error};
use crate::store::{Store, url_of};

/// Removes what a finished corpus no longer needs: records, leases, unfinished files, and shards of interrupted
/// runs that its manifest does not name. Others may be doing the same. What cannot be removed is a warning.
pub(super) fn clean_up(out: &Path, manifest: &Manifest) -> Result<()> {
    let dir = match url_of(out) {
        Some(url) => {
            warn_of(clean_up_store(&Store::open_to_write(&url)?, manifest));
            return Ok(());
        }
        None => out,
    };
    warn_of(remove_folder(dir, PARTS));
    remove_strays(dir, manifest)?;
    if manifest.has_validation {
        remove_strays(&dir.join(VALIDATION), &Manifest::read(&dir.join(VALIDATION))?)?;
    }
    for name in names_in(dir)?.iter().filter(|name| name.starts_with(LEASE)) {
        warn_of(remove_if_exists(&dir.join(name)));
    }
    Ok(())
}

/// Removes the same from a store.
fn clean_up_store(store: &Store, manifest: &Manifest) -> Result<()> {
    // First, so that a process that is late finds that its record is no longer wanted.
    store.delete(&[format!("{PARTS}/{FINGERPRINT}")])?;
    let shards = |folder: &str, manifest: &Manifest| {
        let files = manifest.shards.iter().flat_map(|shard| [&shard.tokens.file, &shard.lines.file]);
        files.map(|file| format!("{folder}{file}")).collect::<HashSet<_>>()
    };
    let (holdout, mut named) = (format!("{VALIDATION}/"), shards("", manifest));
    if manifest.has_validation {
        let validation = Manifest::fetch(&store.at(&format!("{}/{VALIDATION}", store.url()))?)?;
        named.extend(shards(&holdout, &validation));
    }
    let is_stray = |name: &String| match name.strip_prefix(&holdout) {
        Some(_) if !manifest.has_validation => true,
        file => file.unwrap_or(name).starts_with("shard-") && !named.contains(name),
    };
    let names = store.list("")?.into_iter().map(|object| object.name);
    let unneeded = names.filter(|name| name.starts_with(&format!("{PARTS}/")) || is_stray(name));
    store.delete(&unneeded.collect::<Vec<_>>())
}

/// A folder for the shards of an attempt. Those of dead processes are removed.
pub(super) fn temporary_folder(attempt: &str) -> Result<tempfile::TempDir> {
    let dir = std::env::temp_dir();
    remove_temps(&dir, |process| process.is_some_and(|p| p.is_certainly_dead()));
    let prefix = temp_path(Path::new(""), "", attempt);
    let made = tempfile::Builder::new().prefix(&prefix).tempdir_in(&dir);
    let made = made.map_err(|error| write_error(&dir, error))?;
    create_folder(&made.path().join(VALIDATION))?;
    Ok(made)
}

/// Warns on standard error about what could not be removed: a failed cleanup is not an error.
pub(super) fn warn_of(removed: Result<()>) {
    if let Err(error) = removed {
        // Not `eprintln`, which panics where standard error is closed.
        let _ = writeln!(std::io::stderr(), "warning: {error}; it is no longer needed and was not removed");
    }
}

fn remove_strays(dir: &Path, manifest: &Manifest) -> Result<()> {
    let files = manifest.shards.iter().flat_map(|shard| [&shard.tokens.file, &shard.lines.file]);
    let named: HashSet<&String> = files.collect();
    for name in names_in(dir)?.iter().filter(|name| name.starts_with("shard-") && !named.contains(name)) {
        warn_of(remove_if_exists(&dir.join(name)));
    }
    remove_temps(dir, |_| true);
    Ok(())
}

/// Removes unfinished files if `of` is true of the processes that were writing them. `None` stands for an unknown
/// process.
pub(super) fn remove_temps(dir: &Path, of: impl Fn(Option<Process>) -> bool) {
    for name in names_in(dir).unwrap_or_default().iter().filter(|name| is_temp(name)) {
        if of(name.strip_prefix(".tmp-").and_then(Process::of_attempt)) {
            let path = dir.join(name);
            warn_of(if path.is_dir() { remove_tree(&path) } else { remove_if_exists(&path) });
        }
    }
}

/// Removes the folder `dir/name` if it exists. It gets a temporary name first: a late process finds no folder to write
/// to, and leaves nothing behind.
pub(super) fn remove_folder(dir: &Path, name: &str) -> Result<()> {
    let (path, temp) = (dir.join(name), temp_path(dir, name, &Process::current().attempt()));
    match std::fs::rename(&path, &temp) {
        Err(error) if error.kind() == NotFound => Ok(()),
        Err(error) => Err(Error::io(&path, error)),
        Ok(()) => remove_tree(&temp),
    }
}

/// Removes a folder with its contents if it exists; another process may be removing it too.
fn remove_tree(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != NotFound => Err(Error::io(path, error)),
        _ => Ok(()),
    }
}

/// The names of all entries of a folder.
pub(super) fn names_in(dir: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io(dir, e);
    std::fs::read_dir(dir).map_err(failed)?.map(|entry| entry.map(|e| name_of(&e)).map_err(failed)).collect()
}

/// The name of an entry of a folder.
pub(super) fn name_of(entry: &std::fs::DirEntry) -> String {
    entry.file_name().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::testing::write_corpus;
    use crate::format::{MANIFEST, write_atomically};

    #[test]
    fn a_late_writer_leaves_nothing_in_a_removed_folder() {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..50 {
            let parts = dir.path().join(PARTS);
            create_folder(&parts).unwrap();
            let (begun, wait) = std::sync::mpsc::channel();
            let late = std::thread::spawn(move || {
                (0..10_000).find_map(|group| {
                    let written = write_atomically(&parts, &group.to_string(), "late", b"{}");
                    let _ = begun.send(());
                    written.err()
                })
            });
            wait.recv().unwrap();
            remove_folder(dir.path(), PARTS).unwrap();
            assert!(late.join().unwrap().is_some());
            assert!(names_in(dir.path()).unwrap().is_empty(), "{round}");
        }
    }

    #[test]
    fn an_interrupted_removal_is_finished() {
        let dir = tempfile::tempdir().unwrap();
        write_corpus(dir.path(), 100, &[vec![vec![5, 6]]], 2);
        let removed = temp_path(dir.path(), PARTS, &Process::current().attempt());
        create_folder(&removed).unwrap();
        std::fs::write(removed.join("0"), "{}").unwrap();
        clean_up(dir.path(), &Manifest::read(dir.path()).unwrap()).unwrap();
        assert!(!removed.exists() && dir.path().join(MANIFEST).exists());
    }

    #[test]
    fn what_cannot_be_removed_is_no_failure() {
        let dir = tempfile::tempdir().unwrap();
        write_corpus(dir.path(), 100, &[vec![vec![5, 6]]], 2);
        let names = ["shard-9.tokens", ".tmp-x", ".lock-all", "shard-8.tokens"];
        let [folder, link, lease, file] = names.map(|name| dir.path().join(name));
        create_folder(&folder).unwrap(); // stands in for a file that cannot be removed
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        for path in [&lease, &file] {
            std::fs::write(path, "old").unwrap();
        }
        clean_up(dir.path(), &Manifest::read(dir.path()).unwrap()).unwrap();
        assert!(folder.exists() && dir.path().join(MANIFEST).exists());
        assert!([&link, &lease, &file].iter().all(|path| path.symlink_metadata().is_err()));
    }
}
