//! Writing to stores: objects appear complete or not at all, and their length is checked afterwards.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path as LocalPath;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{
    Error as StoreError, MultipartId, ObjectMeta, ObjectStoreExt, PutMode, PutOptions, PutResult,
    Result as StoreResult,
};

use super::client::{Store, bytes_of, runtime};
use super::errors::{Refused, chain};
use super::{Cancel, Request};
use crate::error::{Error, Result};
use crate::threads::nonce;

const MAX_WHOLE: u64 = if cfg!(test) { 2 << 20 } else { 16 << 20 };
/// Bytes of a part: small enough for slow lines, and at least the 5 MiB that S3 requires.
const PART_BYTES: u64 = if cfg!(test) { 1 << 20 } else { 8 << 20 };
/// The maximum number of parts of an object in S3.
const MAX_PARTS: u64 = 10_000;
/// Parts in flight; each is in memory.
const CONCURRENT_PARTS: usize = 4;
/// The largest file that is created conditionally, since this needs a single request.
const MAX_CONDITIONAL: u64 = 256 << 20;
/// Time that a failed upload waits for the store to drop its parts.
const TIDY_TIMEOUT: Duration = Duration::from_secs(10);
/// The same after an interruption, whose caller is waiting.
const INTERRUPTED_TIMEOUT: Duration = Duration::from_secs(1);
const RANGE_BYTES: u64 = 1 << 20;

/// Uploads a file to the object at `url`. With `if_absent`, returns `false` and writes nothing if the object exists.
pub fn upload(path: &LocalPath, url: &str, if_absent: bool) -> Result<bool> {
    let store = Store::open_to_write(url)?;
    if if_absent { store.create("", read_whole(path)?) } else { store.put_file("", path).map(|()| true) }
}

/// Downloads the object at `url` to a file, which appears only when it is complete.
pub fn download(url: &str, path: &LocalPath) -> Result<()> {
    Store::open(url)?.download("", path)
}

/// All objects of the folder `url` as (name, bytes), sorted by name.
pub fn list_objects(url: &str) -> Result<Vec<(String, u64)>> {
    let objects = Store::open(url)?.list("")?;
    Ok(objects.into_iter().map(|object| (object.name, object.size)).collect())
}

/// Deletes objects below the folder `url`. Missing objects are not an error.
pub fn delete_objects(url: &str, names: &[String]) -> Result<()> {
    Store::open_to_write(url)?.delete(names)
}

impl Store {
    pub fn put(&self, name: &str, bytes: impl Into<Bytes>) -> Result<()> {
        let (path, bytes) = (self.path(name)?, bytes.into());
        self.block(self.repeat(name, self.retry, async || {
            let written = self.inner.put(&path, bytes.clone().into()).await?;
            self.check(&path, &bytes, &written).await
        }))
    }

    /// Writes an object unless it exists; returns whether it was written. Two writers of equal bytes may both get `true`.
    pub fn create(&self, name: &str, bytes: impl Into<Bytes>) -> Result<bool> {
        let (path, bytes) = (self.path(name)?, bytes.into());
        if self.block(self.repeat(name, self.retry, async || self.find(&path).await))?.is_some() {
            return Ok(false);
        }
        self.check_conditions(name)?;
        let was_accepted = Cell::new(false);
        self.block(self.repeat(name, self.retry, async || match self.put_absent(&path, &bytes).await {
            // If the object has these bytes, an earlier request wrote it, and the response was lost.
            Err(StoreError::AlreadyExists { .. }) if self.find(&path).await?.is_some() => {
                match self.holds(&path, &bytes).await? {
                    false if was_accepted.get() => Err(generic(Refused::Replaced)),
                    holds => Ok(holds),
                }
            }
            Err(StoreError::AlreadyExists { source, .. }) => Err(generic(source)), // together with a failed request
            written => {
                let written = written?;
                was_accepted.set(true);
                self.check(&path, &bytes, &written).await.map(|()| true)
            }
        }))
    }

    /// Fails if the store ignores conditions. The first call tries it with a temporary object next to the one of this name.
    pub fn check_conditions(&self, name: &str) -> Result<()> {
        if self.heeds_conditions.load(Ordering::Relaxed) {
            return Ok(());
        }
        let path = Path::from(format!("{}.tmp-{:016x}", self.path(name)?, nonce()));
        let tried = self.block(self.repeat(name, self.retry, async || {
            self.inner.put(&path, "".into()).await?;
            match self.put_absent(&path, &Bytes::new()).await {
                Err(StoreError::AlreadyExists { .. }) => Ok(()),
                Err(error) => Err(error),
                Ok(_) => Err(no_conditions()),
            }
        }));
        self.tidy(self.inner.delete(&path));
        tried?;
        self.heeds_conditions.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Sends a request that cleans up after a failed or interrupted request. Its errors are ignored.
    fn tidy(&self, request: impl Future<Output = StoreResult<()>>) {
        let patience = if Cancel::default().is_raised() { INTERRUPTED_TIMEOUT } else { TIDY_TIMEOUT };
        if let Ok(runtime) = runtime() {
            let _ = runtime.block_on(async { tokio::time::timeout(patience, request).await });
        }
    }

    pub fn put_file(&self, name: &str, path: &LocalPath) -> Result<()> {
        let failed = |error| Error::io(path, error);
        let file = File::open(path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        if size <= MAX_WHOLE {
            return self.put(name, read_whole(path)?);
        }
        let part_bytes = PART_BYTES.max(size.div_ceil(MAX_PARTS).next_multiple_of(1 << 20));
        let read = |number: u64| {
            let start = number * part_bytes;
            let mut bytes = vec![0; part_bytes.min(size - start) as usize];
            file.read_exact_at(&mut bytes, start).map_err(failed)?;
            Ok(Bytes::from(bytes))
        };
        let parts = Parts { name, path: self.path(name)?, size, part_bytes, read: &read };
        // A store may lose an upload because of bucket rules or a server restart.
        if self.put_parts(&parts)? || self.put_parts(&parts)? {
            return Ok(());
        }
        let (path, url) = (path.display(), self.url_of(name));
        Err(Error::Input(format!("{url}: the store lost the parts of {path} twice; upload it again")))
    }

    /// Uploads the parts of an object. Returns whether the store has them. After a failure, no part remains.
    fn put_parts(&self, parts: &Parts) -> Result<bool> {
        let store = self.multipart()?;
        let create = async || store.create_multipart(&parts.path).await;
        let id = self.block(self.repeat(parts.name, self.retry, create))?;
        let sent = self.block(self.send_parts(parts, &id));
        if !matches!(sent, Ok(true)) {
            self.tidy(store.abort_multipart(&parts.path, &id));
        }
        sent
    }

    async fn send_parts(&self, parts: &Parts<'_>, id: &MultipartId) -> Result<bool> {
        let store = self.multipart()?;
        let send = |number: u64| async move {
            let bytes = (parts.read)(number)?;
            let put = async || {
                store.put_part(&parts.path, id, number as usize, bytes.clone().into()).await.map_or_else(
                    |error| if is_lost(&error) { Ok(None) } else { Err(error) },
                    |sent| Ok(Some(sent)),
                )
            };
            self.repeat(parts.name, self.retry, put).await
        };
        let sent: Vec<_> =
            stream::iter((0..parts.count()).map(send)).buffered(CONCURRENT_PARTS).try_collect().await?;
        let Some(sent) = sent.into_iter().collect::<Option<Vec<_>>>() else { return Ok(false) };
        let written = self
            .repeat(parts.name, self.retry, async || {
                match store.complete_multipart(&parts.path, id, sent.clone()).await {
                    // Either the response to an earlier request or the upload was lost: the object shows which.
                    Err(error) if is_lost(&error) => Ok(None),
                    written => written.map(Some),
                }
            })
            .await?;
        self.holds_parts(parts, written).await
    }

    /// Whether an object has the parts that were sent: by the ETag of the store's response, or else by
    /// its bytes, because an older object may have the same length.
    async fn holds_parts(&self, parts: &Parts<'_>, written: Option<PutResult>) -> Result<bool> {
        let object = self.repeat(parts.name, self.retry, async || self.find(&parts.path).await).await?;
        let Some(object) = object.filter(|object| object.size == parts.size) else { return Ok(false) };
        if written.is_some_and(|written| is_same(&written, &object)) {
            return Ok(true);
        }
        let holds = |number: u64| async move {
            let start = number * parts.part_bytes;
            let range = start..parts.size.min(start + parts.part_bytes);
            let request = Request { name: parts.name.to_owned(), range, version: None };
            Ok(self.read_range(&request).await? == (parts.read)(number)?)
        };
        let equal = stream::iter((0..parts.count()).map(holds)).buffered(CONCURRENT_PARTS);
        equal.try_fold(true, async |all, one| Ok(all && one)).await
    }

    pub fn download(&self, name: &str, path: &LocalPath) -> Result<()> {
        let object = self.head(name)?;
        let failed = |error| Error::io(path, error);
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(LocalPath::new("."));
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o666); // less the umask
        let file = tempfile::Builder::new().prefix(".tmp-").permissions(permissions).tempfile_in(dir);
        let file = file.map_err(failed)?;
        let starts = (0..object.size).step_by(RANGE_BYTES as usize);
        let requests: Vec<_> = starts
            .map(|start| Request {
                name: name.to_owned(),
                range: start..object.size.min(start + RANGE_BYTES),
                version: object.version.clone(),
            })
            .collect();
        self.read_ranges(&requests, &Cancel::default(), |number, bytes| {
            file.as_file().write_all_at(bytes, requests[number].range.start).map_err(failed)
        })?;
        file.as_file().sync_all().map_err(failed)?;
        file.persist(path).map_err(|error| failed(error.error)).map(drop)
    }

    pub fn delete(&self, names: &[String]) -> Result<()> {
        let paths = names.iter().map(|name| self.path(name)).collect::<Result<Vec<_>>>()?;
        self.block(self.repeat("", self.retry, async || {
            let locations = stream::iter(paths.clone().into_iter().map(Ok)).boxed();
            let deleted: Vec<_> = self.inner.delete_stream(locations).collect().await;
            let is_error = |error: &StoreError| {
                !matches!(error, StoreError::NotFound { .. }) && !chain(error).contains("(code: NoSuchKey)")
            };
            deleted.into_iter().find_map(|one| one.err().filter(is_error)).map_or(Ok(()), Err)
        }))
    }

    async fn find(&self, path: &Path) -> StoreResult<Option<ObjectMeta>> {
        match self.inner.head(path).await {
            Err(StoreError::NotFound { .. }) => Ok(None),
            object => object.map(Some),
        }
    }

    async fn holds(&self, path: &Path, bytes: &Bytes) -> StoreResult<bool> {
        let response = self.inner.get(path).await?;
        Ok(response.meta.size == bytes.len() as u64
            && bytes_of(response, bytes.len() as u64).await? == *bytes)
    }

    async fn put_absent(&self, path: &Path, bytes: &Bytes) -> StoreResult<PutResult> {
        let options = PutOptions::from(PutMode::Create);
        match self.inner.put_opts(path, bytes.clone().into(), options).await {
            Err(error) if chain(&error).contains("<Code>NotImplemented<") => Err(no_conditions()),
            written => written,
        }
    }

    /// Fails unless an object equals the object that the store accepted.
    async fn check(&self, path: &Path, bytes: &Bytes, written: &PutResult) -> StoreResult<()> {
        let object = self.find(path).await?;
        let (size, length) = (object.as_ref().map_or(0, |object| object.size), bytes.len() as u64);
        match object {
            Some(object) if size == length => {
                let holds = is_same(written, &object) || self.holds(path, bytes).await?;
                if holds { Ok(()) } else { Err(generic("the store kept other bytes than the ones sent")) }
            }
            Some(_) => Err(generic(format!("the store kept {size} bytes of {length}"))),
            None => Err(generic("the store did not keep the object that was sent")),
        }
    }
}

struct Parts<'a> {
    name: &'a str,
    path: Path,
    size: u64,
    part_bytes: u64,
    read: &'a dyn Fn(u64) -> Result<Bytes>,
}

impl Parts<'_> {
    fn count(&self) -> u64 {
        self.size.div_ceil(self.part_bytes)
    }
}

/// Whether an object has the ETag of the store's response.
fn is_same(written: &PutResult, object: &ObjectMeta) -> bool {
    let tag = |tag: &Option<String>| tag.as_ref().map(|tag| tag.trim_matches('"').to_owned());
    written.e_tag.is_some() && tag(&written.e_tag) == tag(&object.e_tag)
}

/// Whether the store does not know an upload or its parts: they were completed or dropped.
fn is_lost(error: &StoreError) -> bool {
    const CODES: [&str; 3] = ["status code: 404", "<Code>InvalidPart<", "<Code>InvalidBlockList<"];
    let text = chain(error);
    matches!(error, StoreError::NotFound { .. }) || CODES.iter().any(|code| text.contains(code))
}

fn generic(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> StoreError {
    StoreError::Generic { store: "upload", source: source.into() }
}

fn no_conditions() -> StoreError {
    StoreError::NotImplemented { operation: "If-None-Match".into(), implementer: "this server".into() }
}

/// The bytes of a file that is uploaded with one request.
fn read_whole(path: &LocalPath) -> Result<Vec<u8>> {
    let size = path.metadata().map_err(|error| Error::io(path, error))?.len();
    if size > MAX_CONDITIONAL {
        let path = path.display();
        return Err(Error::Input(format!(
            "{path}: has {size} bytes; a file that must not replace another can have at most {MAX_CONDITIONAL}"
        )));
    }
    std::fs::read(path).map_err(|error| Error::io(path, error))
}
