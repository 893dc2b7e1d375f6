//! The evaluate stage: held-out prompts decoded plainly and with the published drafter.

use std::path::Path;

use anyhow::{Context, Result, bail};
use dflash_data::conversation::read_jsonl;
use dflash_data::tokens::prompt_tokens;
use dflash_eval::evaluate::{Options, evaluate};
use dflash_eval::report::{Setting, write_json};
use dflash_eval::{Report, table};
use dflash_model::{BoundDrafter, Drafter, Drafting};
use rayon::prelude::*;

use crate::config::Precision;
use crate::materials::Materials;
use crate::progress::{Display, Stage};
use crate::publish::Publisher;

/// Measures `run_dir/final`, writes `evaluation.json` and the card's table, and returns the table as text.
pub fn evaluate_final(materials: &Materials, display: Display) -> Result<String> {
    let config = materials.config();
    let Some(prompts_path) = &config.evaluate.prompts else {
        bail!("evaluate.prompts: expected a JSONL of held-out prompts, got nothing")
    };
    let folder = config.run_dir.join("final");
    let drafter = Drafter::load(&folder, &materials.device).with_context(|| folder.display().to_string())?;
    let bound = BoundDrafter::new(drafter, materials.target.head())?;
    let prompts = prompts(materials, prompts_path)?;
    let mut options = Options::new(config.evaluate.max_new, materials.chat.stops.clone());
    options.seed = config.seed;
    options.setting = setting(materials, &bound, prompts_path, &folder);

    let mut stage = Stage::start(display, "evaluate", 0, prompts.len() as u64);
    let report: Report = evaluate(materials.target.as_ref(), &bound, &prompts, &options, &mut |progress| {
        stage.set(progress.done as u64, || match progress.acceptance_length {
            Some(length) => format!("prompts, acceptance length {length:.3}"),
            None => "prompts".to_owned(),
        });
        Ok(())
    })?;
    drop(stage);
    write_json(&config.run_dir.join("evaluation.json"), &report)?;
    Publisher::new(materials)?.write_acceptance(&folder, config, &report)?;
    Ok(table::acceptance(&report))
}

fn prompts(materials: &Materials, path: &Path) -> Result<Vec<Vec<u32>>> {
    let config = materials.config();
    let rows = read_jsonl(path).context("evaluate.prompts")?;
    let limit = config.evaluate.limit.unwrap_or(rows.len());
    rows.par_iter()
        .take(limit)
        .map(|(line, row)| {
            prompt_tokens(&materials.chat, row, Some(config.data.thinking))
                .with_context(|| format!("{}:{line}", path.display()))
        })
        .collect()
}

fn setting(materials: &Materials, drafter: &BoundDrafter, prompts: &Path, folder: &Path) -> Setting {
    let config = materials.config();
    Setting {
        target: config.target.path.display().to_string(),
        drafter: folder.display().to_string(),
        dtype: match config.target.dtype {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
        }
        .to_owned(),
        device: config.target.device.clone(),
        threads: rayon::current_num_threads(),
        block_size: drafter.block_size(),
        block_size_used: drafter.block_size(),
        mask_token_id: materials.resolved.drafter.mask_token_id,
        taps: materials.layers().to_vec(),
        prompts_file: prompts.display().to_string(),
        thinking: if config.data.thinking { "on" } else { "off" }.to_owned(),
        template_sha256: materials.chat.template.hash().to_owned(),
        max_new: config.evaluate.max_new,
        stop_ids: materials.chat.stops.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..Setting::default()
    }
}
