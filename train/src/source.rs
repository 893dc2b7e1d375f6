//! The capture stage, and where batches come from: order, packs and anchors as functions of (seed, epoch).

use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result};
use dflash_data::Identity;
use dflash_data::batch::{Batch, pack, plan_epoch};
use dflash_data::capture::{CaptureConfig, capture, estimate_bytes};
use dflash_data::source::{Sample, TapSource};
use dflash_data::taps::TapStore;
use dflash_data::target_hash;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::config::{RunConfig, TapMode};
use crate::examples::Examples;
use crate::failure::{Blame, Failure};
use crate::materials::Materials;
use crate::progress::{Display, Stage};
use crate::room::check_disk;
use crate::signals::{Interruptible, StopFlag};

/// Samples of a run and the order in which it trains on them.
pub struct Source {
    /// Tokens and taps of every example, held-out ones included.
    pub taps: TapSource,
    /// Which examples make which step.
    pub order: Order,
    /// Indices of the held-out examples.
    pub validation: Vec<usize>,
    /// Hash over target, tokenizer, template, layers, tokens, masks and split.
    pub identity: String,
}

/// Which examples make which step: a pure function of the run file and the examples' lengths.
pub struct Order {
    /// Indices of the examples to train on.
    train: Vec<usize>,
    /// Their lengths, in tokens.
    lengths: Vec<usize>,
    seed: u64,
    pack_tokens: usize,
    accumulate_samples: usize,
    steps: Option<u64>,
    epochs: u64,
    /// The plan of the epoch that was asked for last.
    plan: Mutex<Option<(u64, Plan)>>,
}

/// Steps of an epoch, each of one or more packs of sample indices.
pub type Plan = Arc<Vec<Vec<Vec<usize>>>>;

/// Captures what the tap folder lacks; nothing to do online. Whole shards stay, whenever it is ended.
///
/// # Errors
/// When the folder or what it holds does not fit the run, the disk is too small, or the target fails.
pub fn capture_missing(materials: &Materials, examples: &Examples, display: Display) -> Result<(), Failure> {
    let config = materials.config();
    if config.taps.mode == TapMode::Online {
        return Ok(());
    }
    let settings = CaptureConfig {
        folder: materials.taps_dir(),
        identity: identity(materials).input()?,
        shard_bytes: (config.taps.shard_mib as u64) << 20,
        // an accelerator runs one sequence at a time with all it has
        workers: usize::from(!materials.device.is_cpu()),
    };
    let tokens = examples.all.iter().map(|example| example.tokens.len()).sum();
    let whole = estimate_bytes(tokens, materials.layers().len(), settings.identity.hidden_size);
    let missing = whole.saturating_sub(bytes_in(&settings.folder));
    check_disk("capture", &settings.folder, missing).work()?;
    // capture speaks for the first time when it has accepted the folder and what lies there
    let mut stage = None;
    let outcome = capture(
        materials.target.as_ref(),
        &examples.all,
        &settings,
        &mut |done, total| {
            let stage = stage.get_or_insert_with(|| Stage::start(display, "capture", done as u64, total as u64));
            stage.set(done as u64, || "examples".to_owned());
        },
    )
    .context("capture");
    if stage.is_some() {
        outcome.work()
    } else {
        outcome.input()
    }
}

/// Bytes of the files in a folder; 0 for one that is not there.
fn bytes_in(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum()
}

/// Opens the samples of a run; stored taps must be complete. Online taps stop coming once `stop` is raised.
pub fn open(materials: &Materials, examples: Examples, stop: &StopFlag) -> Result<Source> {
    let config = materials.config();
    let expected = identity(materials)?;
    let identity = data_identity(&expected, &examples)?;
    let Examples { all, train, validation } = examples;
    let taps = match config.taps.mode {
        TapMode::Stored => TapSource::Stored(TapStore::open(&materials.taps_dir(), &expected)?),
        TapMode::Online => {
            let target = Interruptible::new(Arc::clone(&materials.target), stop.clone());
            TapSource::online(Arc::new(target), materials.layers().to_vec(), all)?
        }
    };
    let order = Order::new(config, &taps.lengths(), train);
    Ok(Source {
        taps,
        order,
        validation,
        identity,
    })
}

impl Source {
    /// The passes of the step at (epoch, position); none behind the epoch's last.
    pub fn step(&self, epoch: u64, position: u64, anchors: usize, block_size: usize) -> Result<Option<Vec<Batch>>> {
        let plan = self.order.epoch(epoch);
        let Some(packs) = plan.get(position as usize) else {
            return Ok(None);
        };
        let passes: Result<Vec<Batch>> = packs
            .iter()
            .map(|pack| self.pass(pack, epoch, anchors, block_size))
            .collect();
        passes.map(Some)
    }

    fn pass(&self, indices: &[usize], epoch: u64, anchors: usize, block_size: usize) -> Result<Batch> {
        let samples: Vec<Sample> = indices
            .par_iter()
            .map(|&index| self.taps.sample(index))
            .collect::<Result<_>>()?;
        let drawn: Vec<Vec<usize>> = indices
            .iter()
            .zip(&samples)
            .map(|(&index, sample)| {
                dflash_data::anchors::anchors(&sample.loss_mask, anchors, self.order.seed, epoch, index as u64)
            })
            .collect();
        pack(&samples, &drawn, block_size)
    }
}

impl Order {
    /// The order over `train`, indices into `lengths`.
    pub fn new(config: &RunConfig, lengths: &[usize], train: Vec<usize>) -> Self {
        Self {
            lengths: train.iter().map(|&index| lengths[index]).collect(),
            train,
            seed: config.seed,
            pack_tokens: config.train.pack_tokens,
            accumulate_samples: config.train.accumulate_samples.unwrap_or(1),
            steps: config.train.steps,
            epochs: config.train.epochs.unwrap_or(1),
            plan: Mutex::new(None),
        }
    }

    /// Steps of the whole run.
    pub fn total_steps(&self) -> u64 {
        let steps_of = |epoch| self.epoch(epoch).len() as u64;
        self.steps.unwrap_or_else(|| (0..self.epochs).map(steps_of).sum())
    }

    /// Steps of an epoch, each of one or more packs of example indices.
    pub fn epoch(&self, epoch: u64) -> Plan {
        // a panic elsewhere cannot leave a plan half made: it is stored whole
        let mut last = self.plan.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((planned, plan)) = &*last
            && *planned == epoch
        {
            return Arc::clone(plan);
        }
        let packs = plan_epoch(&self.lengths, self.pack_tokens, self.seed, epoch)
            .into_iter()
            .map(|pack| pack.into_iter().map(|index| self.train[index]).collect())
            .collect();
        let plan = Arc::new(group(packs, self.accumulate_samples));
        *last = Some((epoch, Arc::clone(&plan)));
        plan
    }
}

/// Joins successive packs into steps of at least `samples` samples; the last step of an epoch may have fewer.
pub fn group(packs: Vec<Vec<usize>>, samples: usize) -> Vec<Vec<Vec<usize>>> {
    let mut steps: Vec<Vec<Vec<usize>>> = Vec::new();
    let mut held = samples;
    for pack in packs {
        if held >= samples {
            steps.push(Vec::new());
            held = 0;
        }
        held += pack.len();
        if let Some(step) = steps.last_mut() {
            step.push(pack);
        }
    }
    steps
}

/// Whose taps this run wants.
pub fn identity(materials: &Materials) -> Result<Identity> {
    let config = materials.config();
    Ok(Identity {
        target: target_hash(&config.target.path)?,
        tokenizer: materials.chat.tokenizer.hash().to_owned(),
        template: materials.chat.template.hash().to_owned(),
        thinking: Some(config.data.thinking),
        layers: materials.layers().to_vec(),
        hidden_size: materials.target.info().hidden_size,
    })
}

fn data_identity(identity: &Identity, examples: &Examples) -> Result<String> {
    let mut hash = Sha256::new();
    hash.update(serde_json::to_vec(identity)?);
    for example in &examples.all {
        hash.update((example.tokens.len() as u64).to_le_bytes());
        for (token, supervised) in example.tokens.iter().zip(&example.loss_mask) {
            hash.update(token.to_le_bytes());
            hash.update([u8::from(*supervised)]);
        }
    }
    for index in &examples.train {
        hash.update((*index as u64).to_le_bytes());
    }
    Ok(format!("{:x}", hash.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_whole_packs_of_at_least_so_many_samples() {
        let packs = vec![vec![0, 1], vec![2], vec![3], vec![4, 5, 6], vec![7]];
        assert_eq!(group(packs.clone(), 1).len(), 5);
        let steps = group(packs, 3);
        assert_eq!(
            steps,
            [vec![vec![0, 1], vec![2]], vec![vec![3], vec![4, 5, 6]], vec![vec![7]]]
        );
        assert!(group(Vec::new(), 3).is_empty());
    }
}
