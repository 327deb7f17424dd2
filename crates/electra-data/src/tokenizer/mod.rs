//! Text to token ids: tokenizer files, and a fast path for BERT's WordPiece.

mod names;
mod normalize;
mod open;
mod tokenize;
mod vocab_trie;
mod vocab_txt;
mod word_cache;
mod wordpiece;

pub use open::SpecialNames;
pub use tokenize::{Encoder, Pieces, Tokenizer};

pub(crate) use normalize::{Characters, Meaning};
pub(crate) use vocab_trie::VocabTrie;
