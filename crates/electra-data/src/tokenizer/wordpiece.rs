//! A fast implementation of BERT's tokenizer, with the same ids as the `tokenizers` crate.
//!
//! Text is a sequence of *chunks*, each ended by an ASCII space or punctuation character. A word of ASCII
//! letters and digits is scanned, lowercased and looked up in registers. A chunk with any other character is
//! read character by character; the crate tokenizes chunks with combining marks that could be reordered.

use std::sync::Mutex;

use memchr::memmem::Finder;
use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper};

use crate::error::Result;
use crate::threads::lock;

use super::normalize::{Characters, Meaning};
use super::vocab_trie::VocabTrie;
use super::word_cache::{CASE, Key, MAX_IDS, MAX_KEY_BYTES, Window, WordCache};

const BUFFER: usize = 256;
/// Each added token requires one search through a text.
const MAX_ADDED: usize = 16;

/// The meaning of a byte after a word of ASCII letters and digits. Bytes that do not end a chunk are `Other`,
/// including letters and digits, so the fast loop cannot skip any.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Space,
    Punctuation,
    Other,
}

/// The fast tokenizer. Threads share it; each has a separate [`WordPieceEncoder`].
pub(super) struct FastWordPiece {
    trie: VocabTrie,
    characters: Characters,
    classes: [Class; 256],
    punctuation: [u32; 256],
    case: u64,
    /// Added tokens. The crate tokenizes texts with one of them.
    added: Vec<Finder<'static>>,
    /// Memory of dropped encoders, reused with its caches by new ones.
    scratches: Mutex<Vec<Scratch>>,
}

struct Scratch {
    cache: WordCache,
    buffer: Box<[u32; BUFFER]>,
    word: Vec<u8>,
    ids: Vec<u32>,
}

impl FastWordPiece {
    /// The fast equivalent of a tokenizer, or the reason for having none.
    pub fn new(tokenizer: &tokenizers::Tokenizer) -> std::result::Result<Self, &'static str> {
        let Some(NormalizerWrapper::BertNormalizer(normalizer)) = tokenizer.get_normalizer() else {
            return Err("its normalizer is not BertNormalizer");
        };
        if !matches!(tokenizer.get_pre_tokenizer(), Some(PreTokenizerWrapper::BertPreTokenizer(_))) {
            return Err("its pre-tokenizer is not BertPreTokenizer");
        }
        let ModelWrapper::WordPiece(model) = tokenizer.get_model() else {
            return Err("its model is not WordPiece");
        };
        // Special tokens are not searched for in text.
        let added = tokenizer.get_added_tokens_decoder().into_values().filter(|token| !token.special);
        let added: Vec<_> = added.collect();
        if added.len() > MAX_ADDED || added.iter().any(|token| token.normalized) {
            return Err("it has many added tokens, or some that match normalized text");
        }
        if !leaves_text_alone(tokenizer.get_post_processor()) {
            return Err("its post-processor may change a text's tokens");
        }
        let trie = VocabTrie::new(model).ok_or("its vocabulary has no entry for unknown words")?;
        let fast = Self::from_parts(trie, *normalizer).ok_or("its rules for ASCII are unusual")?;
        let added = added.iter().map(|token| Finder::new(&token.content).into_owned()).collect();
        Ok(Self { added, ..fast })
    }

    fn from_parts(trie: VocabTrie, normalizer: BertNormalizer) -> Option<Self> {
        let characters = Characters::new(normalizer);
        let (mut classes, mut punctuation) = ([Class::Other; 256], [0; 256]);
        for byte in 0..128_u8 {
            let meaning = characters.meaning(char::from(byte), &trie);
            classes[usize::from(byte)] = match meaning {
                Meaning::Space => Class::Space,
                Meaning::Alone(_) => Class::Punctuation,
                _ => Class::Other,
            };
            if let Meaning::Alone(id) = meaning {
                punctuation[usize::from(byte)] = id;
            }
            // The fast loop treats letters and digits as words, and lowercases by setting a bit.
            let lower = if normalizer.lowercase { byte.to_ascii_lowercase() } else { byte };
            if byte.is_ascii_alphanumeric() && meaning != Meaning::Letter(char::from(lower)) {
                return None;
            }
        }
        let case = if normalizer.lowercase { CASE } else { 0 };
        let (added, scratches) = (Vec::new(), Mutex::default());
        Some(Self { trie, characters, classes, punctuation, case, added, scratches })
    }

    /// A new encoder, which reuses the cache of a dropped encoder if possible.
    pub fn encoder(&self) -> WordPieceEncoder<'_> {
        WordPieceEncoder { tokenizer: self, scratch: None }
    }
}

/// Whether a post-processor leaves a text's tokens unchanged when no special tokens are added.
fn leaves_text_alone(processor: Option<&PostProcessorWrapper>) -> bool {
    match processor {
        None | Some(PostProcessorWrapper::Bert(_)) => true,
        Some(PostProcessorWrapper::Template(template)) => {
            let pieces = serde_json::to_value(&template.single).unwrap_or_default();
            let sequences = pieces.as_array().into_iter().flatten().filter_map(|piece| piece.get("Sequence"));
            sequences.map(|sequence| sequence.get("id").and_then(|id| id.as_str())).eq([Some("A")])
        }
        Some(_) => false,
    }
}

impl Scratch {
    fn new() -> Self {
        let (word, ids) = (Vec::new(), Vec::new());
        Self { cache: WordCache::new(), buffer: Box::new([0; BUFFER]), word, ids }
    }
}

pub(crate) struct WordPieceEncoder<'a> {
    tokenizer: &'a FastWordPiece,
    /// Taken at the first text.
    scratch: Option<Scratch>,
}

impl WordPieceEncoder<'_> {
    pub fn has_added_tokens(&self, text: &str) -> bool {
        self.tokenizer.added.iter().any(|token| token.find(text.as_bytes()).is_some())
    }

    pub fn encode_into(&mut self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let tokenizer = self.tokenizer;
        let of_another = || lock(&tokenizer.scratches).pop().unwrap_or_else(Scratch::new);
        let scratch = self.scratch.get_or_insert_with(of_another);
        let mut encoding = TextEncoding { tokenizer, scratch, text, held: 0, ids };
        encoding.run()?;
        encoding.flush();
        Ok(())
    }
}

impl Drop for WordPieceEncoder<'_> {
    fn drop(&mut self) {
        lock(&self.tokenizer.scratches).extend(self.scratch.take());
    }
}

struct TextEncoding<'a> {
    tokenizer: &'a FastWordPiece,
    scratch: &'a mut Scratch,
    text: &'a str,
    /// Number of ids in the buffer that are not in `ids` yet.
    held: usize,
    ids: &'a mut Vec<u32>,
}

impl TextEncoding<'_> {
    fn run(&mut self) -> Result<()> {
        let (tokenizer, bytes, mut at) = (self.tokenizer, self.text.as_bytes(), 0);
        while at < bytes.len() {
            let window = Window::new(bytes, at);
            let length = window.word_length();
            // The end of the text ends a word as a space does.
            let next = bytes.get(at + length).copied().unwrap_or(b' ');
            let class = tokenizer.classes[usize::from(next)];
            if length > MAX_KEY_BYTES || class == Class::Other {
                at = self.chunk(at)?;
                continue;
            }
            if length > 0 {
                self.short_word(window.key(length, tokenizer.case));
            }
            if class == Class::Punctuation {
                self.push(tokenizer.punctuation[usize::from(next)]);
            }
            at += length + 1;
        }
        Ok(())
    }

    /// Reads a chunk from its start, character by character; returns the start of the next chunk.
    fn chunk(&mut self, start: usize) -> Result<usize> {
        let (tokenizer, text) = (self.tokenizer, self.text);
        let mut word = std::mem::take(&mut self.scratch.word);
        let mut end = text.len();
        for (offset, c) in text[start..].char_indices() {
            let at = start + offset;
            match tokenizer.characters.meaning(c, &tokenizer.trie) {
                Meaning::Nothing => {}
                // The word is already too long for the vocabulary: more characters cannot change its id.
                Meaning::Letter(_) | Meaning::Letters(_)
                    if word.len() / 4 > tokenizer.trie.max_word_chars => {}
                Meaning::Letter(letter) if letter.is_ascii() => word.push(letter as u8),
                Meaning::Letter(letter) => word.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes()),
                Meaning::Letters(at) => {
                    word.extend_from_slice(tokenizer.characters.letters(c, at, &tokenizer.trie).as_bytes())
                }
                Meaning::Space => {
                    end = at + c.len_utf8();
                    break;
                }
                Meaning::Alone(id) => {
                    self.word(&word);
                    word.clear();
                    self.push(id);
                    end = at + c.len_utf8();
                    break;
                }
                Meaning::Unclear => {
                    word.clear();
                    end = self.unclear_chunk(start, at)?;
                    break;
                }
            }
        }
        self.word(&word);
        word.clear();
        self.scratch.word = word;
        Ok(end)
    }

    /// Tokenizes a chunk with the crate: combining marks are never moved past ASCII spaces or punctuation.
    fn unclear_chunk(&mut self, start: usize, at: usize) -> Result<usize> {
        let (tokenizer, bytes) = (self.tokenizer, self.text.as_bytes());
        let is_end =
            |byte: &u8| matches!(tokenizer.classes[usize::from(*byte)], Class::Space | Class::Punctuation);
        let end = bytes[at..].iter().position(is_end).map_or(bytes.len(), |length| at + length);
        tokenizer.characters.words(&self.text[start..end], |word| self.word(word.as_bytes()))?;
        Ok(end)
    }

    fn word(&mut self, word: &[u8]) {
        match Key::of(word) {
            Some(key) => self.short_word(key),
            None if word.is_empty() => {}
            None => self.split(word),
        }
    }

    #[inline]
    fn short_word(&mut self, key: Key) {
        let Some(cached) = self.scratch.cache.get(key) else { return self.new_word(key) };
        self.scratch.buffer[self.held..self.held + MAX_IDS].copy_from_slice(&cached.ids);
        self.held += cached.count as usize;
        self.keep_room();
    }

    #[cold]
    fn new_word(&mut self, key: Key) {
        let (bytes, length) = key.bytes();
        let mut ids = std::mem::take(&mut self.scratch.ids);
        self.tokenizer.trie.split(&bytes[..length], &mut ids);
        self.scratch.cache.insert(key, &ids);
        ids.iter().for_each(|&id| self.push(id));
        ids.clear();
        self.scratch.ids = ids;
    }

    fn split(&mut self, word: &[u8]) {
        self.flush();
        self.tokenizer.trie.split(word, self.ids);
    }

    #[inline]
    fn push(&mut self, id: u32) {
        self.scratch.buffer[self.held] = id;
        self.held += 1;
        self.keep_room();
    }

    #[inline]
    fn keep_room(&mut self) {
        if self.held > BUFFER - MAX_IDS {
            self.flush();
        }
    }

    fn flush(&mut self) {
        self.ids.extend_from_slice(&self.scratch.buffer[..self.held]);
        self.held = 0;
    }
}
