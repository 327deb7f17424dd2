//! Counting and dropping, compared with a dictionary of all texts.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use super::buckets::to_bytes;
use super::counts::Counts;
use super::drops::{Drops, Each, find, save_hashes};
use super::sketches::Sample;
use super::watch::{Ended, Hasher};
use super::*;
use crate::error::{Error, Result};
use crate::format::Corpus;
use crate::input::{InvalidUtf8, Mark, ReadOptions, TextSource};
use crate::prepare::options::Pass;
use crate::prepare::output_dir::{InputGroupRecord, OutputDir};
use crate::prepare::place::{Place, Sizes};
use crate::prepare::progress::{Progress, Step};
use crate::prepare::tests::tokenizer;
use crate::prepare::{DropDuplicates, PrepareOptions, PrepareReport, prepare};
use crate::store::test_server::TestServer;
use crate::tokenizer::Tokenizer;

const ENTRIES: &str = "a b c d";

/// Writes documents as JSON lines, `per_file` in each file.
fn write(dir: &Path, documents: &[Vec<String>], per_file: usize) -> PathBuf {
    let folder = dir.join("texts");
    std::fs::create_dir(&folder).unwrap();
    for (number, documents) in documents.chunks(per_file).enumerate() {
        let record = |lines: &Vec<String>| format!("{}\n", serde_json::json!({"text": lines.join("\n")}));
        let records: String = documents.iter().map(record).collect();
        std::fs::write(folder.join(format!("{number:04}.jsonl")), records).unwrap();
    }
    folder
}

fn options(drop_duplicates: Option<DropDuplicates>) -> PrepareOptions {
    PrepareOptions { drop_duplicates, threads: Some(1), part_bytes: Some(200), ..PrepareOptions::default() }
}

fn run(texts: &Path, out: &Path, tokenizer: &Tokenizer, options: &PrepareOptions) -> PrepareReport {
    tried(texts, out, tokenizer, options).unwrap()
}

fn tried(texts: &Path, out: &Path, tokenizer: &Tokenizer, options: &PrepareOptions) -> Result<PrepareReport> {
    prepare(TextSource::Files(vec![texts.to_owned()]), tokenizer, out, options, &mut |_| true)
}

fn documents(dir: &Path) -> Vec<Vec<Vec<u64>>> {
    let corpus = Corpus::open(dir).unwrap();
    let mut documents = Vec::new();
    for shard in (0..corpus.num_shards()).map(|shard| corpus.shard(shard)) {
        let mut at = 0;
        for document in 0..shard.num_documents() {
            let lines = shard.line_lengths(document).unwrap().into_iter().map(|length| {
                let mut ids = vec![0; length as usize];
                shard.copy_tokens(at, &mut ids).unwrap();
                at += u64::from(length);
                ids.iter().map(|&id| id as u64).collect()
            });
            documents.push(lines.collect());
        }
    }
    documents
}

/// The ids of documents in the vocabulary above, without trailing blank lines and empty documents.
fn ids(documents: &[Vec<String>]) -> Vec<Vec<Vec<u64>>> {
    let line = |line: &String| {
        line.split_whitespace().map(|word| 5 + u64::from(word.as_bytes()[0] - b'a')).collect::<Vec<_>>()
    };
    let document = |lines: &Vec<String>| {
        let lines: Vec<_> = lines.iter().map(line).skip_while(Vec::is_empty).collect();
        let end = lines.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1);
        lines[..end].to_vec()
    };
    documents.iter().map(document).filter(|lines| !lines.is_empty()).collect()
}

/// With a dictionary: all and repeated documents, all and repeated lines, the count of each line, documents
/// with repeated lines only, and the text without repeated documents, or lines.
type Expected = ((u64, u64), (u64, u64), HashMap<String, u64>, u64, [Vec<Vec<String>>; 2]);

fn expected(documents: &[Vec<String>]) -> Expected {
    let (mut seen, mut counts) = (HashSet::new(), HashMap::new());
    let (mut num_documents, mut num_lines, mut emptied) = (0, 0, 0);
    let (mut kept_documents, mut kept_lines) = (Vec::new(), Vec::new());
    for lines in documents {
        let texts = lines.iter().map(|line| line.trim_end()).filter(|line| !line.is_empty());
        let texts: Vec<&str> = texts.collect();
        num_documents += u64::from(!texts.is_empty());
        num_lines += texts.len() as u64;
        if texts.is_empty() || seen.insert(texts.clone()) {
            kept_documents.push(lines.clone());
        }
        let mut is_first = |line: &&String| {
            let count = counts.entry(line.trim_end().to_owned()).or_insert(0);
            *count += 1;
            line.trim().is_empty() || *count == 1
        };
        let first_lines: Vec<String> = lines.iter().filter(&mut is_first).cloned().collect();
        emptied += u64::from(!texts.is_empty() && first_lines.iter().all(|line| line.trim().is_empty()));
        kept_lines.push(first_lines);
    }
    counts.remove("");
    let (documents, lines) = (num_documents - seen.len() as u64, num_lines - counts.len() as u64);
    ((num_documents, documents), (num_lines, lines), counts, emptied, [kept_documents, kept_lines])
}

fn any_documents() -> impl Strategy<Value = Vec<Vec<String>>> {
    let line = prop_oneof![
        4 => "[abcd]( [abcd]){0,2}",
        1 => "[abcd] [ \t]{0,2}",
        1 => "[ ]{0,2}",
        1 => "a( b){0,8}",
    ];
    prop::collection::vec(prop::collection::vec(line, 0..5), 1..25)
        // Some text must be left.
        .prop_map(|mut documents| {
            documents.push(vec!["a b c d".into()]);
            documents
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn counts_and_drops_match_a_dictionary(input in any_documents(), per_file in 1_usize..50) {
        let dir = tempfile::tempdir().unwrap();
        let (tokenizer, texts) = (tokenizer(dir.path(), ENTRIES), write(dir.path(), &input, per_file));
        let (all_documents, all_lines, counts, emptied, [once, lines_once]) = expected(&input);
        let out = |name: &str| dir.path().join(name);
        let all = run(&texts, &out("all"), &tokenizer, &options(None));
        let repeats = all.repeats.unwrap();
        let count = |(total, repeated)| RepeatCount { total, repeated, sampled: 1 };
        prop_assert_eq!((repeats.documents, repeats.lines), (count(all_documents), count(all_lines)));
        for line in &repeats.most_repeated {
            let mut counts = counts.iter().filter(|(text, _)| text.trim() == line.text);
            prop_assert!(counts.any(|(_, &count)| count == line.count), "{:?}", line);
        }
        prop_assert_eq!(documents(&out("all")), ids(&input));
        for (unit, expected) in [(DropDuplicates::Documents, &once), (DropDuplicates::Lines, &lines_once)] {
            let (dropping, name) = (options(Some(unit)), format!("{unit:?}"));
            let report = run(&texts, &out(&name), &tokenizer, &dropping);
            prop_assert_eq!(documents(&out(&name)), ids(expected));
            let dropped = (report.dropped_documents, report.dropped_lines, report.emptied_documents);
            prop_assert_eq!(dropped, match unit {
                DropDuplicates::Documents => (all_documents.1, 0, 0),
                DropDuplicates::Lines => (0, all_lines.1, emptied),
            });
            let manifest = |folder: &str| std::fs::read(out(folder).join("manifest.json")).unwrap();
            let again = PrepareOptions { threads: Some(4), ..dropping.clone() };
            let again = run(&texts, &out("threads"), &tokenizer, &again);
            prop_assert_eq!(&again.repeats, &report.repeats);
            prop_assert_eq!(manifest("threads"), manifest(&name));
            if again.num_input_groups > 3 {
                let part = |index| PrepareOptions { partition: Some((index, 3)), ..dropping.clone() };
                let run = |index| run(&texts, &out("parts"), &tokenizer, &part(index));
                let hashed = [1, 2].map(run).map(|report| (report.complete, report.unhashed_input_groups > 0));
                prop_assert_eq!(hashed, [(false, true); 2]);
                // The last partition can build at once; the others run again.
                prop_assert_eq!([3, 2, 1].map(run).map(|report| report.complete), [false, false, true]);
                prop_assert_eq!(manifest("parts"), manifest(&name));
                std::fs::remove_dir_all(out("parts")).unwrap();
            }
            std::fs::remove_dir_all(out("threads")).unwrap();
        }
    }

    #[test]
    fn merged_sample_equals_sample_of_all_hashes(
        hashes in prop::collection::vec(0_u64..500, 0..2_000), cut in 0_usize..2_000
    ) {
        let sample = |capacity, hashes: &[u64]| {
            let mut sample = Sample::new(capacity);
            hashes.iter().for_each(|hash| sample.add(hash.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            sample.finish();
            sample
        };
        let (left, right) = hashes.split_at(cut.min(hashes.len()));
        let (whole, mut first, second) = (sample(64, &hashes), sample(64, left), sample(16, right));
        first.merge(second.total, second.limit, second.sorted().into_iter());
        prop_assert_eq!(first.total, whole.total);
        // The smaller sample may have a lower limit; up to it, both are equal.
        let mut all = whole.sorted();
        all.retain(|&(hash, _)| hash <= first.limit);
        prop_assert_eq!(first.sorted(), all);
    }

    #[test]
    fn repetitions_are_found_with_one_read_per_hash(
        groups in prop::collection::vec(prop::collection::vec(0_u64..40, 0..30), 0..5), held in 1_u64..200
    ) {
        let spread = |hash: &u64| hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let groups: Vec<Vec<u64>> = groups.iter().map(|group| group.iter().map(spread).collect()).collect();
        let bytes = |group: &Vec<u64>| group.iter().flat_map(|hash| hash.to_le_bytes()).collect::<Vec<_>>();
        let files: Vec<Vec<u8>> = groups.iter().map(|group| to_bytes(&bytes(group)).unwrap()).collect();
        let lengths: Vec<u64> = files.iter().map(|file| file.len() as u64).collect();
        let (mut bytes_read, mut drops_of) = (0, Vec::new());
        let mut read = |ranges: &[(usize, Range<u64>)], receive: &mut Each| {
            for (group, range) in ranges {
                bytes_read += range.end - range.start;
                assert!(receive(*group, &files[*group][range.start as usize..range.end as usize]));
            }
            Ok(())
        };
        find(&lengths, held, &mut read, &mut |drops| {
            drops_of.extend(drops);
            Ok(())
        }).unwrap();
        prop_assert!(bytes_read <= lengths.iter().sum::<u64>());
        let mut seen = HashSet::from([0]);
        prop_assert_eq!(drops_of.len(), groups.len());
        for (number, (group, (of, drops))) in groups.iter().zip(&drops_of).enumerate() {
            prop_assert_eq!((*of, drops.len, drops.hash), (number, group.len() as u64, xxh3_64(&bytes(group))));
            for (index, hash) in group.iter().enumerate() {
                prop_assert_eq!(drops.contains(index as u64), !seen.insert(*hash) && *hash != 0);
            }
        }
    }

    #[test]
    fn hashes_do_not_depend_on_fragments(text in "[ab \u{3000}é]{0,40}", cuts in prop::collection::vec(0_usize..60, 0..4)) {
        let whole = Hasher::default().push(&text, &Mark::Line);
        let (mut hasher, mut at) = (Hasher::default(), 0);
        let mut cuts: Vec<_> = cuts.into_iter().filter(|&cut| text.is_char_boundary(cut)).collect();
        cuts.sort_unstable();
        for cut in cuts {
            prop_assert_eq!(hasher.push(&text[at..cut], &Mark::Partial), None);
            at = cut;
        }
        prop_assert_eq!(hasher.push(&text[at..], &Mark::Line), whole);
        prop_assert_eq!(Hasher::default().push(text.trim_end(), &Mark::Line), whole);
    }
}

#[test]
fn most_repeated_lines_are_counted_within_the_bound() {
    // 600 different lines, repeated 100 to 699 times, among 600,000 that occur once, in two input groups.
    let mut groups = [Counts::of_group(2), Counts::of_group(2)];
    let mut counts = HashMap::new();
    for n in 0..1_200_000_u64 {
        let number = if n % 2 == 0 { n / 2 % 600 } else { 1_000 + n };
        if number >= 600 || n / 1_200 < 100 + number {
            let text = format!("line {number}");
            let Some(Ended::Line(hash)) = Hasher::default().push(&text, &Mark::Line) else { panic!() };
            groups[usize::from(n > 200_000)].add_line(hash, &text);
            *counts.entry(text).or_insert(0) += 1;
        }
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("parts")).unwrap();
    let out = OutputDir::unclaimed(dir.path(), Place::Folder(dir.path().to_owned()));
    let save = |(n, counts): (usize, Counts)| out.save_counts(n, &counts.into_bytes().unwrap()).unwrap();
    let files: Vec<_> = groups.into_iter().enumerate().map(save).collect();
    let repeats = merge(&out, &files, &Step::default()).unwrap().0;
    assert_eq!(repeats.lines.total, counts.values().sum::<u64>());
    let repeated = repeats.lines.total - counts.len() as u64;
    let error = repeats.lines.repeated.abs_diff(repeated) as f64 / counts.len() as f64;
    assert!(repeats.lines.sampled > 1 && error < 0.02, "{error}");
    assert!(
        repeats.most_repeated_error <= repeats.lines.total / (1 << 11),
        "{}",
        repeats.most_repeated_error
    );
    assert_eq!(repeats.most_repeated.len(), 10);
    let least = repeats.most_repeated.last().unwrap().count;
    for line in &repeats.most_repeated {
        let count = counts.remove(&line.text).unwrap();
        assert!(
            (line.count..=line.count + repeats.most_repeated_error).contains(&count),
            "{line:?}: {count}"
        );
    }
    assert!(*counts.values().max().unwrap() <= least + repeats.most_repeated_error);
}

#[test]
fn many_input_groups_store_fewer_counts_each() {
    for (num_groups, num_stored) in [(1, 50_000), (1_000, 50_000), (100_000, 4_096)] {
        let mut counts = Counts::of_group(num_groups);
        (0..50_000_u64).for_each(|line| counts.add_line(xxh3_64(&line.to_le_bytes()), "a"));
        let bytes = counts.into_bytes().unwrap().len();
        assert!(bytes < 12 * num_stored + 400, "{num_groups}: {bytes}");
    }
}

#[test]
fn fragments_spaces_and_bad_bytes_are_counted_and_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let (tokenizer, path) = (tokenizer(dir.path(), ENTRIES), dir.path().join("ugly.txt"));
    let long = "a ".repeat(100_000).into_bytes();
    let text = [
        b"a b\r\na b  \r\n\r\na b\t\r\n \r\n\n\nc \xff d\n\nc \xff d\n\n",
        &*long,
        b"\n",
        &long,
        b" \n\nb\n",
        &long,
    ];
    std::fs::write(&path, text.concat()).unwrap();
    let reading = ReadOptions { invalid_utf8: InvalidUtf8::Replace, ..ReadOptions::default() };
    let options =
        |unit| PrepareOptions { reading: reading.clone(), part_bytes: Some(300_000), ..options(Some(unit)) };
    let run = |unit, out: &str| run(&path, &dir.path().join(out), &tokenizer, &options(unit));
    let (lines, documents) =
        (run(DropDuplicates::Lines, "lines"), run(DropDuplicates::Documents, "documents"));
    let repeats = lines.repeats.unwrap();
    let count = |total, repeated| RepeatCount { total, repeated, sampled: 1 };
    assert_eq!((repeats.documents, repeats.lines), (count(6, 1), count(9, 5)));
    let most = repeats.most_repeated.iter().map(|line| (line.text.trim_end().len(), line.count));
    assert_eq!(most.collect::<Vec<_>>(), [(199, 3), (3, 3), (7, 2)]);
    assert_eq!((lines.num_documents, lines.emptied_documents, lines.dropped_lines), (4, 2, 5));
    assert_eq!((documents.num_documents, documents.dropped_documents), (5, 1));
}

/// A folder of a run that drops duplicates, interrupted after hashing and some building.
fn interrupted(dir: &Path) -> (Tokenizer, PathBuf, PathBuf, PrepareOptions, String) {
    let texts: Vec<Vec<String>> = (0..50).map(|n| vec![format!("a{}", " b".repeat(n % 30))]).collect();
    let (tokenizer, texts) = (tokenizer(dir, ENTRIES), write(dir, &texts, 50));
    let (out, options) = (dir.join("out"), options(Some(DropDuplicates::Lines)));
    let expected = run(&texts, &dir.join("expected"), &tokenizer, &options).content_hash;
    let half = PrepareOptions { partition: Some((1, 2)), ..options.clone() };
    let other = PrepareOptions { partition: Some((2, 2)), ..options.clone() };
    run(&texts, &out, &tokenizer, &half);
    assert!(!run(&texts, &out, &tokenizer, &other).complete); // hashes the rest and builds one half
    (tokenizer, texts, out, options, expected)
}

#[test]
fn damaged_or_outdated_files_are_rewritten_and_changed_text_is_detected() {
    type Damage = fn(&mut Vec<u8>);
    let flip = |bytes: &mut Vec<u8>| bytes[0] ^= 1;
    let flip_last = |bytes: &mut Vec<u8>| *bytes.last_mut().unwrap() ^= 1;
    let cut = |bytes: &mut Vec<u8>| bytes.truncate(bytes.len() - 1);
    let of_other_text = |bytes: &mut Vec<u8>| {
        let checksum = bytes.len() - 8;
        bytes[40] ^= 1; // after the digest and the number of lines: the hash of the hashes
        let sealed = xxh3_64(&bytes[..checksum]).to_le_bytes();
        bytes[checksum..].copy_from_slice(&sealed);
    };
    let of_an_older_release = |bytes: &mut Vec<u8>| {
        let mut record = InputGroupRecord::parse(bytes).unwrap();
        record.watched.as_mut().unwrap().file = "input-group-000000.hashes".to_owned();
        *bytes = record.sealed().unwrap();
    };
    let damages: [(&str, Damage); 11] = [
        ("000000.buckets", flip),
        ("000000.buckets", flip_last),
        ("000000.buckets", |bytes| bytes[1_041] ^= 1), // in the first bytes
        ("000001.buckets", cut),
        ("000000.hashes.json", of_an_older_release),
        ("000000.hashes.json", flip),
        ("000001.drops", flip),
        ("000000.drops", Vec::clear),
        ("000001.counts", flip),
        ("000001.counts", cut),
        ("000000.drops", of_other_text),
    ];
    let dir = tempfile::tempdir().unwrap();
    let (tokenizer, texts, begun, options, expected) = interrupted(dir.path());
    for (number, (name, damage)) in damages.into_iter().enumerate() {
        let out = dir.path().join(number.to_string());
        let parts = out.join("parts");
        std::fs::create_dir_all(&parts).unwrap();
        for name in Place::Folder(begun.clone()).names().unwrap() {
            std::fs::copy(begun.join(&name), out.join(&name)).unwrap();
        }
        if number == 4 {
            let path = |ending: &str| parts.join(format!("input-group-000000.{ending}"));
            std::fs::rename(path("buckets"), path("hashes")).unwrap();
        }
        if name.ends_with("buckets") || number == 4 {
            // Otherwise the drops are already stored.
            std::fs::remove_file(parts.join("input-group-000001.drops")).unwrap();
        }
        let path = parts.join(format!("input-group-{name}"));
        let mut bytes = std::fs::read(&path).unwrap_or_default();
        damage(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        let report = match tried(&texts, &out, &tokenizer, &options) {
            // Counts are read only when they are added up.
            Err(Error::Damaged { .. }) if number == 8 => run(&texts, &out, &tokenizer, &options),
            Err(error) if number == 10 => {
                assert!(error.to_string().contains("input group 0 has changed since"), "{error}");
                continue;
            }
            report => report.unwrap(),
        };
        assert_eq!(report.content_hash, expected, "{name}");
    }
}

#[test]
fn groups_in_a_store_are_read_in_parallel() {
    const GROUPS: usize = 60;
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("parts")).unwrap();
    let local = OutputDir::unclaimed(dir.path(), Place::Folder(dir.path().to_owned()));
    let hashes = |group: usize| [7, 7 + group as u64].map(|hash: u64| (hash << 50).to_le_bytes()).concat();
    let hashed: Vec<_> = (0..GROUPS).map(|n| save_hashes(&local, n, &hashes(n)).unwrap()).collect();
    let counts = |group| local.save_counts(group, &Counts::of_group(2).into_bytes().unwrap()).unwrap();
    let counted: Vec<_> = (0..GROUPS).map(counts).collect();
    let server = TestServer::start(dir.path());
    let out = OutputDir::unclaimed(dir.path(), Place::Store(server.bucket()));
    server.log().delay = Duration::from_millis(30);
    let timed = |name: &str, most_requests: usize, work: &(dyn Fn(&Step) -> Result<()> + Sync)| {
        let before = server.log().requests.len();
        let start = Instant::now();
        Step::report(&mut |_| true, work).unwrap();
        let (requests, time) = (server.log().requests.len() - before, start.elapsed());
        assert!(requests <= most_requests && time.as_millis() < 900, "{name}: {requests}, {time:?}");
    };
    timed("counts", GROUPS, &|step| merge(&out, &counted, step).map(drop));
    let sizes = Sizes::new();
    // Three reads, a write and a request for the length per group.
    timed("hashes", 5 * GROUPS, &|step| decide(&out, &hashed, &sizes, step));
    // A task requests the records of its groups, twice if there may be some.
    timed("records", 2 * 9, &|_| out.few_records(&Pass::Build(None), &Vec::from_iter(0..9)).map(drop));
    let drops = Drops::read(&local, GROUPS - 1, &digest(&hashed)).unwrap().unwrap();
    assert_eq!([0, 1].map(|index| drops.contains(index)), [true, false]);
    // The end of the run is detected while the store hangs.
    server.log().delay = Duration::from_secs(20);
    let (start, mut steps) = (Instant::now(), Vec::new());
    let mut stop = |progress: Progress| {
        steps.push((progress.step, progress.bytes_total));
        false
    };
    let stopped = Step::report(&mut stop, |step| merge(&out, &counted, step).map(drop));
    assert!(matches!(stopped, Err(Error::Interrupted)) && start.elapsed() < Duration::from_secs(1));
    assert_eq!(steps, [("adding up counts", counted.iter().map(|file| file.bytes).sum())]);
}
