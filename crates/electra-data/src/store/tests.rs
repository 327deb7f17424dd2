//! Requests to a server on the loopback that answers as it likes, with the clients of S3, GCS and Azure.

use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use object_store::Error as StoreError;

use super::client::opening_retry;
use super::errors::{explain, is_transient, said};
use super::test_server::Reply::{Done, Half, Lost, Pretended, Stall, Undone};
use super::test_server::{Reply, TestServer};
use super::{Store, attended, url_of};
use crate::error::Result;

/// Two parts and a bit.
const LARGE: usize = (5 << 19) + 1;
const BUSY: &str = "<Error><Code>InternalError</Code><Message>again</Message></Error>";
const DENIED: &str = "<Error><Code>AccessDenied</Code><Message>no</Message></Error>";
const NO_UPLOAD: &str = "<Error><Code>NoSuchUpload</Code></Error>";
const NO_BUCKET: &str = "<Error><Code>NoSuchBucket</Code></Error>";

/// A folder served as the bucket `data`, and a store that writes to it, with more variables; one without a value is the
/// server.
fn bucket(scheme: &str, more: &[(&str, &str)]) -> (tempfile::TempDir, TestServer, Store) {
    let dir = tempfile::tempdir().unwrap();
    let server = TestServer::start(dir.path());
    let endpoint = server.url.trim_end_matches("/data");
    let mut variables = match scheme {
        "gs" => vec![("google_base_url", endpoint), ("google_bearer_token", "t")],
        "az" => vec![
            ("azure_storage_endpoint", endpoint),
            ("azure_storage_account_name", "a"),
            ("azure_skip_signature", "true"),
        ],
        _ => vec![("aws_endpoint_url", endpoint), ("aws_skip_signature", "true")],
    };
    variables.extend(more.iter().map(|&(key, value)| (key, if value.is_empty() { endpoint } else { value })));
    let mut store = server.bucket_with(scheme, &variables);
    (store.retry, store.opening) = (Duration::from_secs(2), Duration::from_secs(2));
    (dir, server, store)
}

/// Does something with the object that is called as the operation. Afterwards it has the new bytes or is gone.
fn perform(store: &Store, operation: &str, new: &Path) -> Result<()> {
    let bytes = std::fs::read(new).unwrap();
    match operation {
        "file" | "put" => store.put_file(operation, new),
        "create" => store.create(operation, bytes).map(|created| assert!(created)),
        "delete" => store.delete(&[operation.to_owned()]),
        "list" => {
            let names: Vec<_> = store.list("")?.into_iter().map(|object| object.name).collect();
            assert_eq!(names, ["list"]);
            Ok(())
        }
        "head" => store.head(operation).map(|found| assert_eq!(found.size, bytes.len() as u64)),
        _ => store.read(operation, 1 << 30).map(|found| assert_eq!(found, bytes)),
    }
}

/// Injects replies into an operation on an older object of the same length. What is wrong then: what counts is an error
/// with these words, or the new bytes.
fn failure(
    scheme: &str,
    operation: &str,
    kind: &'static str,
    replies: &[Reply],
    expected: &str,
) -> Option<String> {
    let (dir, server, store) = bucket(scheme, &[]);
    store.check_conditions("warm").unwrap();
    let new = tempfile::NamedTempFile::new().unwrap();
    let length = if operation == "file" { LARGE } else { 100 };
    let bytes: Vec<_> = (0..length).map(|at| (at / 10 % 251) as u8).collect();
    std::fs::write(new.path(), &bytes).unwrap();
    let object = dir.path().join(operation);
    match operation {
        "create" => {}
        "file" | "put" | "delete" => std::fs::write(&object, vec![0; length]).unwrap(),
        _ => std::fs::write(&object, &bytes).unwrap(),
    }
    server.log().replies.extend(replies.iter().map(|&reply| (kind, reply)));
    let outcome = perform(&store, operation, new.path()).map_err(|error| error.to_string());
    let found = std::fs::read(&object).ok();
    let is_right = match &outcome {
        Ok(()) => expected.is_empty() && found == (operation != "delete").then_some(bytes),
        Err(line) => {
            !expected.is_empty()
                && line.contains(expected)
                && line.starts_with(scheme)
                && !line.contains('\n')
        }
    };
    // Azure removes the parts of an upload that failed by itself.
    let names = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let is_part = |name: &std::ffi::OsString| name.to_string_lossy().contains(".part-");
    let objects = names.filter(|name| scheme != "az" || !is_part(name)).count();
    let unused = server.log().replies.len();
    let row =
        format!("{scheme} {operation}: {kind} {replies:?}: {outcome:?}, {unused} unused, {objects} objects");
    (!is_right || unused > 0 || objects > 1).then_some(row)
}

/// What a store may answer to each request, and what then counts: "" is success, with the new bytes.
#[test]
fn an_ambiguous_answer_counts_only_if_the_object_is_the_new_one() {
    const CUT: &str = "<ListBucketResult><Contents><Key>list</Key>";
    const NO_NEXT: &str = "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>";
    const OTHER: Reply = Undone(200, "<R><ETag>\"other\"</ETag></R>");
    const GONE: Reply = Undone(404, NO_UPLOAD);
    let deleted = |code| Undone(200, code);
    let no_key =
        "<DeleteResult><Error><Key>delete</Key><Code>NoSuchKey</Code><Message/></Error></DeleteResult>";
    let denied =
        "<DeleteResult><Error><Key>delete</Key><Code>AccessDenied</Code><Message/></Error></DeleteResult>";
    let busy =
        "<DeleteResult><Error><Key>delete</Key><Code>InternalError</Code><Message/></Error></DeleteResult>";
    let rows: &[(&str, &'static str, &[Reply], &str)] = &[
        ("put", "put", &[Lost], ""),
        ("put", "put", &[Done(500, BUSY)], ""),
        ("put", "put", &[Undone(503, BUSY)], ""),
        ("put", "put", &[Undone(200, BUSY)], ""),
        ("put", "put", &[Undone(409, BUSY)], ""),
        ("put", "put", &[Pretended("another object")], ""),
        ("put", "put", &[Half], ""),
        ("put", "put", &[Undone(404, NO_BUCKET)], "not found; check the URL, the bucket and the region"),
        ("put", "put", &[Undone(412, "")], "it was replaced while it was in use"),
        ("put", "put", &[Undone(403, DENIED)], "check the credentials and what they may read and write"),
        ("put", "head", &[Lost], ""),
        ("put", "head", &[Undone(404, "")], ""),
        ("put", "head", &[Undone(503, "")], ""),
        ("create", "create", &[Lost], ""),
        ("create", "create", &[Done(500, BUSY)], ""),
        ("create", "create", &[Done(200, BUSY)], ""),
        ("create", "create", &[Undone(200, BUSY)], ""),
        ("create", "create", &[Undone(409, BUSY)], ""),
        ("create", "create", &[Undone(412, "")], ""),
        ("create", "create", &[Pretended("another object")], ""),
        ("create", "create", &[Half], "the store has accepted it but keeps other bytes"),
        ("create", "create", &[Undone(400, "<Error><Code>NotImplemented</Code></Error>")], "conditional PUT"),
        ("create", "create", &[Undone(404, NO_BUCKET)], "not found"),
        ("create", "head", &[Undone(503, "")], ""),
        ("file", "begin", &[Lost], ""),
        ("file", "begin", &[Undone(200, BUSY)], ""),
        ("file", "begin", &[Undone(404, NO_BUCKET)], "not found"),
        ("file", "part", &[Lost], ""),
        ("file", "part", &[Done(500, BUSY)], ""),
        ("file", "part", &[Undone(200, BUSY)], ""),
        ("file", "part", &[Half], ""),
        ("file", "part", &[GONE], ""),
        ("file", "part", &[Undone(403, DENIED)], "check the credentials"),
        ("file", "complete", &[Lost], ""),
        ("file", "complete", &[Done(500, BUSY)], ""),
        ("file", "complete", &[Done(404, NO_UPLOAD)], ""),
        ("file", "complete", &[Done(200, DENIED)], ""),
        ("file", "complete", &[Undone(200, BUSY)], ""),
        ("file", "complete", &[Undone(200, DENIED)], ""),
        ("file", "complete", &[Undone(409, BUSY)], ""),
        ("file", "complete", &[Undone(400, "<Error><Code>InvalidPart</Code></Error>")], ""),
        ("file", "complete", &[GONE], ""),
        ("file", "complete", &[OTHER], ""),
        ("file", "complete", &[GONE, GONE], "the store has lost the parts"),
        ("file", "complete", &[OTHER, OTHER], "the store has lost the parts"),
        ("file", "complete", &[Undone(412, "")], "it was replaced while it was in use"),
        ("file", "head", &[Undone(404, "")], ""),
        ("file", "head", &[Lost], ""),
        ("delete", "delete", &[Lost], ""),
        ("delete", "delete", &[Done(500, BUSY)], ""),
        ("delete", "delete", &[Undone(200, BUSY)], ""),
        ("delete", "delete", &[Done(200, no_key)], ""),
        ("delete", "delete", &[deleted(busy)], ""),
        ("delete", "delete", &[deleted(denied)], "(code: AccessDenied)"),
        ("list", "list", &[Lost], ""),
        ("list", "list", &[Undone(503, BUSY)], ""),
        ("list", "list", &[Undone(200, BUSY)], ""),
        ("list", "list", &[Undone(200, "<html>sign in</html>")], ""),
        ("list", "list", &[Undone(200, CUT)], ""),
        ("list", "list", &[Undone(200, NO_NEXT)], ""),
        ("list", "list", &[Undone(403, DENIED)], "check the credentials and what they may read"),
        ("list", "list", &[Undone(404, NO_BUCKET)], "not found; check the URL, the bucket and the region"),
        ("head", "head", &[Lost], ""),
        ("head", "head", &[Undone(503, "")], ""),
        ("head", "head", &[Undone(404, "")], "not found"),
        ("get", "get", &[Lost], ""),
        ("get", "get", &[Undone(503, BUSY)], ""),
        ("get", "get", &[Undone(404, "")], "not found"),
    ];
    // Azure begins no upload, completes it without XML, and lists and deletes in a form of its own. The client of GCS
    // takes a 412 that completes an upload as any other error.
    let is_asked = |scheme: &str, operation: &str, kind: &str, replies: &[Reply]| {
        let is_s3_alone =
            ["list", "delete"].contains(&operation) || kind == "begin" || replies == [Undone(412, "")];
        scheme == "s3" || !is_s3_alone && (scheme == "gs" || replies != [OTHER, OTHER])
    };
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let chunks = ["s3", "gs", "az"].map(|scheme| rows.chunks(8).map(move |rows| (scheme, rows)));
        for (scheme, rows) in chunks.into_iter().flatten() {
            let failures = &failures;
            scope.spawn(move || {
                for &(operation, kind, replies, expected) in rows {
                    if is_asked(scheme, operation, kind, replies) {
                        let failure = failure(scheme, operation, kind, replies, expected);
                        failures.lock().unwrap().extend(failure);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn an_upload_of_small_and_large_files_and_their_requests() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for (scheme, large) in [
        ("s3", "begin part part part complete head"),
        ("gs", "begin part part part complete head"),
        ("az", "part part part complete head"),
    ] {
        for (length, expected) in [(0, "put head"), (1000, "put head"), (LARGE, large)] {
            let (dir, server, store) = bucket(scheme, &[]);
            let bytes: Vec<u8> = (0..length).map(|at| (at / 1000 % 251) as u8).collect();
            std::fs::write(file.path(), &bytes).unwrap();
            store.put_file("a/b ü%20#?", file.path()).unwrap();
            assert!(std::fs::read(dir.path().join("a/b ü%20#?")).unwrap() == bytes);
            let requests: Vec<_> = server.log().requests.iter().map(|(kind, _)| *kind).collect();
            assert_eq!(requests.join(" "), expected, "{scheme}");
            // A store whose ETags say nothing is read.
            server.log().tag = Some("W/\"1\"");
            store.put_file("a/weak", file.path()).unwrap();
        }
    }
}

#[test]
fn an_object_is_created_once_and_a_store_without_conditions_is_refused_every_time() {
    for scheme in ["s3", "gs", "az"] {
        let (dir, _server, store) = bucket(scheme, &[]);
        assert!(store.create("object", "ours").unwrap());
        assert!(!store.create("object", "theirs").unwrap());
        assert!(!store.create("object", "ours").unwrap());
        assert_eq!(std::fs::read(dir.path().join("object")).unwrap(), b"ours");
        let (_dir, server, store) = bucket(scheme, &[]);
        server.log().ignores_conditions = true;
        for _ in 0..2 {
            let error = store.create("new", "x").unwrap_err().to_string();
            assert!(error.contains("it must support conditional PUT"), "{error}");
            assert!(store.list("").unwrap().is_empty());
        }
    }
}

#[test]
fn keys_that_cannot_be_requested_hide_no_others() {
    let names = ["in/a b.txt", "in/a%20b.txt", "in/a#1?.txt", "in/a+b&c.txt", "in/deep/ü.txt"];
    let unreadable = ["in//b.txt", "in/./b", "in/../b", "/in", "in/tail/", "in/a&#1;b", "in/a&#x1F;b"];
    let shown = ["in//b.txt", "in/./b", "in/../b", "/in", "in/tail/", "in/a%01b", "in/a%1Fb"];
    for scheme in ["s3", "gs", "az"] {
        let (dir, server, store) = bucket(scheme, &[]);
        std::fs::create_dir_all(dir.path().join("in/deep")).unwrap();
        names.iter().for_each(|name| std::fs::write(dir.path().join(name), name).unwrap());
        server.log().keys = [&unreadable[..], &["in/mark/"]].concat();
        server.log().page = Some(2);
        let (listed, refused) = store.list_all("").unwrap();
        let mut listed: Vec<_> = listed.into_iter().map(|object| object.name).collect();
        assert_eq!(refused, shown, "{scheme}");
        assert!(listed.iter().all(|name| store.read(name, 100).unwrap() == name.as_bytes()));
        store.delete(&listed).unwrap();
        listed.sort();
        let mut expected = names.to_vec();
        expected.sort_unstable();
        assert_eq!(listed, expected, "{scheme}");
        assert!(store.list("").unwrap().is_empty());
        let below = store.at(&format!("{scheme}://data/in")).unwrap();
        assert_eq!(below.list_all("").unwrap().1.len(), 6);
    }
    let (_dir, server, store) = bucket("az", &[]);
    server.log().keys = vec!["encoded:a%01b"];
    assert_eq!(store.list_all("").unwrap().1, ["a%01b"]);
    let error = Store::configured("s3://data/in//b", false, Vec::new()).unwrap_err().to_string();
    assert!(error.contains("a name with an empty part (//)"), "{error}");
}

#[test]
fn a_metadata_service_that_stumbles_is_no_missing_credential() {
    let generic = |text: &str| StoreError::Generic { store: "S3", source: text.to_owned().into() };
    for (request, is_missing) in [
        ("PUT http://169.254.169.254/latest/api/token", true),
        ("GET http://169.254.170.23/v1/credentials", true),
        ("GET http://[fd00:ec2::254]/latest", true),
        ("GET http://metadata.google.internal/computeMetadata/v1/token", true),
        ("GET http://10.0.0.1/data/169.254.169.254/metadata/instance/metadata.google.internal", false),
    ] {
        let error = generic(&format!("Error performing {request} in 1s, after 2 retries"));
        let line = explain("s3://b/x", &error).to_string();
        assert_eq!(line.contains("no credentials were found; set AWS_ACCESS_KEY_ID"), is_missing, "{line}");
        assert_eq!(is_transient(&error), !is_missing);
    }
    // The server is also the proxy in front of the service's address.
    let (_dir, server, mut store) = bucket("s3", &[("aws_skip_signature", "false"), ("aws_proxy_url", "")]);
    store.retry = Duration::from_secs(60);
    server.log().always_reply = Some(("metadata", Undone(404, "")));
    let start = Instant::now();
    let error = store.put("object", "x").unwrap_err().to_string();
    assert!(
        error.starts_with("s3://data/object: no credentials were found; set AWS_ACCESS_KEY_ID"),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(10));
    server.log().always_reply = None;
    store.put("object", "x").unwrap();
    server.log().replies =
        [Undone(404, ""), Lost, Undone(503, ""), Undone(401, "")].map(|r| ("metadata", r)).into();
    store.put("object", "y").unwrap();
    assert!(server.log().replies.is_empty());
    server.log().always_reply = Some(("metadata", Undone(404, "")));
    store.retry = Duration::from_millis(300);
    let error = store.put("object", "z").unwrap_err().to_string();
    assert!(error.contains("no new credentials from 169.254.169.254: "), "{error}");
    assert!(error.contains("the request was repeated for"), "{error}");
}

#[test]
fn a_start_is_repeated_as_long_as_nobody_waits_at_a_terminal() {
    for (wanted, is_attended, seconds) in [
        (None, true, 15),
        (None, false, 180),
        (Some(7), true, 7),
        (Some(300), true, 300),
        (Some(300), false, 300),
    ] {
        assert_eq!(opening_retry(wanted, is_attended), Duration::from_secs(seconds));
    }
    let (_dir, server, mut store) = bucket("s3", &[]);
    store.opening = Duration::from_secs(60);
    store.put("object", "x").unwrap();
    let busy = "<Error><Code>SlowDown</Code></Error>";
    server.log().replies = vec![("head", Undone(503, busy)); 500];
    std::thread::scope(|scope| {
        (0..50).for_each(|_| drop(scope.spawn(|| store.head("object").unwrap())));
    });
    assert!(server.log().replies.is_empty());
}

#[test]
fn each_error_is_one_line_with_its_remedy() {
    let generic = |text: &str| StoreError::Generic { store: "S3", source: text.to_owned().into() };
    let xml = generic("answer:\n<Error>\n<Code>InvalidRange</Code><Message>not\n so far</Message></Error>");
    assert!(is_transient(&xml));
    assert_eq!(explain("s3://b/x", &xml).to_string(), "s3://b/x: InvalidRange: not so far");
    let absent = StoreError::NotFound { path: "x".into(), source: "404".into() };
    assert_eq!(explain("http://h/x", &absent).to_string(), "http://h/x: not found; check the URL");
    assert!(said(&generic(&"x".repeat(1000))).chars().count() < 300);
    let (_dir, server, mut store) = bucket("s3", &[]);
    store.retry = Duration::from_secs(1);
    server.log().always_reply = Some(("put", Half));
    let error = store.put("object", vec![7; 1000]).unwrap_err().to_string();
    assert!(error.contains("the store kept 500 bytes of 1000; the request was repeated for"), "{error}");
}

#[test]
fn an_upload_that_stalls_is_sent_again_and_an_interrupted_one_leaves_no_parts() {
    let (dir, server, mut store) = bucket("s3", &[]);
    server.log().replies = vec![("put", Stall)];
    store.retry = Duration::from_secs(60);
    store.put("object", "x").unwrap();
    store.delete(&["object".to_owned()]).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(LARGE as u64).unwrap();
    server.log().replies = vec![("part", Stall)];
    let upload = |_: std::sync::mpsc::Sender<()>| store.put_file("object", file.path());
    let has_part = || ["2", "3"].iter().any(|part| dir.path().join(format!("object.part-{part}")).exists());
    let interrupt = |_| if has_part() { Err("Ctrl-C") } else { Ok(()) };
    assert_eq!(attended(upload, interrupt).unwrap_err(), "Ctrl-C");
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn urls_are_told_from_paths() {
    let url = |text: &str| url_of(Path::new(text));
    assert_eq!(url("s3://bucket/a/"), Some("s3://bucket/a".into()));
    assert_eq!(url("s3:/bucket/a"), Some("s3://bucket/a".into()));
    assert_eq!(url("ftp://host/a"), Some("ftp://host/a".into()));
    for path in ["shards", "/a/s3:/b", "a:/b", "C://b", "wiki:0.7", "s3:bucket"] {
        assert_eq!(url(path), None, "{path}");
    }
}
