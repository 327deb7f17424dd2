//! BERT's normalizer and pre-tokenizer as a table of characters, according to the `tokenizers` crate.
//!
//! Nearly every character has the same meaning in any context, so meanings are computed once, in pages of 256
//! characters, on first use of a page. The exceptions are combining marks that are not stripped and that
//! canonical ordering could move past each other; the crate tokenizes text with such marks.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{
    NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
};

use super::vocab_trie::VocabTrie;
use crate::error::{Error, Result};

type CrateResult<T> = std::result::Result<T, tokenizers::Error>;

const PAGE: usize = 256;
const PAGES: usize = 0x11_0000 / PAGE;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meaning {
    Nothing,
    Space,
    /// A separate word, with this id.
    Alone(u32),
    Letter(char),
    /// Several letters of a word; [`Characters::letters`] returns them by this number.
    Letters(u8),
    /// The meaning depends on the context.
    Unclear,
}

pub(crate) struct Characters {
    normalizer: BertNormalizer,
    pages: Box<[OnceLock<Page>]>,
}

struct Page {
    meanings: [Meaning; PAGE],
    /// The letters of characters that become several letters.
    letters: Vec<Box<str>>,
}

impl Characters {
    pub fn new(normalizer: BertNormalizer) -> Self {
        Self { normalizer, pages: (0..PAGES).map(|_| OnceLock::new()).collect() }
    }

    #[inline]
    pub fn meaning(&self, c: char, trie: &VocabTrie) -> Meaning {
        self.page(c, trie).meanings[c as usize % PAGE]
    }

    pub fn letters(&self, c: char, number: u8, trie: &VocabTrie) -> &str {
        &self.page(c, trie).letters[usize::from(number)]
    }

    pub fn words(&self, text: &str, mut take: impl FnMut(&str)) -> Result<()> {
        let words = split(self.normalized(text).map_err(failed)?).map_err(failed)?;
        for (word, _, _) in words.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            take(word);
        }
        Ok(())
    }

    #[inline]
    fn page(&self, c: char, trie: &VocabTrie) -> &Page {
        self.pages[c as usize / PAGE].get_or_init(|| self.new_page(c, trie))
    }

    #[cold]
    fn new_page(&self, c: char, trie: &VocabTrie) -> Page {
        let first = (c as usize / PAGE * PAGE) as u32;
        // Surrogates are not characters; their slots are never read.
        let characters: Vec<char> = (first..first + PAGE as u32).map_while(char::from_u32).collect();
        // If the crate fails, all meanings are unclear: `words` then fails as well and returns the error.
        let mut page = Page { meanings: [Meaning::Unclear; PAGE], letters: Vec::new() };
        let Ok(results) = change_each(&characters, |text| Ok(self.normalized(text)?.get().to_owned())) else {
            return page;
        };
        let Ok(traits) = Traits::of(&results) else { return page };
        for (result, meaning) in results.into_iter().zip(&mut page.meanings) {
            *meaning = self.meaning_of(&result, page.letters.len() as u8, &traits, trie);
            if matches!(meaning, Meaning::Letters(_)) {
                page.letters.push(result.into());
            }
        }
        page
    }

    fn normalized(&self, text: &str) -> CrateResult<NormalizedString> {
        let mut normalized = NormalizedString::from(text);
        self.normalizer.normalize(&mut normalized)?;
        Ok(normalized)
    }

    fn meaning_of(&self, result: &str, number: u8, traits: &Traits, trie: &VocabTrie) -> Meaning {
        let strips = self.normalizer.strip_accents.unwrap_or(self.normalizer.lowercase);
        if strips && result.chars().any(|c| traits.movable.contains(&c)) {
            return Meaning::Unclear;
        }
        let is_split_off = |c: char| c.is_ascii_punctuation() || traits.split_off.contains(&c);
        let trimmed = result.trim();
        let mut letters = trimmed.chars();
        match (letters.next(), letters.next()) {
            _ if result.is_empty() => Meaning::Nothing,
            (None, _) => Meaning::Space,
            (Some(only), None) if is_split_off(only) => Meaning::Alone(id_of(only, trie)),
            (Some(only), None) if trimmed.len() == result.len() => Meaning::Letter(only),
            (Some(only), None) if result.starts_with(' ') && result.ends_with(' ') => {
                Meaning::Alone(id_of(only, trie))
            }
            _ if result.chars().any(|c| c.is_whitespace() || is_split_off(c)) => Meaning::Unclear,
            _ => Meaning::Letters(number),
        }
    }
}

/// Properties of normalized characters outside ASCII, according to the crate.
struct Traits {
    /// Punctuation according to the pre-tokenizer.
    split_off: BTreeSet<char>,
    /// Characters that canonical ordering could move: their combining class is not zero.
    movable: BTreeSet<char>,
}

impl Traits {
    fn of(results: &[String]) -> CrateResult<Self> {
        let characters: BTreeSet<char> =
            results.iter().flat_map(|result| result.chars()).filter(|c| !c.is_ascii()).collect();
        // A character is punctuation if it is split from the letters on both sides.
        let text: String = characters.iter().flat_map(|&c| ['a', c]).chain(['a']).collect();
        let words = split(NormalizedString::from(text))?;
        let words = words.get_splits(OffsetReferential::Normalized, OffsetType::None);
        let alone = words.iter().filter_map(|(word, _, _)| only_char(word)).filter(|c| !c.is_ascii());
        // Next to a mark of class 1, the lowest, and a mark of class 230, nearly the highest: a class above 1 is
        // moved after the former, and a class between 0 and 230 before the latter.
        let probes = |probe: fn(char) -> String| {
            let asked: Vec<String> = characters.iter().copied().map(probe).collect();
            let changed =
                change_each(&asked, |text| Ok(NormalizedString::from(text).nfd().get().to_owned()))?;
            Ok(asked.into_iter().zip(changed).map(|(asked, changed)| asked != changed).collect::<Vec<_>>())
        };
        let low: CrateResult<_> = probes(|c| format!("{c}\u{334}"));
        let (low, high) = (low?, probes(|c| format!("\u{301}{c}"))?);
        let moved = low.into_iter().zip(high).map(|(low, high)| low || high);
        let movable = characters.iter().copied().zip(moved).filter(|&(_, moved)| moved).map(|(c, _)| c);
        Ok(Self { split_off: alone.collect(), movable: movable.collect() })
    }
}

/// Applies `change` to each text. All are changed at once, separated by a character that never changes.
fn change_each(
    texts: &[impl ToString],
    change: impl Fn(&str) -> CrateResult<String>,
) -> CrateResult<Vec<String>> {
    let texts: Vec<String> = texts.iter().map(ToString::to_string).collect();
    let together = change(&texts.join("|"))?;
    let parts: Vec<String> = together.split('|').map(str::to_owned).collect();
    if parts.len() == texts.len() { Ok(parts) } else { texts.iter().map(|text| change(text)).collect() }
}

fn split(text: NormalizedString) -> CrateResult<PreTokenizedString> {
    let mut words = PreTokenizedString::from(text);
    BertPreTokenizer.pre_tokenize(&mut words)?;
    Ok(words)
}

fn failed(error: tokenizers::Error) -> Error {
    Error::Input(format!("cannot split text into words: {error}"))
}

fn only_char(word: &str) -> Option<char> {
    let mut characters = word.chars();
    characters.next().filter(|_| characters.next().is_none())
}

fn id_of(c: char, trie: &VocabTrie) -> u32 {
    let mut ids = Vec::new();
    trie.split(c.encode_utf8(&mut [0; 4]).as_bytes(), &mut ids);
    ids[0] // `split` appends at least one id, and no entry is shorter than a character
}
