//! A training step as the peer took it: its weights, batch, loss and gradients.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use dflash_model::{Blocks, DrafterConfig, Params, TargetHead};
use serde_json::Value;

use super::{Batch, blocks};
use crate::gradient::Gradients;

/// Largest relative distance (L2) of a gradient, and of the loss, from the peer's in f32.
const TOLERANCE: f64 = 1e-4;

/// A frozen matrix in BF16, as targets are published, if it holds only such numbers.
fn published(matrix: Tensor) -> Result<Tensor> {
    let halves = matrix.to_dtype(DType::BF16)?;
    let off = (halves.to_dtype(DType::F32)? - &matrix)?.abs()?.flatten_all()?.max(0)?;
    Ok(if off.to_scalar::<f32>()? > 0.0 { matrix } else { halves })
}

/// What `speculators_step.py --dump` wrote.
pub(super) struct Dump {
    dir: PathBuf,
    weights: HashMap<String, Tensor>,
    batch: HashMap<String, Tensor>,
}

impl Dump {
    /// Reads it and sets `params` to its weights.
    pub(super) fn read(dir: &Path, params: &Params) -> Result<Self> {
        let load = |name: &str| {
            let path = dir.join(name);
            candle_core::safetensors::load(&path, &Device::Cpu).with_context(|| path.display().to_string())
        };
        let (weights, batch) = (load("weights.safetensors")?, load("batch.safetensors")?);
        for name in params.vars().keys() {
            let named = || format!("{}: weights.safetensors: {name}", dir.display());
            let tensor = weights.get(name).with_context(named)?;
            params.set(name, tensor).with_context(named)?;
        }
        Ok(Self {
            dir: dir.to_owned(),
            weights,
            batch,
        })
    }

    pub(super) fn batch(&self, config: &DrafterConfig, context: usize, anchors: usize) -> Result<Batch> {
        let find = |map: &HashMap<String, Tensor>, name: &str| {
            map.get(name)
                .cloned()
                .with_context(|| format!("{}: no tensor {name}", self.dir.display()))
        };
        let numbers = |name: &str| -> Result<Vec<u32>> {
            let flat = find(&self.batch, name)?.to_dtype(DType::U32)?.flatten_all()?;
            Ok(flat.to_vec1()?)
        };
        let (tokens, rows) = (numbers("tokens")?, numbers("anchors")?);
        ensure!(
            tokens.len() == context && rows.len() == anchors,
            "{}: {} tokens and {} anchors, expected {context} and {anchors}",
            self.dir.display(),
            tokens.len(),
            rows.len()
        );
        let rows: Vec<usize> = rows.iter().map(|row| *row as usize).collect();
        Ok(Batch {
            blocks: blocks(config.block_size, &tokens, &rows),
            taps: find(&self.batch, "taps")?.squeeze(0)?,
            head: TargetHead {
                embed: published(find(&self.weights, "embed_tokens.weight")?)?,
                head: published(find(&self.weights, "verifier_lm_head.weight")?)?,
            },
        })
    }

    /// Largest relative distance of our gradients from the peer's, which divides by slots where we divide by weights.
    pub(super) fn distance(
        &self,
        loss: f64,
        found: &Gradients,
        params: &Params,
        blocks: &Blocks,
        denominator: f64,
    ) -> Result<f64> {
        let path = self.dir.join("grads.safetensors");
        let theirs = candle_core::safetensors::load(&path, &Device::Cpu).with_context(|| path.display().to_string())?;
        let slots = blocks.supervised.iter().filter(|on| **on).count() as f64;
        let to_ours = (slots + 1e-5) / denominator;
        let norm = |x: &Tensor| -> Result<f64> { Ok(f64::from(x.sqr()?.sum_all()?.to_scalar::<f32>()?).sqrt()) };
        let mut worst = (0.0, String::from("loss"));
        let path = self.dir.join("loss.json");
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let written: Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        let metric = &written["metrics"]["unary_loss_sum"];
        let base = metric.as_f64().or(written["loss"].as_f64());
        let base = base.with_context(|| format!("{}: no loss", path.display()))? * to_ours;
        worst.0 = (loss - base).abs() / base;
        for (name, ours) in found {
            let Some(peers) = theirs.get(name) else {
                bail!("{}: no gradient of {name}", self.dir.display())
            };
            let peers = (peers * to_ours)?;
            let ours = ours.whole(&params.vars()[name])?;
            let off = norm(&(ours - &peers)?)? / norm(&peers)?.max(1e-12);
            if off > worst.0 {
                worst = (off, name.clone());
            }
        }
        ensure!(
            worst.0 <= TOLERANCE,
            "{}: {} is off the peer's by {:.1e} of its size, expected at most {TOLERANCE:e}; nothing was timed",
            self.dir.display(),
            worst.1,
            worst.0
        );
        Ok(worst.0)
    }
}
