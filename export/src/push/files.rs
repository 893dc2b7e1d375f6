//! Which files of a drafter folder are published: a fixed list of names. Whatever else lies there stays here, named.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use dflash_data::hub::{INLINE_LIMIT, LocalFile, Token};
use dflash_data::recipes::matches;
use serde_json::Value;

/// Names with at most one asterisk.
const ALLOWED: [&str; 16] = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "README.md",
    "LICENSE*",
    "NOTICE*",
    "dflash_export.json",
    // a folder may bring its tokenizer and its code along; ours have neither
    "dflash.py",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
    "*.gguf",
];

/// Bytes of the beginning of weights that are searched for the token: their header. Other files are searched whole.
const SEARCHED: u64 = 16 << 20;

/// Bytes that are searched at once.
const BLOCK: usize = 1 << 20;

/// A folder's entries, told apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selected {
    /// To be sent, by name.
    pub files: Vec<LocalFile>,
    /// Names of files and folders that are not.
    pub left_out: Vec<String>,
}

/// Tells the entries of `folder` apart; `config` is its configuration, which may name code.
///
/// # Errors
/// When a file of the list is a link to nothing, or cannot be read.
pub fn select(folder: &Path, config: &Value) -> Result<Selected> {
    let code = code_files(config);
    let (mut files, mut left_out) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry.with_context(|| folder.display().to_string())?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let allowed = ALLOWED.iter().any(|pattern| matches(pattern, &name)) || code.contains(&name);
        // a name that is not UTF-8 matches nothing as it stands
        if !allowed || path.file_name().and_then(|name| name.to_str()).is_none() {
            left_out.push(if path.is_dir() { name + "/" } else { name });
            continue;
        }
        // the cache of the hub is a folder of links: what is sent is what they lead to
        let real = fs::canonicalize(&path).with_context(|| format!("{}: a link to nothing", path.display()))?;
        let metadata = fs::metadata(&real).with_context(|| path.display().to_string())?;
        if !metadata.is_file() {
            left_out.push(name + "/");
            continue;
        }
        files.push(LocalFile::read(&name, &real)?);
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    left_out.sort();
    Ok(Selected { files, left_out })
}

/// Refuses files that hold the token.
///
/// # Errors
/// Naming the file, or when one cannot be read.
pub fn check_secret(files: &[LocalFile], token: &Token) -> Result<()> {
    for file in files {
        let found = match file.bytes() {
            Some(bytes) => token.occurs_in(bytes),
            None => occurs(file, token).with_context(|| file.path.display().to_string())?,
        };
        ensure!(
            !found,
            "{}: holds the token from {}; nothing was sent",
            file.name,
            token.origin()
        );
    }
    Ok(())
}

/// Whether the token stands in a large file.
fn occurs(file: &LocalFile, token: &Token) -> std::io::Result<bool> {
    let most = if is_weights(&file.name) { SEARCHED } else { u64::MAX };
    let mut opened = File::open(&file.path)?.take(most);
    let mut window: Vec<u8> = Vec::new();
    loop {
        // the token may stand across two blocks
        let kept = window.len().min(token.length());
        window.drain(..window.len() - kept);
        let count = opened.by_ref().take(BLOCK as u64).read_to_end(&mut window)?;
        if token.occurs_in(&window) {
            return Ok(true);
        }
        if count == 0 {
            return Ok(false);
        }
    }
}

fn is_weights(name: &str) -> bool {
    [".safetensors", ".gguf"].iter().any(|end| name.ends_with(end))
}

/// How the hub will most likely take a file, by its size and its usual list of names; it is asked before anything is sent.
pub fn way(file: &LocalFile) -> &'static str {
    if is_weights(&file.name) || file.size > INLINE_LIMIT {
        "as a large file (LFS)"
    } else {
        "in the commit"
    }
}

/// Files that `auto_map` names: `module.Class` is in `module.py`; code of another repository is not here.
fn code_files(config: &Value) -> BTreeSet<String> {
    let named = config["auto_map"].as_object().into_iter().flatten();
    let modules = named.filter_map(|(_, place)| place.as_str()?.split_once('.'));
    modules
        .filter(|(module, _)| !module.is_empty() && module.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'))
        .map(|(module, _)| format!("{module}.py"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn names_are_matched_whole() {
        for (name, allowed) in [
            ("model.safetensors", true),
            ("model-00001-of-00002.safetensors", true),
            ("adamw.safetensors", false),
            ("model.safetensors.partial", false),
            ("config.json", true),
            ("config.json~", false),
            (".env", false),
            ("drafter.gguf", true),
            (".gguf", true),
            ("dflash_export.json", true),
            ("train.py", false),
        ] {
            assert_eq!(ALLOWED.iter().any(|pattern| matches(pattern, name)), allowed, "{name}");
        }
    }

    #[test]
    fn code_is_what_the_configuration_names() {
        let config = json!({"auto_map": {"AutoModel": "modeling_x.Model", "AutoConfig": "org/other--config_x.Config"}});
        assert_eq!(code_files(&config), BTreeSet::from(["modeling_x.py".to_owned()]));
        assert!(code_files(&json!({"auto_map": {"AutoModel": "../../secret.Model"}})).is_empty());
        assert!(code_files(&json!({})).is_empty());
    }
}
