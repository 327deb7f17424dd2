//! Text to a corpus: input files → documents → token ids → shards, input group by input group (`pipelines`), then
//! `finalize`.
//!
//! An input group (files, or a part of a huge file) is either finished or not, and building it again gives the same
//! bytes. So a killed run can be resumed, and several machines can share the groups, with the same result.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;

use super::changes::Comparer;
use super::finalize::Finalizer;
use super::input_group::InputGroupBuilder;
use super::options::{Decided, Pass, Plan, PrepareOptions, TEXT_VERSION, shard_spec};
use super::output_dir::{ALL, Claim, InputGroupRecord, OutputDir, Records, resume_clean_up};
use super::pipelines::{self, Todo};
use super::place::{Place, Sizes, manifest_of};
use super::progress::{Report, Step};
use super::repeats::{Dropped, Repeats, decide, digest, merge};
use crate::error::{Error, Result};
use crate::format::{FileEntry, Manifest, ShardEntry, VALIDATION, create_folder, saturating_sum};
use crate::input::{
    Batcher, PassedOver, SKIPPED, SkipLog, SkippedRecord, TextSource, first_skipped, read_input_group,
};
use crate::store::{Cancel, url_of};
use crate::threads::{lock, nonce};
use crate::tokenizer::Tokenizer;

const MAX_LISTED: usize = 10;

#[derive(Clone, Debug, Default)]
pub struct PrepareReport {
    /// Whether the corpus is complete; otherwise other partitions are missing.
    pub complete: bool,
    pub already_complete: bool,
    pub num_files: usize,
    pub passed_over: PassedOver,
    /// Splits of saved datasets that were not read, because another split was.
    pub skipped_splits: Vec<String>,
    pub num_input_groups: usize,
    pub missing_input_groups: usize,
    /// Input groups whose text has not yet been compared with all other text, because other partitions have not read
    /// theirs.
    pub unhashed_input_groups: usize,
    /// Documents of the corpus, without the validation set (of all finished groups, if the corpus is incomplete).
    pub num_documents: u64,
    pub num_tokens: u64,
    pub empty_documents: u64,
    pub validation_documents: u64,
    pub dropped_documents: u64,
    pub emptied_documents: u64,
    pub dropped_lines: u64,
    /// Repeated text; `None` if the corpus is incomplete or was complete before this run, or if an older release
    /// prepared a part of it.
    pub repeats: Option<Repeats>,
    /// Unreadable records that were skipped. `skipped.jsonl` in the corpus lists them.
    pub skipped_rows: u64,
    pub first_skipped: Vec<SkippedRecord>,
    pub rebuilt_input_groups: usize,
    pub changed_input: Option<PathBuf>,
    pub content_hash: String,
}

/// Prepares a corpus in `out`, or resumes the preparation.
///
/// `progress` is called about ten times per second, on this thread. When it returns `false`, the run stops with
/// [`Error::Interrupted`]; the same call resumes it.
pub fn prepare(
    source: TextSource,
    tokenizer: &Tokenizer,
    out: &Path,
    options: &PrepareOptions,
    progress: &mut Report,
) -> Result<PrepareReport> {
    options.check()?;
    let run = PrepareRun { tokenizer, out, options };
    match source {
        TextSource::Files(inputs) => {
            let plan = Plan::new(&inputs, tokenizer, out, options)?;
            match run.claim(&plan, progress)? {
                Claimed::Complete(report) => Ok(*report),
                Claimed::Unfinished(work) => run.unless_finished(run.finish(*work, &plan, progress), &plan),
            }
        }
        TextSource::Documents(documents) => run.documents(documents, progress),
    }
}

pub(super) struct PrepareRun<'a> {
    pub tokenizer: &'a Tokenizer,
    pub out: &'a Path,
    pub options: &'a PrepareOptions,
}

pub(super) enum Claimed {
    Complete(Box<PrepareReport>),
    Unfinished(Box<Remaining>),
}

pub(super) struct Remaining {
    pub out: OutputDir,
    pub pass: Pass,
    pub todo: Vec<Todo>,
    pub skipped: u64,
    /// Finished groups that must be built again, each with a file that has changed.
    pub stale: BTreeMap<usize, PathBuf>,
}

impl Remaining {
    fn list(&self, progress: &mut Report) -> Result<Sizes> {
        Step::report_one(progress, "looking for finished input groups", || self.out.place.sizes())
    }

    fn records(&self, plan: &Plan, sizes: &Sizes, progress: &mut Report) -> Result<Records> {
        let read = || self.out.records(&self.pass, &Vec::from_iter(0..plan.groups.len()), sizes);
        Step::report_one(progress, "reading finished input groups", read)
    }
}

impl PrepareRun<'_> {
    fn finish(&self, mut work: Remaining, plan: &Plan, progress: &mut Report) -> Result<PrepareReport> {
        self.build_files(&work, plan, progress)?;
        // If a disk damages all hashes, the run must end nevertheless.
        for _ in 0..3 {
            if matches!(work.pass, Pass::Build(_)) || work.todo.is_empty() {
                break;
            }
            self.find_remaining(&mut work, plan, progress)?;
            self.build_files(&work, plan, progress)?;
        }
        self.finalize(&work, plan, progress)
    }

    /// Claims the folder and finds the missing input groups of this run's partition.
    pub fn claim(&self, plan: &Plan, progress: &mut Report) -> Result<Claimed> {
        let tag = |(index, count)| format!("{index}-of-{count}");
        let tag = self.options.partition.map_or(ALL.to_owned(), tag);
        let out = match OutputDir::claim(self.out, &plan.fingerprint, &tag, false)? {
            Claim::Finished(manifest) if plan.is_of(&manifest) => {
                resume_clean_up(self.out, &manifest)?;
                self.comparer(plan).check_finished(self.out, progress)?;
                let report = PrepareReport { already_complete: true, ..report_of(plan) };
                return self.complete(&manifest, report).map(|report| Claimed::Complete(Box::new(report)));
            }
            Claim::Finished(_) => {
                self.comparer(plan).check_sizes(self.out)?;
                return Err(self.occupied("of other inputs or options"));
            }
            Claim::Ours(out) => *out,
        };
        self.create_validation(&out)?;
        let pass = self.options.drop_duplicates.map_or(Pass::Build(None), Pass::Hash);
        let mut work = Remaining { out, pass, todo: Vec::new(), skipped: 0, stale: BTreeMap::new() };
        self.find_remaining(&mut work, plan, progress)?;
        Ok(Claimed::Unfinished(Box::new(work)))
    }

    /// Finds the remaining work. A run that drops duplicates builds groups after all of them have been hashed.
    pub fn find_remaining(&self, work: &mut Remaining, plan: &Plan, progress: &mut Report) -> Result<()> {
        let sizes = work.list(progress)?;
        let records = self.remaining_of_pass(work, &sizes, plan, progress)?;
        let (Pass::Hash(unit), Some(hashed)) = (&work.pass, records) else { return Ok(()) };
        let files: Vec<FileEntry> = hashed.into_iter().filter_map(|record| record.watched).collect();
        match Step::report(progress, |step| decide(&work.out, &files, &sizes, step)) {
            // The file was removed, so its input group is hashed again.
            Err(Error::Damaged { .. }) => return self.find_remaining(work, plan, progress),
            decided => decided?,
        }
        work.pass = Pass::Build(Some(Decided { unit: *unit, digest: digest(&files) }));
        self.remaining_of_pass(work, &sizes, plan, progress)?;
        // Their shards will be replaced: a record of other duplicates must not refer to them again.
        work.out.forget(&work.pass, work.todo.iter().map(|todo| todo.number), &sizes)
    }

    /// Finds the remaining work of this pass; returns the records of all input groups if none is missing.
    fn remaining_of_pass(
        &self,
        work: &mut Remaining,
        sizes: &Sizes,
        plan: &Plan,
        progress: &mut Report,
    ) -> Result<Option<Vec<InputGroupRecord>>> {
        let (index, count) = self.options.partition.unwrap_or((1, 1));
        let is_ours = |number: usize| number % count == index - 1;
        let mut records = work.records(plan, sizes, progress)?;
        let stale = self.comparer(plan).stale(&records, progress)?;
        stale.iter().for_each(|(number, _)| records[*number] = None);
        let stale: BTreeMap<_, _> = stale.into_iter().filter(|(number, _)| is_ours(*number)).collect();
        work.out.forget(&work.pass, stale.keys().copied(), sizes)?;
        work.stale.extend(stale);
        work.skipped = self.check_skipped(records.iter().flatten())?;
        work.todo = (0..plan.groups.len())
            .filter(|&number| is_ours(number) && records[number].is_none())
            .map(|number| Todo { number, bytes: plan.groups[number].num_bytes(&plan.inputs) })
            .collect();
        Ok(records.into_iter().collect())
    }

    pub(super) fn build_files(&self, work: &Remaining, plan: &Plan, progress: &mut Report) -> Result<()> {
        let skips = SkipLog::new(self.options.reading.skip_bad_rows, work.skipped);
        let read = |number: usize, bytes: &AtomicU64, to: &mut Batcher<'_>| {
            let (group, cancel) = (&plan.groups[number], &plan.inputs.cancel);
            let files = &plan.inputs.files[group.files.clone()];
            read_input_group(files, group.part.as_ref(), &self.options.reading, bytes, cancel, to)
        };
        let builder = self.builder(&work.out, &work.pass, plan.groups.len(), &plan.inputs.cancel);
        let threads = self.options.num_threads();
        pipelines::build(&builder, threads, &work.todo, &skips, &read, progress).map(drop)
    }

    fn documents(
        &self,
        documents: Box<dyn Iterator<Item = Result<String>> + Send + '_>,
        progress: &mut Report,
    ) -> Result<PrepareReport> {
        let refused = |reason: &str| Err(Error::Input(reason.to_owned()));
        if self.options.partition.is_some() {
            return refused("partition: needs files as input, not documents");
        }
        if self.options.drop_duplicates.is_some() {
            return refused(
                "drop_duplicates: needs files as input, not documents, because it reads them twice",
            );
        }
        let pass = Pass::Build(None);
        let mut fingerprint = self.options.fingerprint(self.tokenizer, &json!("documents"), TEXT_VERSION);
        if url_of(self.out).is_some() {
            // Only this keeps out a run with other documents.
            fingerprint = format!("{fingerprint}-{:016x}", nonce());
        }
        let out = match OutputDir::claim(self.out, &fingerprint, ALL, true)? {
            Claim::Finished(_) => return Err(self.occupied("already")),
            Claim::Ours(out) => *out,
        };
        out.forget(&pass, 0..1, &out.place.sizes()?)?;
        self.create_validation(&out)?;
        let documents = Mutex::new(documents);
        let read = |_: usize, bytes: &AtomicU64, to: &mut Batcher<'_>| {
            for document in lock(&documents).by_ref() {
                let document = document?;
                bytes.fetch_add(document.len() as u64, Ordering::Relaxed);
                to.push_document(&document)?;
            }
            Ok(())
        };
        let builder = self.builder(&out, &pass, 1, &Cancel::default());
        let (threads, todo) = (self.options.num_threads(), [Todo { number: 0, bytes: 0 }]);
        pipelines::build(&builder, threads, &todo, &SkipLog::default(), &read, progress)
            .inspect_err(|_| out.abandon())?;
        let records = out.few_records(&pass, &[0])?;
        let report = PrepareReport { num_input_groups: 1, ..PrepareReport::default() };
        self.corpus_of(&out, records, report, progress)
    }

    pub fn finalize(&self, work: &Remaining, plan: &Plan, progress: &mut Report) -> Result<PrepareReport> {
        let mut records = work.records(plan, &work.list(progress)?, progress)?;
        let unhashed = records.iter().filter(|record| record.is_none()).count();
        // Runs of other partitions may have read the inputs at another time, and decide themselves whether to build a
        // group again. For this run, a group that does not match is missing.
        if self.options.partition.is_some() && records.iter().all(Option::is_some) {
            for (number, _) in self.comparer(plan).stale(&records, progress)? {
                records[number] = None;
            }
        }
        let report = PrepareReport {
            rebuilt_input_groups: work.stale.len(),
            changed_input: work.stale.values().next().cloned(),
            ..report_of(plan)
        };
        if let Pass::Hash(_) = work.pass {
            let report = PrepareReport { unhashed_input_groups: unhashed, ..report };
            return self.corpus_of(&work.out, vec![None; plan.groups.len()], report, progress);
        }
        self.corpus_of(&work.out, records, report, progress)
    }

    fn corpus_of(
        &self,
        out: &OutputDir,
        records: Records,
        report: PrepareReport,
        progress: &mut Report,
    ) -> Result<PrepareReport> {
        let missing = records.iter().filter(|record| record.is_none()).count();
        let records: Vec<_> = records.into_iter().flatten().collect();
        if missing > 0
            && let Some(manifest) = out.place.manifest()?
        {
            // Another partition's run has just finished the corpus and removed the records.
            return self.complete(&manifest, report);
        }
        let skipped = || records.iter().flat_map(|record| &record.skipped);
        if missing > 0 {
            let total = |f: fn(&ShardEntry) -> u64| {
                saturating_sum(records.iter().flat_map(|record| &record.shards).map(f))
            };
            return Ok(PrepareReport {
                missing_input_groups: missing,
                num_documents: total(|shard| shard.num_documents),
                num_tokens: total(|shard| shard.num_tokens),
                empty_documents: saturating_sum(records.iter().map(|record| record.empty_documents)),
                skipped_rows: self.check_skipped(&records)?,
                first_skipped: skipped().take(MAX_LISTED).cloned().collect(),
                ..report
            });
        }
        self.check_skipped(&records)?;
        let counts: Option<Vec<FileEntry>> = records.iter().map(|record| record.watched.clone()).collect();
        let (repeats, manifest) = Step::report(progress, |step| {
            let counts = counts.map(|files| merge(out, &files, step));
            let (repeats, dropped): (Option<Repeats>, Option<Dropped>) = counts.transpose()?.unzip();
            step.begin("writing the manifest", 0);
            Ok((repeats, self.finalizer(out, dropped.unwrap_or_default()).finalize(records)?))
        })?;
        self.complete(&manifest, PrepareReport { repeats, ..report })
    }

    pub fn finalizer<'a>(&'a self, out: &'a OutputDir, dropped: Dropped) -> Finalizer<'a> {
        Finalizer {
            out,
            tokenizer: self.tokenizer,
            spec: shard_spec(self.tokenizer, &out.attempt),
            options: self.options.to_json(),
            dropped,
            wants_validation: self.options.validation_fraction > 0.0,
        }
    }

    /// The outcome of a run. Ignores an error if another run has finished the same corpus in the meantime.
    pub fn unless_finished(&self, outcome: Result<PrepareReport>, plan: &Plan) -> Result<PrepareReport> {
        let Err(error) = outcome else { return outcome };
        match manifest_of(self.out) {
            Ok(manifest) if manifest.fingerprint == plan.fingerprint => {
                self.complete(&manifest, report_of(plan))
            }
            _ => Err(error),
        }
    }

    fn complete(&self, manifest: &Manifest, report: PrepareReport) -> Result<PrepareReport> {
        let validation_documents =
            if manifest.has_validation { manifest_of(&self.out.join(VALIDATION))?.num_documents } else { 0 };
        // The list is optional, so it may have been removed.
        let list = if manifest.skipped_records > 0 { Place::open(self.out)?.read(SKIPPED)? } else { None };
        Ok(PrepareReport {
            complete: true,
            num_documents: manifest.num_documents,
            num_tokens: manifest.num_tokens,
            empty_documents: manifest.empty_documents,
            validation_documents,
            dropped_documents: manifest.dropped_documents,
            emptied_documents: manifest.emptied_documents,
            dropped_lines: manifest.dropped_lines,
            skipped_rows: manifest.skipped_records,
            first_skipped: first_skipped(&list.unwrap_or_default(), MAX_LISTED)?,
            content_hash: manifest.content_hash.clone(),
            ..report
        })
    }

    /// The number of records skipped so far; an error if it exceeds the limit.
    fn check_skipped<'r>(&self, records: impl IntoIterator<Item = &'r InputGroupRecord>) -> Result<u64> {
        let skipped = records.into_iter().map(|record| record.skipped.len() as u64).sum();
        let allowed = self.options.reading.skip_bad_rows;
        if skipped <= allowed {
            return Ok(skipped);
        }
        let remedy = format!("raise it to at least {skipped}, or start again in another --out");
        let limit = format!("--skip-bad-rows allows {allowed}; {remedy}");
        Err(Error::at(self.out, format_args!("{skipped} bad rows were skipped so far, but {limit}")))
    }

    /// Builds input groups in `out`; the end of the run raises `cancel`.
    pub fn builder<'a>(
        &'a self,
        out: &'a OutputDir,
        pass: &Pass,
        num_groups: usize,
        cancel: &Cancel,
    ) -> InputGroupBuilder<'a> {
        InputGroupBuilder {
            out,
            tokenizer: self.tokenizer,
            spec: shard_spec(self.tokenizer, &out.attempt),
            validation_fraction: self.options.validation_fraction,
            pass: pass.clone(),
            num_groups,
            cancel: cancel.clone(),
        }
    }

    fn comparer<'p>(&self, plan: &'p Plan) -> Comparer<'p> {
        Comparer { plan, verify: self.options.verify_inputs }
    }

    fn create_validation(&self, out: &OutputDir) -> Result<()> {
        if self.options.validation_fraction > 0.0 { create_folder(&out.validation()) } else { Ok(()) }
    }

    fn occupied(&self, whose: &str) -> Error {
        Error::at(
            self.out,
            format_args!("holds a finished corpus {whose}; choose another --out or remove it"),
        )
    }
}

fn report_of(plan: &Plan) -> PrepareReport {
    PrepareReport {
        num_files: plan.inputs.files.len(),
        passed_over: plan.inputs.passed_over.clone(),
        skipped_splits: plan.inputs.skipped_splits.clone(),
        num_input_groups: plan.groups.len(),
        ..PrepareReport::default()
    }
}
