//! Removes files that a finished corpus no longer needs, and files left by dead processes: only files with names that
//! this program writes, and only while `parts/job.json` shows that its work is unfinished.

use std::collections::HashSet;
use std::io::Write;
use std::path::Path;

use super::place::{FINGERPRINT, Place, RECORD, names_in, remove_if_exists};
use super::process::{Process, is_number, is_process_file};
use crate::error::Result;
use crate::format::{Manifest, PARTS, VALIDATION, create_folder, temp_path, write_error};

/// Removes files that a finished corpus no longer needs: records, process files, unfinished files, and shards of
/// interrupted runs that are not in its manifest. Other processes may do the same. Failures are reported as warnings.
pub(super) fn clean_up(place: &Place, manifest: &Manifest) -> Result<()> {
    let validation = if manifest.has_validation { place.below(VALIDATION)?.manifest()? } else { None };
    let shards = |folder: &str, manifest: &Manifest| {
        let files = manifest.shards.iter().flat_map(|shard| [&shard.tokens.file, &shard.lines.file]);
        files.map(|file| format!("{folder}{file}")).collect::<Vec<_>>()
    };
    let mut named: HashSet<String> = shards("", manifest).into_iter().collect();
    named.extend(validation.iter().flat_map(|manifest| shards(&format!("{VALIDATION}/"), manifest)));
    let fingerprint = format!("{PARTS}/{FINGERPRINT}");
    let remove = |is_last: bool| {
        let is_unneeded = |name: &String| {
            is_removable(name, manifest) && !named.contains(name) && (is_last || *name != fingerprint)
        };
        place.remove_all(&place.names()?.into_iter().filter(is_unneeded).collect::<Vec<_>>())
    };
    warn_of(remove(false).and_then(|()| place.remove(&fingerprint)));
    // A late process may have written more files, or now sees that its record is no longer wanted.
    warn_of(remove(true));
    if let Place::Folder(dir) = place {
        for folder in [Some(PARTS), wants_validation(manifest).then_some(VALIDATION)].into_iter().flatten() {
            let _ = std::fs::remove_dir(dir.join(folder)); // unless it contains other files
        }
    }
    Ok(())
}

/// Whether this program writes files of this name when it prepares a corpus, and the finished corpus does not need them,
/// apart from shards in its manifest.
fn is_removable(name: &str, manifest: &Manifest) -> bool {
    match name.rsplit_once('/').unwrap_or(("", name)) {
        ("", file) => is_shard(file) || attempt_of(file).is_some() || is_process_file(file),
        (VALIDATION, file) => wants_validation(manifest) && (is_shard(file) || attempt_of(file).is_some()),
        (PARTS, file) => {
            attempt_of(file).is_some()
                || [FINGERPRINT, "vocab.txt", "tokenizer.json"].contains(&file)
                || file.strip_prefix(FINGERPRINT).is_some_and(|rest| rest.starts_with(".tmp-")) // a test of conditional requests
                || file
                    .strip_prefix(RECORD)
                    .and_then(|rest| rest.split_once('.'))
                    .is_some_and(|(n, _)| is_number(n, 6))
        }
        _ => false,
    }
}

fn wants_validation(manifest: &Manifest) -> bool {
    manifest.options["holdout"].as_f64().is_some_and(|fraction| fraction > 0.0)
}

fn is_shard(file: &str) -> bool {
    let stem = file.strip_suffix(".tokens").or_else(|| file.strip_suffix(".lines"));
    let numbers = stem.and_then(|stem| stem.strip_prefix("shard-")?.split_once('-'));
    numbers.is_some_and(|(group, shard)| is_number(group, 6) && is_number(shard, 3))
}

/// The process that writes a file under this temporary name; `None` if this program did not choose the name.
pub(super) fn attempt_of(file: &str) -> Option<Process> {
    file.strip_prefix(".tmp-").and_then(Process::of_attempt)
}

/// A folder for the shards of an attempt. Folders of dead processes are removed.
pub(super) fn temporary_folder(attempt: &str) -> Result<tempfile::TempDir> {
    let dir = std::env::temp_dir();
    for name in names_in(&dir).unwrap_or_default().iter().filter(|name| is_of_dead(name)) {
        let _ = std::fs::remove_dir_all(dir.join(name)); // other users' folders stay
    }
    let prefix = temp_path(Path::new(""), "", attempt);
    let made = tempfile::Builder::new().prefix(&prefix).tempdir_in(&dir);
    let made = made.map_err(|error| write_error(&dir, error))?;
    create_folder(&made.path().join(VALIDATION))?;
    Ok(made)
}

fn is_of_dead(file: &str) -> bool {
    attempt_of(file).is_some_and(|process| process.has_ended() == Some(true))
}

pub(super) fn remove_of_dead(dir: &Path) {
    for name in names_in(dir).unwrap_or_default().iter().filter(|name| is_of_dead(name)) {
        warn_of(remove_if_exists(&dir.join(name)));
    }
}

/// Warns on standard error about files that could not be removed: a failed cleanup is not an error.
pub(super) fn warn_of(removed: Result<()>) {
    if let Err(error) = removed {
        // Not `eprintln`, which panics if standard error is closed.
        let _ = writeln!(
            std::io::stderr(),
            "warning: {error}; the file is no longer needed, but could not be removed"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::format::testing::write_corpus;
    use crate::input::TextSource;
    use crate::prepare::options::Pass;
    use crate::prepare::output_dir::{ALL, Claim, InputGroupRecord, OutputDir};
    use crate::prepare::tests::tokenizer;
    use crate::prepare::{PrepareOptions, PrepareReport, prepare};

    const FOREIGN: &str = "notes.txt shard-notes.tokens shard-9.tokens shard-000009-000.txt .tmp-x
        .tmp-vocab-vocab.txt .lock-mine .lock-all.mine below/shard-000009-000.tokens below/manifest.json
        parts/notes parts/input-group-notes parts/shard-000009-000.tokens parts/below/input-group-000009.json
        holdout/notes holdout/.lock-all holdout/below/shard-000009-000.lines";
    /// Names of files that a killed run leaves and that no finished corpus has.
    const OURS: &str = "shard-000900-000.tokens shard-1000000-1000.lines .lock-all
        .lock-1-of-2.0123456789abcdef parts/tokenizer.json parts/input-group-000900.counts
        parts/job.json.tmp-0123456789abcdef
        parts/input-group-000900.hashes.json
        .tmp-0123456789abcdef-1-1-0123456789abcdef-shard-000900-000.tokens
        parts/.tmp-0123456789abcdef-1-1-0123456789abcdef-job.json";
    const OURS_IN_VALIDATION: &str = "holdout/shard-000900-000.lines
        holdout/.tmp-0123456789abcdef-1-1-0123456789abcdef-manifest.json";

    fn all_in(dir: &Path) -> BTreeSet<String> {
        let names = names_in(dir).unwrap().into_iter().flat_map(|name| match dir.join(&name) {
            below if below.is_dir() => all_in(&below).iter().map(|file| format!("{name}/{file}")).collect(),
            _ => BTreeSet::from([name]),
        });
        names.collect()
    }

    #[test]
    fn only_own_files_of_finished_work_are_removed() {
        let states = "finished before|of other options, finished|of other options, unfinished|interrupted|resumed and \
                      finished now|interrupted while it was cleaning up";
        for (state, fraction) in states.split('|').flat_map(|state| [(state, 0.0), (state, 0.1)]) {
            let dir = tempfile::tempdir().unwrap();
            let (tokenizer, text) = (tokenizer(dir.path(), "a b"), dir.path().join("text.txt"));
            std::fs::write(&text, "a b b\n\n".repeat(200)).unwrap();
            let run = |out: &str, partition, validation_fraction, goes_on| -> Result<PrepareReport> {
                let options = PrepareOptions { part_bytes: Some(200), partition, ..Default::default() };
                let options = PrepareOptions { validation_fraction, ..options };
                let source = TextSource::Files(vec![text.clone()]);
                prepare(source, &tokenizer, &dir.path().join(out), &options, &mut |_| goes_on)
            };
            run("alone", None, fraction, true).unwrap();
            let is_finished = state.contains("finished before") || state.ends_with(", finished");
            let is_cleaning = state.ends_with("cleaning up");
            let partition = if is_finished || is_cleaning { None } else { Some((1, 2)) };
            run("out", partition, fraction, true).unwrap();
            let (alone, out) = (all_in(&dir.path().join("alone")), dir.path().join("out"));
            let (mut removable, mut not_ours) = (OURS.to_owned(), FOREIGN.to_owned());
            *(if fraction > 0.0 { &mut removable } else { &mut not_ours }) +=
                &format!(" {OURS_IN_VALIDATION}");
            for name in removable.split_whitespace().chain(not_ours.split_whitespace()) {
                create_folder(out.join(name).parent().unwrap()).unwrap();
                std::fs::write(out.join(name), "x").unwrap();
            }
            if is_cleaning {
                let fingerprint = Manifest::read(&out).unwrap().fingerprint;
                std::fs::write(out.join("parts/job.json"), format!("{{\"job\":\"{fingerprint}\"}}")).unwrap();
            }
            let before = all_in(&out);
            let other = if state.starts_with("of other") { 0.7 } else { fraction };
            let outcome = run("out", None, other, state != "interrupted");
            let after = all_in(&out);
            let cleaned = alone.into_iter().chain(not_ours.split_whitespace().map(str::to_owned)).collect();
            let is_cleaned = is_cleaning || state.ends_with("finished now");
            let is_right = match state {
                "interrupted" => after.is_superset(&before),
                _ => after == if is_cleaned { cleaned } else { before },
            };
            assert!(is_right, "{state}, {fraction}: {after:?}");
            let is_refused = state.starts_with("of other") || state == "interrupted";
            assert_eq!(outcome.is_err(), is_refused, "{state}, {fraction}: {outcome:?}");
        }
    }

    #[test]
    fn late_writer_leaves_no_files() {
        let corpus = tempfile::tempdir().unwrap();
        write_corpus(corpus.path(), 100, &[vec![vec![5, 6]]], 2);
        for round in 0..20 {
            let dir = tempfile::tempdir().unwrap();
            let claim = OutputDir::claim(dir.path(), "job", ALL, false).unwrap();
            let Claim::Ours(out) = claim else { panic!("the folder is new") };
            let (begun, wait) = std::sync::mpsc::channel();
            std::thread::scope(|scope| {
                let late = scope.spawn(|| {
                    (0..10_000).find_map(|input_group| {
                        let watched = out.save_counts(input_group, b"counts");
                        let saved = watched.and_then(|file| {
                            let watched = Some(file);
                            let record = InputGroupRecord { input_group, watched, ..Default::default() };
                            out.save_record(&Pass::Build(None), &record)
                        });
                        let _ = begun.send(());
                        saved.err()
                    })
                });
                wait.recv().unwrap();
                clean_up(&out.place, &Manifest::read(corpus.path()).unwrap()).unwrap();
                assert!(late.join().unwrap().is_some());
            });
            drop(out);
            assert_eq!(names_in(dir.path()).unwrap(), [""; 0], "{round}");
        }
    }
}
