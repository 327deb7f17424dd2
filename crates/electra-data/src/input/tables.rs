//! Documents from Parquet tables, and code shared by all table formats.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrow_schema::{DataType, Field, FieldRef, Fields, Schema};
use parquet::basic::{ConvertedType, LogicalType, Type as PhysicalType};
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::Result as ParquetResult;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader, RowGroupMetaData};
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::schema::types::{ColumnDescPtr, ColumnDescriptor, SchemaDescriptor};

use super::division::{Part, Source};
use super::input_file::InputFile;
use super::pipeline::Batcher;
use super::raw_file::TableFile;
use super::read_options::missing_field;
use super::text::MAX_LINE_BYTES;
use crate::error::{Error, Result};

const PROGRESS_ROWS: u64 = 256;

/// Sends each row of a Parquet file, or of the row groups that begin in a part of it, as a document.
///
/// Rows are decoded one at a time, so that memory always holds one page of each column and its dictionary: a
/// batch of rows can be larger than the file by the ratio of a dictionary entry's length to its index's.
pub(super) fn read_parquet(source: Source, to: &mut Batcher) -> Result<()> {
    let Source { file, part, reading, bytes } = source;
    let damaged = |error: &dyn std::fmt::Display| unreadable(file, "Parquet", error);
    let table = TableFile::new(file.open_seekable()?).map_err(|e| file.unreadable(&e))?;
    let metadata = ParquetMetaDataReader::new().parse_and_finish(&table).map_err(|e| damaged(&e))?;
    let columns = arrow_columns(metadata.file_metadata().schema_descr());
    let columns = text_columns(file, &Schema::new(columns), &reading.text_fields)?;
    let leaves: Vec<usize> = columns.iter().map(|column| column.0[0]).collect();
    let groups = match part {
        Some(part) => row_groups_of(part, file, &metadata),
        None => (0..metadata.num_row_groups()).collect(),
    };
    let range = |group: &usize, leaf: usize| {
        let (start, length) = metadata.row_group(*group).column(leaf).byte_range();
        start..start.saturating_add(length)
    };
    let inputs: Vec<_> = leaves
        .iter()
        .map(|&leaf| (leaf, table.column(groups.iter().map(|group| range(group, leaf)), leaves.len())))
        .collect();
    let num_rows = |group: &usize| metadata.row_group(*group).num_rows().max(0) as u64;
    let (size, rows) =
        (part.map_or(file.size, |part| part.end - part.start), groups.iter().map(num_rows).sum::<u64>());
    let (mut done, mut counted, mut texts) = (0, 0, Vec::with_capacity(leaves.len()));
    for group in groups {
        let (row_group, expected) = (metadata.row_group(group), num_rows(&group));
        let columns = inputs.iter().map(|(leaf, input)| ParquetText::open(input, row_group, *leaf));
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
                    return Err(Error::at(&file.path, "a row has more than 1 GiB of text; split it"));
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

/// The columns of a Parquet file by number, also in structs: `review.body`. The logical type decides which columns are
/// text, whichever program wrote the file; other types need only a name for messages. The library's own function
/// would take a minute to compile.
fn arrow_columns(schema: &SchemaDescriptor) -> Fields {
    let is_outermost =
        |name: &str| schema.root_schema().get_fields().iter().any(|field| field.name() == name);
    let column = |column: &ColumnDescPtr| {
        let parts = column.path().parts();
        let name = parts.join(".");
        if column.max_rep_level() > 0 {
            return Field::new(&parts[0], DataType::new_list(arrow_type(column), true), true);
        }
        // A column with the whole name, including dots, has precedence over a field of a struct.
        if parts.len() > 1 && is_outermost(&name) {
            return Field::new("", DataType::Binary, true);
        }
        Field::new(name, arrow_type(column), true)
    };
    schema.columns().iter().map(column).collect()
}

fn arrow_type(column: &ColumnDescriptor) -> DataType {
    match (column.physical_type(), column.logical_type_ref(), column.converted_type()) {
        (PhysicalType::BYTE_ARRAY, Some(LogicalType::String | LogicalType::Json), _)
        | (PhysicalType::BYTE_ARRAY, None, ConvertedType::UTF8 | ConvertedType::JSON) => DataType::Utf8,
        (PhysicalType::BYTE_ARRAY | PhysicalType::FIXED_LEN_BYTE_ARRAY, ..) => DataType::Binary,
        (PhysicalType::BOOLEAN, ..) => DataType::Boolean,
        (PhysicalType::INT32, ..) => DataType::Int32,
        (PhysicalType::INT64 | PhysicalType::INT96, ..) => DataType::Int64,
        (PhysicalType::FLOAT, ..) => DataType::Float32,
        (PhysicalType::DOUBLE, ..) => DataType::Float64,
    }
}

struct ParquetText {
    reader: ColumnReaderImpl<ByteArrayType>,
    values: Vec<ByteArray>,
    levels: Vec<i16>,
}

impl ParquetText {
    fn open(input: &TableFile, group: &RowGroupMetaData, leaf: usize) -> ParquetResult<Self> {
        let (column, rows) = (group.column(leaf), group.num_rows() as usize);
        let pages = SerializedPageReader::new(Arc::new(input.clone()), column, rows, None)?;
        let reader = ColumnReaderImpl::new(column.column_descr_ptr(), Box::new(pages));
        Ok(Self { reader, values: Vec::new(), levels: Vec::new() })
    }

    /// The text of the next row, `Some(None)` for null; `None` at the end.
    fn next(&mut self) -> ParquetResult<Option<Option<ByteArray>>> {
        self.values.clear();
        self.levels.clear();
        let (rows, ..) = self.reader.read_records(1, Some(&mut self.levels), None, &mut self.values)?;
        Ok((rows > 0).then(|| self.values.pop()))
    }
}

fn row_groups_of(part: &Part, file: &InputFile, metadata: &ParquetMetaData) -> Vec<usize> {
    let mut first_byte = 0;
    let begins_here = |group: &usize| {
        let columns = metadata.row_group(*group).columns();
        let begin = columns.iter().map(|column| column.byte_range().0).min().unwrap_or(0);
        // Never before the previous group, so that rows stay in order, and always within the file.
        first_byte = begin.min(file.size.saturating_sub(1)).max(first_byte);
        part.contains(first_byte)
    };
    (0..metadata.num_row_groups()).filter(begins_here).collect()
}

/// The index of a column, followed by the indices of the struct fields that lead to the wanted field.
pub(super) struct ColumnPath(pub Vec<usize>);

impl ColumnPath {
    fn find(fields: &Fields, name: &str) -> Option<(Self, DataType)> {
        if let Some((index, field)) = fields.find(name) {
            return Some((Self(vec![index]), field.data_type().clone()));
        }
        fields.iter().enumerate().find_map(|(index, field)| {
            let DataType::Struct(inner) = field.data_type() else { return None };
            let (path, kind) = Self::find(inner, name.strip_prefix(field.name())?.strip_prefix('.')?)?;
            Some((Self([vec![index], path.0].concat()), kind))
        })
    }
}

fn names_of_texts(fields: &Fields, before: &str) -> Vec<String> {
    let name = |field: &FieldRef| format!("{before}{}", field.name());
    let names = fields.iter().flat_map(|field| match field.data_type() {
        DataType::Struct(inner) => names_of_texts(inner, &format!("{}.", name(field))),
        kind if is_text(kind) => vec![name(field)],
        _ => Vec::new(),
    });
    names.collect()
}

/// The wanted columns; the error lists all text columns.
pub(super) fn text_columns(file: &InputFile, schema: &Schema, fields: &[String]) -> Result<Vec<ColumnPath>> {
    let texts = names_of_texts(schema.fields(), "");
    let column = |field: &String| {
        let reason = match ColumnPath::find(schema.fields(), field) {
            Some((column, kind)) if is_text(&kind) => return Ok(column),
            _ if texts.is_empty() => "no column of strings".to_owned(),
            Some((_, kind)) => {
                let texts = texts.join(", ");
                format!("column \"{field}\" is {kind}, not a string; columns of strings: {texts}")
            }
            None => format!("{}; choose one with --text", missing_field(field, &texts)),
        };
        Err(Error::at(&file.path, reason))
    };
    fields.iter().map(column).collect()
}

fn is_text(kind: &DataType) -> bool {
    match kind {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Dictionary(_, values) => !matches!(**values, DataType::Dictionary(..)) && is_text(values),
        _ => false,
    }
}

pub(super) fn send_row(texts: &[&str], to: &mut Batcher) -> Result<()> {
    match texts {
        [one] => to.push_document(one),
        _ => to.push_document(&texts.join("\n")),
    }
}

pub(super) fn unreadable(file: &InputFile, kind: &str, error: &dyn std::fmt::Display) -> Error {
    let error = error.to_string();
    let error = error.split_whitespace().collect::<Vec<_>>().join(" "); // flatbuffers adds empty lines
    Error::at(&file.path, format!("cannot be read as {kind} ({error}); download the file again"))
}

#[cfg(test)]
mod tests {
    use parquet::schema::parser::parse_message_type;

    use super::*;

    #[test]
    fn string_columns_of_any_writer_are_text() {
        let list = "optional group a (LIST) { repeated group list { optional binary element (UTF8); } }";
        let map = "optional group m (MAP) { repeated group key_value { required binary key (UTF8); } }";
        for (fields, columns) in [
            ("optional binary a (UTF8); optional binary b (STRING); required binary c (JSON);", "+a +b +c"),
            (
                "required binary a; required binary b (ENUM); required binary c (BSON); required int64 d;",
                "a b c d",
            ),
            (
                "required fixed_len_byte_array(3) a; required int96 b; required boolean c; required double d;",
                "a b c d",
            ),
            (
                "optional group a { required group b.c { optional binary d (UTF8); optional float e; } }",
                "+a.b.c.d a.b.c.e",
            ),
            ("optional group a { optional binary b (UTF8); } optional binary a.b (UTF8);", " +a.b"),
            (list, "a"),
            (&format!("optional group b {{ {list} {map} }} optional binary c (UTF8);"), "b b +c"),
            ("repeated binary a (UTF8); repeated group b { required binary c (UTF8); }", "a b"),
            ("optional group a (LIST) { repeated binary array (UTF8); }", "a"),
        ] {
            let schema = parse_message_type(&format!("message m {{ {fields} }}")).unwrap();
            let columns_read = arrow_columns(&SchemaDescriptor::new(schema.into()));
            let mark = |field: &FieldRef| if is_text(field.data_type()) { "+" } else { "" };
            let names = columns_read.iter().map(|field| format!("{}{}", mark(field), field.name()));
            assert_eq!(names.collect::<Vec<_>>().join(" "), columns, "{fields}");
        }
    }
}
