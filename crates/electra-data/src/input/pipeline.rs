//! Pipelines of one reader and one consumer each, in order and in bounded memory; all pipelines share the workers.
//!
//! The reader fills batches of about 1 MiB of text. Each batch has a channel for its result, and the consumer
//! receives from these channels in the order in which the reader made them.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};

use super::identity::InputIdentity;
use super::sampler::{Sampled, Sampler};
use super::skipped::{SkipLog, SkippedRecord};
use super::text::{Cut, FRAGMENT_BYTES, character_boundary};
use crate::error::{Error, Result};
use crate::format::FileEntry;

const BATCH_BYTES: usize = 1 << 20;
const BATCH_TEXTS: usize = 1 << 16;
/// Interval at which a waiting consumer reports progress and checks for signals.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// Nothing: the line continues.
    Partial,
    Line,
    Document,
    /// Nothing: the input group with this number begins here.
    Begin(usize),
    /// An input group. Boxed to keep the other marks small: there are millions of them.
    InputGroup(Box<GroupEnd>),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupEnd {
    pub skipped: Vec<SkippedRecord>,
    pub inputs: Vec<InputIdentity>,
    pub watched: Option<FileEntry>,
}

/// Observes the texts of input groups as they are read, before they are cut, and decides which ones to keep.
pub(crate) trait Watch: Send {
    fn begin(&mut self, input_group: usize) -> Result<()>;

    fn keeps(&mut self, text: &str, mark: &Mark) -> bool;

    /// Ends the input group; returns the file with its results.
    fn end(&mut self) -> Result<FileEntry>;
}

#[derive(Debug)]
pub(crate) struct MarkedText<'a> {
    pub text: &'a str,
    pub mark: &'a Mark,
    /// The sampling level of its part of the document (see `sampler`).
    pub level: u8,
}

/// About 1 MiB of text, divided by marks.
#[derive(Debug, Default)]
pub(crate) struct TextBatch {
    text: String,
    texts: Vec<(usize, Mark, u8)>,
    pub sampled: Sampled,
}

impl TextBatch {
    pub fn texts(&self) -> impl Iterator<Item = MarkedText<'_>> {
        let mut start = 0;
        self.texts.iter().map(move |&(end, ref mark, level)| {
            let text = &self.text[start..end];
            start = end;
            MarkedText { text, mark, level }
        })
    }

    pub fn num_bytes(&self) -> usize {
        self.text.len()
    }
}

/// Steps between reader and batch: cutting, skipping, sampling.
pub(crate) struct Intake<'a> {
    /// Positions at which a line may be cut without changing its tokens.
    pub cut: Cut<'a>,
    pub skips: SkipLog,
    pub sampler: Sampler,
    pub watch: Option<Box<dyn Watch + 'a>>,
}

impl<'a> Intake<'a> {
    pub fn everything(cut: Cut<'a>) -> Self {
        Self { cut, skips: SkipLog::default(), sampler: Sampler::everything(), watch: None }
    }
}

pub(crate) struct Batcher<'a> {
    batch: TextBatch,
    batch_bytes: usize,
    pub intake: Intake<'a>,
    pub inputs: Vec<InputIdentity>,
    send: &'a mut dyn FnMut(TextBatch) -> Result<()>,
}

impl<'a> Batcher<'a> {
    fn new(batch_bytes: usize, intake: Intake<'a>, send: &'a mut dyn FnMut(TextBatch) -> Result<()>) -> Self {
        Self { batch: TextBatch::default(), batch_bytes, intake, inputs: Vec::new(), send }
    }

    /// Appends text with the mark at its end. Long lines are cut where `Cut` allows it.
    pub fn push(&mut self, mut text: &str, mark: Mark) -> Result<()> {
        if let Some(watch) = &mut self.intake.watch
            && !watch.keeps(text, &mark)
        {
            return Ok(());
        }
        while text.len() > 2 * FRAGMENT_BYTES {
            let at = match (cut_near(text, self.intake.cut), self.intake.cut) {
                (Some(at), _) => at,
                (None, Cut::Words(_)) => text.len(),
                (None, _) => break,
            };
            // No vocabulary has a word of this length, and splitting it would take many times the word's memory.
            let is_word = matches!(self.intake.cut, Cut::Words(_)) && at > 2 * FRAGMENT_BYTES;
            self.append(if is_word { "" } else { &text[..at] }, Mark::Partial)?;
            text = &text[at..];
        }
        self.append(text, mark)
    }

    pub fn begin_input_group(&mut self, number: usize) -> Result<()> {
        if let Some(watch) = &mut self.intake.watch {
            watch.begin(number)?;
        }
        self.append("", Mark::Begin(number))
    }

    pub fn end_input_group(&mut self) -> Result<()> {
        let (skipped, inputs) = (self.intake.skips.take(), std::mem::take(&mut self.inputs));
        let watched = self.intake.watch.as_mut().map(|watch| watch.end()).transpose()?;
        self.append("", Mark::InputGroup(Box::new(GroupEnd { skipped, inputs, watched })))
    }

    pub fn push_document(&mut self, text: &str) -> Result<()> {
        for line in text.lines() {
            self.push(line, Mark::Line)?;
        }
        self.push("", Mark::Document)
    }

    fn append(&mut self, text: &str, mark: Mark) -> Result<()> {
        let level = self.intake.sampler.level_of(text, mark == Mark::Document);
        if level.is_some() {
            self.batch.text.push_str(text);
        }
        self.batch.texts.push((self.batch.text.len(), mark, level.unwrap_or(0)));
        if self.batch.text.len() >= self.batch_bytes || self.batch.texts.len() >= BATCH_TEXTS {
            return self.flush();
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if self.batch.texts.is_empty() {
            return Ok(());
        }
        self.batch.sampled = self.intake.sampler.sampled;
        (self.send)(std::mem::take(&mut self.batch))
    }
}

/// The last cut position before a fragment's length, or else the first one after it.
fn cut_near(text: &str, cut: Cut) -> Option<usize> {
    let end = character_boundary(text, FRAGMENT_BYTES);
    cut.last_position(&text.as_bytes()[..end]).or_else(|| Some(end + cut.first_position(&text[end..])?))
}

/// Workers shared by one or more pipelines. A pipeline reads on one thread and consumes on another, in order.
///
/// Workers are not tied to pipelines, so all of them can work on a single remaining input.
pub(crate) struct Workers<T> {
    batches: Sender<(TextBatch, Sender<Result<T>>)>,
    /// Holds an entry for each batch between reader and consumer, in any pipeline: its capacity bounds memory.
    in_flight: (Sender<()>, Receiver<()>),
}

/// Counts a batch as in flight until it is dropped.
struct Permit<'a>(&'a Receiver<()>);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let _ = self.0.try_recv();
    }
}

/// Runs `body` with `threads` workers. Each has a separate `worker`, which may keep state between batches.
pub(crate) fn with_workers<T: Send, W: FnMut(TextBatch) -> Result<T>, R>(
    threads: usize,
    pipelines: usize,
    worker: impl Fn() -> W + Sync,
    body: impl FnOnce(&Workers<T>) -> R,
) -> R {
    std::thread::scope(|scope| {
        let (sender, batches) = bounded::<(TextBatch, Sender<Result<T>>)>(threads);
        for _ in 0..threads {
            let (batches, worker) = (batches.clone(), &worker);
            scope.spawn(move || {
                let mut work = worker();
                batches.iter().for_each(|(batch, slot)| drop(slot.send(work(batch))));
            });
        }
        drop(batches);
        body(&Workers { batches: sender, in_flight: bounded(2 * threads + pipelines) })
    })
}

impl<T: Send> Workers<T> {
    /// Runs `read` on a thread and `consume` on this one; passes `None` every 50 ms while there is no result.
    pub fn run_pipeline(
        &self,
        intake: Intake,
        read: impl FnOnce(&mut Batcher) -> Result<()> + Send,
        mut consume: impl FnMut(Option<T>) -> Result<()>,
    ) -> Result<()> {
        std::thread::scope(|scope| {
            let (slot_sender, slots) = unbounded();
            scope.spawn(move || {
                let mut send = |batch| {
                    self.in_flight.0.send(()).map_err(|_| Error::Interrupted)?;
                    let permit = Permit(&self.in_flight.1);
                    let (result, slot) = bounded(1);
                    slot_sender.send((slot, Some(permit))).map_err(|_| Error::Interrupted)?;
                    self.batches.send((batch, result)).map_err(|_| Error::Interrupted)
                };
                let mut batcher = Batcher::new(BATCH_BYTES, intake, &mut send);
                // The text before an error may complete input groups, which are kept.
                let (read, sent) = (read(&mut batcher), batcher.flush());
                if let Err(error) = read.and(sent) {
                    let (result, slot) = bounded(1);
                    let _ = result.send(Err(error));
                    let _ = slot_sender.send((slot, None));
                }
            });
            while let Some((slot, _permit)) = wait(&slots, &mut consume)? {
                // Without this error, an input group could be finished without the text of the lost batch.
                let result = wait(&slot, &mut consume)?.ok_or_else(worker_stopped)?;
                consume(Some(result?))?;
            }
            Ok(())
        })
    }
}

/// About the first `bytes` of the text that `read` sends, one text per line; an error ends it early.
pub(crate) fn read_beginning(
    bytes: usize,
    cut: Cut,
    read: impl FnOnce(&mut Batcher) -> Result<()>,
) -> String {
    let mut text = String::new();
    let mut send = |batch: TextBatch| {
        batch.texts().for_each(|marked| text.extend([marked.text, "\n"]));
        Err(Error::Interrupted) // stop reading after one batch
    };
    let mut batcher = Batcher::new(bytes, Intake::everything(cut), &mut send);
    // Errors are ignored: the text before them is used, and the run that reads everything reports them.
    let _ = read(&mut batcher);
    let _ = batcher.flush();
    drop(batcher);
    text
}

fn worker_stopped() -> Error {
    Error::Input("a worker thread stopped unexpectedly; please report this with the message above".to_owned())
}

/// The next message, or `None` once the channel is closed.
fn wait<M, T>(from: &Receiver<M>, consume: &mut impl FnMut(Option<T>) -> Result<()>) -> Result<Option<M>> {
    loop {
        match from.recv_timeout(POLL_INTERVAL) {
            Ok(message) => return Ok(Some(message)),
            Err(RecvTimeoutError::Timeout) => consume(None)?,
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}

pub(crate) fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T: Send, W: FnMut(TextBatch) -> Result<T>>(
        threads: usize,
        read: impl FnOnce(&mut Batcher) -> Result<()> + Send,
        worker: impl Fn() -> W + Sync,
        consume: impl FnMut(Option<T>) -> Result<()>,
    ) -> Result<()> {
        let intake = Intake::everything(Cut::Blanks);
        with_workers(threads, 1, worker, |workers| workers.run_pipeline(intake, read, consume))
    }

    #[test]
    fn nothing_is_consumed_after_a_worker_panics() {
        let mut consumed = Vec::new();
        let read = |batcher: &mut Batcher| {
            for text in ["first", "bad", "last"] {
                batcher.push(text, Mark::Line)?;
                batcher.flush()?;
            }
            Ok(())
        };
        let work = |batch: TextBatch| {
            assert_ne!(batch.text, "bad");
            Ok(batch.text)
        };
        let consume = |text: Option<String>| {
            consumed.extend(text);
            Ok(())
        };
        let run = std::panic::AssertUnwindSafe(|| run(2, read, || work, consume));
        assert!(std::panic::catch_unwind(run).is_err());
        assert_eq!(consumed, ["first"]);
    }

    #[test]
    fn first_error_ends_the_pipeline() {
        let endless = |batcher: &mut Batcher| loop {
            batcher.push(&"x".repeat(1000), Mark::Line)?;
        };
        let stopped = run(2, endless, || |_| Ok(()), |_| Err(Error::Interrupted));
        assert!(matches!(stopped, Err(Error::Interrupted)));
        let broken = run(2, |_| Err(Error::Input("no".into())), || |_| Ok(()), |_| Ok(()));
        assert_eq!(broken.unwrap_err().to_string(), "no");
    }
}
