//! A hub on this machine: models with branches and commits, uploads as the real one takes them, and faults on demand.
//!
//! It keeps every request, so that a test can look for what should not have been said.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use dflash_data::files::sha256_hex;
use dflash_data::hub::git_hash;
use serde_json::{Value, json};

/// The one token that it takes.
pub(crate) const TOKEN: &str = "hf_SecretOfTheTests0123456789";
/// What it gives out for the storage of large files; no secret of the user, but kept out of texts all the same.
pub(crate) const STORAGE_TOKEN: &str = "storage-token-of-the-tests";

/// A file of a commit: its bytes, or only what the commit said of a large one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stored {
    Inline(Vec<u8>),
    Large { sha256: String, size: u64 },
}

/// A model.
#[derive(Debug, Clone, Default)]
pub(crate) struct Model {
    pub(crate) private: bool,
    /// Commits of each branch, the last one being its head.
    pub(crate) branches: BTreeMap<String, Vec<String>>,
    pub(crate) commits: BTreeMap<String, BTreeMap<String, Stored>>,
    pub(crate) proposals: Vec<BTreeMap<String, Stored>>,
}

/// What goes wrong with one request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    /// This status, and nothing done.
    Status(u16),
    /// The connection ends in the middle of the request's body.
    Cut,
    /// Done, and the connection ends before the answer.
    Lost,
    /// Done, and this status all the same.
    Done(u16),
    /// Nothing done, and this as an answer.
    Says(&'static str),
    /// Done, and this as an answer.
    DoneSays(&'static str),
    /// Nothing done and nothing said for a minute.
    Silent,
}

/// Another content of a file here, written when a request's line contains `route`.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) route: &'static str,
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
}

/// A request as it came.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) line: String,
    pub(crate) headers: Vec<String>,
    pub(crate) body: Vec<u8>,
}

/// Everything behind the address.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) models: BTreeMap<String, Model>,
    /// Faults of the next requests whose line contains the key.
    pub(crate) faults: BTreeMap<&'static str, VecDeque<Fault>>,
    pub(crate) requests: Vec<Request>,
    /// Files from so many bytes on are large ones; none are without it.
    pub(crate) large_from: Option<u64>,
    /// How large files travel.
    pub(crate) transfer: &'static str,
    /// What happens to a file here meanwhile, once.
    pub(crate) change: Option<Change>,
    /// Whether the token that it gives is refused.
    pub(crate) no_access: bool,
    made: u64,
}

/// The hub.
pub(crate) struct Stub {
    pub(crate) address: String,
    state: Arc<Mutex<State>>,
}

impl Stub {
    pub(crate) fn start() -> Self {
        let state = Arc::new(Mutex::new(State {
            transfer: "xet",
            ..State::default()
        }));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let stub = Self {
            address: address.clone(),
            state: Arc::clone(&state),
        };
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (state, address) = (Arc::clone(&state), address.clone());
                std::thread::spawn(move || serve(stream.unwrap(), &state, &address));
            }
        });
        stub
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Adds a model whose branch `main` has one commit with these files.
    pub(crate) fn publish(&self, name: &str, files: &[(&str, &[u8])]) {
        let files = files
            .iter()
            .map(|(path, body)| ((*path).to_owned(), Stored::Inline(body.to_vec())));
        let mut state = self.state();
        state.models.entry(name.to_owned()).or_default();
        state.commit(name, "main", files.collect());
    }

    pub(crate) fn fail(&self, route: &'static str, faults: &[Fault]) {
        self.state().faults.insert(route, faults.iter().copied().collect());
    }

    /// Commits of a branch that were made by pushing.
    pub(crate) fn commits(&self, name: &str, branch: &str) -> usize {
        let state = self.state();
        // the first one is the hub's own
        state.models[name].branches[branch].len() - 1
    }

    /// Files at a branch's head.
    pub(crate) fn files(&self, name: &str, branch: &str) -> BTreeMap<String, Stored> {
        self.state().files(name, branch)
    }

    /// How many requests contain `text` in their first line.
    pub(crate) fn count(&self, text: &str) -> usize {
        self.state()
            .requests
            .iter()
            .filter(|request| request.line.contains(text))
            .count()
    }
}

impl State {
    fn files(&self, name: &str, branch: &str) -> BTreeMap<String, Stored> {
        let model = &self.models[name];
        model.commits[model.branches[branch].last().unwrap()].clone()
    }

    fn commit(&mut self, name: &str, branch: &str, files: BTreeMap<String, Stored>) -> String {
        self.made += 1;
        let id = git_hash(format!("commit {}", self.made).as_bytes());
        let model = self.models.get_mut(name).unwrap();
        model.branches.entry(branch.to_owned()).or_default().push(id.clone());
        model.commits.insert(id.clone(), files);
        id
    }
}

type Answer = (u16, String, Vec<u8>);

fn answer(status: u16, value: &Value) -> Answer {
    (
        status,
        "content-type: application/json\r\n".to_owned(),
        value.to_string().into_bytes(),
    )
}

fn refusal(status: u16, code: &str) -> Answer {
    // an unkind server repeats what it was told
    let body = json!({"error": format!("not with Bearer {TOKEN}")})
        .to_string()
        .into_bytes();
    (status, format!("x-error-code: {code}\r\n"), body)
}

fn serve(mut stream: TcpStream, state: &Mutex<State>, address: &str) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    loop {
        let Some((line, headers)) = head(&mut reader) else {
            return;
        };
        let fault = {
            let mut state = state.lock().unwrap();
            let due = state.faults.iter_mut().find(|(route, _)| line.contains(**route));
            due.and_then(|(_, faults)| faults.pop_front())
        };
        let length = header(&headers, "content-length").and_then(|length| length.parse::<usize>().ok());
        if matches!(fault, Some(Fault::Cut)) {
            let half = length.unwrap_or_default() / 2;
            let mut body = vec![0; half];
            let _ = reader.read_exact(&mut body);
            state.lock().unwrap().requests.push(Request { line, headers, body });
            let _ = stream.shutdown(std::net::Shutdown::Both);
            return;
        }
        let body = match length {
            Some(length) => {
                let mut body = vec![0; length];
                if reader.read_exact(&mut body).is_err() {
                    return;
                }
                body
            }
            None if header(&headers, "transfer-encoding").is_some() => chunks(&mut reader),
            None => Vec::new(),
        };
        let request = Request { line, headers, body };
        let mut state = state.lock().unwrap();
        state.requests.push(request.clone());
        let line = &request.line;
        if let Some(change) = state.change.take_if(|change| line.contains(change.route)) {
            std::fs::write(change.path, change.bytes).unwrap();
        }
        let said = |body: &str| (200, String::new(), body.as_bytes().to_vec());
        let (status, headers, body) = match fault {
            Some(Fault::Status(status)) => refusal(status, ""),
            Some(Fault::Lost) => {
                route(&mut state, &request, address);
                let _ = stream.shutdown(std::net::Shutdown::Both);
                return;
            }
            Some(Fault::Done(status)) => {
                route(&mut state, &request, address);
                refusal(status, "")
            }
            Some(Fault::Says(body)) => said(body),
            Some(Fault::DoneSays(body)) => {
                route(&mut state, &request, address);
                said(body)
            }
            Some(Fault::Silent) => {
                drop(state);
                std::thread::sleep(std::time::Duration::from_secs(60));
                return;
            }
            _ => route(&mut state, &request, address),
        };
        drop(state);
        let length = body.len();
        let body = if request.line.starts_with("HEAD") {
            Vec::new()
        } else {
            body
        };
        let head = format!("HTTP/1.1 {status} X\r\n{headers}content-length: {length}\r\n\r\n");
        // a client that has hung up has what it wanted
        if stream.write_all(&[head.as_bytes(), &body].concat()).is_err() {
            return;
        }
    }
}

fn head(reader: &mut BufReader<TcpStream>) -> Option<(String, Vec<String>)> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let line = line.trim_end().to_owned();
        if line.is_empty() {
            break;
        }
        lines.push(line);
    }
    let first = lines.remove(0);
    Some((first.trim_end_matches(" HTTP/1.1").to_owned(), lines))
}

pub(crate) fn header<'h>(headers: &'h [String], name: &str) -> Option<&'h str> {
    let mut named = headers.iter().filter_map(|line| line.split_once(": "));
    named
        .find(|(key, _)| key.eq_ignore_ascii_case(name))
        .map(|(_, value)| value)
}

fn chunks(reader: &mut BufReader<TcpStream>) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let length = usize::from_str_radix(line.trim(), 16).unwrap_or_default();
        let mut chunk = vec![0; length + 2];
        if reader.read_exact(&mut chunk).is_err() || length == 0 {
            return body;
        }
        body.extend_from_slice(&chunk[..length]);
    }
}

fn route(state: &mut State, request: &Request, address: &str) -> Answer {
    let (method, target) = request.line.split_once(' ').unwrap();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    if path.starts_with("/v1/") || path.starts_with("/v2/") {
        return storage(path, header(&request.headers, "authorization"));
    }
    let bearer = format!("Bearer {TOKEN}");
    if state.no_access || header(&request.headers, "authorization") != Some(bearer.as_str()) {
        return refusal(401, "");
    }
    let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
    if path == "/api/repos/create" {
        let name = format!(
            "{}/{}",
            body["organization"].as_str().unwrap(),
            body["name"].as_str().unwrap()
        );
        if state.models.contains_key(&name) {
            return refusal(409, "");
        }
        let private = body["private"] == true;
        state.models.insert(
            name.clone(),
            Model {
                private,
                ..Model::default()
            },
        );
        let first = BTreeMap::from([(
            ".gitattributes".to_owned(),
            Stored::Inline(b"*.bin filter=lfs\n".to_vec()),
        )]);
        state.commit(&name, "main", first);
        return answer(200, &json!({"url": format!("{address}/{name}")}));
    }
    let parts: Vec<&str> = path
        .trim_start_matches("/api/models")
        .trim_start_matches('/')
        .split('/')
        .collect();
    let Some(name) = parts.get(..2).map(|parts| parts.join("/")) else {
        return refusal(404, "RepoNotFound");
    };
    if let Some(name) = path.trim_start_matches('/').strip_suffix(".git/info/lfs/objects/batch") {
        assert!(state.models.contains_key(name));
        return answer(200, &json!({"transfer": state.transfer, "objects": []}));
    }
    if !state.models.contains_key(&name) {
        return refusal(404, "RepoNotFound");
    }
    match (method, &parts[2..]) {
        ("GET", []) => info(state, &name, "main"),
        ("GET", ["revision", revision]) => info(state, &name, &revision.replace("%2F", "/")),
        ("POST", ["branch", branch]) => {
            let files = state.files(&name, "main");
            state.commit(&name, &branch.replace("%2F", "/"), files);
            answer(200, &json!({}))
        }
        ("GET", ["tree", commit]) => tree(&state.models[&name].commits[*commit]),
        ("POST", ["preupload", _]) => {
            let mode = |file: &Value| {
                let large = state
                    .large_from
                    .is_some_and(|from| file["size"].as_u64().unwrap() >= from);
                json!({"path": file["path"], "uploadMode": if large { "lfs" } else { "regular" }})
            };
            let files: Vec<Value> = body["files"].as_array().unwrap().iter().map(mode).collect();
            answer(200, &json!({"files": files}))
        }
        ("POST", ["commit", branch]) => {
            commit(state, &name, &branch.replace("%2F", "/"), query, &request.body, address)
        }
        ("GET", ["xet-write-token", _]) => {
            let granted = json!({"accessToken": STORAGE_TOKEN, "exp": 4_000_000_000_u64, "casUrl": address});
            answer(200, &granted)
        }
        ("GET" | "HEAD", ["resolve", commit, file]) => download(&state.models[&name], commit, file),
        _ => refusal(404, "EntryNotFound"),
    }
}

/// Where large files go: it takes everything and says so.
fn storage(path: &str, authorization: Option<&str>) -> Answer {
    let ours = format!("Bearer {STORAGE_TOKEN}");
    match path {
        _ if authorization != Some(ours.as_str()) => refusal(401, ""),
        _ if path.starts_with("/v1/xorbs/") => answer(200, &json!({"was_inserted": true})),
        "/v1/shards" => answer(200, &json!({"result": 1})),
        _ => refusal(404, ""),
    }
}

fn info(state: &State, name: &str, revision: &str) -> Answer {
    let model = &state.models[name];
    let commit = match model.branches.get(revision) {
        Some(commits) => commits.last().unwrap(),
        None if model.commits.contains_key(revision) => revision,
        None => return refusal(404, "RevisionNotFound"),
    };
    answer(200, &json!({"id": name, "sha": commit, "private": model.private}))
}

fn tree(files: &BTreeMap<String, Stored>) -> Answer {
    let entry = |(path, stored): (&String, &Stored)| match stored {
        Stored::Inline(body) => json!({"type": "file", "oid": git_hash(body), "size": body.len(), "path": path}),
        Stored::Large { sha256, size } => {
            let pointer = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n");
            let lfs = json!({"oid": sha256, "size": size, "pointerSize": pointer.len()});
            json!({"type": "file", "oid": git_hash(pointer.as_bytes()), "size": size, "lfs": lfs, "path": path})
        }
    };
    answer(200, &files.iter().map(entry).collect::<Vec<_>>().into())
}

fn commit(state: &mut State, name: &str, branch: &str, query: &str, body: &[u8], address: &str) -> Answer {
    let model = &state.models[name];
    let Some(head) = model.branches.get(branch).and_then(|commits| commits.last()) else {
        return refusal(404, "RevisionNotFound");
    };
    let mut files = model.commits[head].clone();
    for line in body.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let line: Value = serde_json::from_slice(line).unwrap();
        let value = &line["value"];
        let path = || value["path"].as_str().unwrap().to_owned();
        match line["key"].as_str().unwrap() {
            "header" if value["parentCommit"].as_str().is_some_and(|parent| parent != head) => return refusal(412, ""),
            "header" => {}
            "file" => {
                let content = STANDARD.decode(value["content"].as_str().unwrap()).unwrap();
                files.insert(path(), Stored::Inline(content));
            }
            "lfsFile" => {
                let (sha256, size) = (
                    value["oid"].as_str().unwrap().to_owned(),
                    value["size"].as_u64().unwrap(),
                );
                files.insert(path(), Stored::Large { sha256, size });
            }
            other => panic!("a commit with {other}"),
        }
    }
    if query.contains("create_pr=1") {
        state.models.get_mut(name).unwrap().proposals.push(files);
        return answer(
            200,
            &json!({"prUrl": format!("{address}/{name}/discussions/1"), "prNum": 1}),
        );
    }
    let id = state.commit(name, branch, files);
    answer(
        200,
        &json!({"commitUrl": format!("{address}/{name}/commit/{id}"), "commitOid": id}),
    )
}

fn download(model: &Model, commit: &str, file: &str) -> Answer {
    let Some(Stored::Inline(body)) = model.commits.get(commit).and_then(|files| files.get(file)) else {
        return refusal(404, "EntryNotFound");
    };
    let etag = if file.ends_with(".safetensors") {
        sha256_hex(body)
    } else {
        git_hash(body)
    };
    (
        200,
        format!("etag: \"{etag}\"\r\nx-repo-commit: {commit}\r\n"),
        body.clone(),
    )
}
