//! The two inner loops by themselves, for counting instructions (see `bench/instructions.py`).
//!
//! `hot_paths tokenize N` makes a tokenizer and N thousand lines of text, and tokenizes them; `hot_paths load
//! N` loads N epochs of a small corpus, packed and masked. Both print the number of tokens. The cost that
//! does not depend on N is the same in every run and cancels in a difference.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use electra_data::philox::{Purpose, Stream};
use electra_data::{Corpus, Loader, LoaderOptions, Tokenizer, write_sparse};

const WORDS: usize = 8000;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, times] = &arguments[..] else { return Err("tokenize N | load N".into()) };
    let dir = tempfile::tempdir()?;
    let tokens = match what.as_str() {
        "tokenize" => tokenize(dir.path(), times.parse()?)?,
        "load" => load(dir.path(), times.parse()?)?,
        other => return Err(format!("{other}: tokenize or load").into()),
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
fn load(dir: &Path, epochs: u32) -> Result<usize, Box<dyn Error>> {
    write_sparse(dir, 1 << 20, 400)?;
    let options =
        LoaderOptions { batch_size: 512, epochs: Some(i64::from(epochs)), ..LoaderOptions::default() };
    let mut rows = 0;
    for batch in Loader::new(Arc::new(Corpus::open(dir)?), &options)? {
        rows += batch?.num_rows();
    }
    Ok(rows * options.sequence_length as usize)
}
