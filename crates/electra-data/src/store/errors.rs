//! A store's errors in one line each, with the remedy.

use std::error::Error as _;
use std::path::PathBuf;

use object_store::Error as StoreError;

use crate::error::Error;

/// The longest part of a server's response that is shown.
const SHOWN: usize = 240;

/// A response that is rejected, and would be again.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    #[error(
        "the answer is longer than {0} bytes, the most that was asked for; the server or what it serves is wrong"
    )]
    TooLong(u64),
    #[error(
        "the server redirects to {0}, which is another one; if you trust it, set ELECTRA_FAST_REDIRECT_HOSTS to its \
         host (of no use where .netrc has a password of the first)"
    )]
    Redirect(String),
    #[error("the server redirects again and again; check the URL")]
    Redirects,
}

/// Whether the same request may succeed later.
pub(super) fn is_transient(error: &StoreError) -> bool {
    refused(error).is_none()
        && !matches!(
            error,
            StoreError::NotFound { .. }
                | StoreError::PermissionDenied { .. }
                | StoreError::Unauthenticated { .. }
                | StoreError::Precondition { .. }
                | StoreError::NotSupported { .. }
                | StoreError::NotImplemented { .. }
                | StoreError::InvalidPath { .. }
        )
        && !lacks_bucket(error)
        && !lacks_credentials(error)
}

/// Why this crate rejected the response.
fn refused(error: &StoreError) -> Option<&Refused> {
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(refused) = inner.downcast_ref() {
            return Some(refused);
        }
        cause = inner.source();
    }
    None
}

/// The error of a request for `url`.
pub(super) fn explain(url: &str, error: &StoreError) -> Error {
    if let Some(refused) = refused(error) {
        return Error::Input(format!("{url}: {refused}"));
    }
    let refused =
        |remedy: &str| Error::Input(format!("{url}: the store refuses it ({}); {remedy}", said(error)));
    match error {
        StoreError::NotFound { .. } => Error::NotFound { path: PathBuf::from(url), hint: not_found(url) },
        StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => {
            refused(match url.starts_with("http") {
                true => "check the credentials and what they may read; a web server's are in ~/.netrc",
                false => "check the credentials and what they may read and write",
            })
        }
        StoreError::Precondition { .. } => Error::Input(format!(
            "{url}: it was replaced while it was in use; run again when nothing changes it"
        )),
        StoreError::NotSupported { .. } => refused("it must serve ranges of bytes"),
        StoreError::NotImplemented { .. } => refused(
            "it must support conditional PUT (If-None-Match), so that two writers cannot overwrite each other",
        ),
        error if lacks_bucket(error) => Error::NotFound { path: PathBuf::from(url), hint: not_found(url) },
        error if lacks_credentials(error) => {
            Error::Input(format!("{url}: no credentials were found; {}", remedy(url)))
        }
        error => Error::io(url, std::io::Error::other(said(error))),
    }
}

fn not_found(url: &str) -> String {
    let bucket = if url.starts_with("http") { "" } else { ", the bucket and the region" };
    format!("; check the URL{bucket}")
}

fn remedy(url: &str) -> &'static str {
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

/// Whether a list failed because there is no such bucket or container.
fn lacks_bucket(error: &StoreError) -> bool {
    let text = chain(error);
    ["<Code>NoSuchBucket<", "<Code>ContainerNotFound<"].iter().any(|sign| text.contains(sign))
}

/// Outside of a cloud, the last resort of all providers is a metadata server that is not there.
fn lacks_credentials(error: &StoreError) -> bool {
    let text = chain(error);
    [
        "169.254.",
        "metadata.google.internal",
        "metadata/instance",
        "Account must be specified",
        "instance credentials",
    ]
    .iter()
    .any(|sign| text.contains(sign))
}

/// The error in one short line: the code and message of an XML response, or else the innermost cause.
pub(super) fn said(error: &StoreError) -> String {
    let text = chain(error);
    let mut innermost: &dyn std::error::Error = error;
    while let Some(cause) = innermost.source().filter(|cause| !cause.to_string().is_empty()) {
        innermost = cause;
    }
    let tag = |name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        rest.split_once("</").map(|(value, _)| value)
    };
    let short = match (tag("Code"), tag("Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(code), None) => code.to_owned(),
        _ => innermost.to_string(),
    };
    let line = short.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// The texts of the error and of its causes that are not part of it already.
pub(super) fn chain(error: &StoreError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let more = inner.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> StoreError {
        StoreError::Generic { store: "S3", source: text.to_owned().into() }
    }

    #[test]
    fn each_error_is_one_line_with_its_remedy() {
        let missing =
            generic("Error performing PUT http://169.254.169.254/latest/api/token in 1s, after 2 retries");
        assert!(!is_transient(&missing));
        let line = explain("s3://b/x", &missing).to_string();
        assert!(line.starts_with("s3://b/x: no credentials were found; set AWS_ACCESS_KEY_ID"), "{line}");
        let xml =
            generic("answer:\n<Error>\n<Code>InvalidRange</Code><Message>not\n so far</Message></Error>");
        assert!(is_transient(&xml));
        assert_eq!(explain("s3://b/x", &xml).to_string(), "s3://b/x: InvalidRange: not so far");
        let denied = StoreError::PermissionDenied { path: "x".into(), source: "403 Forbidden".into() };
        assert!(
            explain("gs://b/x", &denied).to_string().contains("check the credentials and what they may read")
        );
        let absent = StoreError::NotFound { path: "x".into(), source: "404".into() };
        assert_eq!(explain("http://h/x", &absent).to_string(), "http://h/x: not found; check the URL");
        assert!(said(&generic(&"x".repeat(1000))).chars().count() < 300);
    }
}
