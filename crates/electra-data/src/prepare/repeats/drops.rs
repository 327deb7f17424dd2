//! Finds the documents or lines of a corpus that are repetitions, by the hashes of all of them.

use std::ops::Range;

use ahash::AHashSet;
use xxhash_rust::xxh3::xxh3_64;

use super::buckets::{BUCKETS, Head, to_bytes, unsealed};
use super::watch::BLANK;
use crate::error::{Error, Result};
use crate::format::{FileEntry, hash_hex};
use crate::prepare::output_dir::{BUCKETED, DROPS, OutputDir, part_file, part_path, part_request, total};
use crate::prepare::place::Sizes;
use crate::prepare::progress::Step;

/// Hashes in memory at the same time, about 300 MB.
const HELD: u64 = 29_000_000;
const WRITTEN: usize = 256;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Drops {
    pub len: u64,
    pub hash: u64,
    bits: Bits,
}

impl Drops {
    pub fn contains(&self, index: u64) -> bool {
        self.bits.get(index as usize)
    }

    fn to_bytes(&self, digest: &str) -> Vec<u8> {
        let mut bytes =
            [digest.as_bytes(), &self.len.to_le_bytes(), &self.hash.to_le_bytes(), &self.bits.0].concat();
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    /// The duplicates of an input group, if they were found with hashes of this digest.
    pub fn read(out: &OutputDir, input_group: usize, digest: &str) -> Result<Option<Self>> {
        let bytes = out.place.read(&part_path(&part_file(input_group, DROPS)))?;
        Ok(bytes.and_then(|bytes| Self::parse(&bytes, digest)))
    }

    fn parse(bytes: &[u8], digest: &str) -> Option<Self> {
        let (len, rest) = unsealed(bytes)?.strip_prefix(digest.as_bytes())?.split_first_chunk()?;
        let (hash, bits) = rest.split_first_chunk()?;
        let (len, hash) = (u64::from_le_bytes(*len), u64::from_le_bytes(*hash));
        Some(Self { len, hash, bits: Bits(bits.to_vec()) })
    }
}

/// A bit for each document or line, the lowest bit of a byte first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Bits(Vec<u8>);

impl Bits {
    fn new(len: usize) -> Self {
        Self(vec![0; len.div_ceil(8)])
    }

    fn get(&self, index: usize) -> bool {
        self.0.get(index / 8).is_some_and(|byte| byte >> (index % 8) & 1 == 1)
    }

    fn set(&mut self, index: usize) {
        self.0[index / 8] |= 1 << (index % 8);
    }
}

pub(crate) fn digest(files: &[FileEntry]) -> String {
    hash_hex(files.iter().map(|file| &*file.hash).collect::<String>().as_bytes())
}

/// Stores hashes of 8 bytes. The entry has the digest of the hashes: the pieces of the file have checksums.
pub(super) fn save_hashes(out: &OutputDir, input_group: usize, hashes: &[u8]) -> Result<FileEntry> {
    let bytes = to_bytes(hashes).ok_or_else(|| {
        Error::Input(format!("input group {input_group} has 2^32 lines or more; divide its file"))
    })?;
    let (file, hash) = (part_file(input_group, BUCKETED), hash_hex(hashes));
    out.write(&part_path(&file), &bytes)?;
    Ok(FileEntry { file, bytes: bytes.len() as u64, hash })
}

/// Finds the duplicates, from the hashes of all input groups in order, and stores them unless they are stored.
pub(crate) fn decide(out: &OutputDir, files: &[FileEntry], sizes: &Sizes, step: &Step) -> Result<()> {
    let digest = digest(files);
    if are_known(out, files.len(), sizes, &digest, step)? {
        return Ok(());
    }
    step.begin("finding duplicates", files.iter().map(|file| file.bytes).sum());
    let mut read = |ranges: &[(usize, Range<u64>)], receive: &mut Each| {
        let request = |(group, range): &(usize, Range<u64>)| part_request(&files[*group].file, range.clone());
        let requests: Vec<_> = ranges.iter().map(request).collect();
        out.place.read_batches(step, &requests, |start, pieces| {
            let mut pieces = ranges[start..].iter().zip(pieces);
            let damaged = pieces.find(|((group, _), piece)| !receive(*group, piece));
            damaged.map_or(Ok(()), |((group, _), _)| Err(out.damaged(&files[*group].file)))
        })
    };
    let lengths: Vec<u64> = files.iter().map(|file| file.bytes).collect();
    find(&lengths, HELD, &mut read, &mut |drops| {
        let files = drops
            .iter()
            .map(|(group, drops)| (part_path(&part_file(*group, DROPS)), drops.to_bytes(&digest)));
        out.place.write_all(&out.attempt, &files.collect::<Vec<_>>())
    })
}

fn are_known(out: &OutputDir, num_groups: usize, sizes: &Sizes, digest: &str, step: &Step) -> Result<bool> {
    let whole = |group| {
        let file = part_file(group, DROPS);
        Some(part_request(&file, 0..*sizes.get(&part_path(&file))?))
    };
    let Some(requests) = (0..num_groups).map(whole).collect::<Option<Vec<_>>>() else { return Ok(false) };
    let mut are_known = true;
    step.begin("reading the list of duplicates", total(&requests));
    out.place.read_batches(step, &requests, |_, files| {
        are_known &= files.iter().all(|bytes| Drops::parse(bytes, digest).is_some());
        Ok(())
    })?;
    Ok(are_known)
}

/// Receives a range of an input group's file; returns whether it is sound.
pub(super) type Each<'a> = dyn FnMut(usize, &[u8]) -> bool + 'a;
pub(super) type Read<'a> = dyn FnMut(&[(usize, Range<u64>)], &mut Each) -> Result<()> + 'a;

/// Finds repeated hashes in files of these lengths; holds about `held` hashes at a time, or one bucket.
pub(super) fn find(
    lengths: &[u64],
    held: u64,
    read: &mut Read,
    save: &mut dyn FnMut(Vec<(usize, Drops)>) -> Result<()>,
) -> Result<()> {
    let mut heads = Vec::new();
    let ranges: Vec<_> = (0..lengths.len()).map(|group| (group, Head::RANGE)).collect();
    read(&ranges, &mut |group, bytes| Head::parse(bytes, lengths[group]).map(|h| heads.push(h)).is_some())?;
    // In bucket order, until the order of occurrence is known.
    let mut repeated: Vec<_> = heads.iter().map(|head| Bits::new(head.len())).collect();
    for buckets in passes(&heads, held) {
        let num_hashes = heads.iter().map(|head| head.numbers(&buckets).len() as u64).sum::<u64>();
        let mut seen = AHashSet::with_capacity(num_hashes.min(held) as usize);
        let filled = heads.iter().enumerate().filter(|(_, head)| !head.numbers(&buckets).is_empty());
        let ranges: Vec<_> = filled.map(|(group, head)| (group, head.range(&buckets))).collect();
        read(&ranges, &mut |group, bytes| {
            let mut mark = |number, hash| {
                if hash != BLANK && !seen.insert(hash) {
                    repeated[group].set(number);
                }
            };
            heads[group].for_each(&buckets, bytes, &mut mark).is_some()
        })?;
    }
    let ranges: Vec<_> = heads.iter().map(Head::first_bytes).enumerate().collect();
    for ranges in ranges.chunks(WRITTEN) {
        let mut drops = Vec::new();
        read(ranges, &mut |group, bytes| {
            let group_drops = in_order(&heads[group], bytes, &repeated[group]);
            group_drops.map(|group_drops| drops.push((group, group_drops))).is_some()
        })?;
        save(drops)?;
    }
    Ok(())
}

/// Buckets that are compared at the same time: they have about `held` hashes.
fn passes(heads: &[Head], held: u64) -> Vec<Range<usize>> {
    let of_bucket = |bucket| heads.iter().map(|head| head.numbers(&(bucket..bucket + 1)).len() as u64).sum();
    let (mut passes, mut sum): (Vec<Range<usize>>, u64) = (Vec::new(), 0);
    for bucket in 0..BUCKETS {
        let added: u64 = of_bucket(bucket);
        match passes.last_mut() {
            Some(pass) if sum + added <= held => (pass.end, sum) = (bucket + 1, sum + added),
            _ => {
                passes.push(bucket..bucket + 1);
                sum = added;
            }
        }
    }
    passes
}

fn in_order(head: &Head, first_bytes: &[u8], repeated: &Bits) -> Option<Drops> {
    let mut bits = Bits::new(head.len());
    let are_repeated = head.order(first_bytes)?.map(|number| repeated.get(number));
    are_repeated.enumerate().filter(|(_, is_repeated)| *is_repeated).for_each(|(index, _)| bits.set(index));
    Some(Drops { len: head.len() as u64, hash: head.hash, bits })
}
