//! A store and the requests that read from it: blocking calls to the asynchronous crate `object_store`.
//!
//! The crate retries a request for half a minute. This file retries for longer, because a training run
//! should survive a few bad minutes of a store, and also retries if a response is shorter than requested.

use std::io::IsTerminal;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Once, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded};
use futures_util::{StreamExt, stream};
use object_store::aws::{AmazonS3Builder, Checksum};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{
    ClientOptions, Error as StoreError, GetOptions, GetResult, ObjectMeta, ObjectStore, ObjectStoreExt,
    ObjectStoreScheme, Result as StoreResult, RetryConfig,
};
use tokio::runtime::Runtime;
use url::{Position, Url};

use super::connection::{Connector, TIMEOUT, UNREADABLE, WRITE_TIMEOUT};
use super::errors::{Refused, explain, is_transient, said};
use super::{Cancel, Object, Request, check_url};
use crate::error::{Error, Result};
use crate::threads::{PerProcess, nonce};

/// Requests in flight: a whole shuffle window, because a store's latency limits a reader.
const CONCURRENT: usize = 64;
const NETWORK_THREADS: usize = 2;
/// Seconds for which a failing request is retried, unless the environment sets them.
const RETRY_SECONDS: u64 = 180;
const RETRY_VARIABLE: &str = "ELECTRA_FAST_RETRY_SECONDS";
/// Time for retries of requests that open a corpus or list files while a user waits at a terminal.
const OPENING_RETRY: Duration = Duration::from_secs(15);
/// Time for which the crate retries a request before this file does. Short, so that missing credentials are reported soon.
const INNER_RETRY: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });
/// Upper bound on the memory that is reserved for a response, whatever length it announces.
const MAX_RESERVED: u64 = 8 << 20;
const MAX_PAUSE: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Clone)]
pub(crate) struct Store {
    url: String,
    pub(super) inner: Arc<dyn ObjectStore>,
    multipart: Option<Arc<dyn MultipartStore>>,
    prefix: Path,
    pub(super) retry: Duration,
    pub(super) opening: Duration,
    pub(super) heeds_conditions: Arc<AtomicBool>,
}

impl Store {
    /// The store of a URL, configured by `AWS_…`, `GOOGLE_…` and `AZURE_…` like the clouds' tools. Sends no request.
    pub fn open(url: &str) -> Result<Self> {
        guarded(|| Self::configured(url, false, environment()))
    }

    pub fn open_to_write(url: &str) -> Result<Self> {
        let store = guarded(|| Self::configured(url, true, environment()))?;
        store.multipart().map(drop)?;
        Ok(store)
    }

    pub(super) fn configured(url: &str, writes: bool, variables: Vec<(String, String)>) -> Result<Self> {
        check_url(url)?;
        let bad = |reason: &dyn std::fmt::Display| Error::Input(format!("{url}: {reason}"));
        let parsed = Url::parse(url).map_err(|error| bad(&format!("not a URL ({error})")))?;
        let problems = [
            (parsed.host_str().is_none_or(str::is_empty), "the URL names no bucket or host"),
            (parsed.fragment().is_some(), "write # in its name as %23"),
            (parsed.query().is_some(), "write ? in its name as %3F"),
        ];
        if let Some((_, problem)) = problems.iter().find(|(is_wrong, _)| *is_wrong) {
            return Err(bad(problem));
        }
        let (scheme, prefix) = ObjectStoreScheme::parse(&parsed).map_err(|_| {
            bad(&match super::SCHEMES.contains(&parsed.scheme()) {
                true => "a name with an empty part (//) or control characters cannot be requested",
                false => "unsupported URL; must begin with s3://, gs://, az:// or http(s)://",
            })
        })?;
        let wanted = retry_seconds()?;
        let retry = Duration::from_secs(wanted.unwrap_or(RETRY_SECONDS));
        let opening = if writes { retry } else { opening_retry(wanted, std::io::stderr().is_terminal()) };
        let (inner, multipart) =
            build(&parsed, &scheme, retry, writes, variables).map_err(|error| explain(url, &error))?;
        let heeds_conditions = Arc::default();
        Ok(Self { url: url.to_owned(), inner, multipart, prefix, retry, opening, heeds_conditions })
    }

    pub(super) fn multipart(&self) -> Result<&dyn MultipartStore> {
        self.multipart.as_deref().ok_or_else(|| {
            let url = &self.url;
            Error::Input(format!("{url}: web servers are read-only; pass an s3://, gs:// or az:// URL"))
        })
    }

    /// Another folder or object of the same bucket or host, which shares this store's connections.
    pub fn at(&self, url: &str) -> Result<Self> {
        let prefix = Url::parse(url).ok().and_then(|url| ObjectStoreScheme::parse(&url).ok());
        let (_, prefix) = prefix.ok_or_else(|| Error::Input(format!("{url}: not a URL")))?;
        Ok(Self { url: url.to_owned(), prefix, ..self.clone() })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// A whole object of at most `limit` bytes, in memory.
    pub fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        let path = self.path(name)?;
        self.wait(name, async || bytes_of(self.inner.get(&path).await?, limit).await)
    }

    pub fn head(&self, name: &str) -> Result<Object> {
        let path = self.path(name)?;
        let meta = self.wait(name, async || self.inner.head(&path).await)?;
        let modified = meta.last_modified.timestamp_nanos_opt();
        Ok(Object { name: name.to_owned(), size: meta.size, version: version_of(meta), modified })
    }

    /// All objects below the folder `below` (empty: all objects), sorted by name.
    pub fn list(&self, below: &str) -> Result<Vec<Object>> {
        self.list_all(below).map(|(objects, _)| objects)
    }

    /// The same objects, and the keys of objects that cannot be requested.
    pub fn list_all(&self, below: &str) -> Result<(Vec<Object>, Vec<String>)> {
        let path = self.path(below)?;
        let metas = self.wait(below, async || {
            let listed: Vec<_> = self.inner.list(Some(&path)).collect().await;
            listed.into_iter().collect::<StoreResult<Vec<ObjectMeta>>>()
        })?;
        let prefix =
            if self.prefix.as_ref().is_empty() { String::new() } else { format!("{}/", self.prefix) };
        let (refused, metas): (Vec<_>, Vec<_>) =
            metas.into_iter().partition(|meta| meta.location.as_ref().starts_with(UNREADABLE));
        let key = |meta: ObjectMeta| meta.location.as_ref()[UNREADABLE.len()..].replace("%2F", "/");
        let object = |meta: ObjectMeta| {
            let name = meta.location.as_ref().strip_prefix(&prefix)?.to_owned();
            let (size, modified) = (meta.size, meta.last_modified.timestamp_nanos_opt());
            Some(Object { name, size, modified, version: version_of(meta) })
        };
        let mut objects: Vec<_> = metas.into_iter().filter_map(object).collect();
        objects.sort_by(|a, b| a.name.cmp(&b.name));
        Ok((objects, refused.into_iter().map(key).collect()))
    }

    /// Sends all requests, up to 64 at a time, and calls `receive` with the number and the bytes of every response, in the
    /// order in which they arrive. [`Error::Interrupted`] after a cancellation.
    pub fn read_ranges(
        &self,
        requests: &[Request],
        cancel: &Cancel,
        mut receive: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let answers = requests
            .iter()
            .enumerate()
            .map(|(number, request)| async move { (number, self.read_range(request).await) });
        let mut answers = std::pin::pin!(stream::iter(answers).buffer_unordered(CONCURRENT));
        runtime()?.block_on(async {
            loop {
                match tokio::time::timeout(POLL_INTERVAL, answers.next()).await {
                    Ok(None) => return Ok(()),
                    _ if cancel.is_raised() => return Err(Error::Interrupted),
                    Ok(Some((number, bytes))) => receive(number, &bytes?)?,
                    Err(_) => {}
                }
            }
        })
    }

    /// Sends a request; the response arrives in the channel.
    pub fn start(&self, request: Request) -> Result<Receiver<Result<Vec<u8>>>> {
        let (sender, answer) = bounded(1);
        let store = self.clone();
        let runtime = runtime()?;
        // A separate thread, because the future holds borrows that a task cannot.
        runtime.spawn_blocking(move || {
            let bytes = runtime.block_on(store.read_range(&request));
            let _ = sender.send(bytes); // the receiver may be gone
        });
        Ok(answer)
    }

    pub(super) async fn read_range(&self, request: &Request) -> Result<Vec<u8>> {
        let path = self.path(&request.name)?;
        let wanted = request.range.end - request.range.start;
        self.repeat(&request.name, self.retry, async || {
            let options = GetOptions {
                range: Some(request.range.clone().into()),
                if_match: request.version.clone(),
                ..GetOptions::default()
            };
            let bytes = bytes_of(self.inner.get_opts(&path, options).await?, wanted).await?;
            if bytes.len() as u64 == wanted {
                return Ok(bytes);
            }
            let source = format!("{} bytes instead of {wanted}", bytes.len()).into();
            Err(StoreError::Generic { store: "answer", source })
        })
        .await
    }

    fn wait<T>(&self, name: &str, request: impl AsyncFn() -> StoreResult<T>) -> Result<T> {
        self.block(self.repeat(name, self.opening, request))
    }

    /// Runs requests on the network threads and waits for them, at most until the call is interrupted.
    pub(super) fn block<T>(&self, requests: impl Future<Output = Result<T>>) -> Result<T> {
        let (cancel, mut requests) = (Cancel::default(), std::pin::pin!(requests));
        runtime()?.block_on(async {
            loop {
                match tokio::time::timeout(POLL_INTERVAL, &mut requests).await {
                    Ok(answer) => return answer,
                    Err(_) if cancel.is_raised() => return Err(Error::Interrupted),
                    Err(_) => {}
                }
            }
        })
    }

    pub(super) async fn repeat<T>(
        &self,
        name: &str,
        limit: Duration,
        request: impl AsyncFn() -> StoreResult<T>,
    ) -> Result<T> {
        let start = Instant::now();
        let mut pause = Duration::from_millis(100);
        loop {
            let error = match request().await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let url = self.url_of(name);
            if !is_transient(&error) {
                return Err(explain(&url, &error));
            }
            let (spent, next) = (start.elapsed(), jittered(pause));
            if spent + next > limit {
                let (seconds, text) = (spent.as_secs_f32(), said(&error));
                let message = format!("{text}; retried for {seconds:.0} s");
                return Err(Error::io(url, std::io::Error::other(message)));
            }
            tokio::time::sleep(next).await;
            pause = (2 * pause).min(MAX_PAUSE);
        }
    }

    pub(super) fn url_of(&self, name: &str) -> String {
        if name.is_empty() { self.url.clone() } else { format!("{}/{name}", self.url) }
    }

    pub(super) fn path(&self, name: &str) -> Result<Path> {
        let whole = if name.is_empty() { self.prefix.to_string() } else { format!("{}/{name}", self.prefix) };
        Path::parse(whole.trim_start_matches('/'))
            .map_err(|error| Error::Input(format!("{}: not an object name ({error})", self.url_of(name))))
    }
}

/// The bytes of a response. Reading ends at the first piece after `limit` bytes.
pub(super) async fn bytes_of(answer: GetResult, limit: u64) -> StoreResult<Vec<u8>> {
    let refused = || StoreError::Generic { store: "answer", source: Refused::TooLong(limit).into() };
    let announced = answer.range.end - answer.range.start;
    if announced > limit {
        return Err(refused());
    }
    let mut bytes = Vec::with_capacity(announced.min(MAX_RESERVED) as usize);
    let mut pieces = answer.into_stream();
    while let Some(piece) = pieces.next().await {
        bytes.extend_from_slice(&piece?);
        if bytes.len() as u64 > limit {
            return Err(refused());
        }
    }
    Ok(bytes)
}

/// The ETag, unless it is weak: a weak ETag does not guarantee equal bytes, so servers refuse it as a condition.
fn version_of(meta: ObjectMeta) -> Option<String> {
    meta.e_tag.filter(|tag| !tag.starts_with("W/"))
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Store").field(&self.url).finish()
    }
}

type Clients = (Arc<dyn ObjectStore>, Option<Arc<dyn MultipartStore>>);

fn build(
    url: &Url,
    scheme: &ObjectStoreScheme,
    retry: Duration,
    writes: bool,
    variables: Vec<(String, String)>,
) -> StoreResult<Clients> {
    static CRYPTOGRAPHY: Once = Once::new();
    // Fails only if the process has already installed one, which works as well.
    CRYPTOGRAPHY.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
    let retry = RetryConfig { retry_timeout: retry.min(INNER_RETRY), ..RetryConfig::default() };
    let timeout = if writes { WRITE_TIMEOUT } else { TIMEOUT };
    let client =
        ClientOptions::new().with_allow_http(true).with_timeout_disabled().with_read_timeout(timeout);
    macro_rules! configured {
        ($builder:expr, $prefix:literal) => {{
            let start = $builder
                .with_http_connector(Connector::Cloud)
                .with_client_options(client)
                .with_retry(retry)
                .with_url(url.as_str());
            let variables = variables.into_iter().filter(|(key, _)| key.starts_with($prefix));
            let known = variables.fold(start, |builder, (key, value)| {
                match key.parse() {
                    Ok(key) => builder.with_config(key, value),
                    Err(_) => builder, // not a store option
                }
            });
            let store = Arc::new(known.build()?);
            Ok((store.clone(), writes.then_some(store as _)))
        }};
    }
    match scheme {
        ObjectStoreScheme::AmazonS3 => {
            configured!(AmazonS3Builder::new().with_checksum_algorithm(Checksum::SHA256), "aws_")
        }
        ObjectStoreScheme::GoogleCloudStorage => {
            configured!(GoogleCloudStorageBuilder::new(), "google_")
        }
        ObjectStoreScheme::MicrosoftAzure => {
            configured!(MicrosoftAzureBuilder::new(), "azure_")
        }
        _ => {
            let host = &url[..Position::BeforePath];
            let web = HttpBuilder::new().with_http_connector(Connector::Web(url.clone()));
            Ok((Arc::new(web.with_client_options(client).with_url(host).with_retry(retry).build()?), None))
        }
    }
}

/// Calls its argument while no other thread changes the environment.
type Guard = fn(&mut dyn FnMut());
static GUARD: OnceLock<Guard> = OnceLock::new();

/// Sets how this crate reads the environment in a process whose other languages change it under their locks.
pub fn guard_environment(guard: Guard) {
    let _ = GUARD.set(guard);
}

fn guarded<T>(read: impl FnOnce() -> T) -> T {
    let Some(guard) = GUARD.get() else { return read() };
    let (mut read, mut outcome) = (Some(read), None);
    guard(&mut || outcome = read.take().map(|read| read()));
    outcome.expect("a guard calls its argument")
}

fn environment() -> Vec<(String, String)> {
    let text = |(key, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((key.into_string().ok()?.to_ascii_lowercase(), value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).collect()
}

/// Time for retries of requests that open a corpus: from the environment, or else shorter if a user waits.
pub(super) fn opening_retry(wanted: Option<u64>, is_attended: bool) -> Duration {
    let whole = Duration::from_secs(wanted.unwrap_or(RETRY_SECONDS));
    if wanted.is_none() && is_attended { OPENING_RETRY } else { whole }
}

/// A random pause of 0.5 to 1.5 times `pause`, so that ranks that fail together do not retry together.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + nonce() as f64 / u64::MAX as f64)
}

fn retry_seconds() -> Result<Option<u64>> {
    match std::env::var(RETRY_VARIABLE) {
        Ok(text) => text.parse().map(Some).map_err(|_| {
            Error::Input(format!(
                "{RETRY_VARIABLE} = {text:?}: must be a whole number of seconds, such as 180"
            ))
        }),
        Err(_) => Ok(None),
    }
}

static RUNTIME: PerProcess<Runtime> = PerProcess::new();

pub(super) fn runtime() -> Result<&'static Runtime> {
    RUNTIME.get(|| {
        let mut threads = tokio::runtime::Builder::new_multi_thread();
        threads.worker_threads(NETWORK_THREADS).thread_name("electra-net").enable_all().build()
    })
}
