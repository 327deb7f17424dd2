//! A finished corpus, opened for reading: its manifest and its shards.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use rayon::prelude::*;
use tempfile::TempDir;

use super::atomic_file::{write_atomically, write_error};
use super::block_cache::{BlockCache, CacheOptions, Pins};
use super::damage::{access_error, foreign, wrong_length};
use super::header::{BLOCK_BYTES, HEADER_BYTES, Layout};
use super::manifest::{MANIFEST, MAX_TOKENIZER_BYTES, Manifest, SpecialTokens, saturating_sum};
use super::mmap::MappedFile;
use super::shard::Shard;
use crate::error::{Error, Result};
use crate::store::{Cancel, Store, url_of};
use crate::threads::{lock, nonce, on_all_cores};

pub(crate) const VALIDATION: &str = "holdout";

/// Number of shards up to which their lengths are checked when a corpus is opened, and not on first use.
const CHECKED_SHARDS: usize = 1_000;
/// Idle files that stay mapped. Linux allows 65,530 maps per process.
const MAX_MAPPED: usize = 16_384;
/// Idle shards of a stored corpus that stay open.
const MAX_IDLE: usize = 16;

/// A corpus on disk or in an object store. Opening it reads the manifest and, unless there are thousands of shards or
/// they are in a store, checks the lengths of the files.
#[derive(Debug)]
pub struct Corpus {
    dir: PathBuf,
    manifest: Arc<Manifest>,
    cache: Option<Arc<BlockCache>>,
    store: Option<Store>,
    /// The local copy of the tokenizer's file, and the temporary folder that holds it if the cache has no folder.
    tokenizer: OnceLock<(PathBuf, Option<TempDir>)>,
    shards: Vec<Mutex<Option<Arc<Shard>>>>,
    /// The number of documents before each shard, and the total at the end.
    starts: Vec<u64>,
}

impl Corpus {
    /// Opens the corpus in `dir`. A missing manifest is [`Error::NotFound`]; a damaged manifest or a file
    /// length that differs from the one written is [`Error::Damaged`].
    pub fn open(dir: &Path) -> Result<Self> {
        Self::open_with(dir, None)
    }

    /// Like [`Corpus::open`]; a corpus in an object store is cached according to `options`, or in private temporary
    /// files of at most 1 GiB.
    pub fn open_with(dir: &Path, options: Option<&CacheOptions>) -> Result<Self> {
        let url = url_of(dir);
        let dir = url.as_ref().map_or(dir.to_owned(), PathBuf::from);
        let store = url.map(|url| Store::open(&url)).transpose()?;
        let manifest = Arc::new(Manifest::open(&dir, store.as_ref())?);
        let cache = store.clone().map(|store| BlockCache::open(store, &manifest, options).map(Arc::new));
        let cache = cache.transpose()?;
        check_whole(&dir, store.as_ref(), &manifest)?;
        if store.is_none() && manifest.shards.len() <= CHECKED_SHARDS {
            for entry in &manifest.shards {
                check_length(&dir.join(&entry.tokens.file), entry.tokens.bytes)?;
                check_length(&dir.join(&entry.lines.file), entry.lines.bytes)?;
            }
        }
        let mut starts = vec![0];
        for entry in &manifest.shards {
            starts.push(starts[starts.len() - 1] + entry.num_documents);
        }
        let shards = manifest.shards.iter().map(|_| Mutex::default()).collect();
        Ok(Self { dir, manifest, cache, store, tokenizer: OnceLock::new(), shards, starts })
    }

    pub fn num_shards(&self) -> usize {
        self.shards.len()
    }

    pub fn shard_size(&self, number: usize) -> (u64, u64) {
        let entry = &self.manifest.shards[number];
        (entry.num_documents, entry.num_tokens)
    }

    /// Start of part `index` of `count` of a shard with `tokens` tokens, moved to the start of a checksum's block.
    pub(crate) fn aligned(&self, tokens: u64, index: u64, count: u64) -> u32 {
        let (width, block) = (u64::from(self.manifest.token_bytes), BLOCK_BYTES as u64);
        let blocks = (HEADER_BYTES as u64 + width * tokens) / block;
        let token = (blocks * index / count * block).saturating_sub(HEADER_BYTES as u64) / width;
        if index == count { tokens as u32 } else { token as u32 }
    }

    pub fn shard(&self, number: usize) -> Arc<Shard> {
        let mut slot = lock(&self.shards[number]);
        let open = || match &self.cache {
            None => Shard::new(&self.dir, &self.manifest, &self.manifest.shards[number]),
            Some(cache) => {
                self.close_idle_beyond(MAX_IDLE); // their tables take disk space
                Shard::cached(cache, number, &self.manifest)
            }
        };
        slot.get_or_insert_with(|| Arc::new(open())).clone()
    }

    pub fn shards(&self) -> impl Iterator<Item = Arc<Shard>> {
        (0..self.num_shards()).map(|number| self.shard(number))
    }

    pub fn close_idle(&self) {
        if MappedFile::num_mapped() > MAX_MAPPED {
            self.close_idle_beyond(0);
        }
    }

    fn close_idle_beyond(&self, count: usize) {
        // A shard that is being opened is in use.
        let slots = self.shards.iter().filter_map(|slot| slot.try_lock().ok());
        let is_idle = |slot: &MutexGuard<'_, Option<Arc<Shard>>>| {
            slot.as_ref().is_some_and(|shard| Arc::strong_count(shard) == 1)
        };
        slots.filter(is_idle).skip(count).for_each(|mut slot| *slot = None);
    }

    /// Fetches everything needed to read these ranges of tokens with `before` and `after` tokens around each, and, with
    /// `lines`, their documents' line lengths. Nothing is evicted until the result is dropped. `None` for a corpus on disk.
    pub(crate) fn prefetch(
        &self,
        parts: &[(usize, Range<u32>)],
        (before, after): (u32, u32),
        lines: bool,
        cancel: &Cancel,
    ) -> Result<Option<Vec<Pins>>> {
        let Some(cache) = &self.cache else { return Ok(None) };
        let with_margin = |(number, tokens): &(usize, Range<u32>)| {
            let end = (u64::from(tokens.end) + u64::from(after)).min(self.shard_size(*number).1);
            (*number, self.shard(*number), tokens.start.saturating_sub(before)..end as u32)
        };
        let parts: Vec<_> = parts.iter().map(with_margin).collect();
        let tokens =
            parts.iter().map(|(number, shard, tokens)| (cache.file(2 * number), shard.token_bytes(tokens)));
        let mut ranges: Vec<_> = tokens.collect();
        if lines {
            ranges.extend(parts.iter().map(|(number, ..)| (cache.file(2 * number + 1), 0..HEADER_BYTES)));
        }
        let mut pins = vec![cache.pin(&ranges, cancel)?];
        if lines {
            let lines = |(number, shard, tokens): &(usize, Arc<Shard>, Range<u32>)| {
                Ok((cache.file(2 * number + 1), shard.line_bytes(tokens)?))
            };
            pins.push(cache.pin(&parts.iter().map(lines).collect::<Result<Vec<_>>>()?, cancel)?);
        }
        Ok(Some(pins))
    }

    pub(crate) fn is_stored(&self) -> bool {
        self.store.is_some()
    }

    pub(crate) fn cache_limit(&self) -> Option<u64> {
        self.cache.as_ref().and_then(|cache| cache.limit())
    }

    /// Pins the tables of a shard's tokens and, with `lines`, of its lines. `None` for a corpus on disk.
    pub(crate) fn prefetch_tables(&self, shard: usize, lines: bool) -> Result<Option<Pins>> {
        let Some(cache) = &self.cache else { return Ok(None) };
        let files = [(cache.file(2 * shard), 0..0), (cache.file(2 * shard + 1), 0..HEADER_BYTES)];
        cache.pin(&files[..1 + usize::from(lines)], &Cancel::default()).map(Some)
    }

    /// Estimated bytes that [`Corpus::prefetch`] fetches for `tokens` tokens of a shard, and for its tables.
    pub(crate) fn prefetch_bytes(&self, shard: usize, tokens: u64, lines: bool) -> (u64, u64) {
        let Some(cache) = &self.cache else { return (0, 0) };
        let files = (0..=usize::from(lines)).map(|file| cache.layout(2 * shard + file));
        files.fold((0, 0), |(body, tables), Layout { index, file_length, .. }| {
            let share = (index as u64).saturating_mul(tokens) / self.shard_size(shard).1.max(1);
            let block = BLOCK_BYTES as u64;
            let tail = index as u64 / block * block;
            // A range may begin and end inside a checksummed block.
            (body + (share + 2 * block).min(tail), tables + file_length as u64 - tail)
        })
    }

    /// Tokens in all documents, without any special tokens.
    pub fn num_tokens(&self) -> u64 {
        self.manifest.num_tokens
    }

    pub fn token_bytes(&self) -> u64 {
        saturating_sum(self.manifest.shards.iter().map(|shard| shard.tokens.bytes))
    }

    pub fn num_documents(&self) -> u64 {
        self.manifest.num_documents
    }

    /// Documents without tokens, which `prepare` skipped.
    pub fn empty_documents(&self) -> u64 {
        self.manifest.empty_documents
    }

    /// Identifies the tokens, their order and the tokenizer: 32 hexadecimal digits.
    pub fn content_hash(&self) -> &str {
        &self.manifest.content_hash
    }

    pub fn tokenizer_hash(&self) -> &str {
        &self.manifest.tokenizer.hash
    }

    pub fn special_tokens(&self) -> SpecialTokens {
        self.manifest.tokenizer.special_tokens
    }

    /// Size of the vocabulary: every id is below this.
    pub fn vocab_size(&self) -> u32 {
        self.manifest.tokenizer.vocab_size
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn tokenizer_name(&self) -> PathBuf {
        self.dir.join(&self.manifest.tokenizer.file)
    }

    /// The corpus's copy of the tokenizer's file. For a corpus in a store, a local copy, which exists while the
    /// corpus is open or its cache exists.
    pub fn tokenizer_path(&self) -> Result<PathBuf> {
        let entry = &self.manifest.tokenizer;
        let (Some(store), Some(cache)) = (&self.store, &self.cache) else { return Ok(self.tokenizer_name()) };
        if let Some((path, _)) = self.tokenizer.get() {
            return Ok(path.clone());
        }
        let bytes = store.read(&entry.file, MAX_TOKENIZER_BYTES)?;
        entry.check(&self.tokenizer_name(), &bytes)?;
        // Unique to this reader: threads share a process, and containers may share its pid.
        let tag = format!("{:016x}", nonce());
        let private = || TempDir::with_prefix("electra-fast-");
        let private = if cache.dir().is_none() { Some(private()) } else { None };
        let private = private.transpose().map_err(|error| write_error(&std::env::temp_dir(), error))?;
        let dir = cache.dir().or(private.as_ref().map(TempDir::path)).unwrap_or(Path::new("")).to_owned();
        write_atomically(&dir, &entry.file, &tag, &bytes)?;
        // Otherwise the settings would be inferred from the vocabulary.
        write_atomically(&dir, MANIFEST, &tag, self.manifest.canonical().as_bytes())?;
        Ok(self.tokenizer.get_or_init(|| (dir.join(&entry.file), private)).0.clone())
    }

    pub(crate) fn verify_tokenizer(&self, bytes: &[u8]) -> Result<()> {
        self.manifest.tokenizer.check(&self.tokenizer_name(), bytes)
    }

    /// Settings to open [`Corpus::tokenizer_path`] with: lowercase and strip_accents.
    pub fn tokenizer_settings(&self) -> (Option<bool>, Option<bool>) {
        (self.manifest.tokenizer.lowercase, self.manifest.tokenizer.strip_accents)
    }

    pub fn options(&self) -> String {
        self.manifest.options.to_string()
    }

    pub fn validation(&self) -> Option<PathBuf> {
        self.manifest.has_validation.then(|| self.dir.join(VALIDATION))
    }

    pub fn document(&self, index: u64) -> Result<Vec<u32>> {
        let count = self.num_documents();
        if index >= count {
            return Err(Error::Input(format!(
                "document {index}: out of range; the corpus has {count} documents"
            )));
        }
        let number = self.starts.partition_point(|&start| start <= index) - 1;
        let (shard, local) = (self.shard(number), (index - self.starts[number]) as usize);
        let ends = shard.document_ends()?;
        let start = if local == 0 { 0 } else { ends[local - 1] };
        let mut ids = vec![0; (ends[local] - start) as usize];
        shard.copy_tokens(u64::from(start), &mut ids)?;
        Ok(ids.into_iter().map(|id| id as u32).collect())
    }
}

/// Rejects a validation set that belongs to another corpus.
pub(super) fn check_whole(dir: &Path, store: Option<&Store>, manifest: &Manifest) -> Result<()> {
    let Some(around) = dir.parent().filter(|_| dir.ends_with(VALIDATION)) else { return Ok(()) };
    let store = store.map(|store| store.at(&around.to_string_lossy())).transpose();
    match store.and_then(|store| Manifest::open(around, store.as_ref())) {
        Ok(whole) if whole.has_validation && whole.fingerprint != manifest.fingerprint => {
            Err(foreign(&dir.join(MANIFEST)))
        }
        Err(Error::Interrupted) => Err(Error::Interrupted),
        _ => Ok(()), // a separate corpus
    }
}

/// A truncated file must not be mapped: reading past its end would kill the process.
fn check_length(path: &Path, expected: u64) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.len() == expected => Ok(()),
        Ok(metadata) => Err(wrong_length(path, metadata.len(), expected)),
        Err(error) => Err(access_error(path, error)),
    }
}

/// Tokens read at once: their ids stay in the processor's cache.
const CHUNK_TOKENS: u64 = 1 << 15;
/// Tokens that share one table of counts, which has a row per id, and one request to an object store.
const PART_TOKENS: u64 = 1 << 21;

impl Corpus {
    /// Counts of each id in all documents. Every block is verified, as in [`Corpus::document`].
    pub fn token_counts(&self) -> Result<Vec<u64>> {
        let parts = (0..self.num_shards()).flat_map(|shard| {
            let size = self.shard_size(shard).1;
            let starts = (0..size).step_by(PART_TOKENS as usize);
            starts.map(move |start| (shard, start as u32..size.min(start + PART_TOKENS) as u32))
        });
        let parts: Vec<(usize, Range<u32>)> = parts.collect();
        let zeros = || vec![0; self.vocab_size() as usize];
        let add = |mut sum: Vec<u64>, counts: Vec<u64>| {
            sum.iter_mut().zip(counts).for_each(|(total, count)| *total += count);
            Ok(sum)
        };
        let cancel = Cancel::default();
        let count = |counts, part| match cancel.is_raised() {
            true => Err(Error::Interrupted),
            false => cancel.carry(|| self.count_part(part, counts)),
        };
        on_all_cores(|| parts.par_iter().try_fold(zeros, count).try_reduce(zeros, add))?
    }

    fn count_part(&self, part: &(usize, Range<u32>), mut counts: Vec<u64>) -> Result<Vec<u64>> {
        let (shard, tokens) = (self.shard(part.0), u64::from(part.1.start)..u64::from(part.1.end));
        let _pins = self.prefetch(std::slice::from_ref(part), (0, 0), false, &Cancel::default())?;
        for start in tokens.clone().step_by(CHUNK_TOKENS as usize) {
            let mut ids = vec![0; CHUNK_TOKENS.min(tokens.end - start) as usize];
            shard.expect_unchanged()?;
            shard.copy_tokens(start, &mut ids)?;
            ids.iter().for_each(|&id| counts[id as usize] += 1);
        }
        Ok(counts)
    }
}

#[cfg(test)]
mod tests {
    use crate::format::testing::write_corpus;
    use proptest::prelude::*;

    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::store::test_server::TestServer;

    #[test]
    fn large_corpus_opens_without_checking_each_shard() {
        let dir = tempfile::tempdir().unwrap();
        write_corpus(dir.path(), 100, &[vec![vec![5, 6]]], 1);
        let one = Manifest::read(dir.path()).unwrap();
        let opened = |count: usize| {
            let shards = (0..count).map(|number| {
                let mut shard = one.shards[0].clone();
                shard.tokens.file = format!("shard-{number:06}-000.tokens"); // exists for number 0 only
                shard
            });
            let manifest = Manifest { shards: shards.collect(), ..one.clone() }.seal();
            std::fs::write(dir.path().join(MANIFEST), manifest.canonical()).unwrap();
            Corpus::open(dir.path())
        };
        assert!(
            opened(CHECKED_SHARDS)
                .unwrap_err()
                .to_string()
                .contains("missing, although the manifest lists it")
        );
        let corpus = opened(CHECKED_SHARDS + 1).unwrap();
        assert_eq!(corpus.document(0).unwrap(), [5, 6]);
        let error = corpus.document(1).unwrap_err().to_string();
        assert!(
            error.contains("shard-000001-000.tokens: missing, although the manifest lists it"),
            "{error}"
        );
    }

    #[test]
    fn private_cache_stays_small() {
        let (dir, most) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
        let documents: Vec<_> = (0..2_000).map(|id| vec![vec![id; 9_000]]).collect();
        write_corpus(dir.path(), 30_000, &documents, 150_000);
        let server = TestServer::start(dir.path());
        let corpus = Corpus::open(Path::new(&server.url)).unwrap();
        let measure = || most.fetch_max(corpus.cache.as_ref().unwrap().mapped_bytes(), Ordering::Relaxed);
        for index in (0..2_000).chain((0..2_000).step_by(7)) {
            assert_eq!(corpus.document(index).unwrap(), vec![index as u32; 9_000]);
            measure();
        }
        std::thread::scope(|scope| {
            let counting = scope.spawn(|| corpus.token_counts().unwrap());
            while !counting.is_finished() {
                measure();
            }
            assert_eq!(counting.join().unwrap()[..2_000], [9_000; 2_000]);
        });
        let (most, all) = (most.into_inner() as u64, corpus.token_bytes());
        assert!(most < all / 3 && most > all / 20, "{most} of {all}");
    }

    #[test]
    fn corpus_opens_with_one_request() {
        let dir = tempfile::tempdir().unwrap();
        write_corpus(dir.path(), 100, &[vec![vec![5, 6]], vec![vec![7]]], 2);
        let server = TestServer::start(dir.path());
        let corpus = Corpus::open(Path::new(&server.url)).unwrap();
        assert_eq!(server.log().requests, [("get", "manifest.json".to_owned())]);
        assert_eq!(corpus.num_documents(), 2);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn written_documents_are_read_back(
            documents in prop::collection::vec(
                prop::collection::vec(prop::collection::vec(0_u32..70_000, 0..200), 0..4), 0..40),
            wide in any::<bool>(), max_tokens in 1_u64..2_000,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let size = if wide { 70_000 } else { 60_000 };
            let documents: Vec<Vec<Vec<u32>>> = documents.into_iter()
                .map(|d| d.into_iter().map(|l| l.into_iter().map(|id| id % size).collect()).collect()).collect();
            write_corpus(dir.path(), size, &documents, max_tokens);
            let corpus = Corpus::open(dir.path()).unwrap();
            let nonempty: Vec<_> = documents.iter().filter(|d| d.iter().any(|l| !l.is_empty())).collect();
            prop_assert_eq!(corpus.num_documents(), nonempty.len() as u64);
            for (index, document) in nonempty.iter().enumerate() {
                prop_assert_eq!(corpus.document(index as u64).unwrap(), document.concat());
            }
            let lines: Vec<_> = corpus.shards()
                .flat_map(|s| (0..s.num_documents()).map(|d| s.line_lengths(d).unwrap()).collect::<Vec<_>>())
                .collect();
            for (line_lengths, document) in lines.into_iter().zip(&nonempty) {
                let lengths: Vec<u32> = document.iter().map(|l| l.len() as u32).collect();
                let first = lengths.iter().position(|&n| n > 0).unwrap();
                let last = lengths.iter().rposition(|&n| n > 0).unwrap();
                prop_assert_eq!(&line_lengths[..], &lengths[first..=last]);
            }
            prop_assert!(corpus.document(nonempty.len() as u64).is_err());
        }
    }
}
