//! The inputs of a run, divided into input groups.

use std::path::{Path, PathBuf};

use super::options::{PrepareOptions, TEXT_VERSION};
use crate::error::{Error, Result};
use crate::format::Manifest;
use crate::input::{InputGroup, Inputs};
use crate::tokenizer::Tokenizer;

/// The inputs of a run, with their input groups.
pub(super) struct Plan {
    pub inputs: Inputs,
    pub groups: Vec<InputGroup>,
    pub fingerprint: String,
    /// Those that older versions of the program gave to these inputs and options.
    pub older_fingerprints: Vec<String>,
}

impl Plan {
    /// Lists the inputs of a run that writes to `out`; opens none of them but those that end in `.json`.
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
            let text = "not a regular file, and dropping duplicates reads the text twice; store it in a file";
            return Err(Error::at(&pipe.path, text));
        }
        let groups = inputs.input_groups(&options.reading, options.part_bytes());
        let fingerprint_of = |version| options.fingerprint_of(tokenizer, &inputs, version);
        let older_fingerprints = (1..TEXT_VERSION).map(fingerprint_of).collect();
        Ok(Self { fingerprint: fingerprint_of(TEXT_VERSION), older_fingerprints, inputs, groups })
    }

    /// Whether a finished corpus was made of these inputs and options, by any version of the program.
    pub fn is_of(&self, manifest: &Manifest) -> bool {
        let of_corpus = &manifest.fingerprint;
        self.fingerprint == *of_corpus || self.older_fingerprints.contains(of_corpus)
    }
}

/// Refuses a vocabulary among the inputs: it is not text, so it is there by mistake.
pub(super) fn refuse_vocabulary(inputs: &Inputs, vocabulary: &Path) -> Result<()> {
    if vocabulary.exists() && inputs.contains(vocabulary)? {
        let remedy = "move it out of their folder, or name the text files";
        return Err(Error::at(
            vocabulary,
            format_args!("the vocabulary itself is among the inputs; {remedy}"),
        ));
    }
    Ok(())
}
