//! Documents from Arrow IPC streams and files.

use std::io::{BufReader, Cursor, Read, Seek, SeekFrom};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayAccessor, ArrayRef, RecordBatch};
use arrow_buffer::Buffer;
use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::{FileDecoder, read_footer_length};
use arrow_ipc::{Block, MessageHeader, root_as_footer, root_as_message};
use arrow_schema::ArrowError;

use super::division::{Part, Source};
use super::input_file::InputFile;
use super::pipeline::Batcher;
use super::read_options::ReadOptions;
use super::tables::{ColumnPath, send_row, text_columns, unreadable};
use crate::error::{Error, Result};

/// Limit of a batch's decompressed size: the larger of the first number and the second times the batch's size.
const MAX_DECOMPRESSED: (u64, u64) = (1 << 30, 100);

const FILE_MAGIC: &[u8] = b"ARROW1\0\0";

type ArrowResult<T> = std::result::Result<T, ArrowError>;

/// Sends each row of an Arrow IPC stream or file (a stream between two magic numbers) as a document. From a part of a
/// file, reads only the batches that begin in it; a stream can be read only from its start.
pub(super) fn read_arrow(source: Source, to: &mut Batcher) -> Result<()> {
    let Source { file, part, reading, bytes } = source;
    if let Some(part) = part {
        let mut magic = Vec::new();
        file.raw()?.take(8).read_to_end(&mut magic).map_err(|e| file.unreadable(&e))?;
        if magic == FILE_MAGIC {
            return read_arrow_batches(source, part, to);
        }
        if !part.is_first() {
            return Ok(());
        }
    }
    let damaged = |error| unreadable(file, "Arrow", &error);
    let mut input = file.open(bytes)?;
    let mut start = Vec::with_capacity(8);
    (&mut input).take(8).read_to_end(&mut start).map_err(|e| file.unreadable(&e))?;
    if start == FILE_MAGIC {
        start.clear();
    }
    if start.starts_with(b"FEA1") {
        let remedy = "write it again with pyarrow.feather.write_feather";
        return Err(Error::at(&file.path, format!("Feather version 1 is not supported; {remedy}")));
    }
    let mut input = Cursor::new(start).chain(input);
    let (columns, mut decoder) = open_batches(file, &mut input, reading)?;
    while let Some(message) = Message::read(&mut input).map_err(damaged)? {
        if let Some(batch) = message.decode(&mut decoder).map_err(damaged)? {
            send_rows(file, &columns, &batch, to)?;
        }
    }
    Ok(())
}

/// Sends the rows of the record batches that begin in a part of an Arrow IPC file.
fn read_arrow_batches(source: Source, part: &Part, to: &mut Batcher) -> Result<()> {
    let Source { file, reading, bytes, .. } = source;
    let damaged = |error| unreadable(file, "Arrow", &error);
    let mut input = BufReader::new(file.raw()?);
    let (dictionaries, mut batches) = blocks(&mut input).map_err(damaged)?;
    batches.sort_unstable();
    input.seek(SeekFrom::Start(FILE_MAGIC.len() as u64)).map_err(|e| file.unreadable(&e))?;
    let (columns, mut decoder) = open_batches(file, &mut input, reading)?;
    let mut read = |(offset, _): (u64, u64)| {
        input.seek(SeekFrom::Start(offset))?;
        let ended = || ArrowError::IpcError("a batch is missing".to_owned());
        Message::read(&mut input)?.ok_or_else(ended)?.decode(&mut decoder)
    };
    for block in dictionaries {
        read(block).map_err(damaged)?;
    }
    for block in batches {
        // A damaged offset also belongs to one part, whose reader fails.
        if part.contains(block.0.min(file.size.saturating_sub(1))) {
            if let Some(batch) = read(block).map_err(damaged)? {
                send_rows(file, &columns, &batch, to)?;
            }
            bytes.fetch_add(block.1, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// The text columns and a decoder for batches with them, from the schema at the start of a stream.
fn open_batches(
    file: &InputFile,
    input: &mut impl Read,
    reading: &ReadOptions,
) -> Result<(Vec<ColumnPath>, FileDecoder)> {
    let damaged = |error| unreadable(file, "Arrow", &error);
    let mut open = || {
        let message = Message::read(input)?;
        let metadata = message.as_ref().map(Message::metadata).transpose()?;
        let schema = metadata.and_then(|metadata| Some((metadata.header_as_schema()?, metadata.version())));
        let (schema, version) =
            schema.ok_or_else(|| ArrowError::IpcError("the schema is missing".to_owned()))?;
        if !schema.endianness().equals_to_target_endianness() {
            return Err(ArrowError::IpcError("its byte order differs from this machine's".to_owned()));
        }
        Ok((Arc::new(try_fb_to_schema(schema)?), version))
    };
    let (schema, version) = open().map_err(damaged)?;
    let columns = text_columns(file, &schema, &reading.text_fields)?;
    let mut roots: Vec<usize> = columns.iter().map(|column| column.0[0]).collect();
    roots.sort_unstable();
    roots.dedup();
    let in_batch = |column: ColumnPath| {
        let root = roots.partition_point(|&root| root < column.0[0]);
        ColumnPath([&[root], &column.0[1..]].concat())
    };
    let columns = columns.into_iter().map(in_batch).collect();
    Ok((columns, FileDecoder::new(schema, version).with_projection(roots)))
}

type Extent = (u64, u64);

fn blocks(input: &mut (impl Read + Seek)) -> ArrowResult<(Vec<Extent>, Vec<Extent>)> {
    let mut end = [0; 10];
    input.seek(SeekFrom::End(-10))?;
    input.read_exact(&mut end)?;
    let length = read_footer_length(end)?;
    input.seek(SeekFrom::End(-10 - length as i64))?;
    let mut bytes = Vec::new();
    input.take(length as u64).read_to_end(&mut bytes)?;
    let footer = root_as_footer(&bytes).map_err(|error| ArrowError::IpcError(error.to_string()))?;
    let span = |block: &Block| {
        let length = i64::from(block.metaDataLength()).saturating_add(block.bodyLength());
        (block.offset().max(0) as u64, length.max(0) as u64)
    };
    let dictionaries = footer.dictionaries().into_iter().flatten().map(span).collect();
    Ok((dictionaries, footer.recordBatches().into_iter().flatten().map(span).collect()))
}

/// A message of Arrow IPC: the length of its metadata, the metadata, and the body.
struct Message {
    bytes: Vec<u8>,
    metadata: std::ops::Range<usize>,
}

impl Message {
    /// Reads the next message; `None` at the end of the stream. Allocates only for bytes that exist, whatever length it claims.
    fn read(input: &mut impl Read) -> ArrowResult<Option<Self>> {
        let mut bytes = Vec::new();
        take(input, 4, &mut bytes)?;
        if bytes == [0xff; 4] {
            take(input, 4, &mut bytes)?;
        }
        let length = bytes.last_chunk().map_or(0, |length| i32::from_le_bytes(*length));
        if length == 0 {
            return Ok(None);
        }
        let begin = bytes.len();
        take(input, i64::from(length), &mut bytes)?;
        let mut message = Self { metadata: begin..bytes.len(), bytes };
        let body = message.metadata()?.bodyLength();
        take(input, body, &mut message.bytes)?;
        Ok(Some(message))
    }

    fn metadata(&self) -> ArrowResult<arrow_ipc::Message<'_>> {
        let bytes = &self.bytes[self.metadata.clone()];
        root_as_message(bytes).map_err(|error| ArrowError::IpcError(error.to_string()))
    }

    fn decode(self, decoder: &mut FileDecoder) -> ArrowResult<Option<RecordBatch>> {
        let metadata = self.metadata()?;
        let (kind, dictionary) = (metadata.header_type(), metadata.header_as_dictionary_batch());
        let batch = metadata.header_as_record_batch().or_else(|| dictionary?.data());
        let body = &self.bytes[self.metadata.end..];
        if let Some(batch) = batch.filter(|batch| batch.compression().is_some()) {
            check_decompressed(&batch, body)?;
        }
        let block = Block::new(0, self.metadata.end as i32, body.len() as i64);
        let bytes = Buffer::from_vec(self.bytes);
        if kind == MessageHeader::DictionaryBatch {
            return decoder.read_dictionary(&block, &bytes).map(|()| None);
        }
        decoder.read_record_batch(&block, &bytes)
    }
}

fn take(input: &mut impl Read, length: i64, to: &mut Vec<u8>) -> ArrowResult<()> {
    let length =
        u64::try_from(length).map_err(|_| ArrowError::IpcError(format!("negative length {length}")))?;
    if input.take(length).read_to_end(to)? as u64 == length {
        return Ok(());
    }
    Err(ArrowError::IpcError("truncated: its end marker is missing".to_owned()))
}

/// Rejects a batch that would decompress to far more bytes: each buffer begins with its decompressed length.
fn check_decompressed(batch: &arrow_ipc::RecordBatch<'_>, body: &[u8]) -> ArrowResult<()> {
    let decompressed = |buffer: &arrow_ipc::Buffer| {
        let length = body.get(usize::try_from(buffer.offset()).ok()?..)?.first_chunk()?;
        (buffer.length() > 0).then(|| i64::from_le_bytes(*length).max(0) as u64)
    };
    let total = batch.buffers().into_iter().flatten().filter_map(decompressed).fold(0, u64::saturating_add);
    if total <= MAX_DECOMPRESSED.0.max(MAX_DECOMPRESSED.1 * body.len() as u64) {
        return Ok(());
    }
    Err(ArrowError::IpcError(format!(
        "a compressed batch of {} bytes decompresses to {total}; if that is right, write it in smaller batches",
        body.len()
    )))
}

fn send_rows(file: &InputFile, columns: &[ColumnPath], batch: &RecordBatch, to: &mut Batcher) -> Result<()> {
    let damaged = |problem: &str| unreadable(file, "table", &problem);
    let columns = columns.iter().map(|path| TextColumn::at_path(path, batch)).collect::<Option<Vec<_>>>();
    let columns = columns.ok_or_else(|| damaged("a batch does not have the schema's column types"))?;
    let mut texts = Vec::with_capacity(columns.len());
    for row in 0..batch.num_rows() {
        texts.clear();
        for column in &columns {
            texts.extend(column.at(row).ok_or_else(|| damaged("a key is outside its dictionary"))?);
        }
        send_row(&texts, to)?;
    }
    Ok(())
}

struct TextColumn<'a> {
    columns: Vec<&'a ArrayRef>,
    values: Strings<'a>,
    keys: Option<Vec<usize>>,
}

/// The string at an index (`Some(None)` for null); `None` if the index is out of range.
type Strings<'a> = Box<dyn Fn(usize) -> Option<Option<&'a str>> + 'a>;

impl<'a> TextColumn<'a> {
    fn at_path(path: &ColumnPath, batch: &'a RecordBatch) -> Option<Self> {
        let (&root, inner) = path.0.split_first()?;
        let (mut column, mut structs) = (batch.columns().get(root)?, Vec::new());
        for &index in inner {
            structs.push(column);
            column = column.as_struct_opt()?.columns().get(index)?;
        }
        let mut text = Self::of(column)?;
        text.columns.extend(structs);
        Some(text)
    }

    /// `None` if the column does not hold text.
    fn of(column: &'a ArrayRef) -> Option<Self> {
        let columns = vec![column];
        let Some(dictionary) = column.as_any_dictionary_opt() else {
            return Some(Self { columns, values: strings(column)?, keys: None });
        };
        // Without values every row is null, and `normalized_keys` would panic.
        let has_values = !dictionary.values().is_empty();
        let keys = if has_values { dictionary.normalized_keys() } else { Vec::new() };
        Some(Self { columns, values: strings(dictionary.values())?, keys: Some(keys) })
    }

    /// The text in a row (`Some(None)` for null); `None` if its key is outside the dictionary.
    fn at(&self, row: usize) -> Option<Option<&'a str>> {
        if self.columns.iter().any(|column| column.is_null(row)) {
            return Some(None);
        }
        match &self.keys {
            Some(keys) => (self.values)(*keys.get(row)?),
            None => (self.values)(row),
        }
    }
}

fn strings(array: &ArrayRef) -> Option<Strings<'_>> {
    fn of<'a>(array: impl ArrayAccessor<Item = &'a str> + 'a) -> Strings<'a> {
        Box::new(move |at| (at < array.len()).then(|| array.is_valid(at).then(|| array.value(at))))
    }
    let large = || array.as_string_opt::<i64>().map(of);
    let view = || array.as_string_view_opt().map(of);
    array.as_string_opt::<i32>().map(of).or_else(large).or_else(view)
}
