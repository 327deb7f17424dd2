//! Writing to stores: objects appear complete or not at all, and their length is compared afterwards.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path as LocalPath;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{
    Error as StoreError, MultipartId, ObjectStoreExt, PutMode, PutOptions, Result as StoreResult,
};

use super::client::{Store, bytes_of, runtime};
use super::errors::chain;
use super::{Cancel, Request};
use crate::error::{Error, Result};

/// Larger files are uploaded in parts.
const MAX_WHOLE: u64 = 16 << 20;
/// Bytes of a part: small enough for slow lines, and at least the 5 MiB that S3 requires.
const PART_BYTES: u64 = 8 << 20;
/// The most parts of an object, by S3's rules.
const MAX_PARTS: u64 = 10_000;
/// Parts in flight; each is in memory.
const CONCURRENT_PARTS: usize = 4;
/// The largest file that is created conditionally, because that takes a single request.
const MAX_CONDITIONAL: u64 = 256 << 20;
/// How long an upload that has failed waits until the store has dropped its parts.
const ABORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a request of a download.
const RANGE_BYTES: u64 = 1 << 20;

/// Uploads a file to the object at `url`. With `if_absent`, returns `false` and writes nothing if that exists already.
pub fn upload(path: &LocalPath, url: &str, if_absent: bool) -> Result<bool> {
    let store = Store::open_to_write(url)?;
    if if_absent { store.create("", read_whole(path)?) } else { store.put_file("", path).map(|()| true) }
}

/// Downloads the object at `url` to a file, which appears only when it is complete.
pub fn download(url: &str, path: &LocalPath) -> Result<()> {
    Store::open(url)?.download("", path)
}

/// (name below the folder `url`, bytes) of all its objects, sorted by name.
pub fn list_objects(url: &str) -> Result<Vec<(String, u64)>> {
    let objects = Store::open(url)?.list("")?;
    Ok(objects.into_iter().map(|object| (object.name, object.size)).collect())
}

/// Deletes objects below the folder `url`. Missing ones are no error.
pub fn delete_objects(url: &str, names: &[String]) -> Result<()> {
    Store::open_to_write(url)?.delete(names)
}

impl Store {
    /// Writes an object, whether it exists or not.
    pub fn put(&self, name: &str, bytes: impl Into<Bytes>) -> Result<()> {
        let (path, bytes) = (self.path(name)?, bytes.into());
        self.block(self.repeat(name, self.retry, async || {
            self.inner.put(&path, bytes.clone().into()).await?;
            self.check_length(&path, bytes.len() as u64).await
        }))
    }

    /// Writes an object unless it exists. Returns whether it was written; two writers of the same bytes at the same
    /// moment may both be told so.
    pub fn create(&self, name: &str, bytes: impl Into<Bytes>) -> Result<bool> {
        let (path, bytes, was_absent) = (self.path(name)?, bytes.into(), Cell::new(false));
        self.block(self.repeat(name, self.retry, async || {
            // A server that ignores conditions must not overwrite it.
            if self.exists(&path).await? {
                return Ok(was_absent.get() && self.holds(&path, &bytes).await?);
            }
            was_absent.set(true);
            match self.put_absent(&path, &bytes).await {
                // If it holds these bytes, then an earlier request wrote it, and its answer was lost.
                Err(StoreError::AlreadyExists { .. }) if self.exists(&path).await? => {
                    self.holds(&path, &bytes).await
                }
                Err(StoreError::AlreadyExists { source, .. }) => {
                    Err(StoreError::Generic { store: "conflict", source }) // with a request that failed
                }
                written => {
                    written?;
                    self.check_length(&path, bytes.len() as u64).await?;
                    self.check_conditions(&path, &bytes).await.map(|()| true)
                }
            }
        }))
    }

    /// Uploads a file to an object, whether that exists or not.
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
        self.put_parts(name, size, size.div_ceil(part_bytes), read)
    }

    /// Uploads the parts of an object. If that fails, none of them stays.
    fn put_parts(
        &self,
        name: &str,
        size: u64,
        num_parts: u64,
        read: impl Fn(u64) -> Result<Bytes>,
    ) -> Result<()> {
        let (path, store) = (self.path(name)?, self.multipart()?);
        let id = self.block(self.repeat(name, self.retry, async || store.create_multipart(&path).await))?;
        let sent = self.block(self.send_parts(name, &path, &id, size, num_parts, read));
        if sent.is_err() {
            let abort =
                async { tokio::time::timeout(ABORT_TIMEOUT, store.abort_multipart(&path, &id)).await };
            let _ = runtime()?.block_on(abort); // the first error is the one to report
        }
        sent
    }

    async fn send_parts(
        &self,
        name: &str,
        path: &Path,
        id: &MultipartId,
        size: u64,
        num_parts: u64,
        read: impl Fn(u64) -> Result<Bytes>,
    ) -> Result<()> {
        let (store, read) = (self.multipart()?, &read);
        let send = |number: u64| async move {
            let bytes = read(number)?;
            let put = async || store.put_part(path, id, number as usize, bytes.clone().into()).await;
            self.repeat(name, self.retry, put).await
        };
        let parts: Vec<_> =
            stream::iter((0..num_parts).map(send)).buffered(CONCURRENT_PARTS).try_collect().await?;
        self.repeat(name, self.retry, async || {
            match store.complete_multipart(path, id, parts.clone()).await {
                // Maybe the answer to an earlier request was lost.
                Ok(_) | Err(StoreError::NotFound { .. }) => self.check_length(path, size).await,
                Err(error) => Err(error),
            }
        })
        .await
    }

    /// Downloads an object to a file, which appears only when it is complete.
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

    /// Deletes objects. Missing ones are no error.
    pub fn delete(&self, names: &[String]) -> Result<()> {
        let paths = names.iter().map(|name| self.path(name)).collect::<Result<Vec<_>>>()?;
        self.block(self.repeat("", self.retry, async || {
            let each = stream::iter(paths.clone().into_iter().map(Ok)).boxed();
            let deleted: Vec<_> = self.inner.delete_stream(each).collect().await;
            let is_error = |error: &StoreError| !matches!(error, StoreError::NotFound { .. });
            deleted.into_iter().find_map(|one| one.err().filter(is_error)).map_or(Ok(()), Err)
        }))
    }

    async fn exists(&self, path: &Path) -> StoreResult<bool> {
        match self.inner.head(path).await {
            Ok(_) => Ok(true),
            Err(StoreError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn holds(&self, path: &Path, bytes: &Bytes) -> StoreResult<bool> {
        let found = self.inner.get(path).await?;
        Ok(found.meta.size == bytes.len() as u64 && bytes_of(found, bytes.len() as u64).await? == *bytes)
    }

    async fn put_absent(&self, path: &Path, bytes: &Bytes) -> StoreResult<()> {
        let options = PutOptions::from(PutMode::Create);
        match self.inner.put_opts(path, bytes.clone().into(), options).await {
            Err(error) if chain(&error).contains("<Code>NotImplemented<") => Err(no_conditions()),
            written => written.map(drop),
        }
    }

    /// Fails if an object that exists can be created again: the server ignores conditions.
    async fn check_conditions(&self, path: &Path, bytes: &Bytes) -> StoreResult<()> {
        match self.put_absent(path, bytes).await {
            Err(StoreError::AlreadyExists { .. }) => Ok(()),
            Err(error) => Err(error),
            Ok(()) => Err(no_conditions()),
        }
    }

    async fn check_length(&self, path: &Path, length: u64) -> StoreResult<()> {
        let found = self.inner.head(path).await?.size;
        if found == length {
            return Ok(());
        }
        let source = format!("the store kept {found} bytes of {length}").into();
        Err(StoreError::Generic { store: "upload", source })
    }
}

fn no_conditions() -> StoreError {
    StoreError::NotImplemented { operation: "If-None-Match".into(), implementer: "this server".into() }
}

/// A file that is uploaded by one request.
fn read_whole(path: &LocalPath) -> Result<Vec<u8>> {
    let size = path.metadata().map_err(|error| Error::io(path, error))?.len();
    if size > MAX_CONDITIONAL {
        let path = path.display();
        return Err(Error::Input(format!(
            "{path}: has {size} bytes; a file that must not replace another can have {MAX_CONDITIONAL}"
        )));
    }
    std::fs::read(path).map_err(|error| Error::io(path, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::test_server::{Fault, TestServer};

    /// A folder served as the bucket `data`, and a store that writes to it.
    fn bucket(retry_seconds: u64) -> (tempfile::TempDir, TestServer, Store) {
        let dir = tempfile::tempdir().unwrap();
        let server = TestServer::start(dir.path());
        server.log.lock().unwrap().faulty = Some("object");
        let endpoint = server.url.trim_end_matches("/data");
        let variables = [("aws_endpoint_url", endpoint), ("aws_skip_signature", "true")];
        let variables = variables.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
        let mut store = Store::configured("s3://data", true, variables).unwrap();
        store.retry = Duration::from_secs(retry_seconds);
        (dir, server, store)
    }

    fn inject(server: &TestServer, faults: &[Fault]) {
        server.log.lock().unwrap().faults.extend(faults);
    }

    #[test]
    fn an_upload_survives_faults() {
        let (dir, server, store) = bucket(60);
        for (number, fault) in
            [Fault::Unavailable, Fault::Stall, Fault::Cut, Fault::Short].into_iter().enumerate()
        {
            inject(&server, &[fault]);
            let name = format!("{number}-object");
            store.put(&name, vec![7; 1000]).unwrap();
            assert_eq!(std::fs::read(dir.path().join(name)).unwrap(), vec![7; 1000], "{fault:?}");
        }
        assert!(server.log.lock().unwrap().faults.is_empty());
    }

    #[test]
    fn a_store_that_keeps_failing_is_one_line() {
        let (_dir, server, store) = bucket(1);
        for (fault, message) in [
            (Fault::Unavailable, "s3://data/object: "),
            (Fault::Short, "the store kept 500 bytes of 1000; the request was repeated for"),
            (Fault::Forbidden, "check the credentials and what they may read and write"),
        ] {
            server.log.lock().unwrap().always = Some(fault);
            let error = store.put("object", vec![7; 1000]).unwrap_err().to_string();
            assert!(error.contains(message) && error.lines().count() == 1, "{error}");
        }
    }

    #[test]
    fn an_object_is_created_once() {
        let (dir, server, store) = bucket(60);
        assert!(store.create("object", "ours").unwrap());
        assert!(!store.create("object", "theirs").unwrap());
        assert!(!store.create("object", "ours").unwrap());
        inject(&server, &[Fault::Cut]); // written, but the answer is lost
        assert!(store.create("lost-object", "ours").unwrap());
        assert_eq!(std::fs::read(dir.path().join("object")).unwrap(), b"ours");
        server.log.lock().unwrap().ignores_conditions = true;
        assert!(!store.create("object", "theirs").unwrap());
        let error = store.create("new-object", "x").unwrap_err().to_string();
        assert!(error.contains("it must support conditional PUT"), "{error}");
    }

    #[test]
    fn a_large_file_is_uploaded_in_parts_and_none_stays_after_a_failure() {
        let (dir, server, mut store) = bucket(60);
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..MAX_WHOLE + 4_000_001).map(|at| (at / 1000 % 251) as u8).collect();
        std::fs::write(file.path(), &bytes).unwrap();
        inject(&server, &[Fault::Unavailable, Fault::Stall]);
        store.put_file("object", file.path()).unwrap();
        assert!(std::fs::read(dir.path().join("object")).unwrap() == bytes);
        inject(&server, &[Fault::Short]);
        store.retry = Duration::ZERO;
        let error = store.put_file("short-object", file.path()).unwrap_err().to_string();
        assert!(error.contains("the store kept"), "{error}");
        std::fs::remove_file(dir.path().join("short-object")).unwrap();
        server.log.lock().unwrap().always = Some(Fault::Forbidden);
        assert!(store.put_file("other-object", file.path()).is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_interrupted_upload_leaves_no_parts() {
        let (dir, server, store) = bucket(60);
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(MAX_WHOLE + 1).unwrap();
        inject(&server, &[Fault::Stall]);
        let upload = |_: std::sync::mpsc::Sender<()>| store.put_file("object", file.path());
        let has_part =
            || dir.path().join("object.part-2").exists() || dir.path().join("object.part-3").exists();
        let interrupt = |_| if has_part() { Err("Ctrl-C") } else { Ok(()) };
        assert_eq!(crate::store::attended(upload, interrupt).unwrap_err(), "Ctrl-C");
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
