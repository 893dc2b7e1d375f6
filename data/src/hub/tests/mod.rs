//! Folders of models from the hub as a server on this machine plays it.

mod hostile;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::{Hub, Reference, git_hash, on_record};
use crate::files::sha256_hex;

const FIRST: &str = "0123456789abcdef0123456789abcdef01234567";
const SECOND: &str = "89abcdef0123456789abcdef0123456789abcdef";
const CONFIG: &[u8] = b"{\"model_type\": \"qwen3\"}";
const WEIGHTS: &[u8] = b"weights";

/// A commit's files, and what a download gives where that is something else.
type Files = BTreeMap<String, Vec<u8>>;

/// What the stub has: branches, the files of commits, and bodies that are not the file's.
#[derive(Default)]
struct Store {
    branches: BTreeMap<String, String>,
    commits: BTreeMap<String, Files>,
    wrong: BTreeMap<String, Vec<u8>>,
    /// Status and `x-error-code` of every answer.
    refuse: Option<(u16, &'static str)>,
    asked: Vec<String>,
    /// What the hub says of a commit's files instead of the truth.
    listing: Option<Value>,
    /// The `ETag` of every file instead of its hash.
    etag: Option<String>,
}

/// A hub with the one model `org/name`.
struct Stub {
    address: String,
    store: Arc<Mutex<Store>>,
}

impl Stub {
    fn of(files: &[(&str, &[u8])]) -> Self {
        let store = Arc::new(Mutex::new(Store::default()));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stub = Self {
            address: format!("http://{}", listener.local_addr().unwrap()),
            store: Arc::clone(&store),
        };
        stub.publish(FIRST, files);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                answer(stream.unwrap(), &store);
            }
        });
        stub
    }

    /// Moves `main` to a commit with these files.
    fn publish(&self, commit: &str, files: &[(&str, &[u8])]) {
        let files = files.iter().map(|(path, body)| ((*path).to_owned(), body.to_vec()));
        let mut store = self.store.lock().unwrap();
        store.commits.insert(commit.to_owned(), files.collect());
        store.branches.insert("main".to_owned(), commit.to_owned());
    }

    fn hub(&self, cache: &Path) -> Hub {
        Hub::default().at(&self.address).with_token("secret").cached_in(cache)
    }

    fn downloaded(&self) -> Vec<String> {
        let store = self.store.lock().unwrap();
        let files = store
            .asked
            .iter()
            .filter_map(|line| line.strip_prefix("GET /org/name/resolve/"));
        files.map(|rest| rest.split_once('/').unwrap().1.to_owned()).collect()
    }
}

fn answer(mut stream: TcpStream, store: &Mutex<Store>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap())
        .lines()
        .map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let _headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let request = first
        .trim_end_matches(" HTTP/1.1")
        .split('?')
        .next()
        .unwrap()
        .to_owned();
    let mut store = store.lock().unwrap();
    store.asked.push(request.clone());
    let found = match store.refuse {
        Some((status, code)) => Err((status, code)),
        None => reply(&store, &request).ok_or((404, "RepoNotFound")),
    };
    let (status, headers, body) = match found {
        Ok((headers, body)) => (200, headers, body),
        Err((status, code)) => {
            let body = br#"{"error": "Bearer secret is not welcome"}"#.to_vec();
            (status, format!("x-error-code: {code}\r\n"), body)
        }
    };
    let length = body.len();
    let body = if request.starts_with("HEAD") { Vec::new() } else { body };
    let head = format!("HTTP/1.1 {status} X\r\n{headers}content-length: {length}\r\nconnection: close\r\n\r\n");
    // a client that has hung up has what it wanted
    let _ = stream.write_all(&[head.as_bytes(), &body].concat());
}

fn reply(store: &Store, request: &str) -> Option<(String, Vec<u8>)> {
    let json = "content-type: application/json\r\n".to_owned();
    let (method, path) = request.split_once(' ')?;
    if let Some(revision) = path.strip_prefix("/api/models/org/name/revision/") {
        let known = store.commits.get_key_value(revision).map(|(commit, _)| commit);
        let commit = store.branches.get(revision).or(known)?;
        return Some((json, format!(r#"{{"id": "org/name", "sha": "{commit}"}}"#).into_bytes()));
    }
    if let Some(commit) = path.strip_prefix("/api/models/org/name/tree/") {
        if let Some(listing) = &store.listing {
            return Some((json, listing.to_string().into_bytes()));
        }
        let entry = |(path, body): (&String, &Vec<u8>)| listed(path, body);
        let entries: Vec<_> = store.commits.get(commit)?.iter().map(entry).collect();
        return Some((json, serde_json::Value::from(entries).to_string().into_bytes()));
    }
    let (commit, file) = path.strip_prefix("/org/name/resolve/")?.split_once('/')?;
    let body = store.commits.get(commit)?.get(file)?;
    let etag = store.etag.clone().unwrap_or_else(|| git_hash(body));
    let wrong = store.wrong.get(file).filter(|_| method == "GET");
    let headers = format!("etag: \"{etag}\"\r\nx-repo-commit: {commit}\r\n");
    Some((headers, wrong.unwrap_or(body).clone()))
}

/// A file as the hub lists it: weights as large ones.
fn listed(path: &str, body: &[u8]) -> Value {
    let mut entry = json!({"type": "file", "oid": git_hash(body), "size": body.len(), "path": path});
    if path.ends_with(".safetensors") {
        entry["lfs"] = json!({"oid": sha256_hex(body), "size": body.len(), "pointerSize": 134});
    }
    entry
}

fn locate(hub: &Hub, text: &str) -> anyhow::Result<PathBuf> {
    hub.locate(&Reference::parse(Path::new(text))?.unwrap(), None)
}

fn refusal(hub: &Hub, text: &str) -> String {
    let error = format!("{:#}", locate(hub, text).unwrap_err());
    assert!(!error.contains("secret"), "the token stands in: {error}");
    error
}

fn store_body(stub: &Stub, name: &str) -> usize {
    stub.store.lock().unwrap().commits[FIRST][name].len()
}

/// Files of the cache that have their final name.
fn finished(cache: &Path) -> Vec<PathBuf> {
    let blobs = fs::read_dir(cache.join("models--org--name/blobs"))
        .into_iter()
        .flatten();
    let paths = blobs.map(|blob| blob.unwrap().path());
    paths.filter(|path| path.extension().is_none()).collect()
}

fn model() -> Vec<(&'static str, &'static [u8])> {
    vec![
        ("config.json", CONFIG),
        ("model.safetensors", WEIGHTS),
        ("README.md", b"# name"),
        ("tokenizer.json", b"{}"),
        ("chat_template.jinja", b"{{ messages }}"),
    ]
}

#[test]
fn a_model_is_fetched_without_what_it_is_not_read_from_and_once() {
    let cache = tempfile::tempdir().unwrap();
    let mut files = model();
    files.extend([
        ("pytorch_model.bin", &b"x"[..]),
        ("model.gguf", b"x"),
        ("onnx/model.safetensors", b"x"),
    ]);
    let stub = Stub::of(&files);
    for _ in 0..2 {
        let folder = locate(&stub.hub(cache.path()), "hf://org/name").unwrap();
        assert_eq!(on_record(&folder), format!("hf://org/name@{FIRST}"));
        for (name, body) in model() {
            assert_eq!(std::fs::read(folder.join(name)).unwrap(), body, "{name}");
        }
        let mut downloaded = stub.downloaded();
        downloaded.sort();
        let mut names: Vec<_> = model().iter().map(|(name, _)| (*name).to_owned()).collect();
        names.sort();
        assert_eq!(downloaded, names);
    }
}

#[test]
fn offline_uses_what_was_fetched_and_asks_nobody() {
    let cache = tempfile::tempdir().unwrap();
    let stub = Stub::of(&model());
    let hub = stub.hub(cache.path());
    let offline = hub.clone().offline(true);
    let error = refusal(&offline, "hf://org/name");
    assert!(
        error.contains("does not hold it") && error.contains("HF_HUB_OFFLINE"),
        "{error}"
    );
    let folder = locate(&hub, "hf://org/name").unwrap();
    let asked = stub.store.lock().unwrap().asked.len();
    for text in ["hf://org/name".to_owned(), on_record(&folder)] {
        assert_eq!(locate(&offline, &text).unwrap(), folder, "{text}");
    }
    std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    let error = refusal(&offline, "hf://org/name");
    assert!(
        error.contains("holds only a part") && error.contains("*.safetensors"),
        "{error}"
    );
    assert_eq!(stub.store.lock().unwrap().asked.len(), asked);
}

#[test]
fn a_commit_stays_what_it_was_when_its_branch_moves() {
    let cache = tempfile::tempdir().unwrap();
    let stub = Stub::of(&model());
    let hub = stub.hub(cache.path());
    let first = locate(&hub, "hf://org/name@main").unwrap();
    let mut files = model();
    files[1].1 = b"other weights";
    stub.publish(SECOND, &files);
    let second = locate(&hub, "hf://org/name@main").unwrap();
    assert_eq!(on_record(&second), format!("hf://org/name@{SECOND}"));
    assert_eq!(
        std::fs::read(second.join("model.safetensors")).unwrap(),
        b"other weights"
    );
    let pinned = locate(&hub, &on_record(&first)).unwrap();
    assert_eq!(std::fs::read(pinned.join("model.safetensors")).unwrap(), WEIGHTS);
}

#[test]
fn a_folder_or_a_file_in_a_model_is_fetched_alone() {
    let cache = tempfile::tempdir().unwrap();
    let mut files = model();
    files.extend([
        ("sub/config.json", CONFIG),
        ("sub/model.safetensors", &b"inner"[..]),
        ("sub/deep/model.safetensors", b"x"),
        ("drafter.gguf", b"gguf"),
    ]);
    let stub = Stub::of(&files);
    let hub = stub.hub(cache.path());
    let folder = locate(&hub, "hf://org/name/sub").unwrap();
    assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), b"inner");
    assert_eq!(on_record(&folder), format!("hf://org/name@{FIRST}/sub"));
    assert_eq!(stub.downloaded().len(), 2);
    let file = locate(&hub, "hf://org/name@main/drafter.gguf").unwrap();
    assert_eq!(std::fs::read(file).unwrap(), b"gguf");
    assert_eq!(stub.downloaded().len(), 3);
}

#[test]
fn what_is_no_model_is_refused_with_what_is_there() {
    let cache = tempfile::tempdir().unwrap();
    let stub = Stub::of(&[("config.json", CONFIG), ("model.gguf", b"x")]);
    let error = refusal(&stub.hub(cache.path()), "hf://org/name");
    assert!(
        error.contains("expected *.safetensors") && error.contains("model.gguf"),
        "{error}"
    );
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    stub.publish(
        SECOND,
        &[
            ("config.json", CONFIG),
            ("model-1.safetensors", WEIGHTS),
            ("model.safetensors.index.json", index),
        ],
    );
    let error = refusal(&stub.hub(cache.path()), "hf://org/name");
    assert!(error.contains("expected model-2.safetensors"), "{error}");
}

#[test]
fn a_body_that_is_not_the_file_is_refused_and_not_kept() {
    let cache = tempfile::tempdir().unwrap();
    let stub = Stub::of(&model());
    let hub = stub.hub(cache.path());
    for (name, kind) in [("config.json", "git hash"), ("model.safetensors", "SHA-256")] {
        let page = b"<html>try later</html>".to_vec();
        stub.store.lock().unwrap().wrong.insert(name.to_owned(), page);
        let error = refusal(&hub, "hf://org/name");
        assert!(error.contains("damaged") && error.contains(name), "{error}");
        // as long as the file, and another
        let body = store_body(&stub, name);
        stub.store
            .lock()
            .unwrap()
            .wrong
            .insert(name.to_owned(), vec![b'x'; body]);
        let error = refusal(&hub, "hf://org/name");
        assert!(
            error.contains("damaged") && error.contains(name) && error.contains(kind),
            "{error}"
        );
        assert!(
            finished(cache.path())
                .iter()
                .all(|blob| fs::read(blob).unwrap()[0] != b'x')
        );
        stub.store.lock().unwrap().wrong.clear();
        let folder = locate(&hub, "hf://org/name").unwrap();
        assert_eq!(std::fs::read(folder.join(name)).unwrap().len(), body);
        std::fs::remove_dir_all(cache.path().join("models--org--name")).unwrap();
    }
}

#[test]
fn a_refusal_says_what_can_be_done_and_not_the_token() {
    let cache = tempfile::tempdir().unwrap();
    let stub = Stub::of(&model());
    let hub = stub.hub(cache.path());
    let error = refusal(&hub, "hf://org/other");
    assert!(
        error.contains("hf://org/other") && error.contains("does not have it"),
        "{error}"
    );
    let error = refusal(&hub, "hf://org/name@gone");
    assert!(
        error.contains("hf://org/name@gone") && error.contains("does not have it"),
        "{error}"
    );
    for (status, code, expected) in [
        (401, "", "wants a valid token, set HF_TOKEN"),
        (403, "GatedRepo", "accept its conditions"),
        (403, "", "does not allow it"),
        (400, "", "Bearer [token] is not welcome"),
    ] {
        stub.store.lock().unwrap().refuse = Some((status, code));
        let error = refusal(&hub, "hf://org/name");
        assert!(error.contains(expected), "{status}: {error}");
    }
}
