//! What every stage of a run works with: the resolved run file, the target, its chat text and the run's places.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::{DType, Device};
use dflash_data::tokens::Chat;
use dflash_model::Target;

use crate::config::{Precision, RunConfig};
use crate::resolve::{Resolved, resolve};
use crate::warm_start::Start;

/// A run, opened.
pub struct Materials {
    /// The run file with nothing left open.
    pub resolved: Resolved,
    /// The frozen target.
    pub target: Arc<dyn Target>,
    /// Its chat template, tokenizer and stop tokens.
    pub chat: Chat,
    /// Where drafter and batches lie.
    pub device: Device,
    /// The drafter that training starts from, if any.
    pub start: Option<Start>,
}

impl Materials {
    /// Loads the target and resolves `config` for it.
    pub fn open(config: &RunConfig) -> Result<Self> {
        let section = &config.target;
        let device = dflash_model::device::by_name(&section.device).context("target.device")?;
        let dtype = match section.dtype {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
        };
        let place = || format!("target.path = {}", section.path.display());
        let target = dflash_model::target::load(&section.path, &device, dtype).with_context(place)?;
        let chat = Chat::load(&section.path).with_context(place)?;
        let start = Start::find(config, target.info())?;
        let init = start.as_ref().map(|start| &start.config);
        Ok(Self {
            resolved: resolve(config, target.info(), init)?,
            target: Arc::from(target),
            chat,
            device,
            start,
        })
    }

    /// The resolved run file.
    pub fn config(&self) -> &RunConfig {
        &self.resolved.config
    }

    /// Tapped target layers.
    pub fn layers(&self) -> &[usize] {
        &self.resolved.drafter.target_layer_ids
    }

    /// JSONL of the conversations to train on.
    pub fn conversations(&self) -> PathBuf {
        let config = self.config();
        let default = || config.run_dir.join("responses.jsonl");
        config.data.conversations.clone().unwrap_or_else(default)
    }

    /// Folder of the stored taps.
    pub fn taps_dir(&self) -> PathBuf {
        let config = self.config();
        config.taps.dir.clone().unwrap_or_else(|| config.run_dir.join("taps"))
    }
}
