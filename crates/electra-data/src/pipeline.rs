//! One reader, many workers, one consumer, in order and in bounded memory.
//!
//! The reader fills batches of about 1 MiB of text; each batch travels with a slot for its result,
//! and the consumer takes the slots in the order in which the reader made them.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use crate::error::{Error, Result};
use crate::text::FRAGMENT;

const BATCH_BYTES: usize = 1 << 20;
const BATCH_PIECES: usize = 1 << 16;
/// How long the consumer waits before it looks after progress and signals.
const PATIENCE: Duration = Duration::from_millis(50);

/// What ends where a piece of text ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// Nothing: the line goes on.
    Part,
    Line,
    Document,
    Unit,
}

/// Text in pieces, each ended by a mark.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    text: String,
    pieces: Vec<(usize, Mark)>,
}

impl Batch {
    /// The pieces in order; those that end a document or unit are empty.
    pub fn pieces(&self) -> impl Iterator<Item = (&str, Mark)> {
        let mut start = 0;
        self.pieces.iter().map(move |&(end, mark)| {
            let piece = &self.text[start..end];
            start = end;
            (piece, mark)
        })
    }

    /// Bytes of text.
    pub fn num_bytes(&self) -> usize {
        self.text.len()
    }
}

/// Collects what the reader finds and sends it off in batches.
pub(crate) struct Batcher<'a> {
    batch: Batch,
    /// Whether a line may be cut after whitespace without changing its tokens.
    pub cut_lines: bool,
    send: &'a mut dyn FnMut(Batch) -> Result<()>,
}

impl Batcher<'_> {
    /// Appends a piece of text with what ends there. Long lines are cut, if they may be.
    pub fn push(&mut self, mut text: &str, mark: Mark) -> Result<()> {
        while self.cut_lines && text.len() > 2 * FRAGMENT {
            let Some(at) = whitespace_near(text.as_bytes(), FRAGMENT) else { break };
            self.append(&text[..=at], Mark::Part)?;
            text = &text[at + 1..];
        }
        self.append(text, mark)
    }

    /// Appends a whole document.
    pub fn push_document(&mut self, text: &str) -> Result<()> {
        for line in text.lines() {
            self.push(line, Mark::Line)?;
        }
        self.push("", Mark::Document)
    }

    fn append(&mut self, text: &str, mark: Mark) -> Result<()> {
        self.batch.text.push_str(text);
        self.batch.pieces.push((self.batch.text.len(), mark));
        if self.batch.text.len() >= BATCH_BYTES || self.batch.pieces.len() >= BATCH_PIECES {
            return self.flush();
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if self.batch.pieces.is_empty() {
            return Ok(());
        }
        (self.send)(std::mem::take(&mut self.batch))
    }
}

/// The last blank or tab before `limit`, or else the first one after it.
fn whitespace_near(text: &[u8], limit: usize) -> Option<usize> {
    memchr::memrchr2(b' ', b'\t', &text[..limit])
        .or_else(|| memchr::memchr2(b' ', b'\t', &text[limit..]).map(|at| limit + at))
}

/// Runs `read` and workers on threads and `consume` here; `None` means that a moment has passed.
///
/// Each thread makes a worker of its own, which may remember what it has seen.
pub(crate) fn run<T: Send, W: FnMut(Batch) -> Result<T>>(
    threads: usize,
    cut_lines: bool,
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
            let mut batcher = Batcher { batch: Batch::default(), cut_lines, send: &mut send };
            if let Err(error) = read(&mut batcher).and_then(|()| batcher.flush()) {
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
            let work = |batch: Batch| Ok(batch.pieces().map(|(t, _)| t.to_owned()).collect::<Vec<_>>());
            run(
                threads,
                true,
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
        let stopped = run(2, true, endless, || |_| Ok(()), |_| Err(Error::Interrupted));
        assert!(matches!(stopped, Err(Error::Interrupted)));
        let broken = run(2, true, |_| Err(Error::Input("no".into())), || |_| Ok(()), |_| Ok(()));
        assert_eq!(broken.unwrap_err().to_string(), "no");
    }
}
