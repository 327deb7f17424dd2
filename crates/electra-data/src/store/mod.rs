//! Object stores: reading ranges of objects at `s3://`, `gs://`, `az://` and `http(s)://`, and writing all but the last.
//!
//! A location is a path everywhere in this crate; one that begins with a URL's scheme lies in a store. This folder
//! is the only one that knows the crate `object_store`.

mod cancel;
mod client;
mod connection;
mod errors;
mod list;
mod secrets;
#[cfg(test)]
pub(crate) mod test_server;
#[cfg(test)]
mod tests;
mod upload;

use std::ops::Range;
use std::path::Path;

pub(crate) use cancel::Cancel;
pub use cancel::attended;
pub(crate) use client::Store;
pub use client::guard_environment;
pub use secrets::check_url;
pub use upload::{delete_objects, download, list_objects, upload};

/// An object in a store.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    /// Its name below the store's URL.
    pub name: String,
    /// Its length in bytes.
    pub size: u64,
    /// The identifier of its version, if the store gives one.
    pub version: Option<String>,
    /// When it was last modified, in nanoseconds since 1970.
    pub modified: Option<i64>,
}

/// A range of an object's bytes.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// The object's name below the store's URL.
    pub name: String,
    /// The bytes.
    pub range: Range<u64>,
    /// The version that is wanted.
    pub version: Option<String>,
}

/// The schemes of URLs that can be read.
const SCHEMES: [&str; 7] = ["s3", "s3a", "gs", "az", "azure", "http", "https"];

/// The URL that a path is, or `None` for a local path.
///
/// Libraries of paths merge slashes, so that a URL may arrive as `s3:/bucket/folder`.
pub fn url_of(path: &Path) -> Option<String> {
    let text = path.to_str()?;
    let (scheme, rest) = text.split_once(":/")?;
    let known = SCHEMES.contains(&scheme);
    (known || rest.starts_with('/') && scheme.chars().all(|c| c.is_ascii_alphanumeric()) && scheme.len() > 1)
        .then(|| format!("{scheme}://{}", rest.trim_start_matches('/').trim_end_matches('/')))
}
