//! Random strings that are hard to tokenize, and a vocabulary to split them with.

use std::path::Path;

use electra_data::Tokenizer;
use electra_data::philox::Stream;

fn one_of<T: Copy>(numbers: &mut Stream, items: &[T]) -> T {
    items[numbers.below(items.len() as u32) as usize]
}

/// Ranges of code points with special cases: Latin, marks, Greek, Cyrillic, Hebrew, Arabic, Indic,
/// Tibetan, Jamo, Greek with accents, spaces and format characters, kana and tone marks, CJK, Hangul,
/// private use and CJK compatibility, presentation forms, emoji, music, rarer CJK, tags and variants.
const RANGES: [u32; 60] = [
    0x20, 0x7f, 0x20, 0x7f, 0, 0x20, 0x7f, 0x100, 0x100, 0x250, 0x300, 0x370, 0x300, 0x370, 0x370, 0x530,
    0x590, 0x700, 0x900, 0xe00, 0xf00, 0xfff, 0x1100, 0x1200, 0x1ab0, 0x1b00, 0x1dc0, 0x1f00, 0x1f00, 0x2000,
    0x2000, 0x2070, 0x20d0, 0x2100, 0x2100, 0x2200, 0x3000, 0x3100, 0x4e00, 0x9fff, 0xac00, 0xd7a4, 0xd7b0,
    0xd800, 0xe000, 0xfb00, 0xfb00, 0x10000, 0x10000, 0x12000, 0x16ff0, 0x17000, 0x1d100, 0x1d800, 0x1f300,
    0x1fb00, 0x2a6d0, 0x2fa20, 0xe0000, 0xe0200,
];
/// Combining marks that are not stripped, and characters that may occur between them.
const MARKS: &str = "\
    \u{302e}\u{302f}\u{1d165}\u{1d16d}\u{16ff0}\u{16ff1}\u{301}\u{334}\u{345}\u{34f}\u{1df9}\u{8d3}\
    \u{11a34}\u{0}\u{200d}\u{1e2ec}";
const CHOSEN: &str = "\
    []#\u{fffd}\u{feff}\u{d7ff}\u{e000}\u{10ffff}\u{85}\u{a0}\u{2028}\u{3000}\u{130}\u{3a3}\u{3c2}\
    \u{1e9e}\u{212a}\u{fb01}\u{37e}\u{1fef}\u{2001}\u{f900}\u{2f800}\u{e0001}";
const WORDS: &str = "the The unaffable don't [MASK] ##ing naïve Café e\u{301}clair 日本語 한국어 Привет ΣΊΣΥΦΟΣ \
    İstanbul electroencephalograph internationalization 0x1F “quoted” — résumé’s";

/// A string of up to about 60 characters; one in fifty has a very long word.
pub fn random_string(numbers: &mut Stream) -> String {
    let mut text = String::new();
    let (parts, flavor) = (1 + numbers.below(24), numbers.below(8));
    for _ in 0..parts {
        match (flavor, numbers.below(16)) {
            (_, 0..3) => text.push(one_of(numbers, &[' ', ' ', '\t', '\n', '.', ',', '-', '\''])),
            (0, _) | (_, 3) => text.push(any_char(numbers, 0, 0x11_0000)),
            (1, _) | (_, 4) => text.push(one_of(numbers, &chars(MARKS))),
            (2, _) | (_, 5) => text.push(one_of(numbers, &chars(CHOSEN))),
            (3 | 4, _) | (_, 6..9) => {
                let at = 2 * numbers.below(RANGES.len() as u32 / 2) as usize;
                text.push(any_char(numbers, RANGES[at], RANGES[at + 1]));
            }
            (5, _) | (_, 9..11) => {
                let length = 1 + numbers.below(20);
                text.extend((0..length).map(|_| any_char(numbers, 0x30, 0x7b)));
            }
            _ => text.push_str(one_of(numbers, &WORDS.split(' ').collect::<Vec<_>>())),
        }
    }
    if numbers.below(50) == 0 {
        let (c, length) = (
            one_of(numbers, &['a', 'é', '日', '\u{ac01}', '\u{302e}', '\u{301}']),
            90 + numbers.below(24) as usize,
        );
        text.extend(std::iter::repeat_n(c, length));
    }
    text
}

fn chars(text: &str) -> Vec<char> {
    text.chars().collect()
}

fn any_char(numbers: &mut Stream, from: u32, to: u32) -> char {
    // Surrogates are not characters; use a neighbor instead.
    char::from_u32(from + numbers.below(to - from)).unwrap_or('\u{d7ff}')
}

fn vocabulary() -> Vec<String> {
    let mut entries: Vec<String> = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(str::to_owned).into();
    let mut letters: Vec<char> =
        ('!'..='~').chain("éÉèàïüßñΣσςἀάíдПривет日本語語人한국어어“”’—ﬁı豈\u{301}\u{302e}".chars()).collect();
    letters.extend(('\u{1100}'..'\u{1200}').chain('\u{900}'..'\u{980}'));
    for c in letters {
        entries.extend([c.to_string(), format!("##{c}")]);
    }
    for word in WORDS.split(' ') {
        let chars: Vec<char> = word.chars().collect();
        for (start, length) in
            (0..chars.len()).flat_map(|start| [(start, 2), (start, 3), (start, 5), (start, 8)])
        {
            let piece: String = chars[start..].iter().take(length).collect();
            entries.extend([format!("##{piece}"), piece.to_lowercase(), piece]);
        }
    }
    let mut seen = std::collections::HashSet::new();
    entries.retain(|entry| seen.insert(entry.clone()));
    entries
}

/// Named tokenizers with all combinations of BERT's options.
pub fn tokenizers(dir: &Path) -> Vec<(String, Tokenizer)> {
    let open = |name: &str, text: &str, lowercase, strip_accents| {
        let path = dir.join(name);
        std::fs::write(&path, text).expect("a place to write");
        Tokenizer::from_file(&path, lowercase, strip_accents).expect("a tokenizer")
    };
    let entries = vocabulary().join("\n");
    let options = (0..16).map(|options| [1, 2, 4, 8].map(|bit| options & bit == 0));
    let tokenizer = |[lowercase, strip, clean, chinese]: [bool; 4]| {
        let plain = open("vocab.txt", &entries, Some(lowercase), Some(strip));
        let name =
            format!("lowercase {lowercase}, strip_accents {strip}, clean_text {clean}, chinese {chinese}");
        if clean && chinese {
            return (name, plain);
        }
        let mut json: serde_json::Value =
            serde_json::from_str(&plain.to_json().expect("rules")).expect("JSON");
        let rules = &mut json["normalizer"];
        (rules["clean_text"], rules["handle_chinese_chars"]) = (clean.into(), chinese.into());
        if strip == lowercase {
            rules["strip_accents"] = serde_json::Value::Null; // means the same
        }
        json["truncation"] = serde_json::json!({"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0});
        (name, open("tokenizer.json", &json.to_string(), None, None))
    };
    options.map(tokenizer).collect()
}
