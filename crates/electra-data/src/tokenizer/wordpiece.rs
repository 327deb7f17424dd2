//! BERT's tokenizer, fast: the same ids as the `tokenizers` crate, or not at all.
//!
//! Text is a row of *chunks*, each ended by an ASCII blank or punctuation mark. A word of ASCII letters
//! and digits is found, lowercased and looked up in registers; a chunk with anything else is read
//! character by character; one with combining marks that could change places goes to the crate.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper};

use crate::error::Result;

use super::ascii::{CASE, Key, LONGEST_KEY, Window};
use super::normalize::{Characters, Meaning};
use super::vocab_trie::Pieces;
use super::word_cache::{MOST_PIECES, WordCache};

const BUFFER: usize = 256;

/// What an ASCII byte is; any other is `Other`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Word,
    Space,
    /// A word by itself.
    Mark,
    Other,
}

/// The fast tokenizer. Threads share it, each with an [`Encoder`] of its own.
pub(super) struct FastWordPiece {
    pieces: Pieces,
    characters: Characters,
    classes: [Class; 256],
    marks: [u32; 256],
    case: u64,
    /// What encoders leave behind for the next ones.
    scratches: Mutex<Vec<Scratch>>,
}

/// Memory of one thread.
struct Scratch {
    cache: WordCache,
    buffer: Box<[u32; BUFFER]>,
    word: Vec<u8>,
    ids: Vec<u32>,
}

impl FastWordPiece {
    /// The fast twin of a tokenizer, or why there is none.
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
        // Names of special tokens are text only where the tokenizer was told so.
        let as_text = tokenizer.get_added_vocabulary().get_encode_special_tokens();
        let mut added = tokenizer.get_added_tokens_decoder().into_values();
        if added.any(|token| !token.special || !as_text) {
            return Err("it has added tokens that are not special");
        }
        if !leaves_text_alone(tokenizer.get_post_processor()) {
            return Err("its post-processor may change a text's tokens");
        }
        let pieces = Pieces::new(model).ok_or("its vocabulary has no entry for unknown words")?;
        Self::from_parts(pieces, *normalizer).ok_or("its rules for ASCII are unusual")
    }

    fn from_parts(pieces: Pieces, normalizer: BertNormalizer) -> Option<Self> {
        let characters = Characters::new(normalizer);
        let (mut classes, mut marks) = ([Class::Other; 256], [0; 256]);
        for byte in 0..128_u8 {
            let meaning = characters.meaning(char::from(byte), &pieces);
            classes[usize::from(byte)] = match meaning {
                Meaning::Space => Class::Space,
                Meaning::Alone(_) => Class::Mark,
                Meaning::Letter(_) if byte.is_ascii_alphanumeric() => Class::Word,
                _ => Class::Other,
            };
            if let Meaning::Alone(id) = meaning {
                marks[usize::from(byte)] = id;
            }
            // The fast loop takes letters and digits for words, and lowercases with a bit.
            let lower = if normalizer.lowercase { byte.to_ascii_lowercase() } else { byte };
            if byte.is_ascii_alphanumeric() && meaning != Meaning::Letter(char::from(lower)) {
                return None;
            }
        }
        let case = if normalizer.lowercase { CASE } else { 0 };
        Some(Self { pieces, characters, classes, marks, case, scratches: Mutex::default() })
    }

    /// Something to encode with; it takes over what an earlier one has learnt.
    pub fn encoder(&self) -> Encoder<'_> {
        Encoder { of: self, scratch: self.scratches().pop().unwrap_or_else(Scratch::new) }
    }

    fn scratches(&self) -> MutexGuard<'_, Vec<Scratch>> {
        self.scratches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether one text's tokens pass a post-processor unchanged where no special tokens are added.
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
        Self { cache: WordCache::new(), ..Self::without_cache() }
    }

    /// What an encoder is left with when it hands its memory on.
    fn without_cache() -> Self {
        let (word, ids) = (Vec::new(), Vec::new());
        Self { cache: WordCache::none(), buffer: Box::new([0; BUFFER]), word, ids }
    }
}

/// Encodes text after text, on one thread.
pub(crate) struct Encoder<'a> {
    of: &'a FastWordPiece,
    scratch: Scratch,
}

impl Encoder<'_> {
    /// Appends the ids of a text.
    pub fn encode_into(&mut self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let mut run = Run { of: self.of, scratch: &mut self.scratch, text, held: 0, ids };
        run.text()?;
        run.flush();
        Ok(())
    }
}

impl Drop for Encoder<'_> {
    fn drop(&mut self) {
        self.of.scratches().push(std::mem::replace(&mut self.scratch, Scratch::without_cache()));
    }
}

/// One text on its way.
struct Run<'a> {
    of: &'a FastWordPiece,
    scratch: &'a mut Scratch,
    text: &'a str,
    /// Ids in the buffer that are not in `ids` yet.
    held: usize,
    ids: &'a mut Vec<u32>,
}

impl Run<'_> {
    fn text(&mut self) -> Result<()> {
        let (of, bytes, mut at) = (self.of, self.text.as_bytes(), 0);
        while at < bytes.len() {
            let window = Window::new(bytes, at);
            let length = window.word_length();
            // After the text's end comes a blank, as it were.
            let next = bytes.get(at + length).copied().unwrap_or(b' ');
            let class = of.classes[usize::from(next)];
            if length > LONGEST_KEY || class == Class::Other {
                at = self.chunk(at)?;
                continue;
            }
            if length > 0 {
                self.short_word(window.key(length, of.case));
            }
            if class == Class::Mark {
                self.push(of.marks[usize::from(next)]);
            }
            at += length + 1;
        }
        Ok(())
    }

    /// Reads from a chunk's start, character by character; returns where the next chunk begins.
    fn chunk(&mut self, start: usize) -> Result<usize> {
        let (of, text) = (self.of, self.text);
        let mut word = std::mem::take(&mut self.scratch.word);
        let mut end = text.len();
        for (offset, c) in text[start..].char_indices() {
            let at = start + offset;
            match of.characters.meaning(c, &of.pieces) {
                Meaning::Nothing => {}
                // Enough is enough: the word is unknown by its length already.
                Meaning::Letter(_) | Meaning::Letters(_) if word.len() > 4 * of.pieces.longest() => {}
                Meaning::Letter(letter) if letter.is_ascii() => word.push(letter as u8),
                Meaning::Letter(letter) => word.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes()),
                Meaning::Letters(at) => {
                    word.extend_from_slice(of.characters.letters(c, at, &of.pieces).as_bytes())
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

    /// Leaves a chunk to the crate's own rules: marks cannot move past an ASCII blank or mark.
    fn unclear_chunk(&mut self, start: usize, at: usize) -> Result<usize> {
        let (of, bytes) = (self.of, self.text.as_bytes());
        let is_end = |byte: &u8| matches!(of.classes[usize::from(*byte)], Class::Space | Class::Mark);
        let end = bytes[at..].iter().position(is_end).map_or(bytes.len(), |length| at + length);
        of.characters.words(&self.text[start..end], |word| self.word(word.as_bytes()))?;
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
        let Some(found) = self.scratch.cache.get(key) else { return self.new_word(key) };
        self.scratch.buffer[self.held..self.held + MOST_PIECES].copy_from_slice(&found.ids);
        self.held += found.count as usize;
        self.keep_room();
    }

    #[cold]
    fn new_word(&mut self, key: Key) {
        let (bytes, length) = key.bytes();
        let mut ids = std::mem::take(&mut self.scratch.ids);
        self.of.pieces.split(&bytes[..length], &mut ids);
        self.scratch.cache.insert(key, &ids);
        ids.iter().for_each(|&id| self.push(id));
        ids.clear();
        self.scratch.ids = ids;
    }

    fn split(&mut self, word: &[u8]) {
        self.flush();
        self.of.pieces.split(word, self.ids);
    }

    #[inline]
    fn push(&mut self, id: u32) {
        self.scratch.buffer[self.held] = id;
        self.held += 1;
        self.keep_room();
    }

    #[inline]
    fn keep_room(&mut self) {
        if self.held > BUFFER - MOST_PIECES {
            self.flush();
        }
    }

    fn flush(&mut self) {
        self.ids.extend_from_slice(&self.scratch.buffer[..self.held]);
        self.held = 0;
    }
}
