//! Object stores: reads ranges of objects at `s3://`, `gs://`, `az://` and `http(s)://`, and writes to all but the last.
//!
//! Every location in this crate is a path; a path that begins with a URL scheme is in a store. Only this folder
//! uses the crate `object_store`.

mod cancel;
mod client;
mod connection;
mod errors;
#[cfg(test)]
pub(crate) mod test_server;
#[cfg(test)]
mod tests;
mod upload;

use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

pub(crate) use cancel::Cancel;
pub use cancel::attended;
pub(crate) use client::Store;
pub use client::guard_environment;
pub use errors::check_url;
pub use upload::{delete_objects, download, list_objects, upload};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Object {
    /// Below the store's URL.
    #[serde(skip)]
    pub name: String,
    pub size: u64,
    /// The ETag, if the store sends one.
    pub version: Option<String>,
    /// In nanoseconds since 1970.
    #[serde(default)]
    pub modified: Option<i64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub name: String,
    pub range: Range<u64>,
    pub version: Option<String>,
}

const SCHEMES: [&str; 7] = ["s3", "s3a", "gs", "az", "azure", "http", "https"];

/// The URL that a path stands for, or `None` for a local path.
///
/// Path libraries merge slashes, so a URL may arrive as `s3:/bucket/folder`.
pub fn url_of(path: &Path) -> Option<String> {
    let text = path.to_str()?;
    let (scheme, rest) = text.split_once(":/")?;
    let known = SCHEMES.contains(&scheme);
    (known || rest.starts_with('/') && scheme.chars().all(|c| c.is_ascii_alphanumeric()) && scheme.len() > 1)
        .then(|| format!("{scheme}://{}", rest.trim_start_matches('/').trim_end_matches('/')))
}
