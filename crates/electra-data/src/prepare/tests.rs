//! Concurrent pipelines, tasks and finalizers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::AtomicU64;

use super::changes::Comparer;
use super::options::{Pass, Plan};
use super::output_dir::{ALL, Claim, InputGroupRecord, OutputDir};
use super::pipelines::{self, Todo};
use super::place::names_in;
use super::repeats::Dropped;
use super::run::{Claimed, PrepareRun, Remaining};
use super::*;
use crate::error::{Error, Result};
use crate::format::{MANIFEST, verify};
use crate::input::{Batcher, SkipLog, TextSource};
use crate::store::Cancel;
use crate::tokenizer::Tokenizer;

pub(super) fn tokenizer(dir: &Path, entries: &str) -> Tokenizer {
    let vocab = format!("[PAD] [UNK] [CLS] [SEP] [MASK] {entries}").replace(' ', "\n");
    std::fs::write(dir.join("vocab.txt"), vocab).unwrap();
    Tokenizer::from_file(&dir.join("vocab.txt"), None, None).unwrap()
}

/// A text of documents "a b", "a b b", …, read in about twenty parts, and a setup to prepare it.
struct Setup {
    dir: tempfile::TempDir,
    tokenizer: Tokenizer,
    text: PathBuf,
    out: PathBuf,
    options: PrepareOptions,
}

fn setup(validation_fraction: f64) -> Setup {
    let dir = tempfile::tempdir().unwrap();
    let [text, out] = ["text.txt", "out"].map(|name| dir.path().join(name));
    let documents: String = (0..400).map(|n| format!("a{}\n\n", " b".repeat(1 + n % 9))).collect();
    std::fs::write(&text, &documents).unwrap();
    let part_bytes = Some(documents.len() as u64 / 20);
    let options = PrepareOptions { part_bytes, threads: Some(4), validation_fraction, ..Default::default() };
    Setup { tokenizer: tokenizer(dir.path(), "a b c"), dir, text, out, options }
}

impl Setup {
    fn prepared(&self, out: &Path) -> PrepareReport {
        let source = TextSource::Files(vec![self.text.clone()]);
        prepare(source, &self.tokenizer, out, &self.options, &mut |_| true).unwrap()
    }

    fn run(&self) -> PrepareRun<'_> {
        PrepareRun { tokenizer: &self.tokenizer, out: &self.out, options: &self.options }
    }

    fn plan(&self) -> Plan {
        Plan::new(std::slice::from_ref(&self.text), &self.tokenizer, &self.out, &self.options).unwrap()
    }

    fn open(&self, options: &PrepareOptions) -> PrepareJob {
        let text = std::slice::from_ref(&self.text);
        match PrepareJob::open(text, &self.tokenizer, &self.out, options.clone(), &mut |_| true).unwrap() {
            OpenedJob::Unfinished(job) => *job,
            OpenedJob::Complete(_) => panic!("there is no corpus yet"),
        }
    }
}

/// Calls `check` with the work of a run whose input groups are built but not finalized.
fn with_built(validation_fraction: f64, check: impl FnOnce(&Setup, &PrepareRun, &Plan, Box<Remaining>)) {
    let setup = setup(validation_fraction);
    let (run, plan) = (setup.run(), setup.plan());
    let claimed = run.claim(&plan, &mut |_| true).unwrap();
    let Claimed::Unfinished(work) = claimed else { panic!("there is no corpus yet") };
    run.build_files(&work, &plan, &mut |_| true).unwrap();
    check(&setup, &run, &plan, work);
}

fn record(out: &OutputDir, group: usize) -> Option<InputGroupRecord> {
    out.few_records(&Pass::Build(None), &[group]).unwrap().remove(0)
}

type Read<'a> = dyn Fn(usize, &mut Batcher<'_>) -> Result<()> + Sync + 'a;

/// Builds input groups with a test's reader; returns the outcome and the finished groups.
fn build(threads: usize, groups: usize, skips: &SkipLog, read: &Read) -> (Result<()>, Vec<usize>) {
    let setup = setup(0.0);
    let Claim::Ours(out) = OutputDir::claim(&setup.out, "job", ALL, false).unwrap() else {
        panic!("the folder is new");
    };
    let (run, pass) = (setup.run(), Pass::Build(None));
    let todo: Vec<Todo> = (0..groups).map(|number| Todo { number, bytes: 1 }).collect();
    let read = |number: usize, _: &AtomicU64, to: &mut Batcher<'_>| read(number, to);
    let builder = run.builder(&out, &pass, groups, &Cancel::default());
    let outcome = pipelines::build(&builder, threads, &todo, skips, &read, &mut |_| true).map(drop);
    (outcome, (0..groups).filter(|&group| record(&out, group).is_some()).collect())
}

#[test]
fn pipelines_read_at_the_same_time() {
    let together = Barrier::new(4);
    let read = |_: usize, to: &mut Batcher<'_>| {
        together.wait(); // waits forever unless four groups are being read
        to.push_document("a b")
    };
    let (outcome, finished) = build(8, 16, &SkipLog::default(), &read);
    outcome.unwrap();
    assert_eq!(finished.len(), 16);
}

#[test]
fn pipelines_share_the_limit_of_skipped_rows() {
    let record = || crate::input::SkippedRecord { file: "f".into(), line: 1, reason: String::new() };
    let read = |_: usize, to: &mut Batcher<'_>| {
        to.push_document("a")?;
        to.intake.skips.add(record(), &Error::Input("bad".into()))
    };
    assert!(build(8, 20, &SkipLog::new(20, 0), &read).0.is_ok());
    let error = build(8, 20, &SkipLog::new(20, 1), &read).0.unwrap_err().to_string();
    assert!(error.contains("bad; --skip-bad-rows 20 is used up"), "{error}");
}

#[test]
fn finished_groups_survive_an_error() {
    let read = |number: usize, to: &mut Batcher<'_>| match number {
        9 => Err(Error::Input("group 9 is bad".to_owned())),
        _ => to.push_document("a"),
    };
    for threads in [2, 8] {
        let (outcome, finished) = build(threads, 20, &SkipLog::default(), &read);
        assert_eq!(outcome.unwrap_err().to_string(), "group 9 is bad");
        assert!(if threads == 2 { finished == Vec::from_iter(0..9) } else { !finished.contains(&9) });
    }
}

#[test]
fn text_outside_input_groups_is_an_error() {
    let read = |_: usize, to: &mut Batcher<'_>| {
        to.end_input_group()?;
        to.push_document("a")
    };
    let (outcome, _) = build(2, 1, &SkipLog::default(), &read);
    assert!(outcome.unwrap_err().to_string().contains("more text was read"));
}

#[test]
fn task_of_another_run_is_refused_and_late_task_does_nothing() {
    let setup = setup(0.0);
    let first = setup.open(&setup.options);
    let (settings, group) = (first.settings(&setup.tokenizer).unwrap(), first.input_group(0).unwrap());
    let report = first.finish(&setup.tokenizer, &mut |_| true).unwrap();
    assert_eq!((report.complete, report.missing_input_groups), (false, first.input_groups().len()));
    drop(first);
    let task = |settings: &str| {
        prepare_input_groups(settings, std::slice::from_ref(&group), &setup.tokenizer, 1, &mut |_| true)
    };
    setup.prepared(&setup.out);
    assert_eq!(task(&settings).unwrap(), TaskReport::default());
    assert!(!setup.out.join("parts").exists());
    std::fs::remove_dir_all(&setup.out).unwrap();
    let _second = setup.open(&PrepareOptions { validation_fraction: 0.5, ..setup.options.clone() });
    let refusal = |settings: &str| task(settings).unwrap_err().to_string();
    assert!(refusal(&settings).contains("the run that this task belongs to has ended"));
    let changes =
        [("text_version\":1", "text_version\":900"), ("\"text_version\":1,", ""), ("job", "fingerprint")];
    for settings in changes.map(|(from, to)| settings.replace(from, to)) {
        assert!(refusal(&settings).contains("the task comes from another version of electra-fast"));
        assert!(job_tokenizer(&settings).is_err());
    }
}

#[test]
fn finished_corpus_of_an_older_text_version_is_complete() {
    let setup = setup(0.0);
    let (made, run, plan) = (setup.prepared(&setup.out), setup.run(), setup.plan());
    let mut newer = Plan { older_fingerprints: vec![plan.fingerprint], fingerprint: "new".into(), ..plan };
    let Claimed::Complete(report) = run.claim(&newer, &mut |_| true).unwrap() else { panic!("incomplete") };
    assert!(report.already_complete && report.content_hash == made.content_hash);
    newer.older_fingerprints.clear();
    let refusal = run.claim(&newer, &mut |_| true).err().unwrap().to_string();
    assert!(refusal.contains("of other inputs or options"));
}

#[test]
fn several_runs_can_finalize_at_once() {
    for (round, fraction) in [0.0, 0.1, 1e-12].into_iter().cycle().take(12).enumerate() {
        with_built(fraction, |setup, run, plan, work| {
            let expected = setup.prepared(&setup.dir.path().join("alone"));
            let works = [(); 4].map(|()| Remaining {
                out: OutputDir::join(&setup.out, &plan.fingerprint).unwrap(),
                pass: Pass::Build(None),
                todo: Vec::new(),
                skipped: 0,
                stale: BTreeMap::new(),
            });
            let start = Barrier::new(works.len());
            let finalize = |work| {
                start.wait();
                let report = run.unless_finished(run.finalize(work, plan, &mut |_| true), plan).unwrap();
                let hashes = (&report.content_hash, report.validation_documents);
                assert_eq!(hashes, (&expected.content_hash, expected.validation_documents), "{round}");
            };
            std::thread::scope(|scope| {
                works.iter().for_each(|work| drop(scope.spawn(|| finalize(work))));
            });
            assert!(verify(&setup.out).unwrap().damaged.is_empty());
            drop(work);
            let names = |dir: &Path| names_in(dir).unwrap().into_iter().collect::<BTreeSet<_>>();
            assert_eq!(names(&setup.out), names(&setup.dir.path().join("alone")));
        });
    }
}

#[test]
fn moving_the_last_document_keeps_shards_for_other_finalizers() {
    with_built(0.0, |_, run, plan, work| {
        let records = || Vec::from_iter((0..plan.groups.len()).map(|n| record(&work.out, n).unwrap()));
        let (mut first, mut second) = (records(), records());
        let finalizer = run.finalizer(&work.out, Dropped::default());
        finalizer.move_last_to_validation(&mut first).unwrap();
        finalizer.move_last_to_validation(&mut second).unwrap();
        assert_eq!(first, second);
        assert_ne!(first, records()); // the recorded shards are still complete
    });
}

#[test]
fn manifest_is_written_last_and_before_any_removal() {
    with_built(0.1, |setup, run, plan, work| {
        // A folder of the same name stops the run at each of its last files.
        for name in ["holdout/vocab.txt", "holdout/manifest.json", "vocab.txt", "manifest.json"] {
            let obstacle = setup.out.join(name);
            std::fs::create_dir(&obstacle).unwrap();
            run.finalize(&work, plan, &mut |_| true).unwrap_err();
            assert!(!setup.out.join(MANIFEST).is_file(), "{name}");
            assert!((0..plan.groups.len()).all(|group| record(&work.out, group).is_some()), "{name}");
            std::fs::remove_dir(&obstacle).unwrap();
        }
        assert!(run.finalize(&work, plan, &mut |_| true).unwrap().complete);
    });
}

#[test]
fn records_of_older_releases_are_accepted_without_verify_inputs() {
    with_built(0.0, |setup, _, plan, work| {
        let records = [Some(InputGroupRecord { inputs: Vec::new(), ..record(&work.out, 0).unwrap() })];
        let stale = |verify| Comparer { plan, verify }.stale(&records, &mut |_| true).unwrap();
        assert_eq!((stale(false), stale(true)), (Vec::new(), vec![(0, setup.text.clone())]));
    });
}

#[test]
fn group_with_incomplete_shards_is_unfinished() {
    with_built(0.1, |setup, _, _, work| {
        let shard = |group| setup.out.join(&record(&work.out, group).unwrap().shards[0].lines.file);
        let cut = |path: &Path| {
            let file = std::fs::File::options().write(true).open(path).unwrap();
            file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        };
        cut(&shard(0));
        std::fs::remove_file(shard(1)).unwrap();
        let mut records = (2..).map_while(|group| record(&work.out, group));
        let held_out = records.find(|record| !record.validation.is_empty()).unwrap();
        cut(&work.out.validation().join(&held_out.validation[0].tokens.file));
        for group in [0, 1, held_out.input_group] {
            assert!(record(&work.out, group).is_none(), "{group}");
        }
    });
}
