//! Where a long line may be cut into fragments without changing what a tokenizer makes of it.

/// Longer lines are returned in fragments where the tokenizer allows it.
pub(super) const FRAGMENT_BYTES: usize = 64 << 10;

#[derive(Clone, Copy)]
pub(crate) enum Cut<'a> {
    Nowhere,
    /// After a space or tab.
    Blanks,
    /// After every character that ends a word or is a word; a very long word is shortened.
    Words(&'a (dyn Fn(char) -> bool + Sync)),
}

impl Cut<'_> {
    /// The last position in `text` where it may be cut.
    pub fn last_position(self, text: &[u8]) -> Option<usize> {
        let blank = memchr::memrchr2(b' ', b'\t', text).map(|at| at + 1);
        match self {
            Cut::Nowhere => None,
            Cut::Blanks => blank,
            Cut::Words(ends_word) => blank.or_else(|| last_word_end(text, ends_word)),
        }
    }

    /// The first position in `text` where it may be cut; for `Words`, before the character that ends the
    /// first.
    pub fn first_position(self, text: &str) -> Option<usize> {
        match self {
            Cut::Nowhere => None,
            Cut::Blanks => memchr::memchr2(b' ', b'\t', text.as_bytes()).map(|at| at + 1),
            Cut::Words(ends_word) => text.find(ends_word),
        }
    }
}

/// The last character boundary in `text` that is not after byte `limit`.
pub(crate) fn character_boundary(text: &str, limit: usize) -> usize {
    (0..=limit.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

fn last_word_end(text: &[u8], ends_word: &dyn Fn(char) -> bool) -> Option<usize> {
    let (mut last, mut at) = (None, 0);
    for chunk in text.utf8_chunks() {
        for (offset, c) in chunk.valid().char_indices() {
            if ends_word(c) {
                last = Some(at + offset + c.len_utf8());
            }
        }
        at += chunk.valid().len() + chunk.invalid().len();
    }
    last
}
