//! Text to a corpus: `input` → `corpus` → `tokenize` → `writer`, unit by unit, then `finish`.
//!
//! A unit (a group of files) is done or not done; doing it again gives the same bytes. So a run
//! that was killed goes on, and several machines can share the units, with one and the same result.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::finalize::Finish;
use super::input_group::{Progress, UnitJob};
use super::output_dir::{ALL, Claim, Folder, UnitRecord, clear_up};
use crate::error::{Error, Result};
use crate::format::{
    FORMAT_VERSION, HOLDOUT, MANIFEST, Manifest, ShardEntry, ShardSpec, create_folder, hex128, sum,
};
use crate::input::{
    Batcher, Documents, Inputs, InvalidUtf8, Reading, SkipLog, SkippedRecord, default_threads, read_file,
    read_first,
};
use crate::tokenizer::Tokenizer;

/// Skipped records that a report names.
const SHOWN: usize = 10;
/// A shard ends at the first document boundary after this many tokens …
const SHARD_TOKENS: u64 = 1 << 27;
/// … or documents.
const SHARD_DOCUMENTS: usize = 1 << 22;

/// Where the text comes from.
pub enum Source<'a> {
    /// Files, folders and globs.
    Files(Vec<PathBuf>),
    /// Documents as they come. Such a run cannot be resumed; it starts again.
    Documents(Box<dyn Iterator<Item = Result<String>> + Send + 'a>),
}

/// How to make a corpus.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// How text is found in files.
    pub reading: Reading,
    /// Fraction of documents that go to `holdout/`, at least 0 and below 1.
    ///
    /// Each document is drawn by its place in the corpus alone. If the draw takes none of at least
    /// two documents, the last one is held out.
    pub holdout: f64,
    /// (I, N): do only every N-th unit, beginning with the I-th, counted from 1.
    pub partition: Option<(usize, usize)>,
    /// Threads that tokenise; all cores if not given.
    pub threads: Option<usize>,
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Whether the folder now is a corpus; otherwise other partitions are missing.
    pub complete: bool,
    /// Whether it was one before.
    pub already_complete: bool,
    /// Files that belong to the corpus.
    pub num_files: usize,
    /// Files of unknown kinds that were passed over.
    pub skipped_files: usize,
    /// Splits of saved datasets that were passed over because another one was read.
    pub skipped_splits: Vec<String>,
    /// Units in all, and of these the ones that are not done.
    pub num_units: usize,
    /// Units that are not done, in this folder.
    pub missing_units: usize,
    /// Documents, tokens and empty documents of the corpus (of this run, if it is not complete).
    pub num_documents: u64,
    /// Tokens, without the held-out ones.
    pub num_tokens: u64,
    /// Documents that had no token and were left out.
    pub empty_documents: u64,
    /// Documents that were held out.
    pub holdout_documents: u64,
    /// Records that could not be read and were left out; in a corpus `skipped.jsonl` lists them.
    pub skipped_records: u64,
    /// The first ten of them.
    pub first_skipped: Vec<SkippedRecord>,
    /// The corpus's content hash; empty if it is not complete.
    pub content_hash: String,
}

/// Makes a corpus in `out`, or goes on making it.
///
/// `progress` is called about ten times a second; when it returns `false` the run stops with
/// [`Error::Interrupted`] and can be gone on with.
pub fn prepare(
    source: Source,
    tokenizer: &Tokenizer,
    out: &Path,
    options: &Options,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Report> {
    check(options)?;
    match source {
        Source::Files(inputs) => {
            let inputs = Inputs::expand(&inputs, Some(out), options.reading.format)?;
            refuse_vocabulary(&inputs, tokenizer.path())?;
            Run { tokenizer, out, options }.files(&inputs, progress)
        }
        Source::Documents(documents) => Run { tokenizer, out, options }.documents(documents, progress),
    }
}

struct Run<'a> {
    tokenizer: &'a Tokenizer,
    out: &'a Path,
    options: &'a Options,
}

impl Run<'_> {
    fn files(&self, inputs: &Inputs, progress: &mut dyn FnMut(Progress) -> bool) -> Result<Report> {
        let names: Vec<Value> = inputs.files.iter().map(|file| json!([file.name, file.size])).collect();
        let job = self.job(&Value::from(names));
        let units = inputs.units();
        let report = Report {
            num_files: inputs.files.len(),
            skipped_files: inputs.skipped,
            skipped_splits: inputs.skipped_splits.clone(),
            num_units: units.len(),
            ..Report::default()
        };
        let folder = match Folder::claim(self.out, &job, &self.tag())? {
            Claim::Finished(manifest) if manifest.job == job => {
                clear_up(self.out)?;
                return self.complete(&manifest, Report { already_complete: true, ..report });
            }
            Claim::Finished(_) => return Err(self.occupied("of other inputs or options")),
            Claim::Ours(folder) => folder,
        };
        let records: Vec<_> = (0..units.len()).map(|unit| folder.record(unit)).collect();
        let todo: Vec<usize> = self.share(units.len()).filter(|&unit| records[unit].is_none()).collect();
        let skipped = self.check_skipped(records.iter().flatten())?;
        self.build_files(&folder, inputs, &units, &todo, skipped, progress)?;
        self.finish(&folder, report)
    }

    fn build_files(
        &self,
        folder: &Folder,
        inputs: &Inputs,
        units: &[Range<usize>],
        todo: &[usize],
        skipped: u64,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<()> {
        let done = AtomicU64::new(0);
        let files = || todo.iter().flat_map(|&unit| &inputs.files[units[unit].clone()]);
        let total: u64 = files().map(|file| file.size).sum();
        let read = |to: &mut Batcher| {
            for &unit in todo {
                for file in &inputs.files[units[unit].clone()] {
                    read_file(file, &self.options.reading, &done, to)?;
                }
                to.end_unit()?;
            }
            Ok(())
        };
        self.prepare_holdout(folder)?;
        let bytes = || (done.load(Ordering::Relaxed), total);
        let skips = SkipLog::new(self.options.reading.skip_bad_records, skipped);
        self.unit_job(folder).build(todo, skips, read, bytes, progress)
    }

    fn documents(
        &self,
        documents: Box<dyn Iterator<Item = Result<String>> + Send + '_>,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Report> {
        if self.options.partition.is_some() {
            return Err(Error::Input("a partition needs files as input, not documents".to_owned()));
        }
        let folder = match Folder::claim(self.out, &self.job(&json!("documents")), ALL)? {
            Claim::Finished(_) => return Err(self.occupied("already")),
            Claim::Ours(folder) => folder,
        };
        folder.remove_record(0)?;
        self.prepare_holdout(&folder)?;
        let done = AtomicU64::new(0);
        let read = |to: &mut Batcher| {
            for document in documents {
                let document = document?;
                done.fetch_add(document.len() as u64, Ordering::Relaxed);
                to.push_document(&document)?;
            }
            to.end_unit()
        };
        let bytes = || (done.load(Ordering::Relaxed), 0);
        self.unit_job(&folder).build(&[0], SkipLog::default(), read, bytes, progress)?;
        self.finish(&folder, Report { num_units: 1, ..Report::default() })
    }

    fn finish(&self, folder: &Folder, report: Report) -> Result<Report> {
        let records: Vec<_> = (0..report.num_units).map(|unit| folder.record(unit)).collect();
        let missing = records.iter().filter(|record| record.is_none()).count();
        let records: Vec<_> = records.into_iter().flatten().collect();
        if missing > 0 && self.out.join(MANIFEST).exists() {
            // Another partition's run has just finished the corpus and cleared up.
            return self.complete(&Manifest::read(self.out)?, report);
        }
        let skipped = || records.iter().flat_map(|record| &record.skipped);
        if missing > 0 {
            let total =
                |f: fn(&ShardEntry) -> u64| sum(records.iter().flat_map(|record| &record.shards).map(f));
            return Ok(Report {
                missing_units: missing,
                num_documents: total(|shard| shard.num_documents),
                num_tokens: total(|shard| shard.num_tokens),
                empty_documents: sum(records.iter().map(|record| record.empty_documents)),
                skipped_records: self.check_skipped(&records)?,
                first_skipped: skipped().take(SHOWN).cloned().collect(),
                ..report
            });
        }
        self.check_skipped(&records)?;
        let finish = Finish {
            folder,
            tokenizer: self.tokenizer,
            spec: self.spec(),
            options: self.options_json(),
            holdout: self.options.holdout > 0.0,
        };
        let manifest = finish.finish(records)?;
        self.complete(&manifest, report)
    }

    fn complete(&self, manifest: &Manifest, report: Report) -> Result<Report> {
        let holdout_documents =
            if manifest.holdout { Manifest::read(&self.out.join(HOLDOUT))?.num_documents } else { 0 };
        Ok(Report {
            complete: true,
            num_documents: manifest.num_documents,
            num_tokens: manifest.num_tokens,
            empty_documents: manifest.empty_documents,
            holdout_documents,
            skipped_records: manifest.skipped_records,
            first_skipped: if manifest.skipped_records > 0 {
                read_first(self.out, SHOWN)?
            } else {
                Vec::new()
            },
            content_hash: manifest.content_hash.clone(),
            ..report
        })
    }

    /// How many records have been left out so far, if that is no more than may be.
    fn check_skipped<'r>(&self, records: impl IntoIterator<Item = &'r UnitRecord>) -> Result<u64> {
        let skipped = records.into_iter().map(|record| record.skipped.len() as u64).sum();
        let allowed = self.options.reading.skip_bad_records;
        if skipped <= allowed {
            return Ok(skipped);
        }
        let out = self.out.display();
        Err(Error::Input(format!(
            "{out}: {skipped} bad records were skipped so far, and --skip-bad-records allows {allowed}; give it \
             at least {skipped}, or start again in another --out"
        )))
    }

    /// Everything that the resulting bytes depend on, in one hash.
    fn job(&self, inputs: &Value) -> String {
        let job = json!([FORMAT_VERSION, self.tokenizer.hash(), self.options_json(), inputs]);
        hex128(xxh3_128(job.to_string().as_bytes()))
    }

    /// Options that decide the corpus, and so not how many bad records may be skipped. A format is named
    /// only where one was given: corpora are older than the option.
    fn options_json(&self) -> Value {
        let reading = &self.options.reading;
        let mut options = json!({
            "documents": match reading.documents {
                Documents::BlankLine => "blank-line",
                Documents::File => "file",
                Documents::Line => "line",
            },
            "text_fields": reading.text_fields,
            "invalid_utf8": match reading.invalid_utf8 {
                InvalidUtf8::Error => "error",
                InvalidUtf8::Replace => "replace",
            },
            "holdout": self.options.holdout,
        });
        if let Some(format) = reading.format {
            options["format"] = format.name().into();
        }
        options
    }

    fn tag(&self) -> String {
        self.options.partition.map_or(ALL.to_owned(), |(index, count)| format!("{index}-of-{count}"))
    }

    /// The units of this run's partition.
    fn share(&self, units: usize) -> impl Iterator<Item = usize> + use<> {
        let (index, count) = self.options.partition.unwrap_or((1, 1));
        (0..units).filter(move |unit| unit % count == index - 1)
    }

    fn spec(&self) -> ShardSpec {
        ShardSpec {
            width: if self.tokenizer.vocab_size() <= 1 << 16 { 2 } else { 4 },
            tokenizer_hash: self.tokenizer.hash(),
            tag: self.tag(),
            max_tokens: SHARD_TOKENS,
            max_documents: SHARD_DOCUMENTS,
        }
    }

    fn unit_job<'a>(&'a self, folder: &'a Folder) -> UnitJob<'a> {
        UnitJob {
            folder,
            tokenizer: self.tokenizer,
            spec: self.spec(),
            holdout: self.options.holdout,
            threads: self.options.threads.unwrap_or_else(default_threads),
        }
    }

    fn prepare_holdout(&self, folder: &Folder) -> Result<()> {
        if self.options.holdout > 0.0 { create_folder(&folder.holdout()) } else { Ok(()) }
    }

    fn occupied(&self, whose: &str) -> Error {
        let out = self.out.display();
        Error::Input(format!("{out}: holds a finished corpus {whose}; choose another --out or remove it"))
    }
}

/// A vocabulary is no text: it is among the inputs by mistake.
pub(super) fn refuse_vocabulary(inputs: &Inputs, vocabulary: &Path) -> Result<()> {
    if vocabulary.exists() && inputs.contains(vocabulary)? {
        let path = vocabulary.display();
        return Err(Error::Input(format!(
            "{path}: the vocabulary itself is among the inputs; move it out of their folder, or name the text files"
        )));
    }
    Ok(())
}

fn check(options: &Options) -> Result<()> {
    let holdout = options.holdout;
    if !(0.0..1.0).contains(&holdout) {
        return Err(Error::Input(format!("holdout is {holdout}; give a fraction of at least 0 and below 1")));
    }
    if let Some((index, count)) = options.partition
        && !(1..=count).contains(&index)
    {
        return Err(Error::Input(format!(
            "partition {index}/{count}: count from 1/{count} to {count}/{count}"
        )));
    }
    if options.threads == Some(0) {
        return Err(Error::Input("threads is 0; give at least 1".to_owned()));
    }
    if options.reading.text_fields.is_empty() {
        return Err(Error::Input("no text field is named; the usual one is \"text\"".to_owned()));
    }
    Ok(())
}
