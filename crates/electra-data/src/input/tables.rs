//! Documents from tables: Parquet, and Arrow IPC streams and files.

use std::io::{Read, Seek, SeekFrom};
use std::sync::atomic::{AtomicU64, Ordering};

use arrow_array::cast::AsArray;
use arrow_array::{
    Array, ArrayAccessor, ArrayRef, LargeStringArray, RecordBatch, StringArray, StringViewArray,
};
use arrow_ipc::reader::{FileReader, StreamReader, read_footer_length};
use arrow_ipc::root_as_footer;
use arrow_schema::{ArrowError, DataType, Schema};
use parquet::arrow::parquet_to_arrow_schema;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{FileReader as _, RowGroupReader, SerializedFileReader};

use super::division::Part;
use super::input_file::InputFile;
use super::pipeline::Batcher;
use super::raw_file::RawFile;
use super::read_options::{ReadOptions, missing_field};
use super::text::MAX_LINE_BYTES;
use crate::error::{Error, Result};

/// Progress is counted after so many rows.
const PROGRESS_ROWS: u64 = 256;

/// Sends each row of a Parquet file, or of those row groups that begin in a part of it, as a document.
///
/// Rows are decoded one at a time, so that memory holds a page of each column and its dictionary, whatever the rows: a
/// batch of rows can be as many times larger than the file as a dictionary's entry is longer than its index.
pub(super) fn read_parquet(
    file: &InputFile,
    part: Option<&Part>,
    reading: &ReadOptions,
    bytes: &AtomicU64,
    to: &mut Batcher,
) -> Result<()> {
    let damaged = |error: &dyn std::fmt::Display| unreadable(file, "Parquet", error);
    let table = SerializedFileReader::new(file.open_seekable()?).map_err(|e| damaged(&e))?;
    let (metadata, descriptor) = (table.metadata(), table.metadata().file_metadata().schema_descr());
    // Without the Arrow schema that the file may hold: with the physical types, text is UTF-8 whatever wrote the file.
    let schema = parquet_to_arrow_schema(descriptor, None).map_err(|e| damaged(&e))?;
    let roots = text_columns(file, &schema, &reading.text_fields)?;
    let leaf = |root: &usize| {
        (0..descriptor.num_columns()).find(|&leaf| descriptor.get_column_root_idx(leaf) == *root)
    };
    let leaves: Vec<usize> = roots.iter().filter_map(leaf).collect();
    let groups = match part {
        Some(part) => row_groups_of(part, file, metadata),
        None => (0..metadata.num_row_groups()).collect(),
    };
    let num_rows = |group: &usize| metadata.row_group(*group).num_rows().max(0) as u64;
    let (size, rows) =
        (part.map_or(file.size, |part| part.end - part.start), groups.iter().map(num_rows).sum::<u64>());
    let (mut done, mut counted, mut texts) = (0, 0, Vec::with_capacity(leaves.len()));
    for group in groups {
        let (row_group, expected) = (table.get_row_group(group).map_err(|e| damaged(&e))?, num_rows(&group));
        let columns = leaves.iter().map(|&leaf| ParquetText::open(&*row_group, leaf));
        let mut columns = columns.collect::<ParquetResult<Vec<_>>>().map_err(|e| damaged(&e))?;
        for _ in 0..expected {
            done += 1;
            texts.clear();
            for column in &mut columns {
                let text = column
                    .next()
                    .map_err(|e| damaged(&e))?
                    .ok_or_else(|| damaged(&"a column is too short"))?;
                let length = text.as_ref().map_or(0, ByteArray::len);
                if length > MAX_LINE_BYTES {
                    let path = file.path.display();
                    return Err(Error::Input(format!("{path}: a row has more than 1 GiB of text; split it")));
                }
                texts.extend(text);
            }
            let texts = texts.iter().map(|text| str::from_utf8(text.data()));
            let texts = texts.collect::<std::result::Result<Vec<_>, _>>().map_err(|e| damaged(&e))?;
            send_row(&texts, to)?;
            if done % PROGRESS_ROWS == 0 || done == rows {
                let share = (u128::from(size) * u128::from(done) / u128::from(rows)) as u64;
                bytes.fetch_add(share.saturating_sub(counted), Ordering::Relaxed);
                counted = share;
            }
        }
        for column in &mut columns {
            if column.next().map_err(|e| damaged(&e))?.is_some() {
                return Err(damaged(&"a column is too long"));
            }
        }
    }
    bytes.fetch_add(size.saturating_sub(counted), Ordering::Relaxed);
    Ok(())
}

/// A column of text of a row group.
struct ParquetText {
    reader: ColumnReaderImpl<ByteArrayType>,
    values: Vec<ByteArray>,
    levels: Vec<i16>,
}

impl ParquetText {
    fn open(group: &dyn RowGroupReader, column: usize) -> ParquetResult<Self> {
        match group.get_column_reader(column)? {
            ColumnReader::ByteArrayColumnReader(reader) => {
                Ok(Self { reader, values: Vec::new(), levels: Vec::new() })
            }
            _ => Err(ParquetError::General("a column of text has another physical type".to_owned())),
        }
    }

    /// The text of the next row, `Some(None)` for null; `None` at the end.
    fn next(&mut self) -> ParquetResult<Option<Option<ByteArray>>> {
        self.values.clear();
        self.levels.clear();
        let (rows, ..) = self.reader.read_records(1, Some(&mut self.levels), None, &mut self.values)?;
        Ok((rows > 0).then(|| self.values.pop()))
    }
}

/// The row groups that begin in a part, in order.
fn row_groups_of(part: &Part, file: &InputFile, metadata: &ParquetMetaData) -> Vec<usize> {
    let mut first_byte = 0;
    let begins_here = |group: &usize| {
        let columns = metadata.row_group(*group).columns();
        let begin = columns.iter().map(|column| column.byte_range().0).min().unwrap_or(0);
        // Never before the group before it, so that rows stay in order, and always within the file.
        first_byte = begin.min(file.size.saturating_sub(1)).max(first_byte);
        part.contains(first_byte)
    };
    (0..metadata.num_row_groups()).filter(begins_here).collect()
}

/// Sends each row of an Arrow IPC stream or file (a stream between two magic numbers) as a document. Of a
/// file, the batches that begin in a part are read by themselves; a stream can be read only from its start.
pub(super) fn read_arrow(
    file: &InputFile,
    part: Option<&Part>,
    reading: &ReadOptions,
    bytes: &AtomicU64,
    to: &mut Batcher,
) -> Result<()> {
    if let Some(part) = part {
        let mut magic = Vec::new();
        file.raw()?.take(8).read_to_end(&mut magic).map_err(|e| file.unreadable(&e))?;
        if magic == FILE_MAGIC {
            return read_arrow_batches(file, part, reading, bytes, to);
        }
        if !part.is_first() {
            return Ok(());
        }
    }
    let damaged = |error: &dyn std::fmt::Display| unreadable(file, "Arrow", error);
    let mut input = file.open(bytes)?;
    let mut start = Vec::with_capacity(8);
    (&mut input).take(8).read_to_end(&mut start).map_err(|e| file.unreadable(&e))?;
    if start == FILE_MAGIC {
        start.clear();
    }
    let whole = Tail { inner: std::io::Cursor::new(start).chain(input), last: [0; 8] };
    let mut stream = StreamReader::try_new(whole, None).map_err(|e| damaged(&e))?;
    text_columns(file, &stream.schema(), &reading.text_fields)?;
    for batch in &mut stream {
        send_rows(file, &batch.map_err(|e| damaged(&e))?, &reading.text_fields, to)?;
    }
    // A stream truncated between two batches reads without error, but lacks the end-of-stream marker.
    match stream.get_ref().last {
        END | [_, _, _, _, 0, 0, 0, 0] => Ok(()),
        _ => Err(damaged(&"it is cut off: the mark of its end is missing")),
    }
}

/// Sends the rows of the record batches that begin in a part of an Arrow IPC file.
fn read_arrow_batches(
    file: &InputFile,
    part: &Part,
    reading: &ReadOptions,
    bytes: &AtomicU64,
    to: &mut Batcher,
) -> Result<()> {
    let damaged = |error: &dyn std::fmt::Display| unreadable(file, "Arrow", error);
    let failed = |e| file.unreadable(&e);
    let mut input = file.raw()?;
    let batches = record_batches(&mut input).map_err(|e| damaged(&e))?;
    input.seek(SeekFrom::Start(0)).map_err(failed)?;
    let mut table = FileReader::try_new_buffered(input, None).map_err(|e| damaged(&e))?;
    text_columns(file, &table.schema(), &reading.text_fields)?;
    for (offset, length, index) in batches {
        // A damaged offset still belongs to one part, whose reader fails.
        if part.contains(offset.min(file.size.saturating_sub(1))) {
            table.set_index(index).map_err(|e| damaged(&e))?;
            let batch = table.next().unwrap_or(Err(ArrowError::IpcError("a batch is missing".to_owned())));
            send_rows(file, &batch.map_err(|e| damaged(&e))?, &reading.text_fields, to)?;
            bytes.fetch_add(length, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// (offset, length, index) of each record batch that the footer of an Arrow IPC file lists, in the order in
/// which they lie in the file.
fn record_batches(input: &mut RawFile) -> std::result::Result<Vec<(u64, u64, usize)>, ArrowError> {
    let mut end = [0; 10];
    input.seek(SeekFrom::End(-10))?;
    input.read_exact(&mut end)?;
    let length = read_footer_length(end)?;
    input.seek(SeekFrom::End(-10 - length as i64))?;
    let mut bytes = Vec::new();
    (&mut *input).take(length as u64).read_to_end(&mut bytes)?;
    let footer = root_as_footer(&bytes).map_err(|error| ArrowError::IpcError(error.to_string()))?;
    let blocks = footer.recordBatches().into_iter().flatten();
    let mut found: Vec<_> = blocks
        .enumerate()
        .map(|(index, block)| {
            let length = i64::from(block.metaDataLength()).saturating_add(block.bodyLength());
            (block.offset().max(0) as u64, length.max(0) as u64, index)
        })
        .collect();
    found.sort_unstable();
    Ok(found)
}

/// The first eight bytes of an Arrow IPC file.
const FILE_MAGIC: &[u8] = b"ARROW1\0\0";

/// The end-of-stream marker: an empty message.
const END: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// A reader that remembers its last eight bytes.
struct Tail<R> {
    inner: R,
    last: [u8; 8],
}

impl<R: Read> Read for Tail<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        for &byte in &buffer[count.saturating_sub(8)..count] {
            self.last.rotate_left(1);
            self.last[7] = byte;
        }
        Ok(count)
    }
}

/// Indices of the wanted columns; an error lists the columns that hold text.
fn text_columns(file: &InputFile, schema: &Schema, fields: &[String]) -> Result<Vec<usize>> {
    let texts: Vec<String> =
        schema.fields().iter().filter(|f| is_text(f.data_type())).map(|f| f.name().clone()).collect();
    let path = file.path.display().to_string();
    let mut columns = Vec::with_capacity(fields.len());
    for field in fields {
        match schema.index_of(field) {
            Ok(index) if is_text(schema.field(index).data_type()) => columns.push(index),
            _ if texts.is_empty() => {
                return Err(Error::Input(format!("{path}: no column holds strings; nothing to read")));
            }
            Ok(index) => {
                let (kind, texts) = (schema.field(index).data_type(), texts.join(", "));
                return Err(Error::Input(format!(
                    "{path}: column \"{field}\" is {kind}, not a string; columns of strings are: {texts}"
                )));
            }
            Err(_) => {
                let missing = missing_field(field, &texts);
                return Err(Error::Input(format!("{path}: {missing}; choose with --text-field")));
            }
        }
    }
    Ok(columns)
}

fn is_text(kind: &DataType) -> bool {
    match kind {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Dictionary(_, values) => !matches!(**values, DataType::Dictionary(..)) && is_text(values),
        _ => false,
    }
}

fn send_rows(file: &InputFile, batch: &RecordBatch, fields: &[String], to: &mut Batcher) -> Result<()> {
    let damaged = |what: &str| unreadable(file, "table", &what);
    let mut columns = Vec::with_capacity(fields.len());
    for field in fields {
        let column = batch.column_by_name(field).ok_or_else(|| damaged("a batch lacks a column"))?;
        columns.push(TextColumn::of(column).ok_or_else(|| damaged("a batch has another type of column"))?);
    }
    let mut texts = Vec::with_capacity(fields.len());
    for row in 0..batch.num_rows() {
        texts.clear();
        for column in &columns {
            texts.extend(column.at(row).ok_or_else(|| damaged("a key is beyond its dictionary"))?);
        }
        send_row(&texts, to)?;
    }
    Ok(())
}

fn send_row(texts: &[&str], to: &mut Batcher) -> Result<()> {
    match texts {
        [one] => to.push_document(one),
        _ => to.push_document(&texts.join("\n")),
    }
}

/// A column of text, possibly dictionary-encoded.
struct TextColumn<'a> {
    column: &'a ArrayRef,
    values: Strings<'a>,
    keys: Option<Vec<usize>>,
}

/// An array of strings.
enum Strings<'a> {
    Utf8(&'a StringArray),
    LargeUtf8(&'a LargeStringArray),
    Utf8View(&'a StringViewArray),
}

impl<'a> TextColumn<'a> {
    /// `None` if the column does not hold text.
    fn of(column: &'a ArrayRef) -> Option<Self> {
        let Some(dictionary) = column.as_any_dictionary_opt() else {
            return Some(Self { column, values: Strings::of(column)?, keys: None });
        };
        // Without values every row is null, and `normalized_keys` would panic.
        let has_values = !dictionary.values().is_empty();
        let keys = if has_values { dictionary.normalized_keys() } else { Vec::new() };
        Some(Self { column, values: Strings::of(dictionary.values())?, keys: Some(keys) })
    }

    /// The text in a row (`Some(None)` for null); `None` if its key is outside the dictionary.
    fn at(&self, row: usize) -> Option<Option<&'a str>> {
        if self.column.is_null(row) {
            return Some(None);
        }
        match &self.keys {
            Some(keys) => self.values.get(*keys.get(row)?),
            None => self.values.get(row),
        }
    }
}

impl<'a> Strings<'a> {
    fn of(array: &'a ArrayRef) -> Option<Self> {
        let large = || array.as_string_opt::<i64>().map(Self::LargeUtf8);
        let view = || array.as_string_view_opt().map(Self::Utf8View);
        array.as_string_opt::<i32>().map(Self::Utf8).or_else(large).or_else(view)
    }

    /// The string at an index (`Some(None)` for null); `None` if the index is out of range.
    fn get(&self, at: usize) -> Option<Option<&'a str>> {
        fn one<'a>(array: impl ArrayAccessor<Item = &'a str>, at: usize) -> Option<Option<&'a str>> {
            (at < array.len()).then(|| array.is_valid(at).then(|| array.value(at)))
        }
        match self {
            Self::Utf8(array) => one(*array, at),
            Self::LargeUtf8(array) => one(*array, at),
            Self::Utf8View(array) => one(*array, at),
        }
    }
}

fn unreadable(file: &InputFile, kind: &str, error: &dyn std::fmt::Display) -> Error {
    let path = file.path.display();
    Error::Input(format!("{path}: cannot be read as {kind} ({error}); get the file again"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn only_text_counts_as_text() {
        let numbers: ArrayRef = Arc::new(arrow_array::Int32Array::from(vec![1]));
        assert!(TextColumn::of(&numbers).is_none());
        let strings: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None]));
        let texts = TextColumn::of(&strings).unwrap();
        assert_eq!((texts.at(0), texts.at(1)), (Some(Some("a")), Some(None)));
        assert_eq!(Strings::Utf8(&StringArray::from(vec!["a"])).get(1), None);
    }
}
