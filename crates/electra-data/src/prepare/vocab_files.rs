//! The files that `vocab` writes: `vocab.txt` with a `tokenizer.json` and a `tokenizer_config.json` that store its case
//! and that `transformers` reads, or only a `tokenizer.json`.
//!
//! Existing files are never overwritten: this is checked before any text is read and again when files are written.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::process::Process;
use crate::error::{Error, Result};
use crate::format::{create_folder, write_all_new};
use crate::input::{Inputs, ReadOptions, TextSource};
use crate::tokenizer::Tokenizer;

const CONFIG: &str = "tokenizer_config.json";

pub(super) struct VocabFiles {
    folder: PathBuf,
    /// Name of the `vocab.txt`; `None` if only a `tokenizer.json` is written.
    txt: Option<String>,
    json: String,
}

impl VocabFiles {
    /// Refuses an output that exists; the error says if it is one of the inputs.
    pub fn claim(out: &Path, source: &TextSource, reading: &ReadOptions) -> Result<Self> {
        let shown = out.display();
        if out.is_dir() {
            return Err(Error::at(out, format_args!("is a folder; pass a file in it: {shown}/vocab.txt")));
        }
        let name = out.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = name.ok_or_else(|| Error::at(out, "not a file name"))?;
        let folder = match out.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        let is_json = out.extension().is_some_and(|extension| extension == "json");
        let (txt, json) = if is_json { (None, name) } else { (Some(name), "tokenizer.json".to_owned()) };
        let files = Self { folder, txt, json };
        let config = files.txt.as_ref().map(|_| CONFIG);
        for name in files.txt.as_deref().into_iter().chain([&*files.json]).chain(config) {
            refuse_existing(&files.folder.join(name), source, reading)?;
        }
        let other = files.folder.join("vocab.txt");
        if files.txt.is_some() && other.exists() {
            let use_of = format!("it would be read together with the tokenizer.json of {shown}");
            return Err(Error::at(
                other,
                format_args!("exists, and {use_of}; choose another folder for --out"),
            ));
        }
        Ok(files)
    }

    pub fn write(&self, entries: &[String], lowercase: bool, strip_accents: bool) -> Result<()> {
        let mut text = entries.join("\n").into_bytes();
        text.push(b'\n');
        let path = self.folder.join(self.txt.as_ref().unwrap_or(&self.json));
        let tokenizer =
            Tokenizer::from_vocab(&path, text, (Some(lowercase), Some(strip_accents)), &Default::default())?;
        create_folder(&self.folder)?;
        let (json, config) = (tokenizer.to_json()?, config(lowercase, strip_accents));
        let files = match &self.txt {
            Some(name) => vec![(&**name, tokenizer.file().1), (CONFIG, config.as_bytes())],
            None => Vec::new(),
        };
        let files = [files, vec![(&*self.json, json.as_bytes())]].concat();
        write_all_new(&self.folder, &Process::current().attempt(), &files)
    }
}

fn config(lowercase: bool, strip_accents: bool) -> String {
    let config = json!({
        "tokenizer_class": "BertTokenizer", "do_lower_case": lowercase, "strip_accents": strip_accents,
        "tokenize_chinese_chars": true, "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]",
        "sep_token": "[SEP]", "mask_token": "[MASK]", "clean_up_tokenization_spaces": false,
    });
    format!("{config:#}\n")
}

fn refuse_existing(path: &Path, source: &TextSource, reading: &ReadOptions) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let is_input = match source {
        TextSource::Files(inputs) => Inputs::expand(inputs, None, reading)?.contains(path)?,
        TextSource::Documents(_) => false,
    };
    let message = match is_input {
        true => "is one of the inputs and would be overwritten; choose another --out",
        false => "exists and would be overwritten; choose another folder for --out, or remove the file",
    };
    Err(Error::at(path, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRIES: [&str; 7] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "が", "か"];

    fn claim(out: &Path) -> Result<VocabFiles> {
        let documents = TextSource::Documents(Box::new(std::iter::empty()));
        VocabFiles::claim(out, &documents, &ReadOptions::default())
    }

    fn write(out: &Path, lowercase: bool) -> Result<()> {
        claim(out)?.write(&ENTRIES.map(str::to_owned), lowercase, lowercase)
    }

    #[test]
    fn existing_files_are_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let [txt, json, config] =
            ["vocab.txt", "tokenizer.json", "tokenizer_config.json"].map(|name| dir.path().join(name));
        for existing in [&txt, &json, &config] {
            let claimed = claim(&txt).unwrap();
            std::fs::write(existing, "mine").unwrap();
            // A file that appeared after the check is not overwritten either, and none of the others is written.
            let error = claimed.write(&ENTRIES.map(str::to_owned), true, true).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{}: exists", existing.display())), "{error}");
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
            let error = write(&txt, true).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{}: exists", existing.display())), "{error}");
            let inputs = [txt.clone(), dir.path().to_owned(), dir.path().join("*.txt")];
            for input in inputs.into_iter().filter(|_| txt.exists()) {
                let error = VocabFiles::claim(&txt, &TextSource::Files(vec![input]), &ReadOptions::default())
                    .err()
                    .unwrap()
                    .to_string();
                assert!(error.contains("vocab.txt: is one of the inputs"), "{error}");
            }
            assert_eq!(std::fs::read_to_string(existing).unwrap(), "mine");
            std::fs::remove_file(existing).unwrap();
        }
        assert!(write(dir.path(), true).unwrap_err().to_string().contains("is a folder; pass a file in it"));
    }
}
