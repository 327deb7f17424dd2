//! A web server for tests: serves ranges of a folder's files, counts requests, and misbehaves on demand.
//! It is also the bucket `data` of S3 and GCS and the container `data` of Azure, and a metadata service of AWS.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use url::form_urlencoded;
use xxhash_rust::xxh3::xxh3_128;

use super::Store;

const STALL: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Sound,
    /// Performs the request and closes the connection without a response.
    Lost,
    /// Performs the request and responds with this status and body.
    Done(u16, &'static str),
    /// Responds with this status and body, and does nothing.
    Undone(u16, &'static str),
    /// Responds as if it had performed the request with these bytes, and does nothing.
    Pretended(&'static str),
    /// Performs the request with half of the body.
    Half,
    /// Responds with this status, unless it is 200, and with a body that continues after the requested range.
    Endless(u16),
    Cut,
    Stall,
    /// Sends the body in six pieces, a second apart.
    Slow,
    /// The body is shorter than the range, and the header agrees.
    Short,
    Corrupt,
}

#[derive(Debug, Default)]
pub(crate) struct Log {
    pub requests: Vec<(&'static str, String)>,
    pub delay: Duration,
    pub served: Vec<(String, Range<u64>)>,
    /// Faults of the next requests of a kind, or of the next GETs of files with this suffix.
    pub faults: Vec<(&'static str, Fault)>,
    /// The fault of all later requests of this kind.
    pub always: Option<(&'static str, Fault)>,
    /// Whether a client kept reading an endless body.
    pub was_flooded: bool,
    pub ignores_conditions: bool,
    /// The ETag of all objects, by default a hash of their bytes.
    pub tag: Option<&'static str>,
    /// Keys that are listed in addition to the files, as written in XML.
    pub keys: Vec<&'static str>,
    pub page: Option<usize>,
    /// Names of objects whose upload has ended.
    pub aborted: HashSet<String>,
}

impl Log {
    /// Records a request. Returns its duration and its fault.
    fn note(&mut self, request: &Request) -> (Duration, Option<Fault>) {
        let (kind, name) = (request.kind(), &request.name);
        self.requests.push((kind, name.clone()));
        let concerns = |(key, _): &(&str, _)| *key == kind || kind == "get" && name.ends_with(key);
        let next = self.faults.iter().position(concerns).map(|next| self.faults.remove(next));
        (self.delay, next.or(self.always.filter(concerns)).map(|(_, fault)| fault))
    }
}

/// A running server; it ends with the process.
pub(crate) struct TestServer {
    pub url: String,
    pub log: Arc<Mutex<Log>>,
}

impl TestServer {
    pub fn start(folder: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/data", listener.local_addr().unwrap());
        let log = Arc::new(Mutex::new(Log::default()));
        let (folder, shared) = (folder.to_owned(), log.clone());
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let (folder, log) = (folder.clone(), shared.clone());
                std::thread::spawn(move || Connection { stream: connection.unwrap(), folder, log }.serve());
            }
        });
        Self { url, log }
    }

    pub fn bucket(&self) -> Store {
        self.bucket_with("s3", &[])
    }

    /// The same, with the client of this scheme and more variables; an empty value stands for the server.
    pub fn bucket_with(&self, scheme: &str, more: &[(&str, &str)]) -> Store {
        let variables: &[_] = match scheme {
            "gs" => &[("google_base_url", ""), ("google_bearer_token", "t")],
            "az" => &[
                ("azure_storage_endpoint", ""),
                ("azure_storage_account_name", "a"),
                ("azure_skip_signature", "true"),
            ],
            _ => &[("aws_endpoint_url", ""), ("aws_skip_signature", "true")],
        };
        let endpoint = self.url.trim_end_matches("/data");
        let variables = variables.iter().chain(more).map(|&(key, value)| {
            (key.to_owned(), if value.is_empty() { endpoint.to_owned() } else { value.to_owned() })
        });
        Store::configured(&format!("{scheme}://data"), true, variables.collect()).unwrap()
    }

    pub fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap()
    }

    pub fn bytes_served(&self, ending: &str) -> u64 {
        let log = self.log();
        let served = log.served.iter().filter(|(name, _)| name.ends_with(ending));
        served.map(|(_, range)| range.end - range.start).sum()
    }
}

#[derive(Debug)]
struct Request {
    method: String,
    name: String,
    query: HashMap<String, String>,
    headers: HashMap<String, String>,
    range: Option<Range<usize>>,
    body: Vec<u8>,
}

impl Request {
    fn read(input: &mut impl BufRead) -> Option<Self> {
        let mut line = String::new();
        input.read_line(&mut line).ok().filter(|&length| length > 0)?;
        let mut words = line.split(' ');
        let (method, target) = (words.next()?.to_owned(), words.next()?);
        // A proxy receives complete URLs.
        let target = target.strip_prefix("http://").map_or(target, |url| &url[url.find('/').unwrap()..]);
        let (name, query) = target.split_once('?').unwrap_or((target, ""));
        let query = form_urlencoded::parse(query.as_bytes()).into_owned().collect();
        let name = object_store::path::Path::from_url_path(name.trim_start_matches("/data")).unwrap();
        let mut headers = HashMap::new();
        loop {
            let mut header = String::new();
            input.read_line(&mut header).ok()?;
            let Some((key, value)) = header.trim().split_once(": ") else { break };
            headers.insert(key.to_lowercase(), value.to_owned());
        }
        let mut body = vec![0; headers.get("content-length").map_or(0, |length| length.parse().unwrap())];
        input.read_exact(&mut body).ok()?;
        let range = headers.get("range").map(|range: &String| {
            let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            first.parse().unwrap()..last.parse::<usize>().unwrap() + 1
        });
        Some(Self { method, name: name.to_string(), query, headers, range, body })
    }

    fn kind(&self) -> &'static str {
        const CONDITIONS: [&str; 2] = ["if-none-match", "x-goog-if-generation-match"];
        let has = |key: &str| self.query.contains_key(key);
        match self.method.as_str() {
            _ if self.name.starts_with("latest/") => "metadata",
            "PUT" if self.part().is_some() => "part",
            "PUT" if has("comp") => "complete",
            "PUT" if CONDITIONS.iter().any(|key| self.headers.contains_key(*key)) => "create",
            "PUT" => "put",
            "POST" if has("uploads") => "begin",
            "POST" if has("uploadId") => "complete",
            "DELETE" if has("uploadId") => "abort",
            "POST" | "DELETE" => "delete",
            "HEAD" => "head",
            _ if has("list-type") || has("comp") => "list",
            _ => "get",
        }
    }

    fn part(&self) -> Option<&String> {
        self.query.get("partNumber").or(self.query.get("blockid"))
    }
}

struct Connection {
    stream: TcpStream,
    folder: PathBuf,
    log: Arc<Mutex<Log>>,
}

type Response = (u16, String, Vec<u8>);

impl Connection {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap()
    }

    fn serve(mut self) {
        let mut input = BufReader::new(self.stream.try_clone().unwrap());
        while let Some(request) = Request::read(&mut input) {
            if self.reply(request).is_none() {
                return;
            }
        }
    }

    /// Replies to a request; `None` ends the connection.
    fn reply(&mut self, mut request: Request) -> Option<()> {
        let (delay, fault) = self.log().note(&request);
        std::thread::sleep(delay);
        let is_get = request.kind() == "get";
        match (fault, &mut request.range) {
            (Some(Fault::Stall), _) if !is_get => {
                std::thread::sleep(STALL);
                return None;
            }
            (Some(Fault::Half), _) => request.body.truncate(request.body.len() / 2),
            (Some(Fault::Short), Some(range)) => range.end = range.start + range.len() / 2,
            _ => {}
        }
        let (mut status, tag, mut body) = match fault {
            Some(Fault::Undone(status, body)) => (status, String::new(), body.into()),
            Some(Fault::Pretended(bytes)) => (200, self.tag(bytes.as_bytes()), Vec::new()),
            _ => self.act(&request),
        };
        if is_get && status < 300 && matches!(fault, None | Some(Fault::Sound | Fault::Slow)) {
            let Range { start, end } = request.range.clone().unwrap_or(0..body.len());
            self.log().served.push((request.name.clone(), start as u64..end as u64));
        }
        let (mut length, middle) = (body.len(), body.len() / 2);
        match fault {
            Some(Fault::Lost) => return None,
            Some(Fault::Done(code, text)) => {
                (status, body, length) = (code, text.into(), text.len());
            }
            Some(Fault::Cut | Fault::Stall) => body.truncate(middle),
            Some(Fault::Corrupt) => body[middle] ^= 4,
            Some(Fault::Endless(code)) => {
                (status, length) = (if code == 200 && status == 206 { 206 } else { code }, 1 << 40);
                body = vec![b' '; 64 << 20];
            }
            _ => {}
        }
        let mut head = format!("HTTP/1.1 {status} -\r\nContent-Length: {length}\r\n");
        if let (206, Some(Range { start, end })) = (status, &request.range) {
            head += &format!("Content-Range: bytes {start}-{}/{}\r\n", end - 1, self.length(&request.name));
        }
        if body.starts_with(b"--b") {
            head += "Content-Type: multipart/mixed; boundary=b\r\n";
        }
        if !tag.is_empty() {
            head += &format!("ETag: {tag}\r\n");
        }
        head += "Last-Modified: Tue, 01 Jan 2030 00:00:00 GMT\r\n\r\n";
        self.stream.write_all(head.as_bytes()).ok()?;
        if request.method == "HEAD" {
            return Some(());
        }
        let pieces = if fault == Some(Fault::Slow) { 6 } else { 1 };
        for piece in body.chunks(body.len().div_ceil(pieces).max(1)) {
            self.stream.write_all(piece).ok()?;
            std::thread::sleep(Duration::from_secs(pieces as u64 - 1).min(Duration::from_secs(1)));
        }
        if let Some(Fault::Endless(_)) = fault {
            self.log().was_flooded = true;
        }
        if fault == Some(Fault::Stall) {
            std::thread::sleep(STALL);
        }
        (!matches!(fault, Some(Fault::Cut | Fault::Stall | Fault::Endless(_)))).then_some(())
    }

    fn tag(&self, bytes: &[u8]) -> String {
        self.log().tag.map_or_else(|| format!("\"{:032x}\"", xxh3_128(bytes)), str::to_owned)
    }

    fn length(&self, name: &str) -> u64 {
        self.folder.join(name).metadata().map_or(0, |metadata| metadata.len())
    }

    fn act(&self, request: &Request) -> Response {
        let Request { name, body, headers, .. } = request;
        let path = self.folder.join(name);
        let part = |id: &str| self.folder.join(format!("{name}.part-{}", id.replace('/', "_")));
        let ok = |text: &str| (200, self.tag(body), text.into());
        let fails = |status: u16, code: &str| {
            let text = format!("<Error><Code>{code}</Code><Message>-</Message></Error>");
            (status, String::new(), text.into_bytes())
        };
        let write = |path: &Path, bytes: &[u8]| {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
            ok("")
        };
        let is_azure = headers.contains_key("x-ms-version");
        match request.kind() {
            "head" | "get" => {
                let Ok(bytes) = std::fs::read(&path) else { return fails(404, "NoSuchKey") };
                let tag = self.tag(&bytes);
                // No condition is true for a weak tag.
                if headers.get("if-match").is_some_and(|wanted| *wanted != tag || tag.starts_with("W/")) {
                    return fails(412, "PreconditionFailed");
                }
                match request.range.clone() {
                    Some(range) => (206, tag, bytes[range].to_vec()),
                    None => (200, tag, bytes),
                }
            }
            "create" if path.exists() && !self.log().ignores_conditions => {
                fails(if is_azure { 409 } else { 412 }, "BlobAlreadyExists")
            }
            "create" | "put" => write(&path, body),
            "part" => {
                // As in a store, a late part does not belong to an upload that has ended.
                let log = self.log();
                if log.aborted.contains(name) {
                    return fails(404, "NoSuchUpload");
                }
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(part(request.part().unwrap()), body).unwrap();
                drop(log);
                ok("")
            }
            "begin" => {
                self.log().aborted.remove(name);
                ok("<R><Bucket>data</Bucket><Key>k</Key><UploadId>1</UploadId></R>")
            }
            "complete" => {
                let text = String::from_utf8_lossy(body);
                let ids = text.split(if is_azure { "<Uncommitted>" } else { "<PartNumber>" }).skip(1);
                let parts: Vec<_> = ids.map(|id| part(id.split('<').next().unwrap())).collect();
                match parts.iter().all(|part| part.exists()) {
                    false if is_azure => return fails(400, "InvalidBlockList"),
                    false => return fails(404, "NoSuchUpload"),
                    true => {}
                }
                let bytes: Vec<u8> = parts.iter().flat_map(|part| std::fs::read(part).unwrap()).collect();
                write(&path, &bytes);
                parts.iter().for_each(|part| std::fs::remove_file(part).unwrap());
                let tag = self.tag(&bytes);
                (200, tag.clone(), format!("<R><ETag>{tag}</ETag></R>").into())
            }
            "abort" => {
                self.log().aborted.insert(name.clone());
                let parts = glob::glob(&format!("{}.part-*", path.display())).unwrap();
                parts.for_each(|part| std::fs::remove_file(part.unwrap()).unwrap());
                ok("")
            }
            "delete" if request.method == "DELETE" => match std::fs::remove_file(path) {
                Ok(()) => (204, String::new(), Vec::new()),
                Err(_) => fails(404, "NoSuchKey"),
            },
            "delete" => ok(&self.delete(body)),
            "list" => ok(&self.list(&request.query)),
            _ => ok(match name.rsplit('/').next().unwrap() {
                "token" => "token",
                "security-credentials" => "role",
                // The credentials expire at once, so each request fetches new ones.
                _ => {
                    r#"{"AccessKeyId":"a","SecretAccessKey":"s","Token":"t","Expiration":"2001-01-01T00:00:00Z"}"#
                }
            }),
        }
    }

    /// Deletes the objects in S3's XML, or in the requests of Azure's batch.
    fn delete(&self, body: &[u8]) -> String {
        let text = String::from_utf8_lossy(body);
        let remove = |key: &str| drop(std::fs::remove_file(self.folder.join(key)));
        let (mut deleted, mut batch) = (String::new(), String::new());
        for key in text.split("<Key>").skip(1).map(|key| key.split('<').next().unwrap()) {
            remove(&key.replace("&amp;", "&"));
            deleted += &format!("<Deleted><Key>{key}</Key></Deleted>");
        }
        for (id, rest) in text.split("\r\nDELETE /data/").skip(1).enumerate() {
            let key = rest.split(' ').next().unwrap();
            remove(object_store::path::Path::from_url_path(key).unwrap().as_ref());
            batch += &format!(
                "--b\r\nContent-Type: application/http\r\nContent-ID: {id}\r\n\r\nHTTP/1.1 202 -\r\n\r\n\r\n"
            );
        }
        let s3 = format!("<DeleteResult>{deleted}</DeleteResult>");
        if batch.is_empty() { s3 } else { format!("{batch}--b--\r\n") }
    }

    fn list(&self, query: &HashMap<String, String>) -> String {
        let asked = |key: &str| query.get(key).map(String::as_str);
        let files = glob::glob(&format!("{}/**/*", self.folder.display())).unwrap().map(Result::unwrap);
        let name =
            |path: PathBuf| path.strip_prefix(&self.folder).unwrap().to_str().unwrap().replace('&', "&amp;");
        let mut names: Vec<_> = files.filter(|path| path.is_file()).map(name).collect();
        names.extend(self.log().keys.iter().map(|&key| key.to_owned()));
        names.retain(|name| name.starts_with(asked("prefix").unwrap_or_default()));
        let start = asked("continuation-token").or(asked("marker")).map_or(0, |token| token.parse().unwrap());
        let end = names.len().min(start + self.log().page.unwrap_or(1000));
        let is_azure = query.contains_key("comp");
        let objects: String = names[start..end].iter().map(|name| self.listed(name, is_azure)).collect();
        let next = if end < names.len() { end.to_string() } else { String::new() };
        if is_azure {
            return format!(
                "<EnumerationResults><Blobs>{objects}</Blobs><NextMarker>{next}</NextMarker></EnumerationResults>"
            );
        }
        let more =
            format!("<IsTruncated>true</IsTruncated><NextContinuationToken>{next}</NextContinuationToken>");
        format!("<ListBucketResult>{}{objects}</ListBucketResult>", if next.is_empty() { "" } else { &more })
    }

    fn listed(&self, name: &str, is_azure: bool) -> String {
        let is_mark = name.ends_with("mark/");
        let length = if self.folder.join(name).exists() { self.length(name) } else { u64::from(!is_mark) };
        if !is_azure {
            return format!(
                "<Contents><Key>{name}</Key><LastModified>2030-01-01T00:00:00Z</LastModified><Size>{length}</Size></Contents>"
            );
        }
        let (attribute, name) =
            name.strip_prefix("encoded:").map_or(("", name), |name| (" Encoded=\"true\"", name));
        format!(
            "<Blob><Name{attribute}>{name}</Name><Properties><Last-Modified>Tue, 01 Jan 2030 00:00:00 GMT</Last-Modified>\
             <Content-Length>{length}</Content-Length><Content-Type>t</Content-Type></Properties></Blob>",
        )
    }
}
