//! A drafter folder from the present variables: BF16 tensors, configuration, card, provenance; read back and compared.

use std::path::Path;

use anyhow::{Context, Result};
use dflash_data::hub::{base_model, on_record};
use dflash_data::target_hash;
use dflash_eval::Report;
use dflash_model::folder::{AcceptanceRow, ModelCard, PROVENANCE, verify_written, write_files};
use dflash_model::{DrafterConfig, Params, TargetHead};
use serde_json::{Value, json};

use crate::checkpoint::Progress;
use crate::config::RunConfig;
use crate::durable::replace_file;
use crate::materials::Materials;
use crate::provenance;

/// What every folder of a run says besides its weights.
pub struct Publisher {
    drafter: DrafterConfig,
    head: TargetHead,
    card: ModelCard,
    provenance: Value,
}

impl Publisher {
    /// For the folders of one run.
    pub fn new(materials: &Materials) -> Result<Self> {
        let config = materials.config();
        let target = json!({
            "path": on_record(&config.target.path),
            "hash": target_hash(&config.target.path)?,
            "tokenizer": materials.chat.tokenizer.hash(),
            "template": materials.chat.template.hash(),
        });
        let start = materials.start.as_ref();
        let start = start.map(|start| json!({"path": start.path, "hash": start.hash}));
        let card = card(config);
        Ok(Self {
            drafter: materials.resolved.drafter.clone(),
            head: materials.target.head().clone(),
            provenance: json!({
                "card": card,
                "tool": "dflash-train",
                "program": provenance::collect(),
                "target": target,
                "started_from": start,
                "run": config,
            }),
            card,
        })
    }

    /// Writes the folder's files into the empty `folder` and reads the weights back; `progress` is absent before the
    /// first step.
    pub fn write(&self, folder: &Path, params: &Params, progress: Option<&Progress>) -> Result<()> {
        let tensors = params.published(&self.head)?;
        let mut provenance = self.provenance.clone();
        provenance["trained"] = json!({
            "steps": progress.map_or(0, |progress| progress.step),
            "data": progress.map(|progress| &progress.data),
        });
        write_files(folder, &self.drafter, &tensors, &self.card, &provenance)?;
        verify_written(folder, &tensors).context("reading the written drafter back")
    }

    /// Puts a measured acceptance into the card and the provenance of a published folder.
    pub fn write_acceptance(&self, folder: &Path, config: &RunConfig, report: &Report) -> Result<()> {
        let mut card = self.card.clone();
        card.acceptance.extend(acceptance_row(config, report));
        let path = folder.join(PROVENANCE);
        let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
        let mut provenance: Value = serde_json::from_slice(&bytes).with_context(|| path.display().to_string())?;
        provenance["card"] = serde_json::to_value(&card)?;
        let text = serde_json::to_string_pretty(&provenance)? + "\n";
        replace_file(&path, text.as_bytes())?;
        replace_file(&folder.join("README.md"), card.markdown(&self.drafter).as_bytes())
    }
}

fn card(config: &RunConfig) -> ModelCard {
    let name = config.run_dir.join("final").display().to_string();
    let data = match (&config.data.conversations, &config.data.prompts) {
        // a named file may hold anybody's answers
        (Some(path), _) => Some(format!("conversations of {}", path.display())),
        (None, Some(path)) => Some(format!("the target's own answers to {}", path.display())),
        (None, None) => None,
    };
    let (base_model, base_revision) = base_model(&config.target.path);
    ModelCard {
        base_revision,
        thinking: Some(if config.data.thinking { "on" } else { "off" }.to_owned()),
        data,
        training_length: Some(config.data.max_length),
        ..ModelCard::named(name, base_model)
    }
}

/// The card's line for a report; none when no whole round was measured.
fn acceptance_row(config: &RunConfig, report: &Report) -> Option<AcceptanceRow> {
    let prompts = config.evaluate.prompts.as_ref()?;
    Some(AcceptanceRow {
        prompts: format!("{} of {}", report.prompts, prompts.display()),
        setting: format!(
            "greedy, thinking {}, at most {} new tokens",
            if config.data.thinking { "on" } else { "off" },
            config.evaluate.max_new
        ),
        rounds: report.rounds,
        acceptance_length: report.acceptance_length?,
        acceptance_length_macro: report.acceptance_length_macro?,
    })
}
