//! The fast tokenizer returns the same ids as the `tokenizers` crate for any text and options.
//!
//! `DIFFERENTIAL_SECONDS=600 cargo test --release --test differential random` tries more strings than the tests have
//! time for, and different ones with each `DIFFERENTIAL_SEED`.

use std::time::{Duration, Instant};

mod strings;

use electra_data::Tokenizer;
use electra_data::philox::{Purpose, Stream};
use strings::{random_string, tokenizers};

fn assert_same(name: &str, tokenizer: &Tokenizer, text: &str) {
    let mut ids = Vec::new();
    let fast = tokenizer.encoder().encode_into(text, &mut ids).map(|()| ids);
    assert_eq!(fast.ok(), tokenizer.encode_by_crate(text).ok(), "{name}: {text:?}");
}

fn all() -> Vec<(String, Tokenizer)> {
    let all = tokenizers(tempfile::tempdir().expect("a temporary folder").path());
    for (name, tokenizer) in &all {
        assert!(tokenizer.is_fast(), "{name}: {:?}", tokenizer.fallback_reason());
    }
    all
}

fn is_published(which: usize) -> bool {
    which == 0 || which == 3
}

#[test]
fn random_strings_have_the_crates_ids() {
    let variable = |name: &str| std::env::var(name).ok().and_then(|value| value.parse().ok());
    let end = Instant::now() + Duration::from_secs(variable("DIFFERENTIAL_SECONDS").unwrap_or(0));
    let seed = variable("DIFFERENTIAL_SEED").unwrap_or(20_261_121);
    let (all, mut numbers) = (all(), Stream::new(seed, Purpose::Tie, [0; 3]));
    for round in 0.. {
        for (name, tokenizer) in &all {
            assert_same(name, tokenizer, &random_string(&mut numbers));
        }
        if round >= 400 && Instant::now() >= end {
            break;
        }
    }
}

/// Every character, alone and within words: all of the first two planes with the options of the published vocabularies, an
/// eighth of the planes with letters with each of the other tokenizers, and a sixteenth of the rest.
#[test]
fn all_characters_have_the_crates_ids() {
    let characters: Vec<char> = ('\0'..=char::MAX).collect();
    for (which, (name, tokenizer)) in all().iter().enumerate() {
        for (number, some) in characters.chunks(64).enumerate() {
            let has_letters = some[0] < '\u{40000}';
            let share = if has_letters { 8 } else { 16 };
            if (is_published(which) && some[0] < '\u{20000}') || number % share == which % share {
                let text: String =
                    some.iter().flat_map(|&c| [c, ' ', 'a', c, 'e', c, '\u{301}', ' ']).collect();
                assert_same(name, tokenizer, &text);
            }
        }
    }
}

#[test]
fn edge_cases_have_the_crates_ids() {
    let long = |c: char, n: usize| String::from_iter(std::iter::repeat_n(c, n));
    let mut texts: Vec<String> =
        ["", " ", "a", ".", "\0", "é", "\u{301}", "a\u{0}b", "##", "日", "#日#", "a\u{b}b\u{c}c\u{1c}d"]
            .map(str::to_owned)
            .into();
    for n in [1, 7, 8, 9, 14, 15, 16, 17, 31, 99, 100, 101, 102, 400, 401, 70_000] {
        texts.extend(['a', 'Z', 'é', 'ß', '日', '각', '\u{302e}', '.', '\0'].map(|c| long(c, n)));
        texts.extend([format!("x{}", long('é', n)), format!("{}İ{}", long('b', n), long('c', n))]);
    }
    for (which, (name, tokenizer)) in all().iter().enumerate() {
        // The crate is slow on the longest ones.
        for text in texts.iter().filter(|text| text.len() < 2_000 || is_published(which)) {
            assert_same(name, tokenizer, text);
        }
    }
}
