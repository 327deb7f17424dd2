//! Pipelines, tasks and finalizing at the same time.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::changes::Comparer;
use super::finalize::Finalizer;
use super::input_group::InputGroupBuilder;
use super::options::shard_spec;
use super::output_dir::{ALL, Claim, InputGroupRecord, OutputDir};
use super::pass::Pass;
use super::pipelines::{self, Todo};
use super::plan::Plan;
use super::repeats::Dropped;
use super::run::{Claimed, PrepareRun, RemainingWork};
use super::*;
use crate::error::{Error, Result};
use crate::format::{MANIFEST, verify};
use crate::input::{Batcher, ReadOptions, SkipLog, TextSource};
use crate::store::Cancel;
use crate::tokenizer::Tokenizer;

fn tokenizer(dir: &Path) -> Tokenizer {
    let path = dir.join("vocab.txt");
    std::fs::write(&path, "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nc\n").unwrap();
    Tokenizer::from_file(&path, None, None).unwrap()
}

/// A file of documents "a b", "a b b", …, read in about twenty parts.
fn text(dir: &Path) -> (PathBuf, PrepareOptions) {
    let documents: String = (0..400).map(|n| format!("a{}\n\n", " b".repeat(1 + n % 9))).collect();
    std::fs::write(dir.join("text.txt"), &documents).unwrap();
    let part_bytes = Some(documents.len() as u64 / 20);
    let options = PrepareOptions { part_bytes, threads: Some(4), ..PrepareOptions::default() };
    (dir.join("text.txt"), options)
}

fn prepared(text: &Path, out: &Path, tokenizer: &Tokenizer, options: &PrepareOptions) -> PrepareReport {
    prepare(TextSource::Files(vec![text.to_owned()]), tokenizer, out, options, &mut |_| true).unwrap()
}

type Read<'a> = dyn Fn(usize, &mut Batcher<'_>) -> Result<()> + Sync + 'a;

/// Builds input groups with a reader of the test's own; returns the outcome and which groups are finished.
fn build(pipelines: usize, groups: usize, skips: &SkipLog, read: &Read) -> (Result<()>, Vec<usize>) {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let Claim::Ours(out) = OutputDir::claim(&dir.path().join("out"), "job", ALL, false).unwrap() else {
        panic!("the folder is new");
    };
    let spec = shard_spec(&tokenizer, &out.attempt);
    let builder = InputGroupBuilder {
        out: &out,
        tokenizer: &tokenizer,
        spec,
        validation_fraction: 0.0,
        pass: Pass::Build(None),
        num_groups: groups,
        cancel: Cancel::default(),
    };
    let todo: Vec<Todo> = (0..groups).map(|number| Todo { number, bytes: 1 }).collect();
    let read = |number: usize, _: &AtomicU64, to: &mut Batcher<'_>| read(number, to);
    let outcome = pipelines::build(&builder, 8, pipelines, &todo, skips, &read, &mut |_| true);
    (
        outcome.map(drop),
        (0..groups).filter(|&group| out.record(&Pass::Build(None), group).is_some()).collect(),
    )
}

#[test]
fn pipelines_read_at_the_same_time() {
    let together = Barrier::new(4);
    let read = |_: usize, to: &mut Batcher<'_>| {
        together.wait(); // waits forever unless four groups are being read
        to.push_document("a b")
    };
    let (outcome, finished) = build(4, 16, &SkipLog::default(), &read);
    outcome.unwrap();
    assert_eq!(finished.len(), 16);
}

#[test]
fn the_limit_of_skipped_records_is_one_for_all_pipelines() {
    let record = || crate::input::SkippedRecord { file: "f".into(), line: 1, reason: String::new() };
    let read = |_: usize, to: &mut Batcher<'_>| {
        to.push_document("a")?;
        to.skip(record(), &Error::Input("bad".into()))
    };
    assert!(build(4, 20, &SkipLog::new(20, 0), &read).0.is_ok());
    let error = build(4, 20, &SkipLog::new(20, 1), &read).0.unwrap_err().to_string();
    assert!(error.contains("bad; 20 bad records were skipped before it"), "{error}");
}

#[test]
fn an_error_keeps_the_groups_that_were_finished() {
    let done = AtomicUsize::new(0);
    let read = |number: usize, to: &mut Batcher<'_>| {
        if number == 9 {
            return Err(Error::Input("group 9 is bad".to_owned()));
        }
        done.fetch_add(1, Ordering::Relaxed);
        to.push_document("a")
    };
    let (outcome, finished) = build(1, 20, &SkipLog::default(), &read);
    assert_eq!(outcome.unwrap_err().to_string(), "group 9 is bad");
    assert_eq!(finished, (0..9).collect::<Vec<_>>());
    let (outcome, finished) = build(4, 20, &SkipLog::default(), &read);
    assert_eq!(outcome.unwrap_err().to_string(), "group 9 is bad");
    assert!(!finished.contains(&9));
}

#[test]
fn text_outside_of_input_groups_is_an_error_and_not_dropped() {
    let read = |_: usize, to: &mut Batcher<'_>| {
        to.end_input_group()?;
        to.push_document("a")
    };
    let (outcome, _) = build(1, 1, &SkipLog::default(), &read);
    assert!(outcome.unwrap_err().to_string().contains("more text was read"));
}

#[test]
fn tasks_make_the_same_corpus() {
    let dir = tempfile::tempdir().unwrap();
    let (tokenizer, (text, options)) = (tokenizer(dir.path()), text(dir.path()));
    let local = prepared(&text, &dir.path().join("local"), &tokenizer, &options);
    let out = dir.path().join("out");
    let open = || {
        PrepareJob::open(std::slice::from_ref(&text), &tokenizer, &out, options.clone(), &mut |_| true)
            .unwrap()
    };
    let OpenedJob::Unfinished(job) = open() else { panic!("there is no corpus yet") };
    let settings = job.settings(&tokenizer).unwrap();
    let groups: Vec<String> =
        job.input_groups().iter().map(|&(number, _)| job.input_group(number).unwrap()).collect();
    assert!(groups.len() >= 20);
    let run = |groups: &[String]| {
        let own = job_tokenizer(&settings).unwrap();
        prepare_input_groups(&settings, groups, &own, 1, &mut |_| true).unwrap()
    };
    assert_eq!(job.finish(&tokenizer, &mut |_| true).unwrap().missing_input_groups, groups.len());
    // Each group by two tasks at once.
    let done: Vec<TaskReport> = std::thread::scope(|scope| {
        let tasks: Vec<_> = [0, 0, 1, 1]
            .iter()
            .map(|&odd| {
                let groups: Vec<String> = groups.iter().skip(odd).step_by(2).cloned().collect();
                scope.spawn(move || run(&groups))
            })
            .collect();
        tasks.into_iter().map(|task| task.join().unwrap()).collect()
    });
    assert_eq!(done[0], done[1]);
    assert_eq!(done[0].documents + done[2].documents, local.num_documents);
    let found = job.finish(&tokenizer, &mut |_| true).unwrap();
    assert_eq!((found.complete, found.content_hash), (true, local.content_hash));
    // A task that comes late finds nothing to do, and the folder is as it should be.
    let late = prepare_input_groups(&settings, &groups[..1], &tokenizer, 1, &mut |_| true).unwrap();
    assert_eq!(late, TaskReport::default());
    drop(job);
    assert!(matches!(open(), OpenedJob::Complete(_)));
    assert!(verify(&out).unwrap().damaged.is_empty());
    assert!(!out.join("parts").exists());
}

#[test]
fn a_task_of_another_run_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (tokenizer, (text, options)) = (tokenizer(dir.path()), text(dir.path()));
    let out = dir.path().join("out");
    let open = |options| {
        PrepareJob::open(std::slice::from_ref(&text), &tokenizer, &out, options, &mut |_| true).unwrap()
    };
    let OpenedJob::Unfinished(first) = open(options.clone()) else { panic!("there is no corpus yet") };
    let (settings, group) = (first.settings(&tokenizer).unwrap(), first.input_group(0).unwrap());
    drop(first);
    let _second = open(PrepareOptions { validation_fraction: 0.5, ..options });
    let refusal = |settings: &str| {
        let group = std::slice::from_ref(&group);
        prepare_input_groups(settings, group, &tokenizer, 1, &mut |_| true).unwrap_err().to_string()
    };
    assert!(refusal(&settings).contains("the run that this work belongs to has ended"));
    let of_other = settings.replace("\"text_version\":1", "\"text_version\":900");
    for settings in
        [of_other, settings.replace("\"text_version\":1,", ""), settings.replace("job", "fingerprint")]
    {
        assert!(refusal(&settings).contains("a task of another version of electra-fast came here"));
        assert!(job_tokenizer(&settings).is_err());
    }
}

#[test]
fn a_finished_corpus_of_an_older_text_version_is_complete() {
    let dir = tempfile::tempdir().unwrap();
    let (tokenizer, (text, options)) = (tokenizer(dir.path()), text(dir.path()));
    let out = dir.path().join("out");
    let made = prepared(&text, &out, &tokenizer, &options);
    let run = PrepareRun { tokenizer: &tokenizer, out: &out, options: &options };
    let plan = Plan::new(&[text], &tokenizer, &out, &options).unwrap();
    let mut newer = Plan { older_fingerprints: vec![plan.fingerprint], fingerprint: "new".into(), ..plan };
    let Claimed::Complete(found) = run.claim(&newer, &mut |_| true).unwrap() else {
        panic!("it is complete")
    };
    assert!(found.already_complete && found.content_hash == made.content_hash);
    newer.older_fingerprints.clear();
    assert!(
        run.claim(&newer, &mut |_| true).err().unwrap().to_string().contains("of other inputs or options")
    );
}

#[test]
fn several_can_finalize_at_once() {
    for (round, validation_fraction) in [0.0, 0.1, 1e-12].into_iter().cycle().take(12).enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let (tokenizer, (text, options)) = (tokenizer(dir.path()), text(dir.path()));
        let options = PrepareOptions { validation_fraction, reading: ReadOptions::default(), ..options };
        let expected = prepared(&text, &dir.path().join("alone"), &tokenizer, &options);
        let out = dir.path().join("out");
        let run = PrepareRun { tokenizer: &tokenizer, out: &out, options: &options };
        let plan = Plan::new(std::slice::from_ref(&text), &tokenizer, &out, &options).unwrap();
        let claimed = run.claim(&plan, &mut |_| true).unwrap();
        let Claimed::Unfinished(work) = claimed else { panic!("there is no corpus yet") };
        run.build_files(&work, &plan, &mut |_| true).unwrap();
        let join = || OutputDir::join(&out, &plan.fingerprint).unwrap();
        let works = [(); 4].map(|()| RemainingWork {
            out: join(),
            pass: Pass::Build(None),
            todo: Vec::new(),
            skipped: 0,
            stale: BTreeMap::new(),
        });
        let start = Barrier::new(works.len());
        std::thread::scope(|scope| {
            for work in &works {
                let (run, plan, start, expected) = (&run, &plan, &start, &expected);
                scope.spawn(move || {
                    start.wait();
                    let found = run.unless_finished(run.finalize(work, plan, &mut |_| true), plan).unwrap();
                    let hashes = (&found.content_hash, found.validation_documents);
                    assert_eq!(hashes, (&expected.content_hash, expected.validation_documents), "{round}");
                });
            }
        });
        assert!(verify(&out).unwrap().damaged.is_empty());
        let names = |folder: &str| {
            let entries = std::fs::read_dir(dir.path().join(folder)).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        drop(work);
        assert_eq!(names("out"), names("alone"));
    }
}

/// Has a test look at the work of a run whose input groups are built and not yet a corpus.
fn with_built(validation_fraction: f64, check: impl FnOnce(&PrepareRun<'_>, &Plan, &RemainingWork)) {
    let dir = tempfile::tempdir().unwrap();
    let (tokenizer, (text, options)) = (tokenizer(dir.path()), text(dir.path()));
    let (out, options) = (dir.path().join("out"), PrepareOptions { validation_fraction, ..options });
    let run = PrepareRun { tokenizer: &tokenizer, out: &out, options: &options };
    let plan = Plan::new(std::slice::from_ref(&text), &tokenizer, &out, &options).unwrap();
    let claimed = run.claim(&plan, &mut |_| true).unwrap();
    let Claimed::Unfinished(work) = claimed else { panic!("there is no corpus yet") };
    run.build_files(&work, &plan, &mut |_| true).unwrap();
    check(&run, &plan, &work);
}

#[test]
fn moving_the_last_document_leaves_what_another_finalizer_reads() {
    with_built(0.0, |run, plan, work| {
        let records = || {
            (0..plan.groups.len())
                .map(|group| work.out.record(&Pass::Build(None), group).unwrap())
                .collect::<Vec<_>>()
        };
        let (mut ours, mut theirs) = (records(), records());
        let finalizer = Finalizer {
            out: &work.out,
            tokenizer: run.tokenizer,
            spec: shard_spec(run.tokenizer, &work.out.attempt),
            options: run.options.to_json(),
            dropped: Dropped::default(),
            wants_validation: true,
        };
        finalizer.move_last_to_validation(&mut ours).unwrap();
        finalizer.move_last_to_validation(&mut theirs).unwrap();
        assert_eq!(ours, theirs);
        assert_ne!(ours, records()); // what is recorded is still there, whole
    });
}

#[test]
fn the_manifest_is_written_last_and_nothing_is_removed_before() {
    with_built(0.1, |run, plan, work| {
        // A folder in the way stops the run at each of its last files.
        for name in ["holdout/vocab.txt", "holdout/manifest.json", "vocab.txt", "manifest.json"] {
            let obstacle = run.out.join(name);
            std::fs::create_dir(&obstacle).unwrap();
            run.finalize(work, plan, &mut |_| true).unwrap_err();
            assert!(!run.out.join(MANIFEST).is_file(), "{name}");
            assert!(
                (0..plan.groups.len()).all(|group| work.out.record(&Pass::Build(None), group).is_some()),
                "{name}"
            );
            std::fs::remove_dir(&obstacle).unwrap();
        }
        assert!(run.finalize(work, plan, &mut |_| true).unwrap().complete);
    });
}

#[test]
fn what_an_older_release_recorded_holds_unless_all_content_is_to_be_compared() {
    with_built(0.0, |_, plan, work| {
        let mut record = work.out.record(&Pass::Build(None), 0).unwrap();
        record.inputs.clear();
        let records = [Some(record)];
        let stale = |verify| Comparer { plan, verify }.stale(&records, &mut |_| true).unwrap();
        assert!(stale(false).is_empty());
        assert_eq!(stale(true), [(0, plan.inputs.files[0].path.clone())]);
    });
}

#[test]
fn a_group_is_finished_only_with_all_bytes_of_its_shards() {
    with_built(0.1, |run, _, work| {
        let shard = |record: &InputGroupRecord| run.out.join(&record.shards[0].lines.file);
        let validation = |record: &InputGroupRecord| {
            record.validation.first().map(|shard| work.out.validation().join(&shard.tokens.file))
        };
        let cut = |path: &Path| {
            let file = std::fs::File::options().write(true).open(path).unwrap();
            file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        };
        cut(&shard(&work.out.record(&Pass::Build(None), 0).unwrap()));
        std::fs::remove_file(shard(&work.out.record(&Pass::Build(None), 1).unwrap())).unwrap();
        let records = (2..).map_while(|group| work.out.record(&Pass::Build(None), group));
        let held_out = records.into_iter().find(|record| !record.validation.is_empty()).unwrap();
        cut(&validation(&held_out).unwrap());
        for group in [0, 1, held_out.input_group] {
            assert!(work.out.record(&Pass::Build(None), group).is_none(), "{group}");
        }
    });
}
