//! The files of a commit as the hub lists them, and what of that is believed.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::intact::is_hex;
use super::reference::is_commit;
use super::wire::{Wire, segment};
use super::{Connection, Failure, Kind};

/// The most pages of a listing, and the most files.
const PAGES: usize = 10_000;
const FILES: usize = 1_000_000;

/// A file of a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Its path.
    pub(crate) path: String,
    /// Bytes.
    pub(crate) size: u64,
    /// Git's hash of a small file; the SHA-256 of a large one. The name of its copy in the cache.
    pub(crate) hash: String,
}

impl Entry {
    /// Whether git holds only a pointer to it.
    pub(crate) fn is_large(&self) -> bool {
        self.hash.len() == 64
    }

    /// Checks that the path stays in the folder that it is put into.
    ///
    /// # Errors
    /// Naming it.
    pub(crate) fn check_path(&self) -> Result<()> {
        let path = &self.path;
        let plain = |part: &str| !matches!(part, "" | "." | "..");
        ensure!(
            path.len() <= 1024
                && path.split('/').all(plain)
                && !path.contains(['\\', ':'])
                && !path.contains(char::is_control),
            "{path:?}: the hub names a file by what is no plain path"
        );
        Ok(())
    }
}

/// The commit that a revision of a repository is at. `kind`: `models` or `datasets`.
///
/// # Errors
/// About `subject`; also when the hub names what is no commit.
pub(super) fn commit_of(
    wire: &Wire<'_>,
    connection: &Connection,
    place: &str,
    revision: &str,
    subject: &str,
) -> Result<String, Failure> {
    let route = format!("api/{place}/revision/{}", segment(revision));
    let answer = wire.get(&route, subject)?;
    let commit = answer.get("sha").and_then(Value::as_str).unwrap_or_default();
    // it becomes the name of a folder
    let expected = is_commit(commit) && (!is_commit(revision) || commit.eq_ignore_ascii_case(revision));
    if !expected {
        let cause = format!("GET /{route}: expected a commit as sha, got {commit:?}");
        return Err(connection.worded(Kind::NoHub, false, subject, &cause));
    }
    Ok(commit.to_ascii_lowercase())
}

/// The files of a commit.
///
/// # Errors
/// About `subject`; also when the listing is none.
pub(super) fn files_of(
    wire: &Wire<'_>,
    connection: &Connection,
    place: &str,
    commit: &str,
    subject: &str,
) -> Result<Vec<Entry>, Failure> {
    let route = format!("api/{place}/tree/{commit}");
    let wrong = |cause: &str| {
        let cause = format!("GET /{route}: {cause}");
        connection.worded(Kind::NoHub, false, subject, &cause)
    };
    let mut files = Vec::new();
    let mut query = "recursive=true".to_owned();
    for _ in 0..PAGES {
        let (answer, next) = wire.page(&format!("{route}?{query}"), subject)?;
        let entries = answer.as_array().ok_or_else(|| wrong("expected a list"))?;
        for entry in entries.iter().filter(|entry| entry["type"] == "file") {
            files.push(read(entry).map_err(|error| wrong(&format!("{error:#}")))?);
        }
        if files.len() > FILES {
            return Err(wrong("too many files"));
        }
        match next {
            None => return Ok(files),
            Some(next) => query = next,
        }
    }
    Err(wrong("too many pages"))
}

fn read(entry: &Value) -> Result<Entry> {
    let path = entry["path"].as_str().context("a file without path")?;
    let hash = match entry.get("lfs").filter(|lfs| !lfs.is_null()) {
        Some(lfs) => lfs["oid"].as_str().or_else(|| lfs["sha256"].as_str()),
        None => entry["oid"].as_str(),
    };
    let hash = hash.unwrap_or_default();
    let length = if entry["lfs"].is_null() { 40 } else { 64 };
    ensure!(
        is_hex(hash, length),
        "{path:?}: expected {length} hexadecimal digits as its hash, got {hash:?}"
    );
    let size = entry["size"].as_u64();
    Ok(Entry {
        path: path.to_owned(),
        size: size.with_context(|| format!("{path:?}: expected its size"))?,
        hash: hash.to_ascii_lowercase(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_hash_is_one_or_the_listing_is_none() {
        let (git, sha256) = ("a".repeat(40), "b".repeat(64));
        let small = read(&json!({"path": "a", "size": 1, "oid": git})).unwrap();
        let large = read(&json!({"path": "a", "size": 1, "oid": git, "lfs": {"oid": sha256}})).unwrap();
        assert!(!small.is_large() && large.is_large() && large.hash == sha256);
        for oid in ["", "../../evil", "/tmp/x", &"g".repeat(40), &sha256] {
            let error = read(&json!({"path": "a", "size": 1, "oid": oid}))
                .unwrap_err()
                .to_string();
            assert!(error.contains("40 hexadecimal digits"), "{error}");
        }
        assert!(read(&json!({"path": "a", "size": 1, "oid": git, "lfs": {"oid": git}})).is_err());
        assert!(read(&json!({"path": "a", "size": -1, "oid": git})).is_err());
    }

    #[test]
    fn a_path_stays_below() {
        let check = |path: &str| {
            let path = path.to_owned();
            Entry {
                path,
                size: 0,
                hash: String::new(),
            }
            .check_path()
        };
        check("sub/model-00001.safetensors").unwrap();
        for path in [
            "",
            "/etc/x",
            "../x",
            "a/../b",
            "a//b",
            "a/",
            "a\\b",
            "c:x",
            "a\u{1b}[2J",
        ] {
            assert!(check(path).is_err(), "{path:?}");
        }
    }
}
