"""From text to batches: prepare a corpus, inspect it, load packed and masked rows. The work is done in Rust."""
