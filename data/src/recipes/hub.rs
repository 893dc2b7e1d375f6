//! A data set's files from the Hugging Face hub, through its cache.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use hf_hub::repository::RepoTreeEntry;
use hf_hub::{HFRepositorySync, RepoTypeDataset, split_id};

use super::rows::{complete, files_below, first_match, listed};
use crate::hub::{Hub, intact};

/// Files of one commit.
pub(super) struct Fetched {
    /// Path within the data set, and on this machine.
    pub(super) files: Vec<(String, PathBuf)>,
    /// The commit.
    pub(super) revision: String,
}

/// The files of a data set that the first of `patterns` with any match finds, sorted by name.
///
/// What the cache holds of the revision's commit is not fetched again.
///
/// # Errors
/// When the hub cannot be reached or refuses, no file matches, a part is missing, or a file is not what its hash
/// in the cache says. Offline also when the cache does not hold the data set.
pub(super) fn fetch(hub: &Hub, dataset: &str, patterns: &[&str]) -> Result<Fetched> {
    let connection = hub.connect()?;
    let (owner, name) = split_id(dataset);
    let repository = connection.client.dataset(owner, name);
    let revision = hub.revision();
    let snapshot = repository
        .snapshot_download()
        .revision(revision)
        .allow_patterns(patterns.iter().map(|&pattern| pattern.to_owned()).collect::<Vec<_>>())
        .local_files_only(hub.is_offline())
        .send()
        .map_err(|error| connection.failure(&error, &format!("data set {dataset}")))?;
    let commit = snapshot
        .file_name()
        .and_then(|name| name.to_str())
        .with_context(|| format!("{}: expected a folder named by a commit", snapshot.display()))?
        .to_owned();
    let place = || format!("{dataset} at {revision} ({commit})");
    let here = if snapshot.is_dir() {
        files_below(&snapshot)?
    } else {
        Vec::new()
    };
    let found = first_match(patterns, &here);
    if found.is_empty() {
        let there = if hub.is_offline() {
            here
        } else {
            all_files(&repository, &commit).with_context(place)?
        };
        bail!(
            "{}: expected {}, found {}",
            place(),
            patterns.join(" or "),
            listed(&there)
        );
    }
    complete(&found).with_context(place)?;
    let mut files = Vec::new();
    for file in found {
        let path = snapshot.join(file);
        intact::check(&path)?;
        files.push((file.to_owned(), path));
    }
    Ok(Fetched {
        files,
        revision: commit,
    })
}

/// Paths of all files of a commit.
fn all_files(repository: &HFRepositorySync<RepoTypeDataset>, commit: &str) -> Result<Vec<String>> {
    let entries = repository.list_tree().revision(commit).recursive(true).send()?;
    Ok(entries
        .into_iter()
        .filter_map(|entry| match entry {
            RepoTreeEntry::File { path, .. } => Some(path),
            RepoTreeEntry::Directory { .. } => None,
        })
        .collect())
}
