//! Reading zstd with long windows. A frame's window is the distance of its longest back-reference, which the reader keeps
//! in memory: 8 MiB or less by default, 2 GiB with `zstd --long=31`, as used for the largest forum dumps.

use std::io::{BufRead, Error as IoError, Read, Result as IoResult};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use zstd::stream::read::Decoder;

const MAX_WINDOW_LOG: u32 = 31;
/// Files with a larger window are read one at a time, which bounds the memory of parallel readers.
const SMALL_WINDOW: u64 = 128 << 20;
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The process that reads a file with a large window, or 0. Not a lock, because a fork could leave it held.
static READER: AtomicU32 = AtomicU32::new(0);

pub(super) struct WindowedReader<R: BufRead> {
    decoder: Decoder<'static, R>,
    _turn: Option<Turn>,
}

impl<R: BufRead> WindowedReader<R> {
    /// If this file has a large window, waits until no other such file is being read.
    pub fn new(input: R, window: u64) -> IoResult<Self> {
        if window > 1 << MAX_WINDOW_LOG {
            return Err(IoError::other(TOO_LARGE));
        }
        let mut decoder = Decoder::with_buffer(input)?;
        decoder.window_log_max(MAX_WINDOW_LOG)?;
        Ok(Self { decoder, _turn: (window > SMALL_WINDOW).then(Turn::wait) })
    }
}

impl<R: BufRead> Read for WindowedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> IoResult<usize> {
        self.decoder.read(buffer)
    }
}

struct Turn;

impl Turn {
    fn wait() -> Self {
        let process = std::process::id();
        loop {
            let reader = READER.load(Ordering::Acquire);
            let is_free = reader != process; // the id of another process was inherited by a fork
            if is_free
                && READER.compare_exchange(reader, process, Ordering::AcqRel, Ordering::Acquire).is_ok()
            {
                return Self;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        READER.store(0, Ordering::Release);
    }
}

/// The window, in bytes, of the first frame with data, if that frame begins in `head`.
pub(super) fn window_of(mut head: &[u8]) -> Option<u64> {
    loop {
        let (magic, rest) = head.split_first_chunk()?;
        match u32::from_le_bytes(*magic) {
            0xfd2f_b528 => return frame_window(rest),
            0x184d_2a50..=0x184d_2a5f => {
                let (length, rest) = rest.split_first_chunk()?;
                head = rest.get(u32::from_le_bytes(*length) as usize..)?;
            }
            _ => return None,
        }
    }
}

fn frame_window(header: &[u8]) -> Option<u64> {
    let (&descriptor, rest) = header.split_first()?;
    if descriptor & 0x20 == 0 {
        let (exponent, mantissa) = (rest.first()? >> 3, rest.first()? & 7);
        let base = 1_u64 << (10 + exponent);
        return Some(base + base / 8 * u64::from(mantissa));
    }
    // A single segment: the window is its whole content.
    let dictionary_bytes = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let (size_bytes, offset) = [(1, 0), (2, 256), (4, 0), (8, 0)][usize::from(descriptor >> 6)];
    let bytes = rest.get(dictionary_bytes..)?.get(..size_bytes)?;
    Some(offset + bytes.iter().rev().fold(0, |size, &byte| size << 8 | u64::from(byte)))
}

const TOO_LARGE: &str = "too much memory";

/// The remedy for an error of the decoder that does not indicate damage.
pub(super) fn remedy_of(error: &IoError) -> Option<String> {
    let text = error.to_string();
    let remedy = if text.contains(TOO_LARGE) {
        "has a window of more than 2 GiB; compress it again with `zstd --long=31` or less"
    } else if text.contains("not enough memory") {
        "has a window that does not fit into memory (up to 2 GiB); free some, or decompress it elsewhere with \
         `zstd -d --long=31`"
    } else if text.contains("Dictionary mismatch") {
        "needs the dictionary that it was compressed with; decompress it with `zstd -d -D DICTIONARY`"
    } else {
        return None;
    };
    Some(remedy.to_owned())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn packed(text: &[u8], window_log: u32) -> Vec<u8> {
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
        encoder.long_distance_matching(true).unwrap();
        encoder.window_log(window_log).unwrap();
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn long_windows_are_read_in_turn() {
        let skippable = [&[0x53, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"abc"].concat();
        for window_log in [20, 28, 31] {
            for bytes in [packed(b"text", window_log), [&*skippable, &packed(b"text", window_log)].concat()] {
                assert_eq!(window_of(&bytes), Some(1 << window_log));
                std::thread::scope(|scope| {
                    for _ in 0..3 {
                        scope.spawn(|| {
                            let mut text = String::new();
                            let mut reader = WindowedReader::new(&*bytes, 1 << window_log).unwrap();
                            reader.read_to_string(&mut text).unwrap();
                            assert_eq!(text, "text");
                        });
                    }
                });
            }
        }
        let single = zstd::bulk::compress(&[b'x'; 70_000], 1).unwrap();
        assert_eq!(window_of(&single), Some(70_000));
        assert_eq!((window_of(&single[..5]), window_of(b"")), (None, None));
    }

    #[test]
    fn errors_without_damage_have_a_remedy() {
        let remedy = |bytes: &[u8]| {
            let reader = WindowedReader::new(bytes, window_of(bytes).unwrap_or(0));
            let error = reader.and_then(|mut reader| reader.read_to_end(&mut Vec::new())).unwrap_err();
            remedy_of(&error).unwrap_or_else(|| error.to_string())
        };
        let mut huge = packed(b"text", 31);
        huge[5] = (32 - 10) << 3;
        assert!(remedy(&huge).contains("zstd --long=31"), "{}", remedy(&huge));
        // Only the decoder knows a later frame's window.
        let later = [packed(b"text", 20), huge].concat();
        assert!(remedy(&later).contains("zstd --long=31"), "{}", remedy(&later));
        let mut encoder = zstd::bulk::Compressor::with_dictionary(1, &b"a dictionary ".repeat(20)).unwrap();
        let mut alien = encoder.compress(b"text").unwrap();
        alien.splice(4..5, [alien[4] | 1, 7]); // with the identifier 7
        assert!(remedy(&alien).contains("-D DICTIONARY"), "{}", remedy(&alien));
        let mut damaged = packed(&b"text".repeat(100), 20);
        damaged[8] ^= 0x55;
        assert!(!remedy(&damaged).contains("zstd -"), "{}", remedy(&damaged));
    }
}
