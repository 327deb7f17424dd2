//! Writes a sparse corpus of zeros: `large_corpus DIR TOKENS MEAN_DOCUMENT` (see `bench/large_corpus.py`).

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dir, tokens, mean] = &arguments[..] else { return Err("DIR TOKENS MEAN_DOCUMENT".into()) };
    Ok(electra_data::write_sparse(Path::new(dir), tokens.parse()?, mean.parse()?)?)
}
