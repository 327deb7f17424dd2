//! A web server for tests: serves the files of a folder by ranges, counts what is asked for, and misbehaves on demand.
//! It also takes uploads as S3 does, into the bucket `data`.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::Store;

/// A fault in a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
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

/// The requests that the server has seen, and the faults that it is to inject.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// Method and target of all requests.
    pub requests: Vec<String>,
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
    /// Whether a client has read a body that does not end for long.
    pub was_flooded: bool,
    /// Whether the condition `If-None-Match: *` is ignored.
    pub ignores_conditions: bool,
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
                std::thread::spawn(move || serve(connection.unwrap(), &folder, &log));
            }
        });
        Self { url, log }
    }

    /// Its bucket `data`, to write to.
    pub fn bucket(&self) -> Store {
        let endpoint = self.url.trim_end_matches("/data");
        let variables = [("aws_endpoint_url", endpoint), ("aws_skip_signature", "true")];
        let variables = variables.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
        Store::configured("s3://data", true, variables).unwrap()
    }

    pub fn log(&self) -> std::sync::MutexGuard<'_, Log> {
        self.log.lock().unwrap()
    }

    /// The bytes that were served of files with this ending.
    pub fn bytes_served(&self, ending: &str) -> u64 {
        let log = self.log();
        log.served
            .iter()
            .filter(|(name, _)| name.ends_with(ending))
            .map(|(_, range)| range.end - range.start)
            .sum()
    }
}

/// Answers the requests of one connection.
fn serve(mut connection: TcpStream, folder: &Path, log: &Mutex<Log>) {
    let mut input = BufReader::new(connection.try_clone().unwrap());
    loop {
        let (mut line, mut range, mut is_conditional) = (String::new(), None, false);
        let (mut length, mut is_create) = (0, false);
        if input.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let name = line.split(' ').nth(1).unwrap().trim_start_matches("/data/").to_owned();
        let is_head = line.starts_with("HEAD");
        loop {
            let mut header = String::new();
            input.read_line(&mut header).unwrap();
            if header.trim().is_empty() {
                break;
            }
            is_create |= header.to_lowercase().starts_with("if-none-match:");
            if let Some(value) = header.to_lowercase().trim().strip_prefix("content-length: ") {
                length = value.parse().unwrap();
            }
            is_conditional |= header.to_lowercase().starts_with("if-match:");
            if let Some(value) = header.to_lowercase().trim().strip_prefix("range: bytes=") {
                let (first, last) = value.split_once('-').unwrap();
                range = Some(first.parse::<u64>().unwrap()..last.parse::<u64>().unwrap() + 1);
            }
        }
        let method = line.split(' ').next().unwrap();
        let delay = {
            let mut log = log.lock().unwrap();
            log.requests.push(line.rsplit_once(' ').unwrap().0.to_owned());
            log.delay
        };
        std::thread::sleep(delay);
        if !["GET", "HEAD"].contains(&method) {
            let mut body = vec![0; length];
            if input.read_exact(&mut body).is_err()
                || take(&mut connection, folder, (method, &name), &body, is_create, log).is_none()
            {
                return;
            }
            continue;
        }
        let path = folder.join(&name);
        let done = match path.metadata() {
            Ok(found) if is_head => {
                let length = found.len();
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nETag: W/\"1\"\r\n\r\n");
                connection.write_all(head.as_bytes()).ok()
            }
            Err(_) if is_head => {
                connection.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").ok()
            }
            // No condition holds for a weak tag.
            _ if is_conditional => {
                connection.write_all(b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n\r\n").ok()
            }
            _ => answer(&mut connection, &path, &name, range, log),
        };
        if done.is_none() {
            return;
        }
    }
}

/// Answers a request; `None` ends the connection.
fn answer(
    connection: &mut TcpStream,
    path: &PathBuf,
    name: &str,
    range: Option<Range<u64>>,
    log: &Mutex<Log>,
) -> Option<()> {
    let fault = {
        let mut log = log.lock().unwrap();
        let concerns = name.ends_with(log.faulty.unwrap_or(".tokens"));
        if concerns { log.faults.pop_front().or(log.always) } else { None }
    };
    if let Some(Fault::Endless | Fault::EndlesslyForbidden) = fault {
        let status = match (fault, &range) {
            (Some(Fault::EndlesslyForbidden), _) => "403 Forbidden".to_owned(),
            (_, None) => "200 OK".to_owned(),
            (_, Some(Range { start, end })) => {
                format!("206 Partial Content\r\nContent-Range: bytes {start}-{}/{}", end - 1, 1_u64 << 40)
            }
        };
        let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n", 1_u64 << 40);
        connection.write_all(head.as_bytes()).ok()?;
        for _ in 0..64 {
            connection.write_all(&[b' '; 1 << 20]).ok()?;
        }
        log.lock().unwrap().was_flooded = true;
        return None;
    }
    let slow = fault == Some(Fault::Slow);
    let mut send = |status: &str, headers: &str, length: usize, body: &[u8]| {
        let head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{headers}\r\n");
        connection.write_all(head.as_bytes()).ok()?;
        for piece in body.chunks(if slow { body.len().div_ceil(6) } else { body.len() }.max(1)) {
            connection.write_all(piece).ok()?;
            std::thread::sleep(Duration::from_secs(slow.into()));
        }
        Some(())
    };
    match fault {
        Some(Fault::Unavailable) => return send("503 Service Unavailable", "", 0, b""),
        Some(Fault::Forbidden) => return send("403 Forbidden", "", 0, b""),
        _ => {}
    }
    let Ok(file) = File::open(path) else { return send("404 Not Found", "", 0, b"") };
    let total = file.metadata().unwrap().len();
    let wanted = range.clone().unwrap_or(0..total);
    let mut body = vec![0; (wanted.end - wanted.start) as usize];
    file.read_exact_at(&mut body, wanted.start).unwrap();
    let (mut length, mut end) = (body.len(), wanted.end);
    match fault {
        Some(Fault::Cut | Fault::Stall) => body.truncate(length / 2),
        Some(Fault::Short) => {
            body.truncate(length / 2);
            (length, end) = (body.len(), wanted.start + body.len() as u64);
        }
        Some(Fault::Corrupt) => body[length / 2] ^= 4,
        _ => log.lock().unwrap().served.push((name.to_owned(), wanted.clone())),
    }
    let sent = match range {
        Some(_) => {
            let headers = format!("Content-Range: bytes {}-{}/{total}\r\n", wanted.start, end - 1);
            send("206 Partial Content", &headers, length, &body)
        }
        None => send("200 OK", "", length, &body),
    };
    if fault == Some(Fault::Stall) {
        std::thread::sleep(Duration::from_secs(60));
    }
    (!matches!(fault, Some(Fault::Cut | Fault::Stall))).then_some(()).and(sent)
}

/// Takes an upload or a deletion; `None` ends the connection. Parts of unfinished uploads are files `NAME.part-N`.
fn take(
    connection: &mut TcpStream,
    folder: &Path,
    (method, target): (&str, &str),
    body: &[u8],
    is_create: bool,
    log: &Mutex<Log>,
) -> Option<()> {
    let (name, query) = target.split_once('?').unwrap_or((target, ""));
    let path = folder.join(name);
    let mut log = log.lock().unwrap();
    let is_faulty = method == "PUT" && name.ends_with(log.faulty.unwrap_or(".tokens"));
    let fault = if is_faulty { log.faults.pop_front().or(log.always) } else { None };
    let exists = is_create && !log.ignores_conditions && path.exists();
    drop(log);
    let part = |number| folder.join(format!("{name}.part-{number}"));
    let parts = || (1..100).map(part).filter(|part| part.exists()).collect::<Vec<_>>();
    let mut answer = String::new();
    let mut status = "200 OK";
    match (method, fault) {
        (_, Some(Fault::Unavailable)) => status = "503 Service Unavailable",
        (_, Some(Fault::Forbidden)) => status = "403 Forbidden",
        (_, Some(Fault::Stall)) => std::thread::sleep(Duration::from_secs(60)),
        (_, Some(Fault::Cut)) => {
            std::fs::write(&path, body).unwrap(); // stored, but the answer is lost
            return None;
        }
        ("PUT", _) if exists => status = "412 Precondition Failed",
        ("PUT", _) => {
            let part = query.split('&').find_map(|pair| pair.strip_prefix("partNumber="));
            let to = part.map_or(path, |part| folder.join(format!("{name}.part-{part}")));
            let kept = if fault == Some(Fault::Short) { body.len() / 2 } else { body.len() };
            std::fs::write(to, &body[..kept]).unwrap();
        }
        ("POST", _) if query.starts_with("uploads") => {
            answer = "<R><Bucket>data</Bucket><Key>k</Key><UploadId>1</UploadId></R>".to_owned();
        }
        ("POST", _) => {
            let bytes: Vec<u8> = parts().iter().flat_map(|part| std::fs::read(part).unwrap()).collect();
            std::fs::write(path, bytes).unwrap();
            parts().iter().for_each(|part| std::fs::remove_file(part).unwrap());
            answer = "<R><ETag>\"1\"</ETag></R>".to_owned();
        }
        _ => parts().iter().for_each(|part| std::fs::remove_file(part).unwrap()),
    }
    let length = answer.len();
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nETag: \"1\"\r\n\r\n{answer}");
    connection.write_all(head.as_bytes()).ok()
}
