//! A model on the hub as an upload finds it: made if it is not there, its branch, and the files at the branch's head.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::local::LocalFile;
use super::tree::{Entry, files_of};
use super::upload::Upload;
use super::wire::{Wire, segment};
use super::{Connection, Failure, Kind, is_commit};
use crate::recipes::listed;

const JSON: &str = "application/json";

/// A model that exists.
pub(super) struct Remote<'r> {
    connection: &'r Connection,
    wire: Wire<'r>,
    name: &'r str,
    revision: &'r str,
}

/// A branch at one moment.
pub(super) struct State {
    /// The commit; none in a model without any.
    pub(super) head: Option<String>,
    files: BTreeMap<String, Entry>,
}

impl State {
    /// Whether the file there is the one here, as it was checked.
    pub(super) fn has(&self, file: &LocalFile) -> bool {
        self.files.get(&file.name).is_some_and(|entry| {
            let here = if entry.is_large() { &file.sha256 } else { &file.git };
            entry.hash == *here
        })
    }
}

impl<'r> Remote<'r> {
    /// The model, made if it is not there, which is the second value, and its branch, likewise.
    pub(super) fn open(connection: &'r Connection, upload: &Upload<'r>) -> Result<(Self, bool)> {
        let remote = Self {
            connection,
            wire: Wire::new(connection)?,
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
            !upload.private || created || info["private"] == true,
            "--private: {} exists already, and the hub does not call it private: make it so there, or push without",
            remote.address()
        );
        let branch = remote.ensure_branch();
        if created {
            branch.with_context(|| new_and_empty(upload.repository))?;
        } else {
            branch?;
        }
        Ok((remote, created))
    }

    fn info(&self, revision: Option<&str>) -> Result<Value, Failure> {
        let mut route = format!("api/models/{}", self.name);
        if let Some(revision) = revision {
            route = format!("{route}/revision/{}", segment(revision));
        }
        let subject = format!("push to {}", self.name);
        let answer = self.wire.get(&route, &subject)?;
        if answer.is_object() {
            return Ok(answer);
        }
        let cause = format!("GET /{route}: expected an object");
        Err(self.connection.worded(Kind::NoHub, false, &subject, &cause))
    }

    fn create(&self, private: bool) -> Result<(Value, bool)> {
        let (owner, name) = self.name.split_once('/').context("expected a repository, org/name")?;
        let body = json!({"name": name, "organization": owner, "type": "model", "private": private});
        let asked = self
            .wire
            .post("api/repos/create", JSON, &body, &format!("create {}", self.name));
        let created = match asked {
            Ok(_) => true,
            // somebody was faster, or the answer to a first attempt got lost
            Err(failure) if failure.kind == Kind::Conflict => false,
            Err(failure) => return Err(failure.into()),
        };
        let info = self.info(None);
        let info = if created {
            info.with_context(|| new_and_empty(self.name))?
        } else {
            info?
        };
        Ok((info, created))
    }

    fn ensure_branch(&self) -> Result<()> {
        match self.info(Some(self.revision)) {
            Ok(_) => Ok(()),
            Err(failure) if failure.kind == Kind::NotFound && self.revision == "main" => {
                // a model without any commit has no branch either
                Ok(())
            }
            Err(failure) if failure.kind == Kind::NotFound => {
                let route = format!("api/models/{}/branch/{}", self.name, segment(self.revision));
                let subject = format!("create branch {} of {}", self.revision, self.name);
                match self.wire.post(&route, JSON, &json!({}), &subject) {
                    // the real one may answer without a body
                    Err(failure) if !matches!(failure.kind, Kind::Conflict | Kind::NoHub) => Err(failure.into()),
                    _ => Ok(()),
                }
            }
            Err(failure) => Err(failure.into()),
        }
    }

    /// The branch as it is now.
    pub(super) fn state(&self) -> Result<State> {
        let head = match self.info(Some(self.revision)) {
            Ok(info) => info["sha"].as_str().map(str::to_owned),
            Err(failure) if failure.kind == Kind::NotFound => None,
            Err(failure) => return Err(failure.into()),
        };
        let mut files = BTreeMap::new();
        if let Some(head) = &head {
            ensure!(
                is_commit(head),
                "push to {}: expected a commit as the branch's sha, got {head:?}",
                self.name
            );
            let place = format!("models/{}", self.name);
            let subject = format!("files of {}", self.name);
            for entry in files_of(&self.wire, self.connection, &place, head, &subject)? {
                files.insert(entry.path.clone(), entry);
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

fn new_and_empty(name: &str) -> String {
    format!("push to {name}, which is new and still empty")
}
