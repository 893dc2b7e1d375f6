//! Whether the hub takes large files as large ones, asked before anything is sent.
//!
//! The client asks the same two questions. But when the first is answered with `regular`, or the second with another
//! transfer than xet, it reads the whole file into memory and writes it into the commit as base64.

use anyhow::{Context, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::local::LocalFile;
use super::upload::Upload;
use super::wire::segment;
use super::{Connection, Wire};

/// The most, in bytes, that may travel inside a commit: the hub's own limit for small files.
pub const INLINE_LIMIT: u64 = 10_000_000;

const JSON: &str = "application/json";
const LFS_JSON: &str = "application/vnd.git-lfs+json";

/// Asks how the hub takes the files.
///
/// # Errors
/// When it would take one above [`INLINE_LIMIT`] inside the commit, would take a large one by a way that the client does not
/// know, or refuses to answer.
pub(super) fn admit(connection: &Connection, upload: &Upload<'_>, files: &[&LocalFile]) -> Result<()> {
    let wire = Wire::new(connection)?;
    let (repository, revision) = (upload.repository, upload.revision.unwrap_or("main"));
    let asked: Vec<Value> = files.iter().map(|file| described(file)).collect();
    let answer = wire.post(
        &format!("api/models/{repository}/preupload/{}", segment(revision)),
        JSON,
        &json!({"files": asked}),
        &format!("preupload to {repository}"),
    )?;
    let modes = answer.get("files").and_then(Value::as_array);
    let modes = modes.with_context(|| format!("preupload to {repository}: expected files in the answer"))?;
    let mode = |file: &LocalFile| {
        let named = modes.iter().find(|mode| mode["path"] == *file.name);
        named.and_then(|mode| mode["uploadMode"].as_str())
    };
    let mut large = Vec::new();
    for &file in files {
        match mode(file) {
            // the client sends an empty file inline whatever the answer
            Some("lfs") if file.size > 0 => large.push(file),
            _ if file.size <= INLINE_LIMIT => {}
            answered => bail!(
                "{}: {} bytes would travel inside the commit, all of them in memory: expected that the hub takes it as a \
                 large file (lfs), it says {answered:?}. A .gitattributes in {repository} may be at fault",
                file.name,
                file.size
            ),
        }
    }
    if large.is_empty() {
        return Ok(());
    }
    check_transfer(&wire, repository, revision, &large)
}

/// Checks that large files go by xet, the one way that the client knows.
fn check_transfer(wire: &Wire<'_>, repository: &str, revision: &str, large: &[&LocalFile]) -> Result<()> {
    let object = |file: &&LocalFile| json!({"oid": file.sha256, "size": file.size});
    let objects: Vec<Value> = large.iter().map(object).collect();
    let answer = wire.post(
        &format!("{repository}.git/info/lfs/objects/batch"),
        LFS_JSON,
        &json!({
            "operation": "upload",
            "transfers": ["basic", "multipart", "xet"],
            "objects": objects,
            "hash_algo": "sha256",
            "ref": {"name": revision},
        }),
        &format!("large files of {repository}"),
    )?;
    for (object, file) in answer["objects"].as_array().into_iter().flatten().zip(large) {
        if let Some(message) = object["error"]["message"].as_str() {
            bail!("{}: the hub does not take it: {message}", file.name);
        }
    }
    let transfer = answer["transfer"].as_str();
    let names: Vec<&str> = large.iter().map(|file| file.name.as_str()).collect();
    ensure!(
        transfer == Some("xet"),
        "{}: the hub offers {transfer:?} for large files and only xet is known here: they would travel inside the commit, \
         all of them in memory",
        names.join(", ")
    );
    Ok(())
}

fn described(file: &LocalFile) -> Value {
    json!({"path": file.name, "size": file.size, "sample": STANDARD.encode(&file.sample)})
}
