//! The vocabulary as a trie, and WordPiece's greedy longest-match split of words into entries.
//!
//! Two tries, for entries that begin and entries that continue words, share one double array: the child of a state by
//! a byte is the cell at the state's base plus that byte, if that cell names the state as its parent.

use tokenizers::Model as _;
use tokenizers::models::wordpiece::WordPiece as Model;

const START: usize = 0;
const CONTINUE: usize = 1;
const NONE: u32 = u32::MAX;
/// A cell's children are within this many cells from its base.
const REACH: usize = 256;

#[derive(Clone, Copy)]
struct Cell {
    base: u32,
    parent: u32,
    /// The id of the entry that ends here, or `NONE`.
    id: u32,
}

const FREE: Cell = Cell { base: 0, parent: NONE, id: NONE };

pub(crate) struct VocabTrie {
    cells: Vec<Cell>,
    unknown: u32,
    /// Longer words are always unknown.
    pub max_word_chars: usize,
}

impl VocabTrie {
    /// The model's vocabulary; `None` if it has no entry for unknown words.
    pub fn new(model: &Model) -> Option<Self> {
        let vocab = model.get_vocab();
        let unknown = *vocab.get(&model.unk_token)?;
        let prefix = model.continuing_subword_prefix.as_bytes();
        let mut starts: Vec<(&[u8], u32)> = vocab.iter().map(|(entry, &id)| (entry.as_bytes(), id)).collect();
        starts.sort_unstable();
        let mut others: Vec<(&[u8], u32)> =
            starts.iter().filter_map(|&(entry, id)| Some((entry.strip_prefix(prefix)?, id))).collect();
        others.sort_unstable();
        let mut cells = vec![FREE; 2 + REACH];
        // The roots are their own parents; no base plus byte is their index.
        (cells[START].parent, cells[CONTINUE].parent) = (START as u32, CONTINUE as u32);
        let mut builder = Builder { cells, search_from: 2 };
        builder.build(START, &starts);
        builder.build(CONTINUE, &others);
        Some(Self { cells: builder.cells, unknown, max_word_chars: model.max_input_chars_per_word })
    }

    /// An empty vocabulary: every word is unknown.
    pub fn empty() -> Self {
        Self { cells: vec![FREE; 2 + REACH], unknown: 0, max_word_chars: 0 }
    }

    /// Appends the ids of a non-empty word in UTF-8; at least one.
    pub fn split(&self, word: &[u8], ids: &mut Vec<u32>) {
        let before = ids.len();
        if word.len() > self.max_word_chars && num_chars(word) > self.max_word_chars {
            return ids.push(self.unknown);
        }
        let (mut rest, mut root) = (word, START);
        while !rest.is_empty() {
            let Some((length, id)) = self.longest_entry(root, rest) else {
                ids.truncate(before);
                return ids.push(self.unknown);
            };
            ids.push(id);
            (rest, root) = (&rest[length..], CONTINUE);
        }
    }

    fn longest_entry(&self, root: usize, word: &[u8]) -> Option<(usize, u32)> {
        let (mut state, mut longest) = (root, None);
        for (at, &byte) in word.iter().enumerate() {
            let child = self.cells[state].base as usize + usize::from(byte);
            let cell = self.cells[child];
            if cell.parent as usize != state || child <= CONTINUE {
                break;
            }
            if cell.id != NONE {
                longest = Some((at + 1, cell.id));
            }
            state = child;
        }
        longest
    }
}

fn num_chars(utf8: &[u8]) -> usize {
    utf8.iter().filter(|&&byte| byte & 0xc0 != 0x80).count()
}

struct Builder {
    cells: Vec<Cell>,
    search_from: usize,
}

impl Builder {
    /// Builds the trie of sorted entries below `root`. Skips empty entries, which can never match.
    fn build(&mut self, root: usize, entries: &[(&[u8], u32)]) {
        let empty = entries.iter().take_while(|(entry, _)| entry.is_empty()).count();
        let mut waiting = vec![(root, &entries[empty..], 0)];
        while let Some((state, entries, depth)) = waiting.pop() {
            let children: Vec<_> = entries.chunk_by(|a, b| a.0[depth] == b.0[depth]).collect();
            if children.is_empty() {
                continue;
            }
            let bytes: Vec<u8> = children.iter().map(|group| group[0].0[depth]).collect();
            let base = self.base_for(&bytes);
            self.cells[state].base = base as u32;
            for (group, byte) in children.into_iter().zip(bytes) {
                let child = base + usize::from(byte);
                let (mut group, depth) = (group, depth + 1);
                self.cells[child].parent = state as u32;
                // Entries are distinct, so at most one ends here, and it is the first.
                if group[0].0.len() == depth {
                    self.cells[child].id = group[0].1;
                    group = &group[1..];
                }
                waiting.push((child, group, depth));
            }
        }
    }

    /// A base at which the cells of all `bytes` (sorted) are free.
    fn base_for(&mut self, bytes: &[u8]) -> usize {
        let first = usize::from(bytes[0]);
        let (start, mut taken) = (self.search_from.max(first + 2), 0);
        for at in start.. {
            if self.cells.len() < at + REACH + 1 {
                self.cells.resize(at + REACH + 1, FREE);
            }
            if self.cells[at].parent != NONE {
                taken += 1;
                continue;
            }
            let base = at - first;
            if self.cells.len() < base + REACH {
                self.cells.resize(base + REACH, FREE);
            }
            if bytes.iter().all(|&byte| self.cells[base + usize::from(byte)].parent == NONE) {
                // Nearly all earlier cells are taken: do not search them again.
                if taken * 20 >= (at - start + 1) * 19 {
                    self.search_from = at;
                }
                return base;
            }
        }
        unreachable!("the array grows until there is room")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn trie_of(entries: &[String], max_word_chars: usize) -> (VocabTrie, Model) {
        let vocab: ahash::AHashMap<String, u32> = entries.iter().cloned().zip(7..).collect();
        let model = Model::builder().vocab(vocab).max_input_chars_per_word(max_word_chars).build().unwrap();
        (VocabTrie::new(&model).unwrap(), model)
    }

    proptest! {
        #[test]
        fn words_are_split_like_the_crate(
            entries in prop::collection::vec("(##)?[abcé日#]{0,5}", 0..60),
            words in prop::collection::vec("[abcdé日#]{1,14}", 1..20),
        ) {
            let entries: Vec<String> = entries.into_iter().chain(["[UNK]".to_owned()]).collect();
            let (trie, model) = trie_of(&entries, 12);
            for word in words {
                let mut ids = Vec::new();
                trie.split(word.as_bytes(), &mut ids);
                let expected: Vec<u32> = model.tokenize(&word).unwrap().iter().map(|token| token.id).collect();
                prop_assert_eq!(ids, expected, "{}", word);
            }
        }
    }
}
