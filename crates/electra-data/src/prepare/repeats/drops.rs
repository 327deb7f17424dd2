//! Which documents or lines of a corpus are not the first of their kind, decided by the hashes of all of them.

use ahash::AHashSet;
use xxhash_rust::xxh3::xxh3_64;

use super::hasher::BLANK;
use crate::error::{Error, Result};
use crate::format::{FileEntry, hash_hex};
use crate::prepare::output_dir::OutputDir;
use crate::prepare::progress::Progress;

/// Hashes that are held at a time, in about 300 MB. The hashes are read again for each so many.
const HELD: u64 = 29_000_000;
const HASH: usize = size_of::<u64>();

/// The documents or lines of an input group that are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::prepare) struct Drops {
    /// Number of documents or lines.
    pub len: u64,
    /// xxh3-64 of their hashes.
    pub hash: u64,
    /// A bit for each, the lowest of a byte first.
    bits: Vec<u8>,
}

impl Drops {
    fn of(hashes: &[u8]) -> Self {
        let len = hashes.len() / HASH;
        Self { len: len as u64, hash: xxh3_64(hashes), bits: vec![0; len.div_ceil(8)] }
    }

    pub fn contains(&self, index: u64) -> bool {
        let byte = self.bits.get((index / 8) as usize);
        byte.is_some_and(|byte| byte >> (index % 8) & 1 == 1)
    }

    /// The bytes of the file that stores them; `digest` is that of the hashes of the whole corpus.
    fn to_bytes(&self, digest: &str) -> Vec<u8> {
        let mut bytes =
            [digest.as_bytes(), &self.len.to_le_bytes(), &self.hash.to_le_bytes(), &self.bits].concat();
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    /// What is left out of an input group, if it was decided by hashes with this digest.
    pub fn read(out: &OutputDir, input_group: usize, digest: &str) -> Result<Option<Self>> {
        Ok(out.drops(input_group)?.and_then(|bytes| Self::parse(&bytes, digest)))
    }

    fn parse(bytes: &[u8], digest: &str) -> Option<Self> {
        let (bytes, checksum) = bytes.split_last_chunk()?;
        let (len, rest) = bytes.strip_prefix(digest.as_bytes())?.split_first_chunk()?;
        let (hash, bits) = rest.split_first_chunk()?;
        let is_sound = xxh3_64(bytes) == u64::from_le_bytes(*checksum);
        let (len, hash) = (u64::from_le_bytes(*len), u64::from_le_bytes(*hash));
        is_sound.then(|| Self { len, hash, bits: bits.to_vec() })
    }
}

/// The hash of the hashes of all input groups.
pub(in crate::prepare) fn digest(files: &[FileEntry]) -> String {
    hash_hex(files.iter().map(|file| &*file.hash).collect::<String>().as_bytes())
}

/// Decides which documents or lines are left out, and stores it for each input group, unless it is stored. `files` are
/// the hashes of all input groups in order.
pub(in crate::prepare) fn decide(
    out: &OutputDir,
    files: &[FileEntry],
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<()> {
    let digest = digest(files);
    let known = (0..files.len()).map(|group| Ok(Drops::read(out, group, &digest)?.is_some()));
    if known.collect::<Result<Vec<_>>>()?.into_iter().all(|is_known| is_known) {
        return Ok(());
    }
    let mut read = |file: &FileEntry| {
        if !progress(Progress::default()) {
            return Err(Error::Interrupted);
        }
        out.read_part(file)
    };
    let num_hashes = files.iter().map(|file| file.bytes / HASH as u64).sum();
    let drops = find(files, num_hashes, HELD, &mut read)?;
    let mut found = drops.iter().enumerate();
    found.try_for_each(|(group, drops)| out.save_drops(group, &drops.to_bytes(&digest)))
}

/// Finds the documents or lines whose hash has occurred before, and holds about `held` hashes at a time.
pub(super) fn find<F>(
    files: &[F],
    num_hashes: u64,
    held: u64,
    read: &mut dyn FnMut(&F) -> Result<Vec<u8>>,
) -> Result<Vec<Drops>> {
    let (mut found, passes): (Vec<Drops>, _) = (Vec::new(), num_hashes.div_ceil(held).max(1));
    for pass in 0..passes {
        let is_of_pass = |hash: u64| (u128::from(hash) * u128::from(passes)) >> 64 == u128::from(pass);
        let mut seen = AHashSet::with_capacity(num_hashes.min(held) as usize);
        for (group, file) in files.iter().enumerate() {
            let hashes = read(file)?;
            if pass == 0 {
                found.push(Drops::of(&hashes));
            }
            for (index, hash) in hashes.chunks_exact(HASH).map(to_hash).enumerate() {
                if hash != BLANK && is_of_pass(hash) && !seen.insert(hash) {
                    found[group].bits[index / 8] |= 1 << (index % 8);
                }
            }
        }
    }
    Ok(found)
}

fn to_hash(bytes: &[u8]) -> u64 {
    let mut hash = [0; HASH];
    hash.copy_from_slice(bytes);
    u64::from_le_bytes(hash)
}
