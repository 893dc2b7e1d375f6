//! Prompts with the target's logits, written down so that another engine can be held to them.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use candle_core::DType;
use clap::Args;
use dflash_eval::console::{Failure, at_least_one};
use dflash_eval::load::{PromptSource, Request, Selection, Thinking, load_prompts, load_target, setting};
use dflash_eval::report::{prepare_output, write_json};
use dflash_model::{LogitRows, Target};
use serde::Serialize;

/// What `dflash-export logits` is told.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    /// Target model folder (Hugging Face layout).
    folder: PathBuf,
    /// JSONL of conversations.
    #[arg(long, value_name = "FILE")]
    prompts: PathBuf,
    /// How many prompts.
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = at_least_one)]
    limit: usize,
    /// Where to write them.
    #[arg(long, value_name = "FILE")]
    json: PathBuf,
}

/// Prompts, and what the target makes of the first.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Recorded {
    /// The prompts.
    pub contexts: Vec<Prompt>,
    /// Tokens that end a text.
    pub stop_ids: Vec<u32>,
    /// Logits after each token of the first prompt, [T, V], on the CPU in f32.
    pub logits: Vec<Vec<f32>>,
}

/// One prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Prompt {
    /// As the target's chat template renders it.
    pub text: String,
    /// Its token ids.
    pub tokens: Vec<u32>,
}

/// Renders the prompts, passes the first through the target and writes all of it.
///
/// # Errors
/// As input: files that are missing or do not fit together. As failure of the run: the pass or the disk.
pub fn run_logits(args: &LogitsArgs) -> Result<bool, Failure> {
    let prepare = || {
        prepare_output("--json", &args.json)?;
        let mut about = setting(&args.folder, "cpu", false)?;
        let request = Request {
            target: &args.folder,
            // prompts alone are loaded
            drafter: &args.folder,
            prompts: PromptSource::File(args.prompts.clone()),
            selection: Selection::default(),
            device: "cpu",
            bf16: false,
            thinking: Thinking::Template,
            limit: Some(args.limit),
            without_selector: false,
        };
        let rendered = load_prompts(&request, &mut about)?;
        let prompt = |(index, tokens): (usize, &Vec<u32>)| {
            Ok(Prompt {
                text: rendered.text(index)?,
                tokens: tokens.clone(),
            })
        };
        let contexts: Vec<Prompt> = rendered
            .openings()
            .iter()
            .enumerate()
            .map(prompt)
            .collect::<Result<_>>()?;
        ensure!(!contexts.is_empty(), "{}: no prompts", args.prompts.display());
        Ok((load_target(&args.folder, "cpu", false)?, contexts, about.stop_ids))
    };
    let (target, contexts, stop_ids) = prepare().map_err(Failure::Input)?;
    let logits = logits(target.as_ref(), &contexts[0].tokens).map_err(Failure::Run)?;
    let recorded = Recorded {
        contexts,
        stop_ids,
        logits,
    };
    write_json(&args.json, &recorded).map_err(Failure::Run)?;
    Ok(true)
}

/// Logits after each token, [T, V].
fn logits(target: &dyn Target, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
    let forward = target.session(&[])?.forward(tokens, LogitRows::All)?;
    let logits = forward.logits.context("the target returned no logits")?;
    Ok(logits.to_dtype(DType::F32)?.to_vec2()?)
}
