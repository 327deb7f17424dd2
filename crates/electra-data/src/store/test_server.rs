//! A web server for tests: serves the files of a folder by ranges, counts what is asked for, and misbehaves on demand.
//! It is also the bucket `data` of S3 and GCS and the container `data` of Azure, and a metadata service of AWS.

use std::collections::{HashMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use url::form_urlencoded;
use xxhash_rust::xxh3::xxh3_128;

use super::Store;

/// A fault in the response to a GET.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// None.
    Sound,
    /// "503 Service Unavailable".
    Unavailable,
    /// "403 Forbidden".
    Forbidden,
    /// "403 Forbidden" with a body that does not end.
    EndlesslyForbidden,
    /// The body goes on after the range or the file.
    Endless,
    /// The connection ends in the middle of the body.
    Cut,
    /// The body stops in its middle, and the connection stays open.
    Stall,
    /// The body comes in six pieces, a second apart.
    Slow,
    /// The body is shorter than the range, and the header agrees.
    Short,
    /// A bit of the body is flipped.
    Corrupt,
}

/// What the server does with another request instead of what it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// Does it, and cuts the connection without an answer.
    Lost,
    /// Does it, and answers with this status and body.
    Done(u16, &'static str),
    /// Answers with this status and body, and does nothing.
    Undone(u16, &'static str),
    /// Answers as if it had done it with these bytes, and does nothing.
    Pretended(&'static str),
    /// Does it with half of the body.
    Half,
    /// Waits for a minute.
    Stall,
}

/// The requests that the server has seen, and the faults that it is to inject.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// The kind and the name of each request, as in [`Request::kind`].
    pub requests: Vec<(&'static str, String)>,
    /// How long each of them takes.
    pub delay: Duration,
    /// The ranges of files that were served as requested.
    pub served: Vec<(String, Range<u64>)>,
    /// The ending of the names of files that faults affect; by default that of token files.
    pub faulty: Option<&'static str>,
    /// Faults of the next requests for these files.
    pub faults: VecDeque<Fault>,
    /// The fault of all requests for them after these.
    pub always: Option<Fault>,
    /// Replies to the next requests of a kind.
    pub replies: Vec<(&'static str, Reply)>,
    /// The reply to all requests of a kind after these.
    pub always_reply: Option<(&'static str, Reply)>,
    /// Whether a client has read a body that does not end for long.
    pub was_flooded: bool,
    /// Whether conditions of writes are ignored.
    pub ignores_conditions: bool,
    /// The ETag of all objects, by default that of their bytes.
    pub tag: Option<&'static str>,
    /// Keys that are listed besides the files, as they stand in XML.
    pub keys: Vec<&'static str>,
    /// Objects of a page of a list.
    pub page: Option<usize>,
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

    /// Its bucket `data`, to write to.
    pub fn bucket(&self) -> Store {
        let endpoint = self.url.trim_end_matches("/data");
        self.bucket_with("s3", &[("aws_endpoint_url", endpoint), ("aws_skip_signature", "true")])
    }

    /// The same, with the client of this scheme and with variables.
    pub fn bucket_with(&self, scheme: &str, variables: &[(&str, &str)]) -> Store {
        let variables = variables.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
        Store::configured(&format!("{scheme}://data"), true, variables).unwrap()
    }

    pub fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap()
    }

    /// The bytes that were served of files with this ending.
    pub fn bytes_served(&self, ending: &str) -> u64 {
        let log = self.log();
        let served = log.served.iter().filter(|(name, _)| name.ends_with(ending));
        served.map(|(_, range)| range.end - range.start).sum()
    }
}

/// A request.
#[derive(Debug)]
struct Request {
    method: String,
    name: String,
    query: HashMap<String, String>,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

impl Request {
    /// The next request of a connection; `None` at its end.
    fn read(input: &mut impl BufRead) -> Option<Self> {
        let mut line = String::new();
        input.read_line(&mut line).ok().filter(|&length| length > 0)?;
        let mut words = line.split(' ');
        let (method, target) = (words.next()?.to_owned(), words.next()?);
        // A proxy gets whole URLs.
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
        Some(Self { method, name: name.to_string(), query, headers, body })
    }

    fn is_create(&self) -> bool {
        ["if-none-match", "x-goog-if-generation-match"].iter().any(|key| self.headers.contains_key(*key))
    }

    fn kind(&self) -> &'static str {
        let has = |key: &str| self.query.contains_key(key);
        let comp = self.query.get("comp").map(String::as_str);
        match (self.method.as_str(), comp) {
            _ if self.name.starts_with("latest/") => "metadata",
            ("PUT", Some("blocklist")) => "complete",
            ("PUT", Some("block")) => "part",
            ("PUT", _) if has("partNumber") => "part",
            ("PUT", _) => {
                if self.is_create() {
                    "create"
                } else {
                    "put"
                }
            }
            ("POST", _) if has("uploads") => "begin",
            ("POST", _) if has("uploadId") => "complete",
            ("POST", _) => "delete",
            ("DELETE", _) => {
                if has("uploadId") {
                    "abort"
                } else {
                    "delete"
                }
            }
            ("HEAD", _) => "head",
            (_, Some("list")) => "list",
            _ => {
                if has("list-type") {
                    "list"
                } else {
                    "get"
                }
            }
        }
    }

    /// The part that it uploads.
    fn part(&self) -> Option<&String> {
        self.query.get("partNumber").or(self.query.get("blockid"))
    }
}

struct Connection {
    stream: TcpStream,
    folder: PathBuf,
    log: Arc<Mutex<Log>>,
}

/// A status, the ETag, and the body of a response.
type Response = (u16, String, String);

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
        let reply = {
            let (mut log, kind) = (self.log(), request.kind());
            log.requests.push((kind, request.name.clone()));
            let delay = log.delay;
            drop(log);
            std::thread::sleep(delay);
            let mut log = self.log();
            let next = log.replies.iter().position(|(wanted, _)| *wanted == kind);
            let always = log.always_reply.filter(|(wanted, _)| *wanted == kind).map(|(_, reply)| reply);
            next.map(|next| log.replies.remove(next).1).or(always)
        };
        let is_head = request.method == "HEAD";
        let (status, tag, body) = match reply {
            None if request.kind() == "get" => return self.get(&request),
            None => self.act(&request),
            Some(Reply::Lost) => {
                self.act(&request);
                return None;
            }
            Some(Reply::Done(status, body)) => {
                self.act(&request);
                (status, String::new(), body.to_owned())
            }
            Some(Reply::Undone(status, body)) => (status, String::new(), body.to_owned()),
            Some(Reply::Pretended(bytes)) => (200, self.tag(bytes.as_bytes()), String::new()),
            Some(Reply::Half) => {
                request.body.truncate(request.body.len() / 2);
                self.act(&request)
            }
            Some(Reply::Stall) => {
                std::thread::sleep(Duration::from_secs(60));
                return None;
            }
        };
        let length = if is_head && status == 200 { body.clone() } else { body.len().to_string() };
        let batch =
            if body.starts_with("--b") { "Content-Type: multipart/mixed; boundary=b\r\n" } else { "" };
        let head = format!("HTTP/1.1 {status} -\r\nContent-Length: {length}\r\n{batch}{}\r\n", headers(&tag));
        self.stream.write_all(head.as_bytes()).ok()?;
        if is_head { Some(()) } else { self.stream.write_all(body.as_bytes()).ok() }
    }

    fn tag(&self, bytes: &[u8]) -> String {
        self.log().tag.map_or_else(|| format!("\"{:032x}\"", xxh3_128(bytes)), str::to_owned)
    }

    /// Does what is asked for.
    fn act(&self, request: &Request) -> Response {
        let Request { name, body, .. } = request;
        let path = self.folder.join(name);
        let part = |id: &str| self.folder.join(format!("{name}.part-{}", id.replace('/', "_")));
        let ok = |body: &str| (200, self.tag(&request.body), body.to_owned());
        let fails = |status: u16, code: &str| {
            (status, String::new(), format!("<Error><Code>{code}</Code><Message>-</Message></Error>"))
        };
        let write = |path: &Path, bytes: &[u8]| {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        };
        match request.kind() {
            "head" => match std::fs::read(&path) {
                Ok(bytes) => (200, self.tag(&bytes), bytes.len().to_string()),
                Err(_) => (404, String::new(), String::new()),
            },
            "create" if path.exists() && !self.log().ignores_conditions => fails(
                if request.headers.contains_key("x-ms-version") { 409 } else { 412 },
                "BlobAlreadyExists",
            ),
            "create" | "put" => {
                write(&path, body);
                ok("")
            }
            "part" => {
                write(&part(request.part().unwrap()), body);
                ok("")
            }
            "begin" => ok("<R><Bucket>data</Bucket><Key>k</Key><UploadId>1</UploadId></R>"),
            "complete" => {
                let (text, is_azure) = (String::from_utf8_lossy(body), request.method == "PUT");
                let ids = text.split(if is_azure { "<Uncommitted>" } else { "<PartNumber>" }).skip(1);
                let parts: Vec<_> = ids.map(|id| part(id.split('<').next().unwrap())).collect();
                if !parts.iter().all(|part| part.exists()) {
                    return if is_azure {
                        fails(400, "InvalidBlockList")
                    } else {
                        fails(404, "NoSuchUpload")
                    };
                }
                let bytes: Vec<u8> = parts.iter().flat_map(|part| std::fs::read(part).unwrap()).collect();
                write(&path, &bytes);
                parts.iter().for_each(|part| std::fs::remove_file(part).unwrap());
                let tag = self.tag(&bytes);
                (200, tag.clone(), format!("<R><ETag>{tag}</ETag></R>"))
            }
            "abort" => {
                let parts = glob::glob(&format!("{}.part-*", path.display())).unwrap();
                parts.for_each(|part| std::fs::remove_file(part.unwrap()).unwrap());
                ok("")
            }
            "delete" if request.method == "DELETE" => std::fs::remove_file(path)
                .map_or_else(|_| fails(404, "NoSuchKey"), |()| (204, String::new(), String::new())),
            "delete" => self.delete(body),
            "list" => ok(&self.list(request)),
            _ => ok(match name.trim_end_matches('/').rsplit('/').next().unwrap() {
                "token" => "token",
                "security-credentials" => "role",
                // It expires at once, so each request asks for the next one.
                _ => {
                    r#"{"AccessKeyId":"a","SecretAccessKey":"s","Token":"t","Expiration":"2001-01-01T00:00:00Z"}"#
                }
            }),
        }
    }

    /// Deletes the objects that S3's XML names, or the requests in Azure's batch.
    fn delete(&self, body: &[u8]) -> Response {
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
        (200, String::new(), if batch.is_empty() { s3 } else { format!("{batch}--b--\r\n") })
    }

    /// A page of a list.
    fn list(&self, request: &Request) -> String {
        let asked = |key: &str| request.query.get(key).cloned();
        let (is_azure, prefix) = (request.query.contains_key("comp"), asked("prefix").unwrap_or_default());
        let files = glob::glob(&format!("{}/**/*", self.folder.display())).unwrap().map(Result::unwrap);
        let name =
            |path: PathBuf| path.strip_prefix(&self.folder).unwrap().to_str().unwrap().replace('&', "&amp;");
        let mut names: Vec<_> = files.filter(|path| path.is_file()).map(name).collect();
        names.extend(self.log().keys.iter().map(|&key| key.to_owned()));
        names.retain(|name| name.starts_with(&prefix));
        let start = asked("continuation-token").or(asked("marker")).map_or(0, |token| token.parse().unwrap());
        let end = names.len().min(start + self.log().page.unwrap_or(1000));
        let objects: String = names[start..end].iter().map(|name| self.listed(name, is_azure)).collect();
        let next = if end < names.len() { end.to_string() } else { String::new() };
        match (is_azure, next.is_empty()) {
            (true, _) => {
                format!(
                    "<EnumerationResults><Blobs>{objects}</Blobs><NextMarker>{next}</NextMarker></EnumerationResults>"
                )
            }
            (_, true) => format!("<ListBucketResult>{objects}</ListBucketResult>"),
            _ => format!(
                "<ListBucketResult><IsTruncated>true</IsTruncated>{objects}\
                 <NextContinuationToken>{next}</NextContinuationToken></ListBucketResult>"
            ),
        }
    }

    fn listed(&self, name: &str, is_azure: bool) -> String {
        let length = self
            .folder
            .join(name)
            .metadata()
            .map_or(u64::from(!name.ends_with("mark/")), |found| found.len());
        match (is_azure, name.strip_prefix("encoded:")) {
            (true, encoded) => format!(
                "<Blob><Name{}>{}</Name><Properties><Last-Modified>Tue, 01 Jan 2030 00:00:00 GMT</Last-Modified>\
                 <Content-Length>{length}</Content-Length><Content-Type>t</Content-Type></Properties></Blob>",
                if encoded.is_some() { " Encoded=\"true\"" } else { "" },
                encoded.unwrap_or(name),
            ),
            _ => format!(
                "<Contents><Key>{name}</Key><LastModified>2030-01-01T00:00:00Z</LastModified><Size>{length}</Size></Contents>"
            ),
        }
    }

    /// Answers a GET; `None` ends the connection.
    fn get(&mut self, request: &Request) -> Option<()> {
        let name = &request.name;
        let range = request.headers.get("range").map(|range| {
            let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            first.parse::<u64>().unwrap()..last.parse::<u64>().unwrap() + 1
        });
        let fault = {
            let mut log = self.log();
            let concerns = name.ends_with(log.faulty.unwrap_or(".tokens"));
            if concerns { log.faults.pop_front().or(log.always) } else { None }
        };
        if matches!(fault, Some(Fault::Endless | Fault::EndlesslyForbidden)) {
            return self.flood(fault == Some(Fault::EndlesslyForbidden), range);
        }
        let bytes = std::fs::read(self.folder.join(name));
        let tag = bytes.as_ref().map_or_else(|_| String::new(), |bytes| self.tag(bytes));
        let mut send = |status: &str, more: &str, length: usize, body: &[u8]| {
            let slow = u64::from(fault == Some(Fault::Slow));
            let head =
                format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{more}{}\r\n", headers(&tag));
            self.stream.write_all(head.as_bytes()).ok()?;
            for piece in body.chunks(if slow > 0 { body.len().div_ceil(6) } else { body.len() }.max(1)) {
                self.stream.write_all(piece).ok()?;
                std::thread::sleep(Duration::from_secs(slow));
            }
            Some(())
        };
        let is_other = |wanted: &String| *wanted != tag || tag.starts_with("W/"); // no condition holds for a weak tag
        let total = match (fault, &bytes) {
            (Some(Fault::Unavailable), _) => return send("503 Service Unavailable", "", 0, b""),
            (Some(Fault::Forbidden), _) => return send("403 Forbidden", "", 0, b""),
            (_, Err(_)) => return send("404 Not Found", "", 0, b""),
            _ if request.headers.get("if-match").is_some_and(is_other) => {
                return send("412 Precondition Failed", "", 0, b"");
            }
            (_, Ok(bytes)) => bytes.len() as u64,
        };
        let Range { start, mut end } = range.clone().unwrap_or(0..total);
        let mut body = bytes.unwrap()[start as usize..end as usize].to_vec();
        let mut length = body.len();
        match fault {
            Some(Fault::Cut | Fault::Stall) => body.truncate(length / 2),
            Some(Fault::Short) => {
                body.truncate(length / 2);
                (length, end) = (body.len(), start + body.len() as u64);
            }
            Some(Fault::Corrupt) => body[length / 2] ^= 4,
            _ => self.log.lock().unwrap().served.push((name.to_owned(), start..end)),
        }
        let partial = format!("Content-Range: bytes {start}-{}/{total}\r\n", end.saturating_sub(1));
        let sent = match range {
            Some(_) => send("206 Partial Content", &partial, length, &body),
            None => send("200 OK", "", length, &body),
        };
        if fault == Some(Fault::Stall) {
            std::thread::sleep(Duration::from_secs(60));
        }
        (!matches!(fault, Some(Fault::Cut | Fault::Stall))).then_some(()).and(sent)
    }

    /// Sends a body that does not end for long.
    fn flood(&mut self, is_forbidden: bool, range: Option<Range<u64>>) -> Option<()> {
        let endless = 1_u64 << 40;
        let status = match range {
            _ if is_forbidden => "403 Forbidden".to_owned(),
            None => "200 OK".to_owned(),
            Some(Range { start, end }) => {
                format!("206 Partial Content\r\nContent-Range: bytes {start}-{}/{endless}", end - 1)
            }
        };
        let head = format!("HTTP/1.1 {status}\r\nContent-Length: {endless}\r\n{}\r\n", headers("\"1\""));
        self.stream.write_all(head.as_bytes()).ok()?;
        for _ in 0..64 {
            self.stream.write_all(&[b' '; 1 << 20]).ok()?;
        }
        self.log().was_flooded = true;
        None
    }
}

fn headers(tag: &str) -> String {
    let tag = if tag.is_empty() { String::new() } else { format!("ETag: {tag}\r\n") };
    format!("{tag}Last-Modified: Tue, 01 Jan 2030 00:00:00 GMT\r\n")
}
