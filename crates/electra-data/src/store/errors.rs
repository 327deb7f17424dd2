//! A store's errors as one-line messages with a remedy.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use object_store::Error as StoreError;
use url::Url;

use crate::error::{Error, Result};

const SHOWN: usize = 240;

/// Metadata services that provide credentials to machines and containers in a cloud.
const METADATA_HOSTS: [&str; 6] = [
    "169.254.169.254",
    "169.254.170.2",
    "169.254.170.23",
    "[fd00:ec2::254]",
    "[fd00:ec2::23]",
    "metadata.google.internal",
];

/// Whether a metadata service has answered …
pub(super) static METADATA_ANSWERED: AtomicBool = AtomicBool::new(false);
/// … and this process has then sent a request with its credentials.
pub(super) static HAD_CREDENTIALS: AtomicBool = AtomicBool::new(false);

/// A rejected response. A retry would be useless.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    #[error("the response is longer than the {0} bytes requested; check the server and the file")]
    TooLong(u64),
    #[error(
        "the server redirects to another server, {0}; if you trust it, set ELECTRA_FAST_REDIRECT_HOSTS to its host \
         (not possible if .netrc has a password for the first server)"
    )]
    Redirect(String),
    #[error("too many redirects; check the URL")]
    Redirects,
    #[error("the store accepted the object but kept other bytes; remove the object and run again")]
    Replaced,
}

pub(super) fn is_transient(error: &StoreError) -> bool {
    let is_final = || {
        matches!(
            error,
            StoreError::NotFound { .. }
                | StoreError::PermissionDenied { .. }
                | StoreError::Unauthenticated { .. }
                | StoreError::Precondition { .. }
                | StoreError::NotSupported { .. }
                | StoreError::NotImplemented { .. }
                | StoreError::InvalidPath { .. }
        ) || refused(error).is_some()
            || lacks_bucket(error)
            || is_denied(error)
    };
    !lacks_credentials(error) && (metadata_host(error).is_some() || !is_final())
}

fn is_denied(error: &StoreError) -> bool {
    const SIGNS: [&str; 4] = ["status code: 403", "status code: 401", "(code: AccessDenied)", "(code: 403)"];
    let text = chain(error);
    SIGNS.iter().any(|sign| text.contains(sign))
}

fn refused(error: &StoreError) -> Option<&Refused> {
    causes(error).find_map(|cause| cause.downcast_ref())
}

/// The error and its causes, the innermost last.
fn causes(error: &StoreError) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error as &dyn std::error::Error), |cause| cause.source())
}

pub(super) fn explain(url: &str, error: &StoreError) -> Error {
    if let Some(refused) = refused(error) {
        return Error::Input(format!("{url}: {refused}"));
    }
    if lacks_credentials(error) {
        return Error::Input(format!("{url}: no credentials found; {}", remedy(url)));
    }
    let refused = |remedy: &str| {
        Error::Input(format!("{url}: the store refused the request ({}); {remedy}", said(error)))
    };
    match error {
        StoreError::NotFound { .. } => Error::NotFound { path: PathBuf::from(url), hint: not_found(url) },
        error if is_denied(error) => refused(match url.starts_with("http") {
            true => "check the credentials and their read permission; a web server's are in ~/.netrc",
            false => "check the credentials and their read and write permissions",
        }),
        StoreError::Precondition { .. } => Error::Input(format!(
            "{url}: replaced while in use; run again once no other program is writing to it"
        )),
        StoreError::NotSupported { .. } => refused("it must support range requests"),
        StoreError::NotImplemented { .. } => refused(
            "it must support conditional PUT (If-None-Match), which keeps two writers from overwriting each other",
        ),
        error if lacks_bucket(error) => Error::NotFound { path: PathBuf::from(url), hint: not_found(url) },
        error => Error::io(url, std::io::Error::other(said(error))),
    }
}

fn not_found(url: &str) -> String {
    let bucket = if url.starts_with("http") { "" } else { ", the bucket and the region" };
    format!("; check the URL{bucket}")
}

pub(super) fn remedy(url: &str) -> &'static str {
    match url.split(':').next() {
        Some("s3" | "s3a") => {
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (`aws configure export-credentials --format env` prints \
             them), or AWS_SKIP_SIGNATURE=true for a public bucket"
        }
        Some("gs") => {
            "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or GOOGLE_SKIP_SIGNATURE=true for a public bucket"
        }
        _ => "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    }
}

fn lacks_bucket(error: &StoreError) -> bool {
    let text = chain(error);
    ["<Code>NoSuchBucket<", "<Code>ContainerNotFound<"].iter().any(|sign| text.contains(sign))
}

/// Outside a cloud, the last resort is a metadata service that does not exist, unless it provided credentials before.
fn lacks_credentials(error: &StoreError) -> bool {
    metadata_host(error).is_some() && !HAD_CREDENTIALS.load(Ordering::Relaxed)
        || chain(error).contains("Account must be specified")
}

pub(super) fn is_metadata_host(host: &str) -> bool {
    METADATA_HOSTS.contains(&host)
}

/// The metadata service that the failed request was sent to, if any.
fn metadata_host(error: &StoreError) -> Option<String> {
    // "Error performing PUT http://169.254.169.254/latest/api/token in 1s"
    let url = causes(error).skip(1).find_map(|cause| {
        let text = cause.to_string();
        let word = text.strip_prefix("Error performing ")?.split(' ').nth(1)?;
        Url::parse(word).ok().filter(Url::has_host)
    })?;
    url.host_str().filter(|host| is_metadata_host(host)).map(str::to_owned)
}

/// A short one-line description: the code and message of an XML response, or else the innermost cause.
pub(super) fn said(error: &StoreError) -> String {
    let text = chain(error);
    let texts = causes(error).map(ToString::to_string);
    let innermost = texts.take_while(|text| !text.is_empty()).last().unwrap_or_default();
    let tag = |name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        rest.split_once("</").map(|(value, _)| value)
    };
    let host = metadata_host(error).map_or(String::new(), |host| format!("no new credentials from {host}: "));
    let short = match (tag("Code"), tag("Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(code), None) => code.to_owned(),
        _ => innermost,
    };
    let line = (host + &short).split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// The texts of the error and its causes, without repetitions.
pub(super) fn chain(error: &StoreError) -> String {
    causes(error).skip(1).fold(error.to_string(), |text, cause| {
        let more = cause.to_string();
        if text.contains(&more) { text } else { format!("{text}: {more}") }
    })
}

/// An error if a URL has a user name, a password or a query.
pub fn check_url(url: &str) -> Result<()> {
    let Some((scheme, rest)) = url.split_once("://") else { return Ok(()) };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or(rest);
    // A key may contain a slash; the part before it then looks like a port.
    let port = authority.rsplit_once(':').map_or("", |(_, port)| port);
    let is_port = port.ends_with(']') || port.bytes().all(|byte| byte.is_ascii_digit());
    let names_container = scheme.starts_with("abfs") && !authority.contains(':');
    let has_user = authority.contains('@') && !names_container || !is_port && rest.contains('@');
    let (name, query) = rest.split_once('?').unwrap_or((rest, ""));
    let name = match name.rsplit_once('@') {
        Some((_, name)) if has_user => format!("***@{name}"),
        None if has_user => "***".to_owned(),
        _ => name.to_owned(),
    };
    let remedy = match scheme {
        "s3" | "s3a" | "gs" => remedy(url),
        _ if authority.ends_with(".amazonaws.com") => remedy("s3:"),
        _ if scheme.starts_with('a') || authority.ends_with(".windows.net") => remedy("az:"),
        _ if has_user => "write it to ~/.netrc (machine HOST login USER password PASSWORD)",
        _ => "download the file",
    };
    if has_user {
        return Err(Error::Input(format!(
            "{scheme}://{name}: a password or key in a URL would be shown and stored; remove it and {remedy}"
        )));
    }
    // Elsewhere ? is a wildcard in the names of inputs.
    let is_query = query.split_once('=').is_some_and(|(key, _)| {
        key.starts_with(|c: char| c.is_ascii_alphabetic())
            && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    });
    if is_query || scheme.starts_with("http") && rest.contains('?') {
        return Err(Error::Input(format!(
            "{scheme}://{name}?***: a URL's query is not sent, and a signature would be shown and stored; remove it \
             and {remedy}, or write a ? in a name as %3F"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_refused_and_not_printed() {
        for (url, shown, remedy) in [
            ("http://bob:SECRET@host:80/x", "http://***@host:80/x: ", "~/.netrc"),
            ("https://SECRET@host", "https://***@host: ", "~/.netrc"),
            ("s3://KEY:SECRET@bucket/x", "s3://***@bucket/x: ", "AWS_SECRET_ACCESS_KEY"),
            ("s3://KEY:SEC/RET+@bucket/x", "s3://***@bucket/x: ", "AWS_SECRET_ACCESS_KEY"),
            ("http://bob:SECRET?@host/x", "http://***: ", "~/.netrc"),
            ("http://bob:SECRET#@host/x", "http://***@host/x: ", "~/.netrc"),
            ("gs://SECRET@bucket/x", "gs://***@bucket/x: ", "GOOGLE_APPLICATION_CREDENTIALS"),
            ("abfs://box:SECRET@a.dfs.core.windows.net/x", "abfs://***@a.dfs", "AZURE_STORAGE_ACCOUNT_KEY"),
            (
                "https://b.s3.amazonaws.com/x?X-Amz-Signature=SECRET",
                "https://b.s3.amazonaws.com/x?***: ",
                "AWS_",
            ),
            ("https://a.blob.core.windows.net/c/x?sig=SECRET", "https://a.blob", "AZURE_STORAGE_SAS_TOKEN"),
            ("https://bob:SECRET@host/x?sig=SECRET@SECRET", "https://***@host/x: ", "~/.netrc"),
            ("https://host/x?SECRET", "https://host/x?***: ", "download"),
            ("az://c/x?sig=SECRET", "az://c/x?***: ", "AZURE_STORAGE_SAS_TOKEN"),
            ("s3://b/x?X-Amz-Signature=SECRET", "s3://b/x?***: ", "AWS_SECRET_ACCESS_KEY"),
        ] {
            let error = check_url(url).unwrap_err().to_string();
            assert!(error.starts_with(shown) && error.contains(remedy), "{error}");
            assert!(!error.replace("AWS_SECRET_ACCESS_KEY", "").contains("SEC"), "{error}");
        }
        for url in [
            "s3://bucket/a@b/c?.txt",
            "s3://bucket/part-?-x=1/*",
            "http://host:80/a@b:c",
            "http://[::1]/a@b",
            "http://[::1]:80/x",
            "abfss://container@account.dfs.core.windows.net/x",
            "/a/b?c=d",
        ] {
            check_url(url).unwrap();
        }
    }
}
