//! Checkpoints: whole or absent, and exact to resume from.
//!
//! ```text
//! run/step-000500/config.json, model.safetensors (BF16), README.md     a published drafter folder
//! run/step-000500/state/masters.safetensors                            f32 parameters, by trained name
//! run/step-000500/state/adamw.safetensors                              f32 moments
//! run/step-000500/state/progress.json                                  step, place in the data, what must not change
//! ```
//!
//! A checkpoint is written as `.step-000500.partial`, flushed to the disk and renamed, so that a folder without
//! the leading dot is complete. Nothing random is stored: every draw is a function of seed, epoch and sample.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor, Var};
use serde::{Deserialize, Serialize};

use crate::config::RunConfig;
use crate::config_file;
use crate::durable;
use crate::optim::{self, AdamW};
use crate::warm_start::Start;

/// Version of `progress.json`.
const FORMAT: u32 = 1;

/// Where a run stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// Version of this file.
    pub format: u32,
    /// Optimizer steps made.
    pub step: u64,
    /// Epoch that the next step belongs to, 0-based.
    pub epoch: u64,
    /// Steps of that epoch already made.
    pub position: u64,
    /// Identity of the training data and taps.
    pub data: String,
    /// Keys of the run file that a resumed run must repeat, with their values as TOML.
    pub contract: BTreeMap<String, String>,
    /// The best validated step so far.
    pub best: Option<Best>,
}

/// A validated state.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// Its step.
    pub step: u64,
    /// Its replay acceptance length: accepted drafts a round + 1.
    pub acceptance_length: f64,
}

impl Progress {
    /// The start of a run.
    pub fn start(data: String, contract: BTreeMap<String, String>) -> Self {
        Self {
            format: FORMAT,
            step: 0,
            epoch: 0,
            position: 0,
            data,
            contract,
            best: None,
        }
    }

    /// Refuses to go on under another contract, naming the first key that differs.
    pub fn check_same_run(&self, contract: &BTreeMap<String, String>, data: &str) -> Result<()> {
        let absent = || "nothing".to_owned();
        for key in self.contract.keys().chain(contract.keys()) {
            let (saved, wanted) = (self.contract.get(key), contract.get(key));
            ensure!(
                saved == wanted,
                "resume refused: {key} was {} in the checkpoint and is {} now (a new run that only starts from these \
                 weights sets drafter.init_from)",
                saved.cloned().unwrap_or_else(absent),
                wanted.cloned().unwrap_or_else(absent)
            );
        }
        ensure!(
            self.data == data,
            "resume refused: the training data or taps changed (checkpoint {}, now {data})",
            self.data
        );
        Ok(())
    }
}

/// The keys of a resolved run file that decide the numbers of a run, flattened to `section.key`.
///
/// Left out: where things lie (the data's identity and the hash of the drafter started from stand for them), threads, tracking,
/// whether activations are kept, and when states are saved, validated or evaluated.
pub fn contract(config: &RunConfig, start: Option<&Start>) -> Result<BTreeMap<String, String>> {
    let table: toml::Table = toml::from_str(&config_file::to_toml(config)?)?;
    let mut keys = BTreeMap::new();
    for (section, value) in table {
        match value {
            toml::Value::Table(inner) => {
                for (key, value) in inner {
                    keys.insert(format!("{section}.{key}"), value.to_string());
                }
            }
            value => {
                keys.insert(section, value.to_string());
            }
        }
    }
    let places = [
        "run_dir",
        "threads",
        "tracking",
        "target.path",
        "data.prompts",
        "data.conversations",
        "data.validation",
        "taps.dir",
        "taps.shard_mib",
        "drafter.init_from",
        "drafter.allow",
        // the same bits either way
        "train.recompute",
    ];
    keys.retain(|key, _| {
        let section = key.split('.').next().unwrap_or(key);
        !places.contains(&key.as_str())
            && !["generate", "checkpoint", "validate", "evaluate", "wandb"].contains(&section)
    });
    if let Some(start) = start {
        keys.insert(
            "drafter.init_from".to_owned(),
            format!("a drafter of hash {}", start.hash),
        );
    }
    Ok(keys)
}

/// Writes the state at `progress.step` under `run_dir`; `publish` writes the drafter folder into the folder it gets.
///
/// Returns the checkpoint's folder. An older one of the same step is replaced.
pub fn write(
    run_dir: &Path,
    progress: &Progress,
    masters: &BTreeMap<String, Var>,
    optimizer: &AdamW,
    publish: &dyn Fn(&Path, &Progress) -> Result<()>,
) -> Result<PathBuf> {
    let folder = step_folder(run_dir, progress.step);
    durable::replace_folder(&folder, &|partial| {
        publish(partial, progress)?;
        let state = partial.join("state");
        fs::create_dir(&state).with_context(|| format!("making {}", state.display()))?;
        let tensors: HashMap<&str, Tensor> = masters
            .iter()
            .map(|(name, var)| (name.as_str(), var.as_tensor().clone()))
            .collect();
        let path = state.join("masters.safetensors");
        candle_core::safetensors::save(&tensors, &path).with_context(|| format!("writing {}", path.display()))?;
        optimizer.save(&state.join("adamw.safetensors"))?;
        let path = state.join("progress.json");
        fs::write(&path, serde_json::to_string_pretty(progress)? + "\n")
            .with_context(|| format!("writing {}", path.display()))
    })
    .with_context(|| format!("checkpoint {}", folder.display()))?;
    Ok(folder)
}

/// The state of a checkpoint without its tensors.
pub fn read_progress(folder: &Path) -> Result<Progress> {
    let path = folder.join("state/progress.json");
    let text =
        fs::read_to_string(&path).with_context(|| format!("{}: not a checkpoint to resume from", path.display()))?;
    let progress: Progress = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    ensure!(
        progress.format == FORMAT,
        "{}: expected format {FORMAT}, got {}",
        path.display(),
        progress.format
    );
    Ok(progress)
}

/// Puts a checkpoint's masters and moments into `masters` and `optimizer`.
pub fn read_state(
    folder: &Path,
    progress: &Progress,
    masters: &BTreeMap<String, Var>,
    optimizer: &mut AdamW,
) -> Result<()> {
    let path = folder.join("state/masters.safetensors");
    let mut saved = candle_core::safetensors::load(&path, &Device::Cpu).with_context(|| path.display().to_string())?;
    for (name, var) in masters {
        let Some(tensor) = saved.remove(name) else {
            bail!("{}: tensor {name} is missing", path.display())
        };
        ensure!(
            tensor.shape() == var.shape() && tensor.dtype() == var.dtype(),
            "{}: tensor {name}: expected {} {:?}, got {} {:?}",
            path.display(),
            var.dtype().as_str(),
            var.dims(),
            tensor.dtype().as_str(),
            tensor.dims()
        );
        optim::check_finite(&tensor).with_context(|| format!("{}: tensor {name}", path.display()))?;
        var.set(&tensor.to_device(var.device())?)?;
    }
    if let Some(name) = saved.keys().min() {
        bail!("{}: unexpected tensor {name}", path.display());
    }
    optimizer.load(&folder.join("state/adamw.safetensors"), progress.step)
}

/// The newest whole checkpoint of a run.
pub fn latest(run_dir: &Path) -> Result<Option<PathBuf>> {
    Ok(steps(run_dir)?.last().map(|&step| step_folder(run_dir, step)))
}

/// Steps of the whole checkpoints of a run, ascending.
pub fn steps(run_dir: &Path) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    let entries = match fs::read_dir(run_dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        Err(error) => return Err(error).with_context(|| run_dir.display().to_string()),
    };
    for entry in entries {
        let name = entry?.file_name();
        if let Some(step) = name.to_str().and_then(|name| name.strip_prefix("step-")?.parse().ok()) {
            found.push(step);
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Folder of the checkpoint at `step`.
pub fn step_folder(run_dir: &Path, step: u64) -> PathBuf {
    run_dir.join(format!("step-{step:06}"))
}

/// Removes all checkpoints but the newest `keep_last` and the one at `best`.
pub fn prune(run_dir: &Path, keep_last: usize, best: Option<u64>) -> Result<()> {
    let steps = steps(run_dir)?;
    let old = steps.len().saturating_sub(keep_last);
    for &step in steps[..old].iter().filter(|&&step| Some(step) != best) {
        durable::remove_folder(&step_folder(run_dir, step))?;
    }
    Ok(())
}

/// Renames the checkpoints after `step` to `superseded-step-...`, so that a run resumed at `step` does not mix with them.
///
/// Returns their new folders.
pub fn supersede_after(run_dir: &Path, step: u64) -> Result<Vec<PathBuf>> {
    let mut moved = Vec::new();
    for later in steps(run_dir)?.into_iter().filter(|&later| later > step) {
        let to = run_dir.join(format!("superseded-step-{later:06}"));
        durable::remove_folder(&to)?;
        fs::rename(step_folder(run_dir, later), &to).with_context(|| format!("renaming to {}", to.display()))?;
        moved.push(to);
    }
    Ok(moved)
}

/// The checkpoint that a finished run publishes: the best one where it is kept, else the last.
pub fn chosen(config: &RunConfig, progress: &Progress, last: PathBuf) -> PathBuf {
    let best = progress.best.filter(|_| config.checkpoint.keep_best);
    best.map_or(last, |best| step_folder(&config.run_dir, best.step))
}

/// Copies the published files of a checkpoint, without its state, to `run_dir/final`.
pub fn publish_final(run_dir: &Path, checkpoint: &Path) -> Result<PathBuf> {
    let folder = run_dir.join("final");
    durable::replace_folder(&folder, &|partial| {
        for entry in fs::read_dir(checkpoint).with_context(|| checkpoint.display().to_string())? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                let to = partial.join(entry.file_name());
                fs::copy(entry.path(), &to).with_context(|| format!("copying to {}", to.display()))?;
            }
        }
        Ok(())
    })?;
    Ok(folder)
}
