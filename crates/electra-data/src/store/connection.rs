//! Sending requests: responses have a maximum length, and a web server cannot redirect requests to another server.

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt;
use http_body_util::{BodyExt, Limited};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService, ReqwestConnector,
};
use object_store::path::Path;
use object_store::{ClientOptions, Result};
use reqwest::redirect::{Action, Attempt, Policy};
use url::{Url, form_urlencoded};

use super::errors::{HAD_CREDENTIALS, METADATA_ANSWERED, Refused, is_metadata_host};

/// The longest response: a list, or a whole object. Ranges and objects have tighter limits where they are read.
const MAX_ANSWER: usize = 1 << 30;
/// The longest part of an error response that is read. Only its code and message are shown.
const MAX_REFUSAL: usize = 64 << 10;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that a request may wait for more bytes before it counts as stalled. A whole request has no timeout:
/// over a slow line, requests in flight take long and would be retried forever.
pub(super) const TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 4 } else { 30 });
/// The same for writing, which includes sending the request: four parts of 8 MiB over 2.5 Mbit/s.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 4 } else { 120 });
const MAX_REDIRECTS: usize = 10;

#[derive(Debug)]
pub(super) enum Connector {
    Cloud,
    Web(Url),
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> Result<HttpClient> {
        let client = match self {
            Self::Cloud => ReqwestConnector::default().connect(options)?,
            Self::Web(url) => HttpClient::new(
                web_client(url)
                    .map_err(|error| object_store::Error::Generic { store: "HTTP", source: error.into() })?,
            ),
        };
        Ok(HttpClient::new(Bounded(client)))
    }
}

/// A client that follows redirects within the server and to trusted hosts. If `.netrc` has a password for
/// the server, the client sends it and follows redirects within the server only.
fn web_client(url: &Url) -> reqwest::Result<reqwest::Client> {
    let builder = |trusted: Vec<String>| {
        reqwest::Client::builder()
            .user_agent(concat!("electra-fast/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(TIMEOUT)
            .redirect(Policy::custom(move |attempt| redirect(attempt, &trusted)))
            .http1_only()
            // Without compression, a response is as long as the object.
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate()
    };
    let Some((user, password)) = url.host_str().and_then(password_for) else {
        let hosts = std::env::var("ELECTRA_FAST_REDIRECT_HOSTS").unwrap_or_default();
        return builder(hosts.split(',').map(|host| host.trim().to_owned()).collect()).build();
    };
    let example = builder(Vec::new()).build()?.get(url.clone()).basic_auth(user, Some(password)).build()?;
    builder(Vec::new()).default_headers(example.headers().clone()).build()
}

fn redirect(attempt: Attempt, trusted: &[String]) -> Action {
    let first = attempt.previous().first().map(Url::origin);
    let origin = attempt.url().origin();
    let is_trusted = attempt.url().host_str().is_some_and(|host| trusted.iter().any(|each| each == host));
    if !is_trusted && first.is_some_and(|first| first != origin) {
        return attempt.error(Refused::Redirect(origin.ascii_serialization()));
    }
    if attempt.previous().len() > MAX_REDIRECTS {
        return attempt.error(Refused::Redirects);
    }
    attempt.follow()
}

/// User and password of a host from the file `$NETRC` or `~/.netrc`, like curl.
fn password_for(host: &str) -> Option<(String, String)> {
    let in_home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".netrc"));
    let path = std::env::var_os("NETRC").map(PathBuf::from).or_else(in_home)?;
    login_in(&std::fs::read_to_string(path).ok()?, host)
}

fn login_in(netrc: &str, host: &str) -> Option<(String, String)> {
    let lines = netrc.lines().filter(|line| !line.trim_start().starts_with('#'));
    let mut words = lines.flat_map(str::split_whitespace);
    let (mut is_entry, mut login, mut password) = (false, None, None);
    while let Some(word) = words.next() {
        match word {
            "machine" | "default" if is_entry => break,
            "machine" => is_entry = words.next() == Some(host),
            "default" => is_entry = true,
            "login" if is_entry => login = words.next(),
            "password" if is_entry => password = words.next(),
            _ => {}
        }
    }
    Some((login?.to_owned(), password?.to_owned()))
}

/// A client that limits responses, since the crate reads whole lists and errors, and checks pages of lists.
#[derive(Debug)]
struct Bounded(HttpClient);

type Answer<'a> = Pin<Box<dyn Future<Output = std::result::Result<HttpResponse, HttpError>> + Send + 'a>>;

impl HttpService for Bounded {
    fn call<'s, 'a>(&'s self, request: HttpRequest) -> Answer<'a>
    where
        's: 'a,
        Self: 'a,
    {
        Box::pin(async move {
            let (uri, failed) =
                (request.uri().clone(), |error| HttpError::new_boxed(HttpErrorKind::Unknown, error));
            let is_metadata = uri.host().is_some_and(is_metadata_host);
            if !is_metadata && request.headers().contains_key("authorization") {
                HAD_CREDENTIALS.fetch_or(METADATA_ANSWERED.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            let answer = self.0.execute(request).await?;
            METADATA_ANSWERED.fetch_or(is_metadata && answer.status().is_success(), Ordering::Relaxed);
            if answer.status().is_success() {
                let limited =
                    answer.map(|body| HttpResponseBody::new(Limited::new(body, MAX_ANSWER).map_err(failed)));
                let Some(query) = uri.query().filter(|query| is_list(query)) else {
                    return Ok(limited);
                };
                let (head, body) = limited.into_parts();
                let text = body.bytes().await?;
                let page = readable(query, &String::from_utf8_lossy(&text));
                let page = page.map_err(|error| failed(error.into()))?;
                return Ok(HttpResponse::from_parts(head, page.into()));
            }
            let (head, body) = answer.into_parts();
            let (mut text, mut pieces) = (Vec::new(), body.bytes_stream());
            while let Some(piece) = pieces.next().await
                && text.len() < MAX_REFUSAL
            {
                text.extend_from_slice(&piece?);
            }
            let text = String::from_utf8_lossy(&text).into_owned();
            Ok(HttpResponse::from_parts(head, text.into()))
        })
    }
}

/// Prefix of the placeholder for a key that cannot be requested.
pub(super) const UNREADABLE: &str = "\u{fffd}unreadable ";
const SHOWN: usize = 1000;

/// Names on a list page: the page, an object, its key, the next page, and the request parameter for that page.
type Names = [&'static str; 5];
const S3: Names = ["ListBucketResult", "Contents", "Key", "NextContinuationToken", "continuation-token"];
const AZURE: Names = ["EnumerationResults", "Blob", "Name", "NextMarker", "marker"];

fn is_list(query: &str) -> bool {
    query.split('&').any(|pair| pair == "list-type=2" || pair == "comp=list")
}

/// A complete page without folder markers, with placeholders for keys that cannot be requested.
fn readable(query: &str, page: &str) -> Result<String, String> {
    let is_whole = |names: &Names| page.trim_end().ends_with(&format!("</{}>", names[0]));
    let Some([_, object, key, next, asked]) = [S3, AZURE].into_iter().find(is_whole) else {
        return Err(format!("the response is not a list: {}", page.chars().take(SHOWN).collect::<String>()));
    };
    let next = between(page, &format!("<{next}>"), &format!("</{next}>")).unwrap_or_default();
    let is_truncated = page.contains("<IsTruncated>true</IsTruncated>");
    let known = form_urlencoded::parse(query.as_bytes()).any(|(name, token)| name == asked && token == next);
    if is_truncated && next.is_empty() || known && !next.is_empty() {
        return Err("the list is incomplete: the response has no link to the next page".to_owned());
    }
    let (start, end) = (format!("<{object}>"), format!("</{object}>"));
    let mut objects = page.split(&start);
    let mut whole = objects.next().unwrap_or_default().to_owned();
    for rest in objects {
        let (inner, rest) = rest.split_once(&end).unwrap_or((rest, ""));
        if let Some(inner) = object_with_name(inner, key) {
            whole += &format!("{start}{inner}{end}");
        }
        whole += rest;
    }
    Ok(whole)
}

/// An object's element, with a placeholder if its key cannot be requested; `None` for a folder marker.
fn object_with_name(inner: &str, key: &str) -> Option<String> {
    let Some(text) = between(inner, &format!("<{key}"), &format!("</{key}>")) else {
        return Some(inner.to_owned()); // the crate rejects it
    };
    let (attributes, name) = text.split_once('>').unwrap_or(("", text));
    let plain = resolved(name);
    let is_empty = ["<Size>0<", "<Content-Length>0<"].iter().any(|size| inner.contains(size));
    if plain.ends_with('/') && is_empty {
        return None;
    }
    let is_known = attributes.is_empty() && !plain.contains(char::REPLACEMENT_CHARACTER);
    if is_known && Path::parse(&plain).is_ok_and(|path| path.as_ref() == plain) {
        return Some(inner.to_owned());
    }
    let shown: String = plain
        .chars()
        .map(|c| if c == '/' || c.is_control() { format!("%{:02X}", u32::from(c)) } else { c.to_string() })
        .collect();
    Some(inner.replace(&format!("<{key}{text}<"), &format!("<{key}>{UNREADABLE}{shown}<")))
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    Some(text.split_once(start)?.1.split_once(end)?.0)
}

/// A text with XML's character references resolved.
fn resolved(text: &str) -> String {
    let mut pieces = text.split("&#");
    let mut plain = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let resolved = piece.split_once(';').and_then(|(number, rest)| {
            let hex = number.strip_prefix('x').map(|digits| u32::from_str_radix(digits, 16));
            let number = hex.unwrap_or_else(|| number.parse()).ok().and_then(char::from_u32)?;
            Some(format!("{number}{rest}"))
        });
        plain += &resolved.unwrap_or_else(|| format!("&#{piece}"));
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn netrc_password_belongs_to_the_host() {
        let netrc = "# mine\nmachine a login x password y\nmachine b\n  login bob\n  password p#w\ndefault login d password e\n";
        let login = |host| login_in(netrc, host);
        let pair = |user: &str, password: &str| Some((user.to_owned(), password.to_owned()));
        assert_eq!(
            [login("a"), login("b"), login("c")],
            [pair("x", "y"), pair("bob", "p#w"), pair("d", "e")]
        );
        assert_eq!(login_in("machine a login x", "a"), None);
    }
}
