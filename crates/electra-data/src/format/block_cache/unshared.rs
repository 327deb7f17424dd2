//! Stands in for `locks` elsewhere than on Linux, where a cache has a single reader and evicts nothing
//! (`BlockCache::open`): it needs no locks, and never gets to punch a hole.

use std::fs::File;
use std::io::{ErrorKind, Result};
use std::ops::Range;
use std::time::Duration;

pub(super) const PATIENCE: Duration = Duration::from_secs(30);

pub(super) fn try_lock(_: &File, _: Range<u64>) -> Result<bool> {
    Ok(true)
}

pub(super) fn lock(_: &File, _: u64) -> Result<()> {
    Ok(())
}

pub(super) fn unlock(_: &File, _: Range<u64>) -> Result<()> {
    Ok(())
}

pub(super) fn is_locked(_: &File, _: u64) -> Result<bool> {
    Ok(false)
}

pub(super) fn allocate(_: &File, _: Range<u64>) -> Result<()> {
    Ok(())
}

pub(super) fn punch_hole(_: &File, _: Range<u64>) -> Result<()> {
    Err(ErrorKind::Unsupported.into())
}
