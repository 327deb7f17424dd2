//! URLs that hold a secret. It would be printed in errors and kept in configurations and checkpoints, which others can
//! read, so such a URL is refused before anything is done with it, and never printed.

use super::errors::remedy;
use crate::error::{Error, Result};

/// An error if a URL has a user name, a password or a query.
pub fn check_url(url: &str) -> Result<()> {
    let Some((scheme, rest)) = url.split_once("://") else { return Ok(()) };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or(rest);
    // A key may contain a slash; then the part before it looks like a port.
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
        _ => "download what it signs",
    };
    if has_user {
        return Err(Error::Input(format!(
            "{scheme}://{name}: a password or key in a URL would be shown and stored; leave it out and {remedy}"
        )));
    }
    // Elsewhere ? is a wildcard in the names of inputs.
    let is_query = query.split_once('=').is_some_and(|(key, _)| {
        key.starts_with(|c: char| c.is_ascii_alphabetic())
            && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    });
    if is_query || scheme.starts_with("http") && rest.contains('?') {
        return Err(Error::Input(format!(
            "{scheme}://{name}?***: a URL's query is not sent, and a signature would be shown and stored; leave it out \
             and {remedy}, or write a ? in a name as %3F"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_refused_and_not_printed() {
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
