//! Options that several modes share, and what they load.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::console::{Failure, Precision, at_least_one, threads};
use crate::evaluate::{Block, Options};
use crate::load::{Loaded, Request, Thinking, load};
use crate::prompts::Prompts;
use crate::report::{prepare_output, write_json};
use crate::sampling::SamplingConfig;

/// The target and how it computes.
#[derive(Debug, Clone, Args)]
pub(crate) struct TargetArguments {
    /// Target model folder (Hugging Face layout).
    // optional here because `acceptance --server` has none; every other mode requires it
    #[arg(long, value_name = "FOLDER", required = true)]
    pub(crate) target: Option<PathBuf>,
    /// Where to compute.
    #[arg(long, default_value = "cpu", value_name = "cpu|metal|cuda")]
    pub(crate) device: String,
    /// Compute type of the target.
    #[arg(long, default_value = "f32", value_enum)]
    pub(crate) dtype: Precision,
    /// CPU threads [default: all].
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// No progress.
    #[arg(long)]
    pub(crate) quiet: bool,
}

/// How far to draft, and how to verify.
#[derive(Debug, Clone, Args)]
pub(crate) struct DraftArguments {
    /// Slots of a block, anchor included: 2 up to the drafter's own, or `auto` for what pays most [default: the
    /// drafter's own].
    #[arg(long, value_name = "SLOTS|auto", value_parser = block)]
    pub(crate) block: Option<Block>,
    /// Leave the selector out: the best token of each slot, for comparison.
    #[arg(long)]
    pub(crate) without_selector: bool,
    /// Verify row by row with plain decoding's own arithmetic: slow, for telling rounding from defects.
    #[arg(long)]
    pub(crate) exact_verify: bool,
}

/// The prompts.
#[derive(Debug, Clone, Args)]
pub(crate) struct PromptArguments {
    /// JSONL of conversations; a last assistant turn is left out.
    #[arg(long, value_name = "FILE")]
    pub(crate) prompts: PathBuf,
    /// Only the first N prompts.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) limit: Option<usize>,
    /// Thinking switch for the chat template [default: the template's own].
    #[arg(long, value_enum)]
    pub(crate) thinking: Option<ThinkingName>,
    /// Most new tokens a prompt.
    #[arg(long, default_value_t = 256, value_name = "TOKENS", value_parser = at_least_one)]
    pub(crate) max_new: usize,
}

/// The thinking switch on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ThinkingName {
    /// On.
    On,
    /// Off.
    Off,
    /// Every prompt both ways.
    Both,
}

/// How the target's tokens are chosen.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct SamplingArguments {
    /// Softmax temperature; 0 takes the best token.
    #[arg(long, default_value_t = 0., value_name = "T")]
    pub(crate) temperature: f64,
    /// Keep the K most likely tokens; 0 keeps all.
    #[arg(long, default_value_t = 0, value_name = "K")]
    pub(crate) top_k: usize,
    /// Keep the most likely tokens up to this mass.
    #[arg(long, default_value_t = 1., value_name = "P")]
    pub(crate) top_p: f64,
    /// Drop tokens below this share of the most likely one's probability.
    #[arg(long, default_value_t = 0., value_name = "P")]
    pub(crate) min_p: f64,
    /// Divide the logits of tokens that occurred by this.
    #[arg(long, default_value_t = 1., value_name = "R")]
    pub(crate) repetition_penalty: f64,
    /// Subtract this from the logits of tokens that were written.
    #[arg(long, default_value_t = 0., value_name = "R", allow_negative_numbers = true)]
    pub(crate) presence_penalty: f64,
}

impl SamplingArguments {
    /// The rule.
    ///
    /// # Errors
    /// On a value outside its range.
    pub(crate) fn config(&self) -> Result<SamplingConfig> {
        let config = SamplingConfig {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
        };
        config.check().map(|()| config)
    }
}

/// Where results go besides the terminal.
#[derive(Debug, Clone, Args)]
pub(crate) struct OutputArguments {
    /// Write the whole report here.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

impl OutputArguments {
    /// Refuses what could not be written, before any work.
    ///
    /// # Errors
    /// Names the option and the path.
    pub(crate) fn check(&self) -> Result<()> {
        self.json
            .as_deref()
            .map_or(Ok(()), |path| prepare_output("--json", path))
    }

    /// Writes the report.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub(crate) fn write<T: Serialize>(&self, report: &T) -> Result<(), Failure> {
        self.json
            .as_deref()
            .map_or(Ok(()), |path| write_json(path, report))
            .map_err(Failure::Run)
    }
}

/// Everything loaded, and the options that follow from the command line.
pub(crate) struct Prepared {
    /// Target, drafter, prompts.
    pub(crate) loaded: Loaded,
    /// What to measure.
    pub(crate) options: Options,
}

/// Loads a target, a drafter and prompts; everything that can be wrong with the input is found here, before any
/// decoding.
///
/// # Errors
/// Names option, file and what was expected.
pub(crate) fn prepare(
    target: &TargetArguments,
    drafter: &Path,
    draft: &DraftArguments,
    prompts: &PromptArguments,
    sampling: SamplingConfig,
    seed: u64,
) -> Result<Prepared> {
    use_threads(target.threads)?;
    let mut loaded = load(&Request {
        target: target.target.as_deref().context("--target is missing")?,
        drafter,
        prompts: &prompts.prompts,
        device: &target.device,
        bf16: target.dtype == Precision::Bf16,
        thinking: thinking(prompts.thinking),
        limit: prompts.limit,
        without_selector: draft.without_selector,
    })?;
    loaded.setting.max_new = prompts.max_new;
    let mut options = Options {
        block: draft.block.unwrap_or_default(),
        sampling,
        exact_verify: draft.exact_verify,
        costs: true,
        seed,
        ..Options::new(prompts.max_new, loaded.setting.stop_ids.clone())
    };
    let width = options.width(loaded.drafting.as_ref()).context("--block")?;
    loaded.setting.block_size_used = width.most() + 1;
    options.setting = loaded.setting.clone();
    let positions = loaded.target.info().max_positions;
    for (index, prompt) in loaded.prompts.openings().iter().enumerate() {
        ensure!(
            prompt.len() < positions,
            "{}: {} tokens of prompt, the target has only {positions} positions",
            loaded.prompts.about(index).id,
            prompt.len()
        );
    }
    Ok(Prepared { loaded, options })
}

/// Sets the size of the thread pool; must come before any work.
///
/// # Errors
/// When a pool was made before.
pub(crate) fn use_threads(threads: Option<usize>) -> Result<()> {
    let Some(threads) = threads else { return Ok(()) };
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global()
        .with_context(|| format!("--threads {threads}"))
}

/// The switch that a name means.
pub(crate) fn thinking(name: Option<ThinkingName>) -> Thinking {
    match name {
        None => Thinking::Template,
        Some(ThinkingName::On) => Thinking::On,
        Some(ThinkingName::Off) => Thinking::Off,
        Some(ThinkingName::Both) => Thinking::Both,
    }
}

fn block(text: &str) -> Result<Block, String> {
    if text == "auto" {
        return Ok(Block::Auto);
    }
    text.parse()
        .map(Block::Slots)
        .map_err(|_| "expected a number of slots or auto".into())
}
