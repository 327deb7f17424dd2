//! What a run of `prepare` leaves in its folder so that the next one can go on.

/// The folder of unit records; its presence without a manifest means unfinished work.
pub(crate) const PARTS: &str = "parts";
