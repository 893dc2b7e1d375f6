//! A data set's files from the Hugging Face hub, through its cache.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use hf_hub::repository::RepoTreeEntry;
use hf_hub::{HFClient, HFClientSync, HFError, HFRepositorySync, RepoTypeDataset, split_id};

use super::rows::{complete, files_below, first_match, listed};
use crate::files::sha256_of_file;

/// How the hub is reached.
#[derive(Clone, Default)]
pub struct Hub {
    endpoint: Option<String>,
    token: Option<String>,
    cache: Option<PathBuf>,
    revision: Option<String>,
    offline: bool,
}

/// Files of one commit.
pub(super) struct Fetched {
    /// Path within the data set, and on this machine.
    pub(super) files: Vec<(String, PathBuf)>,
    /// The commit.
    pub(super) revision: String,
}

impl Hub {
    /// The hub as the environment sets it up: `HF_ENDPOINT`, `HF_TOKEN` or the token that its own tools stored, the
    /// cache in `HF_HUB_CACHE` or below `HF_HOME`, and the cache alone when `HF_HUB_OFFLINE` is 1, true, yes or on.
    pub fn from_env() -> Self {
        // the other variables are read by the client, this one is not
        let offline = std::env::var("HF_HUB_OFFLINE").unwrap_or_default();
        Self {
            offline: ["1", "true", "yes", "on"].contains(&offline.to_ascii_lowercase().as_str()),
            ..Self::default()
        }
    }

    /// Another address than the environment's.
    #[must_use]
    pub fn at(mut self, endpoint: &str) -> Self {
        self.endpoint = Some(endpoint.to_owned());
        self
    }

    /// Another token than the environment's.
    #[must_use]
    pub fn with_token(mut self, token: &str) -> Self {
        self.token = Some(token.to_owned());
        self
    }

    /// Another cache folder than the environment's.
    #[must_use]
    pub fn cached_in(mut self, folder: &Path) -> Self {
        self.cache = Some(folder.to_owned());
        self
    }

    /// Another branch, tag or commit than `main`.
    #[must_use]
    pub fn at_revision(mut self, revision: &str) -> Self {
        self.revision = Some(revision.to_owned());
        self
    }

    /// Whether only the cache is asked.
    #[must_use]
    pub fn offline(mut self, offline: bool) -> Self {
        self.offline = offline;
        self
    }

    /// The files of a data set that the first of `patterns` with any match finds, sorted by name.
    ///
    /// What the cache holds of the revision's commit is not fetched again.
    ///
    /// # Errors
    /// When the hub cannot be reached or refuses, no file matches, a part is missing, or a file is not what its hash
    /// in the cache says. Offline also when the cache does not hold the data set.
    pub(super) fn fetch(&self, dataset: &str, patterns: &[&str]) -> Result<Fetched> {
        let mut client = HFClient::builder();
        if let Some(endpoint) = &self.endpoint {
            client = client.endpoint(endpoint);
        }
        if let Some(token) = &self.token {
            client = client.token(token);
        }
        if let Some(cache) = &self.cache {
            client = client.cache_dir(cache);
        }
        let client = client.build().context("cannot set up the hub's client")?;
        let (endpoint, cache) = (client.endpoint().to_owned(), client.cache_dir().to_owned());
        let client = HFClientSync::from_inner(client).context("cannot set up the hub's client")?;
        let (owner, name) = split_id(dataset);
        let repository = client.dataset(owner, name);
        let revision = self.revision.as_deref().unwrap_or("main");
        let snapshot = repository
            .snapshot_download()
            .revision(revision)
            .allow_patterns(patterns.iter().map(|&pattern| pattern.to_owned()).collect::<Vec<_>>())
            .local_files_only(self.offline)
            .send()
            .map_err(|error| explained(error, dataset, self.offline, &endpoint, &cache))?;
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
            let there = if self.offline {
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
            undamaged(&path)?;
            files.push((file.to_owned(), path));
        }
        Ok(Fetched {
            files,
            revision: commit,
        })
    }
}

impl fmt::Debug for Hub {
    /// Everything but the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("endpoint", &self.endpoint)
            .field("token_set", &self.token.is_some())
            .field("cache", &self.cache)
            .field("revision", &self.revision)
            .field("offline", &self.offline)
            .finish()
    }
}

/// The client's error with what the user can do about it.
fn explained(error: HFError, dataset: &str, offline: bool, endpoint: &str, cache: &Path) -> anyhow::Error {
    let advice = match &error {
        HFError::LocalEntryNotFound { .. } if offline => {
            format!(
                "{} does not hold it, and HF_HUB_OFFLINE forbids to fetch it",
                cache.display()
            )
        }
        HFError::Request { .. } => format!(
            "{endpoint} cannot be reached. Without network, HF_HUB_OFFLINE=1 uses what the cache {} holds, and a path \
             instead of hub a local copy",
            cache.display()
        ),
        HFError::AuthRequired { .. }
        | HFError::Forbidden { .. }
        | HFError::RepoNotFound { .. }
        | HFError::RevisionNotFound { .. } => {
            format!("{endpoint} does not give it out. If it needs an account, set HF_TOKEN")
        }
        _ => format!("{endpoint} answers with an error"),
    };
    anyhow::Error::new(error).context(format!("data set {dataset}: {advice}"))
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

/// Compares a file with the hash that the cache names it by. The client stores whatever body it gets, an error page
/// too, under the name of the file that it asked for.
fn undamaged(path: &Path) -> Result<()> {
    let Ok(target) = std::fs::read_link(path) else {
        return Ok(());
    };
    let name = target.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    // large files are named by SHA-256, small ones by git's hash
    if name.len() == 64 {
        let found = sha256_of_file(path)?;
        ensure!(
            found == name,
            "{}: damaged: expected SHA-256 {name}, found {found}. Remove the file that it links to and fetch it again",
            path.display()
        );
    }
    Ok(())
}
