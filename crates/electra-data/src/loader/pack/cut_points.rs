//! Positions at which documents may be cut into rows (`cut_at`): any token, words, or lines.

use std::sync::Arc;

use crate::error::Result;
use crate::format::Shard;

/// Tokens read at a time in the search for the start of a word.
const STRIDE: u32 = 16;

pub(super) enum CutPoints {
    /// Starts of words: a flag for each id that begins a word.
    Words(Arc<[bool]>),
    Lines {
        lengths: Vec<u32>,
        starts: Vec<u32>,
    },
}

impl CutPoints {
    pub fn lines() -> Self {
        Self::Lines { lengths: Vec::new(), starts: Vec::new() }
    }

    /// The start or end of a block: `edge` moved back to a cut point or the start of its document, if one is at most
    /// `reach` tokens away. It depends on nothing else, so neighboring blocks agree, and edges keep their order.
    pub fn snap(&mut self, shard: &Shard, edge: u32, reach: u32) -> Result<u32> {
        if u64::from(edge) == shard.num_tokens() {
            return Ok(edge);
        }
        let start = self.enter(shard, edge)?;
        let is_near = edge - start <= reach;
        let (after, otherwise) = if is_near { (start, start) } else { (edge - reach, edge) };
        Ok(self.last(shard, after, edge)?.unwrap_or(otherwise))
    }

    /// Prepares for the document that contains token `at` of the shard; returns the document's first token.
    pub fn enter(&mut self, shard: &Shard, at: u32) -> Result<u32> {
        let ends = shard.document_ends()?;
        let number = ends.partition_point(|&end| end <= at);
        let first = if number == 0 { 0 } else { ends[number - 1] };
        if let Self::Lines { lengths, starts } = self {
            shard.read_line_lengths(number as u64, lengths)?;
            starts.clear();
            let mut start = Some(first);
            for &length in lengths.iter() {
                starts.extend(start);
                start = start.and_then(|start| start.checked_add(length));
            }
            if start != Some(ends[number]) {
                return Err(shard.lines_mismatch(number));
            }
        }
        Ok(first)
    }

    /// The last cut point among the tokens `after + 1..=at` of the current document.
    pub fn last(&self, shard: &Shard, after: u32, at: u32) -> Result<Option<u32>> {
        match self {
            Self::Words(starts) => last_word(shard, starts, after, at),
            Self::Lines { starts, .. } => {
                let number = starts.partition_point(|&start| start <= at);
                Ok(starts[..number].last().copied().filter(|&start| start > after))
            }
        }
    }
}

fn last_word(shard: &Shard, word_starts: &[bool], after: u32, at: u32) -> Result<Option<u32>> {
    let (mut end, mut ids) = (at + 1, [0; STRIDE as usize]);
    while end > after + 1 {
        let start = (after + 1).max(end.saturating_sub(STRIDE));
        let ids = &mut ids[..(end - start) as usize];
        shard.copy_tokens(start.into(), ids)?;
        let begins_word = |&id: &i32| word_starts.get(id as usize).copied().unwrap_or(true);
        if let Some(position) = ids.iter().rposition(begins_word) {
            return Ok(Some(start + position as u32));
        }
        end = start;
    }
    Ok(None)
}
