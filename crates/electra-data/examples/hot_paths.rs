//! The two inner loops by themselves, for counting instructions (see `bench/README.md`).
//!
//! `hot_paths tokenize N` makes a tokenizer and N thousand lines of text, and tokenizes them; `hot_paths load
//! N` loads N epochs of a small corpus, packed and masked; `hot_paths mix8 N` does so with eight corpora of
//! different weights that have about as many tokens together. All print the number of tokens. The cost that does
//! not depend on N is the same in every run and cancels in a difference.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use electra_data::philox::{Purpose, Stream};
use electra_data::{Corpus, Loader, LoaderOptions, Tokenizer};
use sparse_corpus::write_sparse;

mod sparse_corpus;

const WORDS: usize = 8000;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, times] = &arguments[..] else { return Err("tokenize N | load N | mixK N".into()) };
    let dir = tempfile::tempdir()?;
    let tokens = match what.as_str() {
        "tokenize" => tokenize(dir.path(), times.parse()?)?,
        "load" => load(dir.path(), 1, times.parse()?)?,
        other => match other.strip_prefix("mix").map(str::parse) {
            Some(Ok(corpora)) => load(dir.path(), corpora, times.parse()?)?,
            _ => return Err(format!("{other}: tokenize, load or mixK").into()),
        },
    };
    println!("{tokens}");
    Ok(())
}

/// Tokenizes lines of words that are entries, capitalized entries, entries with a suffix, or unknown.
fn tokenize(dir: &Path, thousands: u32) -> Result<usize, Box<dyn Error>> {
    let words: Vec<String> = (0..WORDS).map(spell).collect();
    let special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "##s", "##ing", ".", ","];
    let vocab: Vec<&str> = special.into_iter().chain(words.iter().map(String::as_str)).collect();
    let path = dir.join("vocab.txt");
    std::fs::write(&path, vocab.join("\n"))?;
    let tokenizer = Tokenizer::from_file(&path, Some(true), None)?;
    let mut encoder = tokenizer.encoder();
    let mut draw = Stream::new(1, Purpose::Tie, [0, 0, 0]);
    let (mut ids, mut tokens) = (Vec::new(), 0);
    for _ in 0..1000 * thousands {
        let mut line = String::new();
        for _ in 0..20 {
            // The smaller of two draws, so that some words are frequent.
            let word = &words[draw.below(WORDS as u32).min(draw.below(WORDS as u32)) as usize];
            match draw.below(16) {
                0 => line.extend(word[..1].to_uppercase().chars().chain(word[1..].chars())),
                1 => line.extend([word, "ing"]),
                2 => line.extend([word, ","]),
                3 => line.extend(["É", word]),
                _ => line.push_str(word),
            }
            line.push(' ');
        }
        ids.clear();
        encoder.encode_into(&line, &mut ids)?;
        tokens += ids.len();
    }
    Ok(tokens)
}

fn spell(number: usize) -> String {
    let digits = [number % 20, number / 20 % 20, number / 400 % 20];
    digits
        .iter()
        .map(|&digit| ["ba", "ke", "mo", "tu", "ri"][digit % 5].to_owned() + &"nlst"[digit / 5..=digit / 5])
        .collect()
}

/// Loads whole epochs, so that threads that work ahead do the same work in every run.
fn load(dir: &Path, corpora: u32, epochs: u32) -> Result<usize, Box<dyn Error>> {
    let open = |number: u32| -> Result<_, Box<dyn Error>> {
        let dir = dir.join(number.to_string());
        let tokens = (1 << 20) / u64::from(corpora) * (8 + u64::from(number)) / 8; // no two are the same
        write_sparse(&dir, tokens, 400, 1)?;
        Ok((Arc::new(Corpus::open(&dir)?), Some(f64::from(8 + number))))
    };
    let options =
        LoaderOptions { batch_size: 512, epochs: Some(i64::from(epochs)), ..LoaderOptions::default() };
    let mut rows = 0;
    for batch in Loader::mixture((0..corpora).map(open).collect::<Result<_, _>>()?, &options)? {
        rows += batch?.num_rows();
    }
    Ok(rows * options.sequence_length as usize)
}
