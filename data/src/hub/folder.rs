//! From `hf://org/name@revision/folder` to a folder of the hub's cache.
//!
//! Only what a target or a drafter is read from is fetched, and only of the folder that was asked for. Within a process
//! a reference stands for one commit, however often it is asked for and whatever happens to its branch meanwhile.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use hf_hub::progress::{DownloadEvent, ProgressEvent, ProgressHandler};
use hf_hub::repository::RepoTreeEntry;
use hf_hub::split_id;
use serde_json::Value;

use super::reference::Reference;
use super::{Connection, Hub, intact};
use crate::recipes::listed;

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

/// Larger files are compared with their hash when they are fetched, smaller ones whenever they are used.
const SMALL: u64 = 16 << 20;

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

/// The folder that a path means, by the environment's hub: itself, or one of the hub's cache for `hf://..`.
///
/// # Errors
/// When the reference is none, or the hub or its cache do not have what it names.
pub fn folder(path: &Path) -> Result<PathBuf> {
    fetch(path, || None)
}

/// As [`folder`]; `watch` makes the display of a download, if there is one.
///
/// # Errors
/// As [`folder`].
pub fn fetch(path: &Path, watch: impl FnOnce() -> Option<Watch>) -> Result<PathBuf> {
    static FOUND: Mutex<BTreeMap<PathBuf, PathBuf>> = Mutex::new(BTreeMap::new());
    let Some(reference) = Reference::parse(path)? else {
        return Ok(path.to_owned());
    };
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = found.get(path) {
        return Ok(known.clone());
    }
    let folder = Hub::from_env().locate(&reference, watch())?;
    found.insert(path.to_owned(), folder.clone());
    Ok(folder)
}

impl Hub {
    /// The folder, or file, of the cache that a reference means, fetched as far as it is not there.
    ///
    /// # Errors
    /// When the hub cannot be reached or refuses, the reference names no model there, a file is not what its hash says,
    /// or, offline, the cache holds it not at all or in part.
    pub fn locate(&self, reference: &Reference, watch: Option<Watch>) -> Result<PathBuf> {
        let connection = self.connect()?;
        let (owner, name) = split_id(&reference.repository);
        let repository = connection.client.model(owner, name);
        let revision = reference.revision.as_deref().unwrap_or("main");
        let (allowed, ignored) = patterns(reference.inner.as_deref());
        let blobs = connection.cache.join(format!("models--{owner}--{name}")).join("blobs");
        let before = names_in(&blobs);
        let request = repository
            .snapshot_download()
            .revision(revision)
            .allow_patterns(allowed)
            .ignore_patterns(ignored)
            .local_files_only(self.is_offline());
        let watch = watch.map(|watch| hf_hub::progress::Progress::new(Downloads::new(watch)));
        let snapshot = request
            .maybe_progress(watch)
            .send()
            .map_err(|error| connection.failure(&error, &reference.to_string()))?;
        let place = match &reference.inner {
            Some(inner) => snapshot.join(inner),
            None => snapshot.clone(),
        };
        check_blobs(&place, &before)?;
        if let Err(missing) = whole(&place) {
            if self.is_offline() {
                bail!(
                    "{reference}: {} holds only a part of it, and HF_HUB_OFFLINE forbids to fetch the rest: {missing:#}",
                    connection.cache.display()
                );
            }
            let commit = snapshot.file_name().and_then(|name| name.to_str()).unwrap_or(revision);
            let there = files_at(&connection, reference, commit)?;
            bail!("{reference} at commit {commit}: {missing:#}; found {}", listed(&there));
        }
        Ok(place)
    }
}

/// What to fetch for a folder, or a file, and what not.
fn patterns(inner: Option<&str>) -> (Vec<String>, Vec<String>) {
    let prefix = inner.map_or_else(String::new, |inner| format!("{inner}/"));
    let mut allowed: Vec<String> = WANTED.iter().map(|name| format!("{prefix}{name}")).collect();
    allowed.extend(inner.map(str::to_owned));
    // an asterisk matches slashes, too: without this the folders below would come along
    (allowed, vec![format!("{prefix}*/*")])
}

fn names_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries
        .flatten()
        .map(|entry| PathBuf::from(entry.file_name()))
        .collect()
}

/// Checks what was fetched just now, and small files in any case. One that is damaged and new is removed: the next call
/// fetches it again.
fn check_blobs(place: &Path, before: &[PathBuf]) -> Result<()> {
    let files = if place.is_dir() {
        names_in(place).iter().map(|name| place.join(name)).collect()
    } else {
        vec![place.to_owned()]
    };
    for path in files.into_iter().filter(|path| path.is_file()) {
        let blob = std::fs::read_link(&path).ok();
        let name = blob.as_ref().and_then(|blob| blob.file_name()).map(PathBuf::from);
        let fresh = name.is_some_and(|name| !before.contains(&name));
        let size = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
        if !fresh && size > SMALL {
            continue;
        }
        let checked = intact::check(&path);
        if let (Err(_), true, Ok(blob)) = (&checked, fresh, path.canonicalize()) {
            // the error that follows is the one to report
            let _ = std::fs::remove_file(blob).and_then(|()| std::fs::remove_file(&path));
        }
        checked?;
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

/// Paths of the files in the folder that a reference means, at a commit; all of the model's if there is none.
fn files_at(connection: &Connection, reference: &Reference, commit: &str) -> Result<Vec<String>> {
    let (owner, name) = split_id(&reference.repository);
    let repository = connection.client.model(owner, name);
    let entries = repository
        .list_tree()
        .revision(commit)
        .recursive(true)
        .send()
        .map_err(|error| connection.failure(&error, &reference.to_string()))?;
    let files = entries.into_iter().filter_map(|entry| match entry {
        RepoTreeEntry::File { path, .. } => Some(path),
        RepoTreeEntry::Directory { .. } => None,
    });
    Ok(files.collect())
}

/// Adds up what the client tells of single files.
struct Downloads {
    watch: Watch,
    state: Mutex<(u64, BTreeMap<String, u64>)>,
}

impl Downloads {
    fn new(watch: Watch) -> Self {
        Self {
            watch,
            state: Mutex::new((0, BTreeMap::new())),
        }
    }
}

impl ProgressHandler for Downloads {
    fn on_progress(&self, event: &ProgressEvent) {
        let ProgressEvent::Download(event) = event else { return };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            // single files of a snapshot start once more, with their own sizes
            DownloadEvent::Start { total_bytes, .. } => state.0 = state.0.max(*total_bytes),
            DownloadEvent::Progress { files } => {
                for file in files {
                    state.1.insert(file.filename.clone(), file.bytes_completed);
                }
            }
            _ => return,
        }
        let done: u64 = state.1.values().sum();
        let total = state.0;
        if total > 0 {
            (self.watch)(Transfer {
                done: done.min(total),
                total,
            });
        }
    }
}
