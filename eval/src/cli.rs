//! The command line: what was asked for, run and printed. Exit codes: 0 done, 1 failed, 2 bad usage or input.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::console::{Failure, Precision, Switch, at_least_one, exit_code, print};
use crate::evaluate::{Options, evaluate};
use crate::load::{Loaded, Request, load};
use crate::lossless::{Kind, lossless};
use crate::progress::Display;
use crate::report::{prepare_json_path, write_json};
use crate::table;

/// Measures DFlash drafters: what a target accepts, and whether its text stays the same.
#[derive(Debug, Parser)]
#[command(name = "dflash-eval", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Decode prompts plainly and with the drafter; report acceptance, speed, and whether the texts are identical.
    Acceptance {
        #[command(flatten)]
        common: Common,
        /// Count rounds that the budget narrowed or a stop token cut, too.
        #[arg(long)]
        include_truncated: bool,
    },
    /// Check that speculative decoding gives plain decoding's text, with good and with hostile drafters.
    Lossless {
        #[command(flatten)]
        common: Common,
        /// Drafters to check with.
        #[arg(
            long,
            value_delimiter = ',',
            default_value = "trained,random,right,wrong",
            value_name = "KINDS"
        )]
        drafters: Vec<KindName>,
    },
}

#[derive(Debug, Args)]
struct Common {
    /// Target model folder (Hugging Face layout).
    #[arg(long, value_name = "FOLDER")]
    target: PathBuf,
    /// Drafter folder (published layout).
    #[arg(long, value_name = "FOLDER")]
    drafter: PathBuf,
    /// JSONL of conversations; a last assistant turn is left out.
    #[arg(long, value_name = "FILE")]
    prompts: PathBuf,
    /// Most new tokens a prompt.
    #[arg(long, default_value_t = 256, value_name = "TOKENS", value_parser = at_least_one)]
    max_new: usize,
    /// Write the whole report here.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where to compute.
    #[arg(long, default_value = "cpu", value_name = "cpu|metal|cuda")]
    device: String,
    /// Compute type of the target.
    #[arg(long, default_value = "f32", value_enum)]
    dtype: Precision,
    /// Only the first N prompts.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    limit: Option<usize>,
    /// Thinking switch for the chat template [default: the template's own].
    #[arg(long, value_enum)]
    thinking: Option<Switch>,
    /// Slots of a block, anchor included: 2 up to the drafter's own [default: the drafter's own].
    #[arg(long, value_name = "SLOTS")]
    block: Option<usize>,
    /// Leave the selector out: the best token of each slot, for comparison.
    #[arg(long)]
    without_selector: bool,
    /// CPU threads [default: all].
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    threads: Option<usize>,
    /// Seed of the bootstrap and of the random drafter.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// No progress.
    #[arg(long)]
    quiet: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum KindName {
    Trained,
    Random,
    Right,
    Wrong,
}

/// Runs a parsed command line and returns the exit code of the process.
pub fn run(cli: Cli) -> ExitCode {
    let outcome = match cli.command {
        Command::Acceptance {
            common,
            include_truncated,
        } => run_acceptance(&common, include_truncated),
        Command::Lossless { common, drafters } => run_lossless(&common, &drafters),
    };
    exit_code(outcome)
}

fn run_acceptance(common: &Common, include_truncated: bool) -> Result<bool, Failure> {
    let (loaded, options) = prepare(common).map_err(Failure::Input)?;
    let options = Options {
        include_truncated,
        ..options
    };
    let mut display = Display::new("acceptance", loaded.prompts.len(), common.quiet);
    let (target, drafting) = (loaded.target.as_ref(), loaded.drafting.as_ref());
    let report = evaluate(target, drafting, &loaded.prompts, &options, &mut |progress| {
        display.update(progress);
    })
    .map_err(Failure::Run)?;
    print(&table::acceptance(&report)).map_err(Failure::Run)?;
    if let Some(path) = &common.json {
        write_json(path, &report).map_err(Failure::Run)?;
    }
    Ok(true)
}

fn run_lossless(common: &Common, drafters: &[KindName]) -> Result<bool, Failure> {
    let kinds: Vec<Kind> = drafters.iter().map(|&name| kind(name)).collect();
    let (loaded, options) = prepare(common).map_err(Failure::Input)?;
    let mut display = Display::new("lossless", loaded.prompts.len(), common.quiet);
    let (target, drafting) = (loaded.target.as_ref(), loaded.drafting.as_ref());
    let report = lossless(target, drafting, &loaded.prompts, &kinds, &options, &mut |progress| {
        display.update(progress);
    })
    .map_err(Failure::Run)?;
    print(&table::lossless(&report)).map_err(Failure::Run)?;
    if let Some(path) = &common.json {
        write_json(path, &report).map_err(Failure::Run)?;
    }
    Ok(report.passed)
}

/// Everything that can be wrong with the input is found here, before any decoding.
fn prepare(common: &Common) -> Result<(Loaded, Options)> {
    if let Some(path) = &common.json {
        prepare_json_path(path)?;
    }
    if let Some(threads) = common.threads {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global()
            .with_context(|| format!("--threads {threads}"))?;
    }
    let mut loaded = load(&Request {
        target: &common.target,
        drafter: &common.drafter,
        prompts: &common.prompts,
        device: &common.device,
        bf16: common.dtype == Precision::Bf16,
        thinking: common.thinking.map(|switch| switch == Switch::On),
        limit: common.limit,
        without_selector: common.without_selector,
    })?;
    let block = common.block.unwrap_or(loaded.setting.block_size);
    loaded.setting.block_size_used = block;
    loaded.setting.max_new = common.max_new;
    let options = Options {
        block: common.block,
        seed: common.seed,
        setting: loaded.setting.clone(),
        ..Options::new(common.max_new, loaded.setting.stop_ids.clone())
    };
    options
        .limits(loaded.target.as_ref(), loaded.drafting.as_ref())
        .context("--block")?;
    let positions = loaded.target.info().max_positions;
    for (index, prompt) in loaded.prompts.iter().enumerate() {
        ensure!(
            prompt.len() < positions,
            "{}: prompt {index} has {} tokens, the target only {positions} positions",
            common.prompts.display(),
            prompt.len()
        );
    }
    Ok((loaded, options))
}

fn kind(name: KindName) -> Kind {
    match name {
        KindName::Trained => Kind::Trained,
        KindName::Random => Kind::Random,
        KindName::Right => Kind::Right,
        KindName::Wrong => Kind::Wrong,
    }
}
