//! Text that is not UTF-8: UTF-16 with a byte order mark is decoded, UTF-32 and UTF-16 without a mark are refused.

use std::io::{BufRead, Read, Result as IoResult};
use std::path::Path;

use crate::error::{Error, Result};

pub(super) const HEAD_BYTES: usize = 4 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Utf8,
    Utf16 { big_endian: bool },
}

impl Encoding {
    /// The encoding of a file that begins with `head`, or an error with the command that converts the file.
    pub fn of(head: &[u8], path: &Path) -> Result<Self> {
        let head = &head[..head.len().min(HEAD_BYTES)];
        let (name, convert_from) = match head {
            [0xff, 0xfe, 0, 0, ..] | [0, 0, 0xfe, 0xff, ..] => ("UTF-32", "UTF-32"),
            [0xff, 0xfe, ..] => return Ok(Self::Utf16 { big_endian: false }),
            [0xfe, 0xff, ..] => return Ok(Self::Utf16 { big_endian: true }),
            // Two adjacent bytes of every four are nearly always 0.
            _ if zeros(head).into_iter().all(|count| count >= 2 && count * 5 >= head.len()) => {
                let is_big = head.iter().step_by(4).all(|&byte| byte == 0);
                ("UTF-32 without a byte order mark", if is_big { "UTF-32BE" } else { "UTF-32LE" })
            }
            _ => match utf16_likeness(head) {
                [0, 0] => return Ok(Self::Utf8),
                [little, big] => {
                    ("UTF-16 without a byte order mark", if big > little { "UTF-16BE" } else { "UTF-16LE" })
                }
            },
        };
        let convert = format!("iconv -f {convert_from} -t UTF-8 {} > NEW-FILE", path.display());
        Err(Error::at(path, format!("looks like {name}; convert it to UTF-8: {convert}")))
    }
}

fn zeros(head: &[u8]) -> [usize; 2] {
    [0, 1].map(|first| head.iter().skip(first).step_by(2).filter(|&&byte| byte == 0).count())
}

/// The number of plausible characters if the bytes are UTF-16, little-endian or big-endian; 0 if they are not UTF-16
/// text. In UTF-16, spaces, line ends and Latin letters have a zero byte; text in other encodings has none.
fn utf16_likeness(head: &[u8]) -> [usize; 2] {
    let num_zeros: usize = zeros(head).iter().sum();
    // The head may end within a character.
    let is_utf8 = std::str::from_utf8(head).map_or_else(|error| error.error_len().is_none(), |_| true);
    if num_zeros == 0 || (is_utf8 && (num_zeros < 2 || num_zeros * 100 < head.len())) {
        return [0, 0];
    }
    [false, true].map(|big_endian| {
        let units = head.as_chunks::<2>().0.iter().map(|&pair| unit(pair, big_endian));
        let mut characters: Vec<char> = char::decode_utf16(units).map(|c| c.unwrap_or('\0')).collect();
        characters.pop(); // its second half may be missing
        let makes_sense =
            |c: &&char| c.is_alphanumeric() || c.is_ascii_graphic() || c.is_whitespace() || **c > '\u{2000}';
        let likely = characters.iter().filter(makes_sense).count();
        let is_text = characters.iter().any(char::is_ascii) && !characters.contains(&'\0');
        if is_text && likely * 10 >= characters.len() * 9 { likely } else { 0 }
    })
}

fn unit(pair: [u8; 2], big_endian: bool) -> u16 {
    if big_endian { u16::from_be_bytes(pair) } else { u16::from_le_bytes(pair) }
}

/// UTF-8 from UTF-16. An unpaired surrogate becomes a byte that is invalid in UTF-8, which `text` reports or replaces.
pub(super) struct Utf16Reader<R> {
    input: R,
    big_endian: bool,
    /// Bytes of an incomplete unit or surrogate pair.
    rest: Vec<u8>,
    decoded: Vec<u8>,
    start: usize,
}

impl<R: BufRead> Utf16Reader<R> {
    pub fn new(input: R, big_endian: bool) -> Self {
        Self { input, big_endian, rest: Vec::new(), decoded: Vec::new(), start: 0 }
    }

    fn fill(&mut self) -> IoResult<()> {
        let big_endian = self.big_endian;
        self.start = 0;
        self.decoded.clear();
        while self.decoded.is_empty() {
            let chunk = self.input.fill_buf()?;
            let (length, at_end) = (chunk.len(), chunk.is_empty());
            self.rest.extend_from_slice(chunk);
            self.input.consume(length);
            let whole = if at_end { self.rest.len() } else { self.whole_length() };
            if whole == 0 && at_end {
                return Ok(());
            }
            let units = self.rest[..whole].as_chunks::<2>().0.iter().map(|&pair| unit(pair, big_endian));
            for character in char::decode_utf16(units) {
                match character {
                    Ok(c) => self.decoded.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
                    Err(_) => self.decoded.push(0xff),
                }
            }
            if whole % 2 == 1 {
                self.decoded.push(0xff);
            }
            self.rest.drain(..whole);
        }
        Ok(())
    }

    /// The number of buffered bytes without an incomplete unit or surrogate pair at their end.
    fn whole_length(&self) -> usize {
        let units = self.rest.as_chunks::<2>().0;
        let is_half = units.last().is_some_and(|&pair| unit(pair, self.big_endian) & 0xfc00 == 0xd800);
        2 * (units.len() - usize::from(is_half))
    }
}

impl<R: BufRead> Read for Utf16Reader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> IoResult<usize> {
        if self.start == self.decoded.len() {
            self.fill()?;
        }
        let count = (&self.decoded[self.start..]).read(buffer)?;
        self.start += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    fn encoded(text: &str, bytes_of: fn(u16) -> [u8; 2]) -> Vec<u8> {
        text.encode_utf16().flat_map(bytes_of).collect()
    }

    fn decoded(bytes: &[u8], buffer: usize) -> Vec<u8> {
        let Encoding::Utf16 { big_endian } = Encoding::of(bytes, Path::new("x")).unwrap() else { panic!() };
        let mut text = Vec::new();
        Utf16Reader::new(BufReader::with_capacity(buffer, bytes), big_endian).read_to_end(&mut text).unwrap();
        text
    }

    #[test]
    fn utf16_is_decoded_with_any_buffer_size() {
        let text = "\u{feff}Grüße, 日本語 𝔘 😀\r\nend";
        for bytes_of in [u16::to_le_bytes, u16::to_be_bytes] {
            let bytes = encoded(text, bytes_of);
            for buffer in 1..9 {
                assert_eq!(decoded(&bytes, buffer), text.as_bytes());
            }
            let cut = decoded(&bytes[..bytes.len() - 1], 3);
            assert_eq!(cut, [&text.as_bytes()[..text.len() - 1], b"\xff"].concat());
        }
        let halves: Vec<u8> =
            [0xfeff_u16, 0xd83d, 0x41, 0xde00].into_iter().flat_map(u16::to_le_bytes).collect();
        assert_eq!(decoded(&halves, 2), b"\xef\xbb\xbf\xffA\xff");
    }

    #[test]
    fn other_encodings_are_refused_with_a_conversion_command() {
        let refusal = |bytes: &[u8]| Encoding::of(bytes, Path::new("a.txt")).unwrap_err().to_string();
        for text in ["cat\ndog", "Привет мир и ещё раз.\n", "一つの、漢字かな交じり文。\n一二三の見本。\n"]
        {
            for (bytes_of, name) in
                [(u16::to_le_bytes as fn(_) -> _, "UTF-16LE"), (u16::to_be_bytes, "UTF-16BE")]
            {
                let error = refusal(&encoded(text, bytes_of));
                assert!(error.contains(&format!("iconv -f {name} -t UTF-8 a.txt >")), "{error}");
                assert!(!error.contains("replace"), "{error}");
            }
            let units = |bytes_of: fn(u32) -> [u8; 4]| -> Vec<u8> {
                text.chars().flat_map(|c| bytes_of(u32::from(c))).collect()
            };
            assert!(refusal(&units(u32::to_le_bytes)).contains("-f UTF-32LE "));
            assert!(refusal(&units(u32::to_be_bytes)).contains("-f UTF-32BE "));
        }
        assert!(refusal(b"\xff\xfe\0\0a\0\0\0").contains("-f UTF-32 "));
        for fine in ["", "\0", "cat", "\u{feff}cat", "a stray \0 byte", "日本語\n\0\0\0"] {
            assert_eq!(Encoding::of(fine.as_bytes(), Path::new("x")).unwrap(), Encoding::Utf8, "{fine}");
        }
    }
}
