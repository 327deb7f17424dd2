//! Sending requests: the length of responses is limited, and a web server cannot redirect requests to another one.

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
use object_store::{ClientOptions, Result};
use reqwest::redirect::{Action, Attempt, Policy};
use url::Url;

use super::errors::{HAD_CREDENTIALS, METADATA_ANSWERED, Refused, is_metadata_host};
use super::list;

/// The longest response: a list, or a whole object. Ranges and objects have tighter limits where they are read.
const MAX_ANSWER: usize = 1 << 30;
/// The longest part of an error response that is read. Only its code and message are shown.
const MAX_REFUSAL: usize = 64 << 10;

/// Timeout of connecting to a web server, the same as the crate's for other stores.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a request may wait for more bytes before it counts as stalled. There is no timeout for a whole request:
/// over a slow line, requests in flight take long and would be repeated forever.
pub(super) const TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 4 } else { 30 });
/// The same while writing, where sending the request counts as waiting: four parts of 8 MiB over 2.5 Mbit/s.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 4 } else { 120 });
const MAX_REDIRECTS: usize = 10;

/// Makes the clients of a store.
#[derive(Debug)]
pub(super) enum Connector {
    /// Clients of a cloud store, or of its configured endpoint.
    Cloud,
    /// Clients of the web server of this URL.
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

/// A client that follows redirects within the server and to hosts that the user trusts. If `.netrc` has a password for
/// the server, it sends that and follows redirects within the server only.
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

/// The user and the password of a host in the file `$NETRC` or `~/.netrc`, as for curl.
fn password_for(host: &str) -> Option<(String, String)> {
    let in_home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".netrc"));
    let path = std::env::var_os("NETRC").map(PathBuf::from).or_else(in_home)?;
    login_in(&std::fs::read_to_string(path).ok()?, host)
}

/// The first entry for a host.
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

/// A client that limits the length of responses, because the crate reads lists and error responses as a whole, and
/// checks pages of lists.
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
                let Some(query) = uri.query().filter(|query| list::is_asked_for(query)) else {
                    return Ok(limited);
                };
                let (head, body) = limited.into_parts();
                let text = body.bytes().await?;
                let page = list::readable(query, &String::from_utf8_lossy(&text));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_that_of_the_host() {
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
