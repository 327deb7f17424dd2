//! Files to documents: plain text and JSON here, Parquet and Arrow in `tables`.

use std::borrow::Cow;
use std::io::BufRead;
use std::sync::atomic::AtomicU64;

use super::arrow::read_arrow;
use super::division::{Part, Source, SplitPoint};
use super::identity::InputIdentity;
use super::input_file::{Compression, InputFile};
use super::json::{BadRecord, parse_record};
use super::json_objects::Objects;
use super::pipeline::{Batcher, Mark};
use super::read_options::{DocumentSeparator, InputFormat, InvalidUtf8, ReadOptions};
use super::tables::read_parquet;
use super::text::Cut;
use super::text::{InvalidBytes, LineEndings, Lines, is_indivisible};
use crate::error::{Error, Result};
use crate::store::Cancel;
use crate::threads::caught;

/// Sends every document of a file, or of a part of it, to the batcher; `bytes` counts the bytes read from disk.
pub(crate) fn read_file(
    file: &InputFile,
    part: Option<&Part>,
    reading: &ReadOptions,
    bytes: &AtomicU64,
    to: &mut Batcher,
) -> Result<()> {
    let source = Source { file, part, reading, bytes };
    let mut read = || match file.format {
        InputFormat::Text => read_text(source, to),
        InputFormat::JsonLines => read_json_lines(source, to),
        InputFormat::Json => read_json_objects(source, to),
        InputFormat::Parquet => read_parquet(source, to),
        InputFormat::Arrow => read_arrow(source, to),
    };
    let is_plain = matches!(file.format, InputFormat::Text | InputFormat::JsonLines | InputFormat::Json);
    let result = if is_plain && file.compression == Compression::None {
        read()
    } else {
        // The libraries for tables and compressed files panic on some damaged files.
        let damaged = |_| Err(Error::at(&file.path, "too damaged to be read; download the file again"));
        caught(read).unwrap_or_else(damaged)
    };
    // Checked first: a change of the file explains any other error.
    file.check_unchanged()?;
    result
}

/// Sends the documents of an input group, and records the identities of its files.
pub(crate) fn read_input_group(
    files: &[InputFile],
    part: Option<&Part>,
    reading: &ReadOptions,
    bytes: &AtomicU64,
    cancel: &Cancel,
    to: &mut Batcher,
) -> Result<()> {
    for file in files {
        read_file(file, part, reading, bytes, to)?;
        to.inputs.extend(InputIdentity::of(file, part, cancel)?);
        // Otherwise the hashed bytes might differ from the bytes read.
        file.check_unchanged()?;
    }
    Ok(())
}

type Opened<'a> = (Box<dyn BufRead + 'a>, u64, LineEndings);

/// The text of a file, or of a part of it; `None` for all but the first part of an indivisible file.
fn open_part<'a>(source: Source<'a>, split: SplitPoint, is_json: bool) -> Result<Option<Opened<'a>>> {
    let Source { file, part, bytes, .. } = source;
    match part {
        Some(part) if !is_indivisible(file, is_json)? => {
            let Some(range) = split.text_of(part, file)? else { return Ok(None) };
            Ok(Some((file.open_range(&range, bytes)?, range.start, LineEndings::Newline)))
        }
        Some(part) if !part.is_first() => Ok(None),
        _ => Ok(Some((file.open_text(bytes)?, 0, LineEndings::Detect))),
    }
}

fn read_text(source: Source, to: &mut Batcher) -> Result<()> {
    let Source { file, reading, .. } = source;
    let split = match reading.separator {
        DocumentSeparator::Line => SplitPoint::Line,
        DocumentSeparator::BlankLine | DocumentSeparator::File => SplitPoint::BlankLine,
    };
    let Some((input, begin, line_ends)) = open_part(source, split, false)? else {
        return Ok(());
    };
    let mut lines = Lines::new(input, (file, begin), reading.invalid_utf8, line_ends, to.intake.cut);
    // Whether the current line and the current document have any text yet.
    let (mut line_begun, mut document_begun) = (false, reading.separator == DocumentSeparator::File);
    while let Some(fragment) = lines.next()? {
        let text = fragment.text.map_err(|bad| bad.in_file(&file.path))?;
        let blank = !line_begun && text.trim().is_empty() && fragment.ends_line;
        line_begun = !fragment.ends_line;
        if blank && reading.separator != DocumentSeparator::File {
            if std::mem::take(&mut document_begun) {
                to.push("", Mark::Document)?;
            }
            continue;
        }
        document_begun = true;
        to.push(&text, if fragment.ends_line { Mark::Line } else { Mark::Partial })?;
        if fragment.ends_line && reading.separator == DocumentSeparator::Line {
            to.push("", Mark::Document)?;
            document_begun = false;
        }
    }
    if document_begun { to.push("", Mark::Document) } else { Ok(()) }
}

fn read_json_lines(source: Source, to: &mut Batcher) -> Result<()> {
    let Source { file, reading, .. } = source;
    let Some((input, begin, _)) = open_part(source, SplitPoint::Line, true)? else {
        return Ok(());
    };
    // A record must be parsed as a whole, so its line is never cut.
    let (invalid, line_ends) = (reading.invalid_utf8, LineEndings::Newline);
    let mut lines = Lines::new(input, (file, begin), invalid, line_ends, Cut::Nowhere);
    while let Some(fragment) = lines.next()? {
        let document = match &fragment.text {
            Ok(text) if text.trim().is_empty() => continue,
            Ok(text) => parse_record(text, reading),
            Err(bad) => Err(BadRecord::invalid(bad)),
        };
        match document {
            Ok(document) => to.push_document(&document)?,
            Err(bad) => {
                let number = lines.line_number()?;
                to.intake.skips.add(bad.skipped(&file.name, number), &bad.error(&file.path, number))?;
            }
        }
    }
    Ok(())
}

fn read_json_objects(source: Source, to: &mut Batcher) -> Result<()> {
    let Source { file, reading, bytes, .. } = source;
    let mut objects = Objects::new(file.open_text(bytes)?);
    while let Some(object) = objects.next().map_err(|trouble| trouble.in_file(file))? {
        let text = match reading.invalid_utf8 {
            InvalidUtf8::Replace => Ok(String::from_utf8_lossy(&object.bytes)),
            InvalidUtf8::Error => std::str::from_utf8(&object.bytes).map(Cow::from).map_err(|error| {
                BadRecord::invalid(&InvalidBytes { at: object.offset + error.valid_up_to() as u64 })
            }),
        };
        let document = text.as_ref().map_err(BadRecord::clone).and_then(|text| parse_record(text, reading));
        match document {
            Ok(document) => to.push_document(&document)?,
            Err(bad) => {
                to.intake
                    .skips
                    .add(bad.skipped(&file.name, object.line), &bad.error(&file.path, object.line))?;
            }
        }
    }
    Ok(())
}
