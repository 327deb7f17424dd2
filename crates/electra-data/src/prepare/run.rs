//! Text to a corpus: input files → documents → token ids → shards, one input group at a time, then
//! `finalize`.
//!
//! An input group (a group of files) is either finished or not, and building it again gives the same bytes.
//! So a run that was killed can be resumed, and several machines can share the groups, with the same result.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::finalize::Finalizer;
use super::input_group::InputGroupBuilder;
use super::output_dir::{ALL, Claim, InputGroupRecord, OutputDir, clean_up};
use super::progress::Progress;
use crate::error::{Error, Result};
use crate::format::{
    FORMAT_VERSION, MANIFEST, Manifest, ShardEntry, ShardSpec, VALIDATION, create_folder, hex128,
    saturating_sum,
};
use crate::input::{
    Batcher, DocumentSeparator, Inputs, InvalidUtf8, ReadOptions, SkipLog, SkippedRecord, TextSource,
    default_threads, read_file, read_first_skipped,
};
use crate::tokenizer::Tokenizer;

/// How many skipped records a report lists.
const MAX_LISTED: usize = 10;
/// A shard ends at the first document boundary after this many tokens …
const SHARD_TOKENS: u64 = 1 << 27;
/// … or documents.
const SHARD_DOCUMENTS: usize = 1 << 22;

/// How to make a corpus.
#[derive(Clone, Debug, Default)]
pub struct PrepareOptions {
    /// How files are read.
    pub reading: ReadOptions,
    /// Fraction of documents that go to the validation split in `holdout/`, at least 0 and below 1.
    ///
    /// A document is chosen by its position in the corpus alone. If none of at least two documents is chosen,
    /// the last one is.
    pub validation_fraction: f64,
    /// (I, N): build only every N-th input group, starting with the I-th, counted from 1.
    pub partition: Option<(usize, usize)>,
    /// Number of threads that tokenize; `None` for one per core.
    pub threads: Option<usize>,
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub struct PrepareReport {
    /// Whether the corpus is complete; otherwise other partitions are missing.
    pub complete: bool,
    /// Whether it was complete before this run.
    pub already_complete: bool,
    /// Input files of the corpus.
    pub num_files: usize,
    /// Files of unknown kinds that were skipped.
    pub skipped_files: usize,
    /// Splits of saved datasets that were not read because another one was.
    pub skipped_splits: Vec<String>,
    /// Input groups in total.
    pub num_input_groups: usize,
    /// Input groups that are not finished yet.
    pub missing_input_groups: usize,
    /// Documents of the corpus, without the validation split (of all finished groups, if it is not complete).
    pub num_documents: u64,
    /// Tokens in them.
    pub num_tokens: u64,
    /// Documents without any token, which were left out.
    pub empty_documents: u64,
    /// Documents in the validation split.
    pub validation_documents: u64,
    /// Unreadable records that were skipped. `skipped.jsonl` in the corpus lists them.
    pub skipped_records: u64,
    /// The first ten of them.
    pub first_skipped: Vec<SkippedRecord>,
    /// The corpus's content hash; empty if it is not complete.
    pub content_hash: String,
}

/// Makes a corpus in `out`, or resumes making it.
///
/// `progress` is called about ten times per second. When it returns `false`, the run stops with
/// [`Error::Interrupted`]; the same call resumes it.
pub fn prepare(
    source: TextSource,
    tokenizer: &Tokenizer,
    out: &Path,
    options: &PrepareOptions,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<PrepareReport> {
    check(options)?;
    match source {
        TextSource::Files(inputs) => {
            let inputs = Inputs::expand(&inputs, Some(out), options.reading.format)?;
            refuse_vocabulary(&inputs, tokenizer.path())?;
            PrepareRun { tokenizer, out, options }.files(&inputs, progress)
        }
        TextSource::Documents(documents) => {
            PrepareRun { tokenizer, out, options }.documents(documents, progress)
        }
    }
}

struct PrepareRun<'a> {
    tokenizer: &'a Tokenizer,
    out: &'a Path,
    options: &'a PrepareOptions,
}

impl PrepareRun<'_> {
    fn files(&self, inputs: &Inputs, progress: &mut dyn FnMut(Progress) -> bool) -> Result<PrepareReport> {
        let names: Vec<Value> = inputs.files.iter().map(|file| json!([file.name, file.size])).collect();
        let fingerprint = self.fingerprint(&Value::from(names));
        let groups = inputs.input_groups();
        let report = PrepareReport {
            num_files: inputs.files.len(),
            skipped_files: inputs.skipped,
            skipped_splits: inputs.skipped_splits.clone(),
            num_input_groups: groups.len(),
            ..PrepareReport::default()
        };
        let out = match OutputDir::claim(self.out, &fingerprint, &self.tag())? {
            Claim::Finished(manifest) if manifest.fingerprint == fingerprint => {
                clean_up(self.out)?;
                return self.complete(&manifest, PrepareReport { already_complete: true, ..report });
            }
            Claim::Finished(_) => return Err(self.occupied("of other inputs or options")),
            Claim::Ours(out) => out,
        };
        let records: Vec<_> = (0..groups.len()).map(|group| out.record(group)).collect();
        let todo: Vec<usize> =
            self.partition(groups.len()).filter(|&group| records[group].is_none()).collect();
        let skipped = self.check_skipped(records.iter().flatten())?;
        self.build_files(&out, inputs, &groups, &todo, skipped, progress)?;
        self.finalize(&out, report)
    }

    fn build_files(
        &self,
        out: &OutputDir,
        inputs: &Inputs,
        groups: &[Range<usize>],
        todo: &[usize],
        skipped: u64,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<()> {
        let done = AtomicU64::new(0);
        let files = || todo.iter().flat_map(|&group| &inputs.files[groups[group].clone()]);
        let total: u64 = files().map(|file| file.size).sum();
        let read = |to: &mut Batcher| {
            for &group in todo {
                for file in &inputs.files[groups[group].clone()] {
                    read_file(file, &self.options.reading, &done, to)?;
                }
                to.end_input_group()?;
            }
            Ok(())
        };
        self.create_validation(out)?;
        let bytes = || (done.load(Ordering::Relaxed), total);
        let skips = SkipLog::new(self.options.reading.skip_bad_records, skipped);
        self.builder(out).build(todo, skips, read, bytes, progress)
    }

    fn documents(
        &self,
        documents: Box<dyn Iterator<Item = Result<String>> + Send + '_>,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<PrepareReport> {
        if self.options.partition.is_some() {
            return Err(Error::Input("a partition needs files as input, not documents".to_owned()));
        }
        let out = match OutputDir::claim(self.out, &self.fingerprint(&json!("documents")), ALL)? {
            Claim::Finished(_) => return Err(self.occupied("already")),
            Claim::Ours(out) => out,
        };
        out.remove_record(0)?;
        self.create_validation(&out)?;
        let done = AtomicU64::new(0);
        let read = |to: &mut Batcher| {
            for document in documents {
                let document = document?;
                done.fetch_add(document.len() as u64, Ordering::Relaxed);
                to.push_document(&document)?;
            }
            to.end_input_group()
        };
        let bytes = || (done.load(Ordering::Relaxed), 0);
        self.builder(&out).build(&[0], SkipLog::default(), read, bytes, progress)?;
        self.finalize(&out, PrepareReport { num_input_groups: 1, ..PrepareReport::default() })
    }

    fn finalize(&self, out: &OutputDir, report: PrepareReport) -> Result<PrepareReport> {
        let records: Vec<_> = (0..report.num_input_groups).map(|group| out.record(group)).collect();
        let missing = records.iter().filter(|record| record.is_none()).count();
        let records: Vec<_> = records.into_iter().flatten().collect();
        if missing > 0 && self.out.join(MANIFEST).exists() {
            // The run of another partition has just finished the corpus and removed the records.
            return self.complete(&Manifest::read(self.out)?, report);
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
                skipped_records: self.check_skipped(&records)?,
                first_skipped: skipped().take(MAX_LISTED).cloned().collect(),
                ..report
            });
        }
        self.check_skipped(&records)?;
        let finalizer = Finalizer {
            out,
            tokenizer: self.tokenizer,
            spec: self.spec(),
            options: self.options_json(),
            wants_validation: self.options.validation_fraction > 0.0,
        };
        let manifest = finalizer.finalize(records)?;
        self.complete(&manifest, report)
    }

    fn complete(&self, manifest: &Manifest, report: PrepareReport) -> Result<PrepareReport> {
        let validation_documents = if manifest.has_validation {
            Manifest::read(&self.out.join(VALIDATION))?.num_documents
        } else {
            0
        };
        Ok(PrepareReport {
            complete: true,
            num_documents: manifest.num_documents,
            num_tokens: manifest.num_tokens,
            empty_documents: manifest.empty_documents,
            validation_documents,
            skipped_records: manifest.skipped_records,
            first_skipped: if manifest.skipped_records > 0 {
                read_first_skipped(self.out, MAX_LISTED)?
            } else {
                Vec::new()
            },
            content_hash: manifest.content_hash.clone(),
            ..report
        })
    }

    /// The number of records skipped so far; an error if it exceeds the limit.
    fn check_skipped<'r>(&self, records: impl IntoIterator<Item = &'r InputGroupRecord>) -> Result<u64> {
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
    fn fingerprint(&self, inputs: &Value) -> String {
        let parts = json!([FORMAT_VERSION, self.tokenizer.hash(), self.options_json(), inputs]);
        hex128(xxh3_128(parts.to_string().as_bytes()))
    }

    /// Options that decide the content, so without `skip_bad_records`. A format is included only if given:
    /// corpora made before there was that option must keep their fingerprint.
    fn options_json(&self) -> Value {
        let reading = &self.options.reading;
        let mut options = json!({
            "documents": match reading.separator {
                DocumentSeparator::BlankLine => "blank-line",
                DocumentSeparator::File => "file",
                DocumentSeparator::Line => "line",
            },
            "text_fields": reading.text_fields,
            "invalid_utf8": match reading.invalid_utf8 {
                InvalidUtf8::Error => "error",
                InvalidUtf8::Replace => "replace",
            },
            "holdout": self.options.validation_fraction,
        });
        if let Some(format) = reading.format {
            options["format"] = format.name().into();
        }
        options
    }

    fn tag(&self) -> String {
        self.options.partition.map_or(ALL.to_owned(), |(index, count)| format!("{index}-of-{count}"))
    }

    /// The input groups of this run's partition.
    fn partition(&self, num_groups: usize) -> impl Iterator<Item = usize> + use<> {
        let (index, count) = self.options.partition.unwrap_or((1, 1));
        (0..num_groups).filter(move |group| group % count == index - 1)
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

    fn builder<'a>(&'a self, out: &'a OutputDir) -> InputGroupBuilder<'a> {
        InputGroupBuilder {
            out,
            tokenizer: self.tokenizer,
            spec: self.spec(),
            validation_fraction: self.options.validation_fraction,
            threads: self.options.threads.unwrap_or_else(default_threads),
        }
    }

    fn create_validation(&self, out: &OutputDir) -> Result<()> {
        if self.options.validation_fraction > 0.0 { create_folder(&out.validation()) } else { Ok(()) }
    }

    fn occupied(&self, whose: &str) -> Error {
        let out = self.out.display();
        Error::Input(format!("{out}: holds a finished corpus {whose}; choose another --out or remove it"))
    }
}

/// Refuses a vocabulary among the inputs: it is not text and is there by mistake.
pub(super) fn refuse_vocabulary(inputs: &Inputs, vocabulary: &Path) -> Result<()> {
    if vocabulary.exists() && inputs.contains(vocabulary)? {
        let path = vocabulary.display();
        return Err(Error::Input(format!(
            "{path}: the vocabulary itself is among the inputs; move it out of their folder, or name the text files"
        )));
    }
    Ok(())
}

fn check(options: &PrepareOptions) -> Result<()> {
    let holdout = options.validation_fraction;
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
