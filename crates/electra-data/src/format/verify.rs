//! Verifying every byte of a corpus.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use super::block_cache::{BlockCache, Pins};
use super::corpus::{VALIDATION, check_whole};
use super::damage::{access_error, damaged};
use super::manifest::{MAX_TOKENIZER_BYTES, Manifest, saturating_sum};
use super::mmap::MappedFile;
use super::shard::Shard;
use crate::error::{Error, Result};
use crate::store::{Cancel, Store, url_of};
use crate::threads::on_all_cores;

const CHUNK_TOKENS: usize = 1 << 15;

#[derive(Clone, Debug, Default)]
pub struct Verified {
    pub num_files: u64,
    pub num_bytes: u64,
    /// One line per damaged block, table or file: path, problem, remedy.
    pub damaged: Vec<String>,
}

/// Verifies every checksum, length and table of a corpus and of its validation set.
///
/// Damage to files is collected; a missing or damaged manifest is an error.
pub fn verify(dir: &Path) -> Result<Verified> {
    let verifier = Verifier::open(dir)?;
    let mut verified = Verified::default();
    verifier.verify(&mut verified)?;
    if verifier.manifest.has_validation {
        match Verifier::open(&verifier.dir.join(VALIDATION)) {
            Ok(validation) => validation.verify(&mut verified)?,
            Err(error) => verified.damaged.push(error.to_string()),
        }
    }
    Ok(verified)
}

struct Verifier {
    dir: PathBuf,
    store: Option<Store>,
    manifest: Manifest,
}

impl Verifier {
    fn open(dir: &Path) -> Result<Self> {
        let url = url_of(dir);
        let store = url.as_deref().map(Store::open).transpose()?;
        let dir = url.map_or(dir.to_owned(), PathBuf::from);
        let manifest = Manifest::open(&dir, store.as_ref())?;
        check_whole(&dir, store.as_ref(), &manifest)?;
        Ok(Self { dir, store, manifest })
    }

    fn verify(&self, verified: &mut Verified) -> Result<()> {
        let Self { dir, manifest, .. } = self;
        let cancel = Cancel::default();
        let check = |number| match cancel.is_raised() {
            true => Err(Error::Interrupted),
            false => Ok(cancel.carry(|| self.check_shard(number))),
        };
        let shards = 0..manifest.shards.len();
        let errors: Vec<Vec<Error>> =
            on_all_cores(|| shards.into_par_iter().map(check).collect::<Result<_>>())??;
        verified.damaged.extend(errors.into_iter().flatten().map(|error| error.to_string()));
        verified.num_files += 2 + 2 * manifest.shards.len() as u64;
        let bytes = manifest.shards.iter().flat_map(|shard| [shard.tokens.bytes, shard.lines.bytes]);
        verified.num_bytes = saturating_sum(bytes.chain([verified.num_bytes]));
        let path = dir.join(&manifest.tokenizer.file);
        let tokenizer = match &self.store {
            None => crate::regular_file::read(&path).map_err(|error| access_error(&path, error)),
            Some(store) => store.read(&manifest.tokenizer.file, MAX_TOKENIZER_BYTES),
        };
        let checked = tokenizer.and_then(|bytes| manifest.tokenizer.check(&path, &bytes));
        verified.damaged.extend(checked.err().map(|error| error.to_string()));
        Ok(())
    }

    /// A shard in a store gets a separate cache, removed afterwards: a corpus may be larger than the disk.
    fn check_shard(&self, number: usize) -> Vec<Error> {
        let entry = &self.manifest.shards[number];
        let shard = match &self.store {
            None => Shard::new(&self.dir, &self.manifest, entry),
            Some(store) => {
                let alone = Arc::new(Manifest::new(
                    self.manifest.token_bytes,
                    self.manifest.tokenizer.clone(),
                    vec![entry.clone()],
                ));
                match BlockCache::open(store.clone(), &alone, None) {
                    Ok(cache) => Shard::cached(&Arc::new(cache), 0, &alone),
                    Err(error) => return vec![error],
                }
            }
        };
        // Blocks read from a store stay mapped, since they are read again below.
        let (mut errors, _pins) = check_file(shard.tokens());
        let (more, _more_pins) = check_file(shard.lines());
        errors.extend(more);
        if errors.is_empty() {
            errors.extend(check_tables(&shard).err());
            errors.extend(check_ids(&shard).err());
        }
        errors
    }
}

fn check_file(file: Result<&MappedFile>) -> (Vec<Error>, Option<Pins>) {
    let (file, (blocks, pins)) = match file.and_then(|file| Ok((file, file.damaged_blocks()?))) {
        Ok(file) => file,
        Err(error) => return (vec![error], None),
    };
    let count = file.layout.num_blocks;
    let error = |block| damaged(file.path(), format!("block {block} of {count} is damaged"));
    (blocks.into_iter().map(error).collect(), pins)
}

/// The line lengths of every document must add up to its length.
fn check_tables(shard: &Shard) -> Result<()> {
    let mut start = 0;
    for (document, &end) in shard.document_ends()?.iter().enumerate() {
        let lines: u64 = shard.line_lengths(document as u64)?.into_iter().map(u64::from).sum();
        if lines != u64::from(end - start) {
            return Err(shard.lines_mismatch(document));
        }
        start = end;
    }
    Ok(())
}

/// Every id must be in the vocabulary: it indexes an embedding.
fn check_ids(shard: &Shard) -> Result<()> {
    let mut ids = vec![0; CHUNK_TOKENS];
    let mut start = 0;
    while start < shard.num_tokens() {
        let count = (shard.num_tokens() - start).min(CHUNK_TOKENS as u64);
        shard.copy_tokens(start, &mut ids[..count as usize])?;
        start += count;
    }
    Ok(())
}
