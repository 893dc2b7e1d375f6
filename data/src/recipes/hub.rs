//! A data set's files from the Hugging Face hub, through its cache.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::rows::{complete, files_below, first_match, listed};
use crate::hub::snapshot::{Asked, Snapshot, held};
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
    let subject = format!("data set {dataset}");
    let revision = hub.revision();
    let asked = Asked {
        kind: "datasets",
        repository: dataset,
        revision,
        subject: &subject,
    };
    let online = if hub.is_offline() {
        None
    } else {
        Some(Snapshot::ask(&connection, asked)?)
    };
    let (commit, there, cached) = if let Some(snapshot) = &online {
        (snapshot.commit.clone(), snapshot.paths(), None)
    } else {
        let (commit, folder) = held(&connection, asked)?;
        (commit, files_below(&folder)?, Some(folder))
    };
    let place = || format!("{dataset} at {revision} ({commit})");
    let found: Vec<String> = first_match(patterns, &there).into_iter().map(str::to_owned).collect();
    if found.is_empty() {
        bail!(
            "{}: expected {}, found {}",
            place(),
            patterns.join(" or "),
            connection.redacted(&listed(&there))
        );
    }
    complete(&found.iter().map(String::as_str).collect::<Vec<_>>()).with_context(place)?;
    let folder = match (&online, cached) {
        (Some(snapshot), _) => snapshot.fetch(&found, None)?,
        (None, folder) => folder.unwrap_or_default(),
    };
    let mut files = Vec::new();
    for file in found {
        let path = folder.join(&file);
        intact::check(&path)?;
        files.push((file, path));
    }
    Ok(Fetched {
        files,
        revision: commit,
    })
}
