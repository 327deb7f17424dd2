//! One corpus written by many processes: a parent divides the work into tasks for any executor.
//!
//! The parent ([`PrepareJob`]) lists the inputs, claims the folder and finally writes the corpus; a task
//! ([`prepare_input_groups`]), in any process that sees the same files, builds input groups. They exchange JSON. A task
//! that runs twice, even at the same time, writes the same files.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use serde::{Deserialize, Serialize};

use super::options::{Pass, Plan, PrepareOptions, TEXT_VERSION};
use super::output_dir::{InputGroupRecord, OutputDir};
use super::pipelines::{self, Todo};
use super::place::{Place, manifest_of};
use super::progress::Report;
use super::run::{Claimed, PrepareReport, PrepareRun, Remaining};
use crate::error::{Error, Result};
use crate::format::{PARTS, SpecialTokens};
use crate::input::{Batcher, InputFile, Part, ReadOptions, SkipLog, read_input_group};
use crate::store::{Cancel, url_of};
use crate::tokenizer::Tokenizer;

/// A corpus that tasks are preparing. Claims its folder until it is dropped.
pub struct PrepareJob {
    out: PathBuf,
    options: PrepareOptions,
    plan: Plan,
    work: Box<Remaining>,
}

pub enum OpenedJob {
    Complete(Box<PrepareReport>),
    Unfinished(Box<PrepareJob>),
}

#[derive(Serialize, Deserialize)]
struct TaskSettings {
    text_version: usize,
    out: PathBuf,
    /// Under the name used in records; releases without text versions accept it only under its original name.
    #[serde(rename = "job")]
    fingerprint: String,
    reading: ReadOptions,
    validation_fraction: f64,
    pass: Pass,
    num_groups: usize,
    skipped: u64,
    /// The tokenizer's file in the folder of records, with its settings and hash.
    tokenizer: PathBuf,
    case: (Option<bool>, Option<bool>),
    special_tokens: SpecialTokens,
    tokenizer_hash: u64,
}

#[derive(Serialize, Deserialize)]
struct AssignedGroup {
    number: usize,
    bytes: u64,
    files: Vec<InputFile>,
    part: Option<Part>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskReport {
    /// Documents with at least one token, including the validation set.
    pub documents: u64,
    pub tokens: u64,
    /// Bytes of input, as the parent counts them.
    pub bytes: u64,
}

impl PrepareJob {
    /// Lists the inputs, claims the folder, and stores the tokenizer for tasks. `progress`: see [`crate::prepare()`].
    pub fn open(
        inputs: &[PathBuf],
        tokenizer: &Tokenizer,
        out: &Path,
        options: PrepareOptions,
        progress: &mut Report,
    ) -> Result<OpenedJob> {
        options.check()?;
        let run = PrepareRun { tokenizer, out, options: &options };
        let plan = Plan::new(inputs, tokenizer, out, &options)?;
        let work = match run.claim(&plan, progress)? {
            Claimed::Complete(report) => return Ok(OpenedJob::Complete(report)),
            Claimed::Unfinished(work) => work,
        };
        // Stored with the records and not sent with every task: a tokenizer can have several megabytes.
        let (name, bytes) = tokenizer.file();
        work.out.write(&format!("{PARTS}/{name}"), bytes)?;
        let absolute = || std::path::absolute(out).map_err(|e| Error::io(out, e));
        let out = url_of(out).map_or_else(absolute, |url| Ok(url.into()))?;
        Ok(OpenedJob::Unfinished(Box::new(Self { out, options, plan, work })))
    }

    pub fn settings(&self, tokenizer: &Tokenizer) -> Result<String> {
        self.to_text(&TaskSettings {
            text_version: TEXT_VERSION,
            out: self.out.clone(),
            fingerprint: self.plan.fingerprint.clone(),
            reading: self.options.reading.clone(),
            validation_fraction: self.options.validation_fraction,
            pass: self.work.pass.clone(),
            num_groups: self.plan.groups.len(),
            skipped: self.work.skipped,
            tokenizer: self.out.join(PARTS).join(tokenizer.file().0),
            case: tokenizer.settings(),
            special_tokens: tokenizer.special_tokens(),
            tokenizer_hash: tokenizer.hash(),
        })
    }

    /// All missing input groups as (number, bytes of input), in order.
    pub fn input_groups(&self) -> Vec<(usize, u64)> {
        self.work.todo.iter().map(|todo| (todo.number, todo.bytes)).collect()
    }

    /// Begins the second pass over the input once tasks have completed the first; returns whether there is one.
    pub fn next_pass(&mut self, tokenizer: &Tokenizer, progress: &mut Report) -> Result<bool> {
        if let Pass::Build(_) = self.work.pass {
            return Ok(false);
        }
        let run = PrepareRun { tokenizer, out: &self.out, options: &self.options };
        run.find_remaining(&mut self.work, &self.plan, progress)?;
        Ok(matches!(self.work.pass, Pass::Build(_)))
    }

    pub fn input_group(&self, number: usize) -> Result<String> {
        let group = &self.plan.groups[number];
        let mut files = self.plan.inputs.files[group.files.clone()].to_vec();
        for file in &mut files {
            file.path = std::path::absolute(&file.path).map_err(|e| Error::io(&file.path, e))?;
        }
        let (bytes, part) = (group.num_bytes(&self.plan.inputs), group.part.clone());
        self.to_text(&AssignedGroup { number, bytes, files, part })
    }

    /// Writes the corpus from the groups that the tasks built; incomplete if one of them has not run.
    pub fn finish(&self, tokenizer: &Tokenizer, progress: &mut Report) -> Result<PrepareReport> {
        let run = PrepareRun { tokenizer, out: &self.out, options: &self.options };
        run.unless_finished(run.finalize(&self.work, &self.plan, progress), &self.plan)
    }

    fn to_text(&self, value: &impl Serialize) -> Result<String> {
        // The only values that cannot be text are paths.
        serde_json::to_string(value).map_err(|error| {
            Error::at(&self.out, format_args!("cannot be sent to other processes ({error}); rename it"))
        })
    }
}

pub fn job_tokenizer(settings: &str) -> Result<Tokenizer> {
    let settings = parse_settings(settings)?;
    let path = &settings.tokenizer;
    let (folder, name) =
        (path.parent().unwrap_or(path), path.file_name().unwrap_or_default().to_string_lossy());
    let bytes = Place::open(folder)?.read(&name)?.ok_or_else(|| {
        // The usual cause is that this machine does not see the parent's folder.
        let hint = "; every worker must see --out and the inputs under the same paths".to_owned();
        Error::NotFound { path: path.clone(), hint }
    })?;
    let tokenizer = Tokenizer::restored(path, (&name, bytes), settings.case, settings.special_tokens)?;
    if tokenizer.hash() != settings.tokenizer_hash {
        let message = "not the tokenizer of this run, or this machine has another version of electra-fast";
        return Err(Error::at(path, message));
    }
    Ok(tokenizer)
}

/// Builds the input groups of one task. `progress` works as in [`crate::prepare()`].
pub fn prepare_input_groups(
    settings: &str,
    groups: &[String],
    tokenizer: &Tokenizer,
    threads: usize,
    progress: &mut Report,
) -> Result<TaskReport> {
    let settings = parse_settings(settings)?;
    let mut groups: Vec<AssignedGroup> = groups.iter().map(|group| parse(group)).collect::<Result<_>>()?;
    let cancel = Cancel::default();
    groups.iter_mut().flat_map(|group| &mut group.files).for_each(|file| file.cancel_with(&cancel));
    let outcome = settings.build(&groups, tokenizer, threads, &cancel, progress);
    // If another process has finished the corpus in the meantime, this work can no longer be recorded.
    let is_finished = || manifest_of(&settings.out).is_ok_and(|of| of.fingerprint == settings.fingerprint);
    match outcome {
        Err(Error::Interrupted) => Err(Error::Interrupted),
        Err(_) if is_finished() => Ok(TaskReport::default()),
        outcome => outcome,
    }
}

impl TaskSettings {
    fn build(
        &self,
        groups: &[AssignedGroup],
        tokenizer: &Tokenizer,
        threads: usize,
        cancel: &Cancel,
        progress: &mut Report,
    ) -> Result<TaskReport> {
        let out = OutputDir::join(&self.out, &self.fingerprint)?;
        let options = PrepareOptions {
            reading: self.reading.clone(),
            validation_fraction: self.validation_fraction,
            ..PrepareOptions::default()
        };
        let run = PrepareRun { tokenizer, out: &self.out, options: &options };
        let numbers: Vec<_> = groups.iter().map(|group| group.number).collect();
        let known = out.few_records(&self.pass, &numbers)?;
        let unfinished = groups.iter().zip(&known).filter(|(_, record)| record.is_none());
        let todo = unfinished.map(|(group, _)| Todo { number: group.number, bytes: group.bytes });
        let todo: Vec<Todo> = todo.collect();
        let read = |number: usize, bytes: &AtomicU64, to: &mut Batcher<'_>| {
            let group = groups.iter().find(|group| group.number == number);
            group.map_or(Ok(()), |AssignedGroup { files, part, .. }| {
                read_input_group(files, part.as_ref(), &self.reading, bytes, cancel, to)
            })
        };
        let skips = SkipLog::new(self.reading.skip_bad_rows, self.skipped);
        let builder = run.builder(&out, &self.pass, self.num_groups, cancel);
        let built = pipelines::build(&builder, threads, &todo, &skips, &read, progress)?;
        let known = || known.iter().flatten();
        Ok(TaskReport {
            documents: built.documents + known().map(|record| record.documents).sum::<u64>(),
            tokens: built.tokens + known().map(InputGroupRecord::num_tokens).sum::<u64>(),
            bytes: groups.iter().map(|group| group.bytes).sum(),
        })
    }
}

fn parse_settings(text: &str) -> Result<TaskSettings> {
    let settings: TaskSettings = parse(text)?;
    match settings.text_version {
        TEXT_VERSION => Ok(settings),
        version => Err(other_version(format!("text version {version}, here {TEXT_VERSION}"))),
    }
}

fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T> {
    serde_json::from_str(text).map_err(other_version)
}

fn other_version(reason: impl std::fmt::Display) -> Error {
    Error::Input(format!(
        "the task comes from another version of electra-fast ({reason}); install the same version"
    ))
}
