//! Verifying a corpus with the lists that `prepare` writes beside it. Its shards and tables: `format`.

use std::path::Path;

use super::changes;
use super::place::{Place, manifest_of};
use crate::error::{Error, Result};
use crate::format::{self, Verified, hash_hex};
use crate::input::SKIPPED;

/// Verifies every checksum, length and table of a corpus and of its validation split.
///
/// Damage to files is collected; a manifest that is missing or damaged is an error.
pub fn verify(dir: &Path) -> Result<Verified> {
    let mut verified = format::verify(dir)?;
    let (place, manifest) = (Place::open(dir)?, manifest_of(dir)?);
    let mut note = |found: Result<bool>| {
        verified.num_files += u64::from(!matches!(found, Ok(false)));
        verified.damaged.extend(found.err().map(|error| error.to_string()));
    };
    note(changes::read(dir).map(|list| list.is_some()));
    note(place.read(SKIPPED).and_then(|list| match (list, &manifest.skipped_hash) {
        (Some(list), Some(hash)) if hash_hex(&list) != *hash => Err(Error::Damaged {
            path: dir.join(SKIPPED),
            reason: "not the bytes written; remove it".to_owned(),
        }),
        (list, _) => Ok(list.is_some()),
    }));
    Ok(verified)
}
