//! Input files in object stores: finding them by URL, folder or glob, and opening them.

use std::io::Write;

use serde::{Deserialize, Serialize};

use super::raw_file::{Failure, StoredFile};
use super::saved_dataset::is_hidden;
use crate::error::{Error, Result};
use crate::store::{Cancel, Object, Store, check_url};
use crate::threads::lock;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StoredObject {
    pub url: String,
    #[serde(flatten)]
    pub listed: Object,
    #[serde(skip)]
    store: Option<Store>,
    #[serde(skip)]
    pub cancel: Cancel,
    #[serde(skip)]
    failure: Failure,
}

impl StoredObject {
    pub fn failure(&self) -> Option<Error> {
        let failure = lock(&self.failure);
        failure.as_ref().map(|error| match error {
            Error::Interrupted => Error::Interrupted,
            Error::NotFound { path, hint } => Error::NotFound { path: path.clone(), hint: hint.clone() },
            Error::Io { path, source } => {
                Error::io(path.clone(), std::io::Error::new(source.kind(), source.to_string()))
            }
            other => Error::Input(other.to_string()),
        })
    }

    pub(super) fn open(&self) -> Result<StoredFile> {
        let store = match &self.store {
            Some(store) => store.at(&self.url)?,
            None => Store::open(&self.url)?,
        };
        Ok(StoredFile::new(store, self.listed.clone(), self.cancel.clone(), self.failure.clone()))
    }
}

/// The objects of a URL: one object, a folder or a glob, which with `visible` matches no hidden objects.
pub(super) fn find(url: &str, visible: bool) -> Result<Vec<StoredObject>> {
    check_url(url)?;
    let is_glob = |part: &str| part.contains(['*', '?', '[']);
    // The part of the URL before the first glob is a folder.
    let folder = match url.split('/').position(is_glob) {
        Some(count) => url.split('/').take(count).collect::<Vec<_>>().join("/"),
        None => url.to_owned(),
    };
    let store = Store::open(&folder)?;
    if folder.starts_with("http") {
        if folder.len() < url.len() {
            return Err(Error::Input(format!(
                "{url}: a web server cannot list files; pass the URL of each file"
            )));
        }
        return Ok(vec![object_of(&store, url, store.head("")?)]);
    }
    if folder.len() < url.len() {
        return matching(&store, &folder, url, visible);
    }
    let is_bucket = url.split('/').count() == 3;
    if is_bucket {
        return Ok(below(&store, &folder, objects_in(&store)?)); // some stores respond as if it were an object
    }
    match store.head("") {
        Ok(object) => Ok(vec![object_of(&store, url, object)]),
        Err(Error::NotFound { path, .. }) => {
            let objects = below(&store, &folder, objects_in(&store)?);
            let hint = "; No files matched: check the URL or the glob".to_owned();
            if objects.is_empty() { Err(Error::NotFound { path, hint }) } else { Ok(objects) }
        }
        Err(error) => Err(error),
    }
}

/// The objects of a folder. Objects that cannot be requested are skipped with a warning.
fn objects_in(store: &Store) -> Result<Vec<Object>> {
    let (objects, refused) = store.list_all("")?;
    if let Some(first) = refused.first() {
        let (url, count) = (store.url(), refused.len());
        // Not `eprintln`, which panics where standard error is closed.
        let _ = writeln!(
            std::io::stderr(),
            "warning: {url}: skipped {count} objects whose names have an empty part (//), . or .., a slash at the \
             end or control characters ({first}); rename them"
        );
    }
    Ok(objects)
}

fn below(store: &Store, folder: &str, objects: Vec<Object>) -> Vec<StoredObject> {
    let visible = |object: &Object| object.name.split('/').all(|part| !part.is_empty() && !is_hidden(part));
    let objects = objects.into_iter().filter(visible);
    objects.map(|object| object_of(store, &url_in(folder, &object.name), object)).collect()
}

/// The objects of a folder that match a glob, and the objects below a matching folder.
fn matching(store: &Store, folder: &str, url: &str, visible: bool) -> Result<Vec<StoredObject>> {
    let rest = url[folder.len()..].trim_start_matches('/');
    let bad = |error: &dyn std::fmt::Display| Error::Input(format!("{url}: {error}"));
    let pattern = glob::Pattern::new(rest).map_err(|e| bad(&e))?;
    let below_it = glob::Pattern::new(&format!("{rest}/**/*")).map_err(|e| bad(&e))?;
    let options = glob::MatchOptions {
        require_literal_separator: true,
        require_literal_leading_dot: visible,
        ..glob::MatchOptions::new()
    };
    let objects = objects_in(store)?.into_iter().filter(|object| {
        [&pattern, &below_it].iter().any(|pattern| pattern.matches_with(&object.name, options))
    });
    Ok(objects.map(|object| object_of(store, &url_in(folder, &object.name), object)).collect())
}

fn url_in(folder: &str, name: &str) -> String {
    format!("{folder}/{}", name.replace('%', "%25").replace('#', "%23").replace('?', "%3F"))
}

fn object_of(store: &Store, url: &str, object: Object) -> StoredObject {
    let (url, listed) = (url.to_owned(), Object { name: String::new(), ..object });
    let (cancel, failure) = (Cancel::default(), Failure::default());
    StoredObject { url, listed, store: Some(store.clone()), cancel, failure }
}
