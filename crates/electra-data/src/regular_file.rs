//! Opening files that must be regular: a pipe would block, and a device may never end.

use std::fs::{File, Metadata};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Opens a file; an error if it is a pipe, socket or device.
pub(crate) fn open(path: &Path) -> Result<File> {
    match special_kind(&std::fs::metadata(path)?) {
        Some(kind) => Err(Error::new(ErrorKind::InvalidInput, format!("{kind}: must be a regular file"))),
        None => File::open(path),
    }
}

/// The bytes of a file; an error if it is a pipe, socket or device.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

pub(crate) fn special_kind(metadata: &Metadata) -> Option<&'static str> {
    let kind = metadata.file_type();
    let is_device = kind.is_char_device() || kind.is_block_device();
    [(kind.is_fifo(), "a pipe"), (kind.is_socket(), "a socket"), (is_device, "a device")]
        .into_iter()
        .find_map(|(is_it, name)| is_it.then_some(name))
}
