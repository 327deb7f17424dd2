//! Writes a sparse corpus of zeros: `large_corpus DIR TOKENS MEAN_DOCUMENT COPIES` (see `bench/large_corpus.py`).

use std::error::Error;
use std::path::Path;

mod sparse_corpus;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dir, tokens, mean, copies] = &arguments[..] else {
        return Err("DIR TOKENS MEAN_DOCUMENT COPIES".into());
    };
    sparse_corpus::write_sparse(Path::new(dir), tokens.parse()?, mean.parse()?, copies.parse()?)
}
