//! Which drafter a run starts from, kept with the run: `start.json`.
//!
//! Once a checkpoint is there, nothing is read of that drafter any more, and it may be moved or deleted. What stays needed
//! is what it was: its hash, which a resumed run must repeat, and its configuration, which fills the open keys of the run
//! file again.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use dflash_data::hub::on_record;
use dflash_data::target_hash;
use dflash_eval::folder::{drafter_in, sizes_for};
use dflash_model::{DrafterConfig, TargetInfo, formats};
use serde_json::{Value, json};

use super::KEY;
use crate::checkpoint;
use crate::config::RunConfig;
use crate::durable::replace_file;

/// The record's name in the run folder.
const RECORD: &str = "start.json";

/// The drafter that a run starts from.
#[derive(Debug, Clone, PartialEq)]
pub struct Start {
    /// Its path as it goes on record.
    pub path: String,
    /// Its hash, 64 hexadecimal characters.
    pub hash: String,
    /// Its configuration.
    pub config: DrafterConfig,
}

impl Start {
    /// The drafter that `drafter.init_from` names; where it is gone and the run has a checkpoint, as the run remembers it.
    ///
    /// # Errors
    /// When it is no drafter, or its tensors are not those of its configuration; by key and path.
    pub fn find(config: &RunConfig, target: &TargetInfo) -> Result<Option<Self>> {
        let Some(path) = &config.drafter.init_from else {
            return Ok(None);
        };
        if !path.exists()
            && let Some(record) = Self::read(&config.run_dir)?
            && record.path == on_record(path)
            && checkpoint::latest(&config.run_dir)?.is_some()
        {
            return Ok(Some(record));
        }
        let place = drafter_in(path).context(KEY)?;
        let facts = formats::facts(&place, Some(&sizes_for(&place, target))).context(KEY)?;
        let problems = facts.problems();
        if !problems.is_empty() {
            bail!("{KEY}: {}: {}", place.display(), problems.join("; "));
        }
        Ok(Some(Self {
            path: on_record(path),
            hash: target_hash(&place).context(KEY)?,
            config: facts.config,
        }))
    }

    /// Writes the record.
    ///
    /// # Errors
    /// When the folder cannot be written to.
    pub fn write(&self, run_dir: &Path) -> Result<()> {
        let record = json!({"path": self.path, "hash": self.hash, "config": self.config.to_json()?});
        let text = serde_json::to_string_pretty(&record)? + "\n";
        replace_file(&run_dir.join(RECORD), text.as_bytes())
    }

    fn read(run_dir: &Path) -> Result<Option<Self>> {
        let path: PathBuf = run_dir.join(RECORD);
        if !path.exists() {
            return Ok(None);
        }
        let named = || path.display().to_string();
        let record: Value = serde_json::from_slice(&fs::read(&path).with_context(named)?).with_context(named)?;
        let text = |key: &str| {
            let text = record[key].as_str().map(str::to_owned);
            text.with_context(|| format!("{}: {key}: expected a text", path.display()))
        };
        Ok(Some(Self {
            path: text("path")?,
            hash: text("hash")?,
            config: DrafterConfig::from_json(&record["config"], &named())?,
        }))
    }
}
