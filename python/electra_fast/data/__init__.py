"""Text to batches: prepare a corpus, look at it, load masked and packed rows of it; the work is done in Rust."""
