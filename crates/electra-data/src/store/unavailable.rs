//! What stands in for a store in a build without the feature `object-store`: errors that say so.

use std::convert::Infallible;

use crossbeam_channel::Receiver;

use super::{Cancel, Object, Request, check_url};
use crate::error::{Error, Result};

/// No store can be opened.
#[derive(Clone, Debug)]
pub(crate) struct Store(Infallible);

impl Store {
    pub fn open(url: &str) -> Result<Self> {
        check_url(url)?;
        Err(Error::Input(format!(
            "{url}: this build reads no object stores; build it with the feature object-store"
        )))
    }

    pub fn at(&self, _: &str) -> Result<Self> {
        match self.0 {}
    }

    pub fn start(&self, _: Request) -> Result<Receiver<Result<Vec<u8>>>> {
        match self.0 {}
    }

    pub fn url(&self) -> &str {
        match self.0 {}
    }

    pub fn read(&self, _: &str, _: u64) -> Result<Vec<u8>> {
        match self.0 {}
    }

    pub fn head(&self, _: &str) -> Result<Object> {
        match self.0 {}
    }

    pub fn list(&self, _: &str) -> Result<Vec<Object>> {
        match self.0 {}
    }

    pub fn read_ranges(
        &self,
        _: &[Request],
        _: &Cancel,
        _: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        match self.0 {}
    }
}
