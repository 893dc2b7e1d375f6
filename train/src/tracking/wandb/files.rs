//! The folder `files/` of an offline run: the run's configuration, numbers, machine and words, for people and for
//! wandb's local tools. `wandb sync` writes its own copies from the log when it uploads.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::Kept;
use crate::durable::replace_file;
use crate::provenance;
use crate::tracking::appended::{Appended, make_folder};
use crate::tracking::{Row, clock};

/// The files that change while the run works.
pub(super) struct Files {
    summary_path: PathBuf,
    summary: Map<String, Value>,
    output: Appended,
}

impl Files {
    /// Writes `config.yaml`, `wandb-metadata.json` and, from what the log kept, `output.log`.
    pub(super) fn write(folder: &Path, config: &Map<String, Value>, started: Duration, kept: &Kept) -> Result<Self> {
        make_folder(folder)?;
        replace_file(&folder.join("config.yaml"), yaml(config).as_bytes())?;
        let metadata = serde_json::to_string_pretty(&metadata(started))? + "\n";
        replace_file(&folder.join("wandb-metadata.json"), metadata.as_bytes())?;
        let output = folder.join("output.log");
        replace_file(&output, kept.lines.concat().as_bytes())?;
        let numbers = kept.summary.iter();
        let numbers = numbers.filter_map(|(name, json)| Some((name.clone(), serde_json::from_str(json).ok()?)));
        Ok(Self {
            summary_path: folder.join("wandb-summary.json"),
            summary: numbers.collect(),
            output: Appended::open(&output)?,
        })
    }

    /// Takes the latest numbers.
    pub(super) fn remember(&mut self, row: &Row) {
        self.summary.insert("_step".to_owned(), row.step.into());
        for (name, number) in &row.values {
            self.summary.insert(name.clone(), Value::Number(number.clone()));
        }
    }

    /// Adds a line to `output.log`.
    pub(super) fn say(&mut self, line: &str) -> Result<()> {
        self.output.write(line.as_bytes())
    }

    /// Writes `wandb-summary.json`.
    pub(super) fn finish(&mut self) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.summary)? + "\n";
        replace_file(&self.summary_path, text.as_bytes())
    }
}

/// Every key with its value as W&B lays it out. JSON is YAML, so the values need no writer of their own.
fn yaml(config: &Map<String, Value>) -> String {
    let lines = config
        .iter()
        .flat_map(|(key, value)| [key.clone(), format!(":\n    value: {value}\n")]);
    lines.collect()
}

/// The machine and the program, without names of people, hosts or folders.
fn metadata(started: Duration) -> Value {
    let facts = provenance::collect();
    let mut metadata = json!({
        "os": format!("{}-{}", facts.os, facts.arch),
        "startedAt": clock::iso(started),
        "program": "dflash-train",
        "version": facts.version,
        "cpu_count": facts.cores,
    });
    if let Some(commit) = facts.git_commit {
        metadata["git"] = json!({ "commit": commit });
    }
    metadata
}
