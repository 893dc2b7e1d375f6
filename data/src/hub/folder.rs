//! From `hf://org/name@revision/folder` to a folder of the hub's cache.
//!
//! Only what a target or a drafter is read from is fetched, and only of the folder that was asked for. Within a process
//! a reference stands for one commit, however often it is asked for and whatever happens to its branch meanwhile.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::reference::Reference;
use super::snapshot::{Asked, SMALL, Snapshot, held};
use super::{Hub, intact};
use crate::recipes::{listed, matches};

/// Names, in the folder itself, of what a model is read from.
const WANTED: [&str; 13] = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "dflash_export.json",
    // never read, but its presence makes a drafter another one, which its reader refuses
    "mask_embedding.pt",
    "README.md",
    "vocab.json",
    "merges.txt",
];

/// How far a transfer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// Bytes so far.
    pub done: u64,
    /// All bytes.
    pub total: u64,
}

/// Is told how far a transfer is, from other threads.
pub type Watch = Box<dyn Fn(Transfer) + Send + Sync>;

/// The folder that a path means, by the environment's hub: itself, or one of the hub's cache for `hf://..`; `watch` makes the
/// display of a download, if there is one.
///
/// # Errors
/// When the reference is none, or the hub or its cache do not have what it names.
pub fn fetch(path: &Path, watch: impl FnOnce() -> Option<Watch>) -> Result<PathBuf> {
    static FOUND: Mutex<BTreeMap<PathBuf, PathBuf>> = Mutex::new(BTreeMap::new());
    let Some(reference) = Reference::parse(path)? else {
        return Ok(path.to_owned());
    };
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = found.get(path) {
        return Ok(known.clone());
    }
    let folder = Hub::from_env().locate(&reference, watch().as_ref())?;
    found.insert(path.to_owned(), folder.clone());
    Ok(folder)
}

impl Hub {
    /// The folder, or file, of the cache that a reference means, fetched as far as it is not there.
    ///
    /// # Errors
    /// When the hub cannot be reached or refuses, the reference names no model there, a file is not what its hash says,
    /// or, offline, the cache holds it not at all or in part.
    pub fn locate(&self, reference: &Reference, watch: Option<&Watch>) -> Result<PathBuf> {
        let connection = self.connect()?;
        let subject = reference.to_string();
        let asked = Asked {
            kind: "models",
            repository: &reference.repository,
            revision: reference.revision.as_deref().unwrap_or("main"),
            subject: &subject,
        };
        let inner = reference.inner.as_deref();
        if self.is_offline() {
            let (_, folder) = held(&connection, asked)?;
            let place = inner.map_or_else(|| folder.clone(), |inner| folder.join(inner));
            check_links(&place)?;
            whole(&place).with_context(|| {
                format!(
                    "{reference}: {} holds only a part of it, and HF_HUB_OFFLINE forbids to fetch the rest",
                    connection.cache.display()
                )
            })?;
            return Ok(place);
        }
        let snapshot = Snapshot::ask(&connection, asked)?;
        let there = snapshot.paths();
        let paths: Vec<String> = there.iter().filter(|path| wanted(inner, path)).cloned().collect();
        let folder = snapshot.fetch(&paths, watch)?;
        let place = inner.map_or_else(|| folder.clone(), |inner| folder.join(inner));
        check_links(&place)?;
        if let Err(missing) = whole(&place) {
            let found = connection.redacted(&listed(&there));
            bail!("{reference} at commit {}: {missing:#}; found {found}", snapshot.commit);
        }
        Ok(place)
    }
}

/// Whether a file is fetched for a folder: what a model is read from, without the folders below; or it is named itself.
fn wanted(inner: Option<&str>, path: &str) -> bool {
    let below = match inner {
        Some(inner) => path.strip_prefix(inner).and_then(|rest| rest.strip_prefix('/')),
        None => Some(path),
    };
    let named = |name: &str| !name.contains('/') && WANTED.iter().any(|pattern| matches(pattern, name));
    inner == Some(path) || below.is_some_and(named)
}

fn names_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries
        .flatten()
        .map(|entry| PathBuf::from(entry.file_name()))
        .collect()
}

/// Checks that everything that a reader would find is a file of the cache, and small ones once more against their hash:
/// other tools fetch into the same cache.
fn check_links(place: &Path) -> Result<()> {
    let files = if place.is_dir() {
        names_in(place).iter().map(|name| place.join(name)).collect()
    } else {
        vec![place.to_owned()]
    };
    for path in files.into_iter().filter(|path| path.is_file()) {
        let size = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
        if size <= SMALL {
            intact::check(&path)?;
        } else {
            intact::named(&path)?;
        }
    }
    Ok(())
}

/// Whether a model, or the one file that was asked for, is all there.
fn whole(place: &Path) -> Result<()> {
    if place.is_file() {
        return Ok(());
    }
    ensure!(place.join("config.json").is_file(), "expected a config.json");
    let names = names_in(place);
    let tensors = |name: &PathBuf| name.extension().is_some_and(|extension| extension == "safetensors");
    ensure!(names.iter().any(tensors), "expected *.safetensors");
    for index in names
        .iter()
        .filter(|name| name.to_string_lossy().ends_with(".safetensors.index.json"))
    {
        let bytes = std::fs::read(place.join(index)).with_context(|| index.display().to_string())?;
        let index: Value = serde_json::from_slice(&bytes).with_context(|| index.display().to_string())?;
        let shards = index.get("weight_map").and_then(Value::as_object).into_iter().flatten();
        for shard in shards.filter_map(|(_, shard)| shard.as_str()) {
            ensure!(place.join(shard).is_file(), "expected {shard}, which the index names");
        }
    }
    Ok(())
}
