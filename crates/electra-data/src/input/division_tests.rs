//! Reading a file in parts gives the same documents, skipped records and errors as reading it whole.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use arrow_array::{ArrayRef, DictionaryArray, RecordBatch, StringArray, types::Int32Type};
use arrow_ipc::MetadataVersion;
use arrow_ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use proptest::prelude::*;

use super::*;
use crate::error::Result;
use crate::store::test_server::{Fault, Log, TestServer};

type Found = (Vec<Vec<String>>, Vec<SkippedRecord>);

fn read(path: &Path, reading: &ReadOptions, part_bytes: u64) -> Result<Found> {
    let inputs = Inputs::expand(&[path.to_owned()], None, &ReadOptions::default())?;
    let groups = inputs.input_groups(reading, part_bytes);
    let read = |to: &mut Batcher<'_>| {
        for (number, group) in groups.iter().enumerate() {
            to.begin_input_group(number)?;
            for file in &inputs.files[group.files.clone()] {
                read_file(file, group.part.as_ref(), reading, &AtomicU64::new(0), to)?;
            }
            to.end_input_group()?;
        }
        Ok(())
    };
    let (mut outcome, mut document): (Found, String) = ((Vec::new(), Vec::new()), String::new());
    let work = |batch: TextBatch| {
        Ok(batch.texts().map(|text| (text.text.to_owned(), text.mark.clone())).collect::<Vec<_>>())
    };
    let consume = |batch: Option<Vec<(String, Mark)>>| {
        for (text, mark) in batch.into_iter().flatten() {
            document.push_str(&text);
            match mark {
                Mark::Partial => {}
                Mark::Line => document.push('\n'),
                Mark::Begin(_) => outcome.0.push(Vec::new()),
                Mark::Document => outcome.0.last_mut().unwrap().push(std::mem::take(&mut document)),
                Mark::InputGroup(end) => outcome.1.extend(end.skipped),
            }
        }
        Ok(())
    };
    let skips = SkipLog::new(reading.skip_bad_rows, 0);
    let intake = Intake { skips, ..Intake::everything(Cut::Blanks) };
    with_workers(1, 1, || work, |workers| workers.run_pipeline(intake, read, consume))?;
    Ok(outcome)
}

/// Compares a file in parts with the whole file; returns the number of documents in each part.
fn compare(path: &Path, reading: &ReadOptions, part_bytes: u64) -> Vec<usize> {
    let flat = |outcome: Result<Found>| {
        outcome.map(|(groups, skipped)| (groups.concat(), skipped)).map_err(|e| e.to_string())
    };
    let parts = read(path, reading, part_bytes);
    let counts = parts.as_ref().map_or(Vec::new(), |outcome| outcome.0.iter().map(Vec::len).collect());
    let (parts, whole) = (flat(parts), flat(read(path, reading, u64::MAX)));
    let differ =
        || format!("in parts of {part_bytes}: {:.300} … {:.300}", format!("{parts:?}"), format!("{whole:?}"));
    assert!(parts == whole, "{}", differ());
    counts
}

fn file(dir: &tempfile::TempDir, name: &str, bytes: impl AsRef<[u8]>) -> std::path::PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn separated_by(separator: DocumentSeparator) -> ReadOptions {
    ReadOptions { separator, ..ReadOptions::default() }
}

/// Texts that are hard to divide: spaces on blank lines, line ends of all kinds, byte order marks, invalid bytes.
fn ugly_text() -> impl Strategy<Value = Vec<u8>> {
    let pieces = "a|word two|\n|\n\n|\r\n|\r\n\r\n| \n|\t\r\n|\r|x\n|long line of words\n|\u{3000}\n|\u{85}|\u{feff}|é";
    let pieces: Vec<_> = pieces.split('|').collect();
    let text =
        prop::collection::vec(prop::sample::select(pieces), 0..50).prop_map(|all| all.concat().into_bytes());
    // Sometimes with a byte order mark before, invalid bytes after, line ends of old Macs, or as UTF-16.
    (text, any::<bool>(), 0..8_u8).prop_map(|(mut text, has_mark, kind)| {
        if has_mark {
            text.splice(0..0, *b"\xef\xbb\xbf");
        }
        match kind {
            0 => text.extend_from_slice(b"\n\nsome \xff\xfe words\n"),
            1 => text.iter_mut().filter(|byte| **byte == b'\n').for_each(|byte| *byte = b'\r'),
            2 => {
                let utf16 =
                    String::from_utf8_lossy(&text).encode_utf16().flat_map(u16::to_be_bytes).collect();
                text = [b"\xfe\xff".to_vec(), utf16].concat();
            }
            _ => {}
        }
        text
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn text_in_parts_equals_whole_text(text in ugly_text(), part_bytes in 1..60_u64, replace in any::<bool>()) {
        let dir = tempfile::tempdir().unwrap();
        let path = file(&dir, "a.txt", text);
        let invalid_utf8 = if replace { InvalidUtf8::Replace } else { InvalidUtf8::Error };
        for separator in [DocumentSeparator::BlankLine, DocumentSeparator::Line, DocumentSeparator::File] {
            compare(&path, &ReadOptions { invalid_utf8, ..separated_by(separator) }, part_bytes);
        }
    }

    #[test]
    fn records_in_parts_equal_whole_records(
        lines in prop::collection::vec(prop::sample::select(vec![
            "{\"text\": \"a\"}", "{\"text\": \"b\\nc\"}", "", " ", "{\"text\"", "{\"body\": 1}", "{\"text\": 5}\r",
            "\u{feff}{\"text\": \"d\"}", "{\"text\": \"a longer text\", \"id\": [1, 2]}", "\u{0}",
        ]), 0..20),
        part_bytes in 1..60_u64,
        skip_bad_rows in prop::sample::select(vec![0_u64, 2, 100]),
        ends in any::<bool>(),
        is_utf16 in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let text = lines.join("\n") + if ends { "\n" } else { "" };
        let utf16 = || format!("\u{feff}{text}").encode_utf16().flat_map(u16::to_le_bytes).collect();
        let path = file(&dir, "a.jsonl", if is_utf16 { utf16() } else { text.clone().into_bytes() });
        compare(&path, &ReadOptions { skip_bad_rows, ..ReadOptions::default() }, part_bytes);
    }
}

#[test]
fn each_document_is_in_the_part_where_it_begins() {
    let dir = tempfile::tempdir().unwrap();
    let text: String = (0..100).map(|n| format!("document {n:03}\n\n")).collect();
    let counts = compare(&file(&dir, "a.txt", &text), &separated_by(DocumentSeparator::BlankLine), 300);
    assert_eq!((counts.len(), counts.iter().sum::<usize>()), (5, 100));
    assert!(counts.iter().all(|&count| (18..=22).contains(&count)), "{counts:?}");
    // A document that spans several parts belongs to the first one, and the parts within it are empty.
    let long = format!("{text}{}\n\n{text}", "word\n".repeat(400));
    let counts = compare(&file(&dir, "b.txt", long), &separated_by(DocumentSeparator::BlankLine), 300);
    assert!(counts[6..11].iter().all(|&count| count == 0), "{counts:?}");
    assert_eq!(compare(&file(&dir, "c.txt", "a\rb\r\rc\r"), &ReadOptions::default(), 2), [2, 0, 0, 0]);
}

#[test]
fn very_long_lines_are_cut_at_the_same_places() {
    let dir = tempfile::tempdir().unwrap();
    let blanks = |kib: usize| " ".repeat(kib << 10);
    for kib in [63, 64, 100, 250, 600] {
        let text = format!("a\n{}\nb b\n\n{}c\n{}\nd\n", blanks(kib), blanks(kib / 2), blanks(kib)).repeat(3);
        let path = file(&dir, "a.txt", text);
        for part_bytes in [40 << 10, 90 << 10, 300_001] {
            compare(&path, &separated_by(DocumentSeparator::BlankLine), part_bytes);
            compare(&path, &separated_by(DocumentSeparator::Line), part_bytes);
        }
    }
}

fn row_text(row: usize) -> String {
    format!("row {row} {}", "x".repeat(row % 50))
}

fn batches(rows: usize, rows_per_batch: usize) -> Vec<RecordBatch> {
    let texts: Vec<String> = (0..rows).map(row_text).collect();
    let batch = |texts: &[String]| {
        let text: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
        // One dictionary for all batches: a file cannot replace it.
        let keys = (0..texts.len() as i32).map(|n| n % 2).collect::<Vec<_>>();
        let values: ArrayRef = Arc::new(StringArray::from(vec!["odd", "even"]));
        let other: ArrayRef = Arc::new(DictionaryArray::<Int32Type>::new(keys.into(), values));
        RecordBatch::try_from_iter([("text", text), ("other", other)]).unwrap()
    };
    texts.chunks(rows_per_batch).map(batch).collect()
}

/// Writes columns of text, in row groups of `rows_per_group` rows and pages of 64 KiB.
fn write_parquet(path: &Path, columns: &[(&str, Vec<String>)], rows_per_group: usize) {
    let fields: String = columns.iter().map(|(name, _)| format!("required binary {name} (UTF8); ")).collect();
    let schema = Arc::new(parse_message_type(&format!("message m {{ {fields} }}")).unwrap());
    let properties = WriterProperties::builder().set_data_page_size_limit(64 << 10).set_write_batch_size(8);
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties.build())).unwrap();
    let rows = columns[0].1.len();
    for start in (0..rows).step_by(rows_per_group) {
        let mut group = writer.next_row_group().unwrap();
        for (_, texts) in columns {
            let mut column = group.next_column().unwrap().unwrap();
            let texts = &texts[start..rows.min(start + rows_per_group)];
            let values: Vec<_> = texts.iter().map(|text| ByteArray::from(text.as_str())).collect();
            column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
}

fn odd_or_even(row: usize) -> String {
    ["odd", "even"][row % 2].to_owned()
}

#[test]
fn stored_table_is_prefetched_and_read_once() {
    let (dir, delay) = (tempfile::tempdir().unwrap(), std::time::Duration::from_millis(30));
    let text = |row: usize| (0..300).map(|n| format!("{} ", row * n)).collect();
    let server = TestServer::start(dir.path());
    // Row groups of many pages, many small row groups, and a small file, each with a column that is not read.
    for (rows, rows_per_group, fields, requests) in [
        (3_000, 1_000, &["text"][..], 10),
        (1_500, 50, &["other", "text"][..], 65),
        (100, 50, &["text", "other"][..], 1),
    ] {
        let columns = [
            ("unread", (0..rows).map(|row| row_text(row * 7)).collect()),
            ("other", (0..rows).map(odd_or_even).collect()),
            ("text", (0..rows).map(text).collect()),
        ];
        let (local, url) = (dir.path().join("a.parquet"), format!("{}/a.parquet", server.url));
        write_parquet(&local, &columns, rows_per_group);
        let bytes = local.metadata().unwrap().len();
        let text_fields = fields.iter().map(|&field| field.to_owned()).collect();
        let reading = ReadOptions { text_fields, ..ReadOptions::default() };
        let expected = read(&local, &reading, u64::MAX).unwrap();
        *server.log() = Log { delay, ..Log::default() };
        let start = std::time::Instant::now();
        assert!(read(Path::new(&url), &reading, u64::MAX).unwrap() == expected);
        let (elapsed, served) = (start.elapsed(), server.log().served.clone());
        let total: u64 = served.iter().map(|(_, range)| range.end - range.start).sum();
        assert!(served.len() <= requests, "{served:?}");
        assert!(
            total <= bytes && (served.len() < 20 || elapsed < delay * served.len() as u32),
            "{elapsed:?}"
        );
        let faults = vec![(".parquet", Fault::Cut), (".parquet", Fault::Short)];
        *server.log() = Log { faults, ..Log::default() };
        compare(Path::new(&url), &reading, bytes / 5);
    }
}

#[test]
fn tables_are_divided_between_row_groups_and_batches() {
    let (dir, batches) = (tempfile::tempdir().unwrap(), batches(500, 7));
    let schema = batches[0].schema();
    let path = |name: &str| dir.path().join(name);
    let create = |name: &str| std::fs::File::create(path(name)).unwrap();
    let columns =
        [("text", (0..500).map(row_text).collect()), ("other", (0..500).map(odd_or_even).collect())];
    write_parquet(&path("a.parquet"), &columns, 13);
    // Aligned as by pyarrow.
    let alignment = IpcWriteOptions::try_new(8, false, MetadataVersion::V5).unwrap();
    let mut table = FileWriter::try_new_with_options(create("a.arrow"), &schema, alignment).unwrap();
    let mut stream = StreamWriter::try_new(create("b.arrow"), &schema).unwrap();
    for batch in &batches {
        table.write(batch).unwrap();
        stream.write(batch).unwrap();
    }
    table.finish().unwrap();
    stream.finish().unwrap();
    let reading = ReadOptions { text_fields: vec!["other".into(), "text".into()], ..ReadOptions::default() };
    for part_bytes in [50, 1_000, 3_000, 10_000, 1 << 20] {
        for name in ["a.parquet", "a.arrow"] {
            let counts = compare(&path(name), &reading, part_bytes);
            assert_eq!(counts.iter().sum::<usize>(), 500);
            assert!(counts.iter().all(|&count| part_bytes > 10_000 || count < 250), "{name}: {counts:?}");
        }
        let counts = compare(&path("b.arrow"), &reading, part_bytes);
        assert_eq!((counts[0], counts.iter().sum::<usize>()), (500, 500));
    }
    let missing = ReadOptions { text_fields: vec!["none".into()], ..ReadOptions::default() };
    for name in ["a.parquet", "a.arrow"] {
        compare(&path(name), &missing, 3_000);
        let bytes = std::fs::read(path(name)).unwrap();
        let cut = file(&dir, &format!("cut-{name}"), &bytes[..bytes.len() - 30]);
        assert!(read(&cut, &reading, 1_000).is_err());
    }
}

#[test]
fn only_huge_divisible_files_are_divided() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["a.txt", "b.txt.gz", "c.jsonl", "d.txt", "e.txt"] {
        file(&dir, name, vec![b'x'; if name == "d.txt" { 100 } else { 1_000 }]);
    }
    let inputs = Inputs::expand(&[dir.path().to_owned()], None, &ReadOptions::default()).unwrap();
    let groups = |reading: &ReadOptions, part_bytes| -> Vec<_> {
        let parts = inputs.input_groups(reading, part_bytes);
        parts.into_iter().map(|g| (g.files, g.part.map_or(0, |part| part.end - part.start))).collect()
    };
    let sizes = groups(&ReadOptions::default(), 500);
    assert_eq!(
        sizes,
        [(0..1, 500), (0..1, 500), (1..2, 0), (2..3, 500), (2..3, 500), (3..4, 0), (4..5, 500), (4..5, 500)]
    );
    assert_eq!(
        groups(&separated_by(DocumentSeparator::File), 500),
        [(0..2, 0), (2..3, 500), (2..3, 500), (3..5, 0)]
    );
    assert_eq!(groups(&ReadOptions::default(), 1_000), [(0..5, 0)]);
}
