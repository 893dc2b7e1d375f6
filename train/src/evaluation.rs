//! The evaluate stage: held-out prompts decoded plainly and with the published drafter.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use dflash_data::conversation::read_conversations;
use dflash_data::files::sha256_hex;
use dflash_data::hub::on_record;
use dflash_data::target_hash;
use dflash_data::tokens::prompt_tokens;
use dflash_eval::evaluate::{Options, evaluate};
use dflash_eval::report::{Setting, write_json};
use dflash_eval::{Report, table};
use dflash_model::{BoundDrafter, Drafter};
use rayon::prelude::*;

use crate::done::evaluation_path;
use crate::failure::{Blame, Failure};
use crate::materials::Materials;
use crate::progress::{Display, Stage};
use crate::publish::Publisher;
use crate::{checkpoint, tracking};

/// Measures `run_dir/final`, writes `evaluation.json` and the card's table, and returns the table as text.
///
/// Nothing is written before the last prompt is decoded, so a signal ends it at once and a later run starts it again.
pub fn evaluate_final(materials: &Materials, display: Display) -> Result<String, Failure> {
    let config = materials.config();
    let missing = || anyhow!("evaluate.prompts: expected a JSONL of held-out prompts, got nothing");
    let prompts_path = config.evaluate.prompts.as_ref().ok_or_else(missing).input()?;
    let folder = config.run_dir.join("final");
    let load = || Drafter::load(&folder, &materials.device).with_context(|| folder.display().to_string());
    let bound = load()
        .and_then(|drafter| Ok(BoundDrafter::new(drafter, materials.target.head())?))
        .input()?;
    let prompts = prompts(materials, prompts_path).input()?;
    let mut options = Options::new(config.evaluate.max_new, materials.chat.stops.clone());
    options.seed = config.seed;
    options.setting = setting(materials, prompts_path).input()?;

    let mut stage = Stage::start(display, "evaluate", 0, prompts.len() as u64);
    let report: Report = evaluate(materials.target.as_ref(), &bound, &prompts, &options, &mut |progress| {
        stage.set(progress.done as u64, || match progress.acceptance_length {
            Some(length) => format!("prompts, acceptance length {length:.3}"),
            None => "prompts".to_owned(),
        });
        Ok(())
    })
    .work()?;
    drop(stage);
    // the report last: it stands for all three
    Publisher::new(materials)
        .and_then(|publisher| publisher.write_acceptance(&folder, config, &report))
        .work()?;
    let trained = checkpoint::steps(&config.run_dir).work()?.last().copied().unwrap_or(0);
    tracking::evaluation(config, trained, &report)
        .context("tracking")
        .work()?;
    write_json(&evaluation_path(materials), &report).work()?;
    Ok(table::acceptance(&report))
}

/// Rendered and tokenised prompts of the evaluation, at most `evaluate.limit`.
pub fn prompts(materials: &Materials, path: &Path) -> Result<Vec<Vec<u32>>> {
    let config = materials.config();
    let rows = read_conversations(path).context("evaluate.prompts")?;
    let limit = config.evaluate.limit.unwrap_or(rows.len());
    rows.par_iter()
        .take(limit)
        .map(|(line, row)| {
            prompt_tokens(&materials.chat, row, Some(config.data.thinking))
                .with_context(|| format!("{}:{line}", path.display()))
        })
        .collect()
}

/// Under which circumstances `run_dir/final` is measured.
pub fn setting(materials: &Materials, prompts: &Path) -> Result<Setting> {
    let config = materials.config();
    let folder = config.run_dir.join("final");
    let drafter = &materials.resolved.drafter;
    let bytes = std::fs::read(prompts).with_context(|| format!("evaluate.prompts: {}", prompts.display()))?;
    Ok(Setting {
        target_hash: target_hash(&config.target.path)?,
        drafter_hash: target_hash(&folder)?,
        prompts_sha256: sha256_hex(&bytes),
        target: on_record(&config.target.path),
        drafter: folder.display().to_string(),
        dtype: config.target.dtype.to_string(),
        device: config.target.device.clone(),
        threads: rayon::current_num_threads(),
        block_size: drafter.block_size,
        block_size_used: drafter.block_size,
        mask_token_id: drafter.mask_token_id,
        taps: materials.layers().to_vec(),
        prompts_file: prompts.display().to_string(),
        thinking: if config.data.thinking { "on" } else { "off" }.to_owned(),
        template_sha256: materials.chat.template.hash().to_owned(),
        max_new: config.evaluate.max_new,
        stop_ids: materials.chat.stops.clone(),
        width_policy: "fixed".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..Setting::default()
    })
}
