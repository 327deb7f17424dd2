//! The options of `prepare` and `train_vocab`; the passes of `prepare`, its plan for its inputs, and the fingerprint of
//! everything that the resulting bytes depend on.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::choice::{Choice, choice};
use crate::error::{Error, Result};
use crate::format::{FORMAT_VERSION, Manifest, ShardSpec, hash_hex};
use crate::input::{InputFile, InputGroup, Inputs, PART_BYTES, ReadOptions, default_threads};
use crate::tokenizer::Tokenizer;

/// Hashes of the documents and ids of a fixed text (see the last test in this file), one per version of the code between
/// text and ids. After a change, append the new value: unfinished work of the previous version is then refused, so that
/// no corpus mixes both. Never replace a value.
const TEXT_HASHES: [&str; 1] = ["3cb2331fc07c82b6ebf18ebfdc430680"];
pub(super) const TEXT_VERSION: usize = TEXT_HASHES.len();
/// Tokens after which a shard ends at the next document boundary …
const SHARD_TOKENS: u64 = 1 << 27;
/// … or documents.
const SHARD_DOCUMENTS: usize = 1 << 22;

#[derive(Clone, Debug, Default)]
pub struct PrepareOptions {
    pub reading: ReadOptions,
    /// Fraction of documents in the validation set, `holdout/`: at least 0 and below 1.
    ///
    /// Only its position in the corpus decides whether a document is chosen. If none of at least two documents is chosen,
    /// the last one is.
    pub validation_fraction: f64,
    pub drop_duplicates: Option<DropDuplicates>,
    /// (I, N): build only every Nth input group, starting with the Ith, counted from 1.
    pub partition: Option<(usize, usize)>,
    /// Compare the whole content of inputs with the recorded hash, even if size, time and samples are equal.
    pub verify_inputs: bool,
    pub threads: Option<usize>,
    /// Larger files are read in parts of at most this size; `None` for 512 MiB. For tests.
    #[doc(hidden)]
    pub part_bytes: Option<u64>,
}

impl PrepareOptions {
    pub(super) fn check(&self) -> Result<()> {
        let holdout = self.validation_fraction;
        let reason = if !(0.0..1.0).contains(&holdout) {
            &*format!("holdout = {holdout}: must be at least 0 and below 1")
        } else if let Some((index, count)) = self.partition
            && !(1..=count).contains(&index)
        {
            &*format!("partition = {index}/{count}: must be from 1/{count} to {count}/{count}")
        } else if self.threads == Some(0) {
            "threads = 0: must be at least 1"
        } else if self.reading.text_fields.is_empty() {
            "no text field; pass one, usually \"text\""
        } else {
            return Ok(());
        };
        Err(Error::Input(reason.to_owned()))
    }

    pub(super) fn num_threads(&self) -> usize {
        self.threads.unwrap_or_else(default_threads)
    }

    pub(super) fn part_bytes(&self) -> u64 {
        self.part_bytes.unwrap_or(PART_BYTES)
    }

    pub(super) fn fingerprint(&self, tokenizer: &Tokenizer, inputs: &Value, text_version: usize) -> String {
        let mut parts = vec![json!(FORMAT_VERSION), json!(tokenizer.hash()), self.to_json(), inputs.clone()];
        if text_version > 1 {
            parts.push(json!(text_version)); // version 1 was not included
        }
        hash_hex(Value::from(parts).to_string().as_bytes())
    }

    /// The fingerprint for these files: the size of parts counts only if files are divided.
    pub(super) fn fingerprint_of(&self, tokenizer: &Tokenizer, inputs: &Inputs, version: usize) -> String {
        let part_bytes = self.part_bytes();
        let entry = |file: &InputFile| match file.is_divided(&self.reading, part_bytes) {
            true => json!([file.name, file.size, part_bytes]),
            false => json!([file.name, file.size]),
        };
        self.fingerprint(tokenizer, &inputs.files.iter().map(entry).collect(), version)
    }

    /// Options that decide the content, so without `skip_bad_rows`. Some are included only if they are set: corpora
    /// written before these options existed must keep their fingerprints.
    pub(super) fn to_json(&self) -> Value {
        let reading = &self.reading;
        let mut options = json!({
            "documents": reading.separator.name(),
            "text_fields": reading.text_fields,
            "invalid_utf8": reading.invalid_utf8.name(),
            "holdout": self.validation_fraction,
        });
        if let Some(format) = reading.format {
            let name = format.name();
            options["format"] = if name == "txt" { "text" } else { name }.into(); // the original name
        }
        if let Some(duplicates) = self.drop_duplicates {
            options["drop_duplicates"] = duplicates.name().into();
        }
        options
    }
}

#[derive(Clone, Debug, Default)]
pub struct VocabOptions {
    pub reading: ReadOptions,
    /// Number of entries, including the five special tokens; at least 32.
    pub size: usize,
    pub lowercase: bool,
    pub strip_accents: bool,
    /// The most frequent characters that make up this fraction of the text become entries.
    pub character_coverage: f64,
    /// Minimum count of a pair of entries to be merged.
    pub min_frequency: u64,
    pub threads: Option<usize>,
    /// Bytes of the sample of text in which words are counted; `None` for all text.
    pub sample: Option<u64>,
    pub seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropDuplicates {
    Documents,
    Lines,
}

choice!(DropDuplicates { "documents" => Documents, "lines" => Lines });

/// A run's pass over the input groups: to drop duplicates, a run hashes all text before it builds any group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Pass {
    Hash(DropDuplicates),
    Build(Option<Decided>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Decided {
    pub unit: DropDuplicates,
    pub digest: String,
}

impl Pass {
    pub fn digest(&self) -> Option<&str> {
        if let Self::Build(Some(decided)) = self { Some(&decided.digest) } else { None }
    }
}

pub(super) fn shard_spec(tokenizer: &Tokenizer, attempt: &str) -> ShardSpec {
    ShardSpec {
        width: if tokenizer.vocab_size() <= 1 << 16 { 2 } else { 4 },
        tokenizer_hash: tokenizer.hash(),
        tag: attempt.to_owned(),
        max_tokens: SHARD_TOKENS,
        max_documents: SHARD_DOCUMENTS,
    }
}

pub(super) struct Plan {
    pub inputs: Inputs,
    pub groups: Vec<InputGroup>,
    pub fingerprint: String,
    pub older_fingerprints: Vec<String>,
}

impl Plan {
    /// Lists the inputs of a run that writes to `out`; opens only those that end in `.json`.
    pub fn new(
        files: &[PathBuf],
        tokenizer: &Tokenizer,
        out: &Path,
        options: &PrepareOptions,
    ) -> Result<Self> {
        let inputs = Inputs::expand(files, Some(out), &options.reading)?;
        refuse_vocabulary(&inputs, tokenizer.path())?;
        if options.drop_duplicates.is_some()
            && let Some(pipe) = inputs.files.iter().find(|file| !file.regular)
        {
            let text = "not a regular file; drop_duplicates reads the text twice, so store it in a file";
            return Err(Error::at(&pipe.path, text));
        }
        let groups = inputs.input_groups(&options.reading, options.part_bytes());
        let fingerprint_of = |version| options.fingerprint_of(tokenizer, &inputs, version);
        let older_fingerprints = (1..TEXT_VERSION).map(fingerprint_of).collect();
        Ok(Self { fingerprint: fingerprint_of(TEXT_VERSION), older_fingerprints, inputs, groups })
    }

    /// Whether a finished corpus has these inputs and options, for any version of the program.
    pub fn is_of(&self, manifest: &Manifest) -> bool {
        let of_corpus = &manifest.fingerprint;
        self.fingerprint == *of_corpus || self.older_fingerprints.contains(of_corpus)
    }
}

/// Refuses a vocabulary among the inputs: it is not text, so it must be a mistake.
pub(super) fn refuse_vocabulary(inputs: &Inputs, vocabulary: &Path) -> Result<()> {
    if vocabulary.exists() && inputs.contains(vocabulary)? {
        let remedy = "move it out of their folder, or pass the text files by name";
        return Err(Error::at(
            vocabulary,
            format_args!("the vocabulary itself is among the inputs; {remedy}"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::input::{DocumentSeparator, InvalidUtf8, TextSource};
    use crate::prepare::prepare;
    use crate::prepare::tests::tokenizer;

    const SPECIAL: &str = "[PAD] [UNK] [CLS] [SEP] [MASK]";
    const SCRIPTS: &str = "Straße ﬁn İstanbul ΣΟΦΟΣ e\u{301}té | мир йод | हिन्दी ไทย 한국 ｶﾞ が | 東京都は | שלום مرحبا | 😀👩\u{200d}👩 ①½Ⅻ";
    const OTHERS: [&str; 3] = [
        r###""normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKD"}, {"type": "StripAccents"}]},
             "pre_tokenizer": {"type": "BertPreTokenizer"},
             "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                       "max_input_chars_per_word": 100, "vocab": IDS}"###,
        r#""normalizer": {"type": "NFC"}, "model": {"type": "BPE", "merges": [["Ġ", "a"]], "vocab": IDS},
           "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}"#,
        r#""normalizer": {"type": "NFKC"}, "model": {"type": "Unigram", "unk_id": 1, "vocab": SCORES},
           "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}"#,
    ];

    /// A tokenizer for every code path: the fast one with and without case, and the others.
    fn tokenizers(dir: &Path) -> Vec<Tokenizer> {
        let is_letter = |c: &char| !c.is_whitespace() && !c.is_control();
        let letters = ('!'..'\u{3400}').chain(SCRIPTS.chars()).filter(is_letter);
        let letters: BTreeSet<String> = letters.flat_map(|c| [format!("{c}"), format!("##{c}")]).collect();
        let entries = SPECIAL.split(' ').chain(letters.iter().map(|letter| &**letter)).chain(["Ġa", "▁a"]);
        let entries: Vec<&str> = entries.collect();
        let [vocab, json] = ["vocab.txt", "tokenizer.json"].map(|name| dir.join(name));
        std::fs::write(&vocab, entries.join("\n")).unwrap();
        let ids = entries.iter().zip(0..).map(|(&entry, id): (_, u32)| (entry.to_owned(), id.into()));
        let ids = Value::from(ids.collect::<serde_json::Map<_, _>>()).to_string();
        let scores: Value = entries.iter().map(|entry| json!([entry, -1.0])).collect();
        let fast = [true, false].map(|case| Tokenizer::from_file(&vocab, Some(case), None).unwrap());
        let others = OTHERS.map(|rules| {
            let rules = rules.replace("IDS", &ids).replace("SCORES", &scores.to_string());
            std::fs::write(&json, format!("{{{rules}}}")).unwrap();
            Tokenizer::from_file(&json, None, None).unwrap()
        });
        assert!(fast.iter().all(Tokenizer::is_fast) && !others.iter().any(Tokenizer::is_fast));
        fast.into_iter().chain(others).collect()
    }

    /// Files with all kinds of line ends and marks, and with a word for each of 25,000 code points, except in blocks to
    /// which new versions of Unicode, and so other compilers, add letters with case.
    fn inputs(dir: &Path) -> Vec<PathBuf> {
        let others = (0x3400..0xA700).chain(0xA800..0x1_6E00).chain(0x1_7000..0x11_0000);
        let points = (0..0x3400).chain(others.step_by(89)).filter_map(char::from_u32);
        let words: Vec<String> = points.map(|point| format!("a{point}b")).collect();
        let lines = words.chunks(100).map(|words| format!("{SCRIPTS} {}", words.join(" ")));
        let lines: Vec<String> = lines.collect();
        let eol = ["\n", "\r\n", "\r", "\n \t\n", "\u{85}", "\u{2028}", "\n\n", "\u{b}\u{c}", "\n\u{3000}\n"];
        let mut text = b"\xef\xbb\xbf".to_vec();
        for (line, end) in lines.iter().zip(eol.iter().cycle()) {
            text.extend([line.as_bytes(), b"\xff a\xe3\x81b\0", end.as_bytes()].concat());
        }
        let record = |line: &String| json!({"text": line.repeat(2), "title": "a"}).to_string();
        let records = lines.iter().step_by(9).map(record).collect::<Vec<_>>().join("\n").into_bytes();
        let write = |(name, bytes)| std::fs::write(dir.join(name), bytes).map(|()| dir.join(name));
        [("a.txt", text), ("b.jsonl", records)].map(write).map(std::io::Result::unwrap).to_vec()
    }

    #[test]
    fn fixed_text_has_the_hash_of_this_text_version() {
        let dir = tempfile::tempdir().unwrap();
        let (inputs, mut hashes) = (inputs(dir.path()), String::new());
        for (number, tokenizer) in tokenizers(dir.path()).iter().enumerate() {
            for (separator, fields, drop_duplicates) in [
                (DocumentSeparator::BlankLine, "title text", None),
                (DocumentSeparator::Line, "text", Some(DropDuplicates::Lines)),
                (DocumentSeparator::File, "text", Some(DropDuplicates::Documents)),
            ] {
                let reading = ReadOptions {
                    separator,
                    text_fields: fields.split(' ').map(str::to_owned).collect(),
                    invalid_utf8: InvalidUtf8::Replace,
                    ..ReadOptions::default()
                };
                let part_bytes = Some(100_000);
                let options = PrepareOptions { reading, drop_duplicates, part_bytes, ..Default::default() };
                let options = PrepareOptions { validation_fraction: 0.1, ..options };
                let out = dir.path().join(format!("{number}-{}", separator.name()));
                let source = TextSource::Files(inputs.clone());
                let report = prepare(source, tokenizer, &out, &options, &mut |_| true).unwrap();
                hashes += &format!("{} {}\n", report.content_hash, report.validation_documents);
            }
        }
        let hash = hash_hex(hashes.as_bytes());
        assert_eq!(Some(&*hash), TEXT_HASHES.last().copied(), "append it to TEXT_HASHES");
        let (small, options) = (tokenizer(dir.path(), "a"), PrepareOptions::default());
        let fingerprint = |version| options.fingerprint(&small, &json!("documents"), version);
        assert_eq!(fingerprint(1), "7dc4b22e5f3ef4cada6591fe1a2dd2e5"); // as before text versions existed
        assert!(fingerprint(2) != fingerprint(1) && fingerprint(3) != fingerprint(2));
    }
}
