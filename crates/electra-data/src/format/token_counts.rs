//! Counts of each token in a corpus: the weights of a unigram distribution.

use std::ops::Range;

use rayon::prelude::*;

use super::corpus::Corpus;
use crate::error::{Error, Result};
use crate::store::Cancel;
use crate::threads::on_all_cores;

/// Tokens read at a time: their ids stay in the processor's cache.
const CHUNK_TOKENS: u64 = 1 << 15;
/// Tokens that share one table of counts, which has an entry for every entry of the vocabulary. They are fetched at a
/// time from an object store.
const PART_TOKENS: u64 = 1 << 21;

impl Corpus {
    /// How often each of the [`Corpus::vocab_size`] ids occurs in all documents. Every block is verified, as for
    /// [`Corpus::document`].
    pub fn token_counts(&self) -> Result<Vec<u64>> {
        let parts = (0..self.num_shards()).flat_map(|shard| {
            let size = self.shard_size(shard).1;
            let starts = (0..size).step_by(PART_TOKENS as usize);
            starts.map(move |start| (shard, start as u32..size.min(start + PART_TOKENS) as u32))
        });
        let parts: Vec<(usize, Range<u32>)> = parts.collect();
        let zeros = || vec![0; self.vocab_size() as usize];
        let add = |mut sum: Vec<u64>, counts: Vec<u64>| {
            sum.iter_mut().zip(counts).for_each(|(total, count)| *total += count);
            Ok(sum)
        };
        let cancel = Cancel::default();
        let count = |counts, part| match cancel.is_raised() {
            true => Err(Error::Interrupted),
            false => cancel.carry(|| self.count_part(part, counts)),
        };
        on_all_cores(|| parts.par_iter().try_fold(zeros, count).try_reduce(zeros, add))?
    }

    fn count_part(&self, part: &(usize, Range<u32>), mut counts: Vec<u64>) -> Result<Vec<u64>> {
        let (shard, tokens) = (self.shard(part.0), u64::from(part.1.start)..u64::from(part.1.end));
        let _pins = self.prefetch(std::slice::from_ref(part), (0, 0), false, &Cancel::default())?;
        for start in tokens.clone().step_by(CHUNK_TOKENS as usize) {
            let mut ids = vec![0; CHUNK_TOKENS.min(tokens.end - start) as usize];
            shard.expect_unchanged()?;
            shard.copy_tokens(start, &mut ids)?;
            ids.iter().for_each(|&id| counts[id as usize] += 1);
        }
        Ok(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::testing::{HEADER_BYTES, forge, write_corpus};

    #[test]
    fn an_id_outside_the_vocabulary_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        write_corpus(dir.path(), 7, &[vec![vec![5; 50_000]], vec![vec![6; 50_000]]], 1);
        for (id, complaint) in
            [(6, None), (9, Some("-001.tokens: token 40000: id 9 is not in the vocabulary of 7"))]
        {
            forge(dir.path(), 1, false, |bytes| bytes[HEADER_BYTES + 80_000] = id);
            let found = Corpus::open(dir.path()).unwrap().token_counts().map_err(|error| error.to_string());
            assert_eq!(found.is_err(), complaint.is_some());
            assert!(found.err().is_none_or(|found| found.contains(complaint.unwrap())));
        }
    }
}
