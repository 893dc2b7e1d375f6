//! A model on the hub as an upload finds it: made if it is not there, its branch, and the files at the branch's head.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use hf_hub::repository::{ModelInfo, RepoTreeEntry, RepoTypeModel};
use hf_hub::{HFRepositorySync, split_id};

use super::upload::{LocalFile, Upload};
use super::{Connection, Failure, Kind, git_hash};
use crate::files::sha256_of_file;
use crate::recipes::listed;

/// A model that exists.
pub(super) struct Remote<'r> {
    connection: &'r Connection,
    repository: HFRepositorySync<RepoTypeModel>,
    name: &'r str,
    revision: &'r str,
}

/// A branch at one moment.
pub(super) struct State {
    /// The commit; none in a model without any.
    pub(super) head: Option<String>,
    files: BTreeMap<String, Held>,
}

/// How a file is held there.
enum Held {
    /// In git, under this hash of it.
    Small(String),
    /// Outside; git has a pointer to it, under this hash of the pointer.
    Large(String),
}

impl State {
    /// Whether the file there is the one here; one that cannot be read here is not.
    pub(super) fn has(&self, file: &LocalFile) -> bool {
        match self.files.get(&file.name) {
            None => false,
            Some(Held::Small(hash)) => std::fs::read(&file.path).is_ok_and(|bytes| git_hash(&bytes) == *hash),
            // the listing has the file's own hash, too, but under a name that the client does not read
            Some(Held::Large(hash)) => {
                sha256_of_file(&file.path).is_ok_and(|found| git_hash(pointer(&found, file.size).as_bytes()) == *hash)
            }
        }
    }
}

impl<'r> Remote<'r> {
    /// The model, made if it is not there, which is the second value, and its branch, likewise.
    pub(super) fn open(connection: &'r Connection, upload: &Upload<'r>) -> Result<(Self, bool)> {
        let (owner, name) = split_id(upload.repository);
        let remote = Self {
            connection,
            repository: connection.client.model(owner, name),
            name: upload.repository,
            revision: upload.revision.unwrap_or("main"),
        };
        let (info, created) = match remote.info(None) {
            Ok(info) => (info, false),
            // looked for first: a token may be good for this model, and not for making others
            Err(failure) if failure.kind == Kind::NotFound => remote.create(upload.private)?,
            Err(failure) => return Err(failure.into()),
        };
        ensure!(
            !upload.private || created || info.private == Some(true),
            "--private: {} exists already, and the hub does not call it private: make it so there, or push without",
            remote.address()
        );
        remote.ensure_branch()?;
        Ok((remote, created))
    }

    fn info(&self, revision: Option<&str>) -> Result<ModelInfo, Failure> {
        let asked = self
            .repository
            .info()
            .maybe_revision(revision.map(str::to_owned))
            .send();
        asked.map_err(|error| self.connection.failure(&error, &format!("push to {}", self.name)))
    }

    fn create(&self, private: bool) -> Result<(ModelInfo, bool)> {
        let request = self.connection.client.create_repository();
        let asked = request
            .repo_id(self.name)
            .repo_type(RepoTypeModel)
            .private(private)
            .send();
        let created = match asked.map_err(|error| self.connection.failure(&error, &format!("create {}", self.name))) {
            Ok(_) => true,
            // somebody was faster, or the answer to a first attempt got lost
            Err(failure) if failure.kind == Kind::Conflict => false,
            Err(failure) => return Err(failure.into()),
        };
        Ok((self.info(None)?, created))
    }

    fn ensure_branch(&self) -> Result<()> {
        match self.info(Some(self.revision)) {
            Ok(_) => Ok(()),
            Err(failure) if failure.kind == Kind::NotFound && self.revision == "main" => {
                // a model without any commit has no branch either
                Ok(())
            }
            Err(failure) if failure.kind == Kind::NotFound => {
                let asked = self.repository.create_branch().branch(self.revision).send();
                let subject = format!("create branch {} of {}", self.revision, self.name);
                match asked.map_err(|error| self.connection.failure(&error, &subject)) {
                    Err(failure) if failure.kind != Kind::Conflict => Err(failure.into()),
                    _ => Ok(()),
                }
            }
            Err(failure) => Err(failure.into()),
        }
    }

    /// The branch as it is now.
    pub(super) fn state(&self) -> Result<State> {
        let head = match self.info(Some(self.revision)) {
            Ok(info) => info.sha,
            Err(failure) if failure.kind == Kind::NotFound => None,
            Err(failure) => return Err(failure.into()),
        };
        let mut files = BTreeMap::new();
        if let Some(head) = &head {
            let request = self.repository.list_tree().revision(head).recursive(true);
            let entries = request
                .send()
                .map_err(|error| self.connection.failure(&error, &format!("files of {}", self.name)))?;
            for entry in entries {
                let RepoTreeEntry::File { oid, path, lfs, .. } = entry else {
                    continue;
                };
                let held = if lfs.is_some() { Held::Large } else { Held::Small };
                files.insert(path, held(oid));
            }
        }
        Ok(State { head, files })
    }

    /// Refuses a model that has weights of its own beside what is sent: a reader would load both.
    pub(super) fn check_weights(&self, state: &State, files: &[LocalFile]) -> Result<()> {
        let weights = |name: &str| !name.contains('/') && name.ends_with(".safetensors");
        let foreign = state.files.keys().filter(|name| weights(name));
        let foreign: Vec<String> = foreign
            .filter(|name| files.iter().all(|file| file.name != **name))
            .cloned()
            .collect();
        if foreign.is_empty() {
            return Ok(());
        }
        bail!(
            "{} has weights that are not in the folder, and whoever loads it would load them, too: {}. Remove them there, \
             or push to another repository",
            self.address(),
            listed(&foreign)
        )
    }

    /// The model's page.
    pub(super) fn address(&self) -> String {
        format!("{}/{}", self.connection.endpoint.trim_end_matches('/'), self.name)
    }

    /// The page of a commit, or of the model.
    pub(super) fn address_of(&self, commit: Option<&str>) -> String {
        match commit {
            Some(commit) => format!("{}/commit/{commit}", self.address()),
            None => self.address(),
        }
    }
}

/// What git holds in place of a large file.
fn pointer(sha256: &str, size: u64) -> String {
    format!("version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pointer_is_the_one_of_the_specification() {
        // the example of git-lfs's docs/spec.md, and what `git hash-object --stdin` says of it
        let sha256 = "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393";
        let hash = git_hash(pointer(sha256, 12345).as_bytes());
        assert_eq!(hash, "60c8d8ab2adcf57a391163a7eeb0cdb8bf348e44");
    }
}
