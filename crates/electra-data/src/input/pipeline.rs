//! One reader, many workers, one consumer, in order and in bounded memory.
//!
//! The reader fills batches of about 1 MiB of text; each batch travels with a slot for its result,
//! and the consumer takes the slots in the order in which the reader made them.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use super::sampler::{Draw, Drawn};
use super::skipped::{SkipLog, SkippedRecord};
use super::text::{Cut, FRAGMENT, character_boundary};
use crate::error::{Error, Result};

const BATCH_BYTES: usize = 1 << 20;
const BATCH_PIECES: usize = 1 << 16;
/// How long the consumer waits before it looks after progress and signals.
const PATIENCE: Duration = Duration::from_millis(50);

/// What ends where a piece of text ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// Nothing: the line goes on.
    Part,
    Line,
    Document,
    /// With the records of the unit that were left out.
    Unit(Vec<SkippedRecord>),
}

/// A piece of text in a batch; one that ends a document or unit is empty.
#[derive(Debug)]
pub(crate) struct Piece<'a> {
    pub text: &'a str,
    pub mark: &'a Mark,
    /// Of the part that it belongs to (see `draw`).
    pub level: u8,
}

/// Text in pieces, each ended by a mark.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    text: String,
    pieces: Vec<(usize, Mark, u8)>,
    /// What was drawn of the text up to here.
    pub drawn: Drawn,
}

impl Batch {
    /// The pieces in order.
    pub fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        let mut start = 0;
        self.pieces.iter().map(move |&(end, ref mark, level)| {
            let text = &self.text[start..end];
            start = end;
            Piece { text, mark, level }
        })
    }

    /// Bytes of text.
    pub fn num_bytes(&self) -> usize {
        self.text.len()
    }
}

/// How a reader's text is cut, left out and drawn.
pub(crate) struct Intake<'a> {
    /// Where a line may be cut without changing what comes of it.
    pub cut: Cut<'a>,
    pub skips: SkipLog,
    pub draw: Draw,
}

impl<'a> Intake<'a> {
    /// Takes all text and leaves no record out.
    pub fn of_all(cut: Cut<'a>) -> Self {
        Self { cut, skips: SkipLog::default(), draw: Draw::all() }
    }
}

/// Collects what the reader finds and sends it off in batches.
pub(crate) struct Batcher<'a> {
    batch: Batch,
    /// A batch is sent when it has so many bytes of text.
    batch_bytes: usize,
    intake: Intake<'a>,
    send: &'a mut dyn FnMut(Batch) -> Result<()>,
}

impl<'a> Batcher<'a> {
    fn new(batch_bytes: usize, intake: Intake<'a>, send: &'a mut dyn FnMut(Batch) -> Result<()>) -> Self {
        Self { batch: Batch::default(), batch_bytes, intake, send }
    }

    /// Whether only a little text is wanted.
    pub fn is_brief(&self) -> bool {
        self.batch_bytes < BATCH_BYTES
    }

    /// Where a line may be cut.
    pub fn cut(&self) -> Cut<'a> {
        self.intake.cut
    }

    /// Appends a piece of text with what ends there. Long lines are cut, where they may be.
    pub fn push(&mut self, mut text: &str, mark: Mark) -> Result<()> {
        while text.len() > 2 * FRAGMENT {
            let at = match (cut_near(text, self.intake.cut), self.intake.cut) {
                (Some(at), _) => at,
                (None, Cut::Words(_)) => text.len(),
                (None, _) => break,
            };
            // A word that long is no word, and splitting it would take many times its memory.
            let is_word = matches!(self.intake.cut, Cut::Words(_)) && at > 2 * FRAGMENT;
            self.append(if is_word { "" } else { &text[..at] }, Mark::Part)?;
            text = &text[at..];
        }
        self.append(text, mark)
    }

    /// Leaves a record out, if it may be; `error` says what is wrong with it.
    pub fn skip(&mut self, record: SkippedRecord, error: &Error) -> Result<()> {
        self.intake.skips.add(record, error)
    }

    /// Ends a unit.
    pub fn end_unit(&mut self) -> Result<()> {
        let skipped = self.intake.skips.take();
        self.append("", Mark::Unit(skipped))
    }

    /// Appends a whole document.
    pub fn push_document(&mut self, text: &str) -> Result<()> {
        for line in text.lines() {
            self.push(line, Mark::Line)?;
        }
        self.push("", Mark::Document)
    }

    fn append(&mut self, text: &str, mark: Mark) -> Result<()> {
        let level = self.intake.draw.level_of(text, mark == Mark::Document);
        if level.is_some() {
            self.batch.text.push_str(text);
        }
        self.batch.pieces.push((self.batch.text.len(), mark, level.unwrap_or(0)));
        if self.batch.text.len() >= self.batch_bytes || self.batch.pieces.len() >= BATCH_PIECES {
            return self.flush();
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if self.batch.pieces.is_empty() {
            return Ok(());
        }
        self.batch.drawn = self.intake.draw.drawn();
        (self.send)(std::mem::take(&mut self.batch))
    }
}

/// The last place to cut before a fragment's length, or else the first one after it.
fn cut_near(text: &str, cut: Cut) -> Option<usize> {
    let end = character_boundary(text, FRAGMENT);
    cut.last_place(&text.as_bytes()[..end]).or_else(|| Some(end + cut.first_place(&text[end..])?))
}

/// Runs `read` and workers on threads and `consume` here; `None` means that a moment has passed.
///
/// Each thread makes a worker of its own, which may remember what it has seen.
pub(crate) fn run<T: Send, W: FnMut(Batch) -> Result<T>>(
    threads: usize,
    intake: Intake,
    read: impl FnOnce(&mut Batcher) -> Result<()> + Send,
    worker: impl Fn() -> W + Sync,
    mut consume: impl FnMut(Option<T>) -> Result<()>,
) -> Result<()> {
    std::thread::scope(|scope| {
        let (job_sender, jobs) = bounded::<(Batch, Sender<Result<T>>)>(threads);
        let (slot_sender, slots) = bounded::<Receiver<Result<T>>>(2 * threads);
        for _ in 0..threads {
            let (jobs, worker) = (jobs.clone(), &worker);
            scope.spawn(move || {
                let mut work = worker();
                jobs.iter().for_each(|(batch, slot)| drop(slot.send(work(batch))));
            });
        }
        drop(jobs);
        scope.spawn(move || {
            let mut send = |batch| {
                let (result, slot) = bounded(1);
                slot_sender.send(slot).map_err(|_| Error::Interrupted)?;
                job_sender.send((batch, result)).map_err(|_| Error::Interrupted)
            };
            let mut batcher = Batcher::new(BATCH_BYTES, intake, &mut send);
            // What came before an error may be whole units, which are kept.
            let (read, sent) = (read(&mut batcher), batcher.flush());
            if let Err(error) = read.and(sent) {
                let (result, slot) = bounded(1);
                let _ = result.send(Err(error));
                let _ = slot_sender.send(slot);
            }
        });
        while let Some(slot) = wait(&slots, &mut consume)? {
            if let Some(result) = wait(&slot, &mut consume)? {
                consume(Some(result?))?;
            }
        }
        Ok(())
    })
}

/// About the first `bytes` of text that `read` finds, one piece per line; an error ends it early.
pub(crate) fn beginning(bytes: usize, cut: Cut, read: impl FnOnce(&mut Batcher) -> Result<()>) -> String {
    let mut text = String::new();
    let mut send = |batch: Batch| {
        batch.pieces().for_each(|piece| text.extend([piece.text, "\n"]));
        Err(Error::Interrupted) // that is enough
    };
    let mut batcher = Batcher::new(bytes, Intake::of_all(cut), &mut send);
    // What broke off, if it was not the sending, broke off after what is in the batch.
    let _ = read(&mut batcher);
    let _ = batcher.flush();
    text
}

/// The next message, or `None` when there will be none.
fn wait<M, T>(from: &Receiver<M>, consume: &mut impl FnMut(Option<T>) -> Result<()>) -> Result<Option<M>> {
    loop {
        match from.recv_timeout(PATIENCE) {
            Ok(message) => return Ok(Some(message)),
            Err(RecvTimeoutError::Timeout) => consume(None)?,
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}

/// How many workers to use when nobody says.
pub(crate) fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order_whatever_the_threads() {
        for threads in [1, 5] {
            let mut found = Vec::new();
            let read = |batcher: &mut Batcher| {
                (0..300_000).try_for_each(|i| batcher.push(&i.to_string(), Mark::Line))
            };
            let work = |batch: Batch| Ok(batch.pieces().map(|p| p.text.to_owned()).collect::<Vec<_>>());
            run(
                threads,
                Intake::of_all(Cut::Blanks),
                read,
                || work,
                |texts| {
                    found.extend(texts.into_iter().flatten());
                    Ok(())
                },
            )
            .unwrap();
            assert!(found.iter().enumerate().all(|(i, text)| *text == i.to_string()));
            assert_eq!(found.len(), 300_000);
        }
    }

    #[test]
    fn the_first_error_ends_everything() {
        let endless = |batcher: &mut Batcher| loop {
            batcher.push(&"x".repeat(1000), Mark::Line)?;
        };
        let stopped =
            run(2, Intake::of_all(Cut::Blanks), endless, || |_| Ok(()), |_| Err(Error::Interrupted));
        assert!(matches!(stopped, Err(Error::Interrupted)));
        let broken = run(
            2,
            Intake::of_all(Cut::Blanks),
            |_| Err(Error::Input("no".into())),
            || |_| Ok(()),
            |_| Ok(()),
        );
        assert_eq!(broken.unwrap_err().to_string(), "no");
    }
}
