//! Compares the fast tokenizer with the `tokenizers` crate on random strings, on all cores.
//!
//! `cargo run --release --example differential -- SECONDS [SEED [VOCAB.TXT]]` exits with status 1 at the
//! first difference.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[path = "../tests/strings/mod.rs"]
mod strings;

use strings::{Numbers, random_string, tokenizers};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let seconds = arguments.get(1).and_then(|text| text.parse().ok()).unwrap_or(10);
    let seed = arguments.get(2).and_then(|text| text.parse().ok()).unwrap_or(1);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let all = tokenizers(arguments.get(3).map(std::path::Path::new), folder.path());
    let (end, count) = (Instant::now() + Duration::from_secs(seconds), AtomicU64::new(0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for thread in 0..threads as u64 {
            let (all, count) = (&all, &count);
            scope.spawn(move || {
                let mut numbers = Numbers((seed << 16) + thread);
                let mut encoders: Vec<_> = all.iter().map(|(_, tokenizer)| tokenizer.encoder()).collect();
                let mut ids = Vec::new();
                while Instant::now() < end {
                    let text = random_string(&mut numbers);
                    let which = numbers.below(all.len());
                    let (name, tokenizer) = &all[which];
                    ids.clear();
                    let found = encoders[which].encode_into(&text, &mut ids).map(|()| &ids);
                    if found.as_ref().ok().copied() != tokenizer.encode_by_crate(&text).as_ref().ok() {
                        eprintln!("{name}: {text:?}: {found:?}");
                        std::process::exit(1);
                    }
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    println!("{} strings, {} configurations, seed {seed}: no difference", count.into_inner(), all.len());
}
