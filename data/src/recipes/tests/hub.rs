//! The hub as a server on this machine plays it.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::Result;

use crate::files::sha256_hex;
use crate::hub::git_hash;
use crate::parquet_file::tests::{Leaf, write};
use crate::recipes::Hub;
use crate::recipes::hub::{Fetched, fetch};
use crate::recipes::{Recipe, Selection, Source, load};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const FILE: &str = "main/test-00000-of-00001.jsonl";
const ROWS: &str = "{\"question\": \"1+1?\", \"answer\": \"2\"}\n{\"question\": \"2+2?\", \"answer\": \"4\"}\n";
const PATTERNS: &[&str] = &["main/test-*.jsonl"];

/// A hub of one data set: answers by method and path, and what it was asked.
struct Stub {
    address: String,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Stub {
    /// `files`: path, the body that the listing is of, and the one that a download gives.
    fn of(files: &[(&str, &[u8], &[u8])]) -> Self {
        let mut answers = HashMap::new();
        let json = "content-type: application/json\r\n";
        let dataset = "/api/datasets/openai/gsm8k";
        let mut add = |request: String, headers: String, body: &[u8]| answers.insert(request, (headers, body.to_vec()));
        add(
            format!("GET {dataset}/revision/main"),
            json.to_owned(),
            format!("{{\"id\": \"openai/gsm8k\", \"sha\": \"{COMMIT}\"}}").as_bytes(),
        );
        let entries: Vec<_> = files
            .iter()
            .map(|(path, told, _)| {
                let lfs = serde_json::json!({"oid": sha256_hex(told), "size": told.len()});
                serde_json::json!({"type": "file", "oid": git_hash(told), "lfs": lfs, "size": told.len(), "path": path})
            })
            .collect();
        let listing = serde_json::Value::from(entries).to_string();
        add(
            format!("GET {dataset}/tree/{COMMIT}"),
            json.to_owned(),
            listing.as_bytes(),
        );
        for (path, _, body) in files {
            let url = format!("/datasets/openai/gsm8k/resolve/{COMMIT}/{path}");
            add(format!("GET {url}"), "etag: \"/tmp/evil\"\r\n".to_owned(), body);
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap())
                    .lines()
                    .map_while(Result::ok);
                let Some(first) = lines.next() else { continue };
                let token = lines
                    .take_while(|line| !line.is_empty())
                    .find_map(|line| line.strip_prefix("authorization: ").map(str::to_owned));
                let request = first
                    .trim_end_matches(" HTTP/1.1")
                    .split('?')
                    .next()
                    .unwrap_or_default()
                    .to_owned();
                let (status, headers, body) = match answers.get(&request) {
                    Some((headers, body)) => ("200 OK", headers.as_str(), body.as_slice()),
                    None => (
                        "404 Not Found",
                        "x-error-code: RepoNotFound\r\n",
                        &b"{\"error\": \"none\"}"[..],
                    ),
                };
                log.lock()
                    .unwrap()
                    .push(format!("{request} {}", token.unwrap_or_default()));
                let length = body.len();
                let body = if request.starts_with("HEAD") { &[] } else { body };
                let head =
                    format!("HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\nconnection: close\r\n\r\n");
                // a client that has hung up has what it wanted
                let _ = stream.write_all(&[head.as_bytes(), body].concat());
            }
        });
        Self { address, asked }
    }

    fn hub(&self, cache: &Path) -> Hub {
        Hub::default().at(&self.address).with_token("secret").cached_in(cache)
    }

    fn downloads(&self) -> usize {
        let asked = self.asked.lock().unwrap();
        asked.iter().filter(|line| line.starts_with("GET /datasets")).count()
    }
}

fn error_of(fetched: Result<Fetched>) -> String {
    format!("{:#}", fetched.err().unwrap())
}

#[test]
fn files_of_a_commit_are_fetched_once_with_the_token_and_then_come_from_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    let stub = Stub::of(&[
        (FILE, ROWS.as_bytes(), ROWS.as_bytes()),
        ("main/train.jsonl", b"{}", b"{}"),
    ]);
    let hub = stub.hub(cache.path());
    for downloads in [1, 1] {
        let fetched = fetch(&hub, "openai/gsm8k", PATTERNS).unwrap();
        assert_eq!(fetched.revision, COMMIT);
        let [(name, path)] = fetched.files.as_slice() else {
            panic!()
        };
        assert_eq!(
            (name.as_str(), std::fs::read_to_string(path).unwrap().as_str()),
            (FILE, ROWS)
        );
        assert_eq!(stub.downloads(), downloads);
    }
    assert!(
        stub.asked
            .lock()
            .unwrap()
            .iter()
            .all(|line| line.ends_with(" Bearer secret"))
    );
    assert!(!format!("{hub:?}").contains("secret"));
    let asked = stub.asked.lock().unwrap().len();
    let fetched = fetch(&hub.offline(true), "openai/gsm8k", PATTERNS).unwrap();
    assert_eq!((fetched.revision.as_str(), fetched.files.len()), (COMMIT, 1));
    assert_eq!(stub.asked.lock().unwrap().len(), asked, "offline asks nobody");
}

#[test]
fn a_recipe_from_the_hub_records_the_commit() {
    let cache = tempfile::tempdir().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.parquet");
    let schema = "message m { optional binary question (UTF8); }";
    let group: &[Leaf<'_>] = &[(&["q"], &[1], &[0])];
    write(&path, schema, parquet::basic::Compression::UNCOMPRESSED, &[group]);
    let bytes = std::fs::read(&path).unwrap();
    let name = "main/test-00000-of-00001.parquet";
    let stub = Stub::of(&[(name, &bytes, &bytes)]);
    let recipe = Recipe::by_name("gsm8k").unwrap();
    let set = load(recipe, &Source::Hub(stub.hub(cache.path())), &Selection::default()).unwrap();
    assert_eq!((set.prompts.len(), set.facts.revision.as_deref()), (1, Some(COMMIT)));
    assert_eq!(
        (set.facts.source.as_str(), set.facts.files[0].path.as_str()),
        ("openai/gsm8k on the hub", name)
    );
}

#[test]
fn what_the_data_set_does_not_have_is_named_with_what_it_has() {
    let cache = tempfile::tempdir().unwrap();
    let stub = Stub::of(&[
        ("README.md", b"x", b"x"),
        ("main/test-00000-of-00002.jsonl", ROWS.as_bytes(), ROWS.as_bytes()),
    ]);
    let error = error_of(fetch(&stub.hub(cache.path()), "openai/gsm8k", &["main/train-*.jsonl"]));
    assert!(
        error.contains("expected main/train-*.jsonl") && error.contains("README.md"),
        "{error}"
    );
    let error = error_of(fetch(&stub.hub(cache.path()), "openai/gsm8k", PATTERNS));
    assert!(
        error.contains("expected 2 files") && error.contains("openai/gsm8k at main"),
        "{error}"
    );
    let error = error_of(fetch(&stub.hub(cache.path()), "nobody/nothing", PATTERNS));
    assert!(
        error.contains("nobody/nothing") && error.contains("HF_TOKEN"),
        "{error}"
    );
}

#[test]
fn a_body_that_is_not_the_file_is_refused() {
    let cache = tempfile::tempdir().unwrap();
    let stub = Stub::of(&[(FILE, ROWS.as_bytes(), b"<html>try later</html>")]);
    let error = error_of(fetch(&stub.hub(cache.path()), "openai/gsm8k", PATTERNS));
    assert!(error.contains("damaged") && error.contains(FILE), "{error}");
}

#[test]
fn without_network_the_error_says_what_can_be_done() {
    let cache = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let hub = Hub::default()
        .at(&format!("http://127.0.0.1:{port}"))
        .cached_in(cache.path());
    let error = error_of(fetch(&hub, "openai/gsm8k", PATTERNS));
    assert!(
        error.contains("openai/gsm8k") && error.contains("cannot be reached"),
        "{error}"
    );
    assert!(error.contains("HF_HUB_OFFLINE=1"), "{error}");
    let error = error_of(fetch(&hub.offline(true), "openai/gsm8k", PATTERNS));
    assert!(error.contains("does not hold it"), "{error}");
}
