//! The command line. Exit codes: 0 done, 1 a check failed, 2 bad usage or input.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, ensure};
use clap::{Args, Parser, Subcommand};
use dflash_eval::console::{self, Failure, Precision, Switch, at_least_one, exit_code};
use dflash_eval::evaluate::{Options, evaluate};
use dflash_eval::folder::{drafter_in, settle};
use dflash_eval::load::{Loaded, PromptSource, Request, Selection, Thinking, load, load_target};
use dflash_eval::progress::Display;
use dflash_eval::report::{Report, prepare_output, write_json};
use serde::Serialize;

use crate::convert::{Conversion, Hf, Speculators};
use crate::gguf;
use crate::inspect::inspect;
use crate::logits::{LogitsArgs, run_logits};
use crate::push::Push;
use crate::verify::{Verification, compare_copy, failures};
use crate::walk::{add_states, walks};

/// Inspects and verifies drafter folders.
#[derive(Debug, Parser)]
#[command(name = "dflash-export", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print configuration and tensors, and whether they agree; reads no weights.
    Inspect {
        /// Drafter folder of any format, or GGUF file.
        folder: PathBuf,
        /// Check that the drafter is one for this target folder.
        #[arg(long, value_name = "FOLDER")]
        target: Option<PathBuf>,
        /// Print JSON instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Write the published folder that every engine reads, from a run or a drafter of any format.
    Hf(Hf),
    /// Write a folder of the speculators format.
    Speculators(Speculators),
    /// Write a copy, reload it and compare; then decode prompts and look at the acceptance.
    Verify {
        /// Drafter folder of any format, or GGUF file.
        folder: PathBuf,
        #[command(flatten)]
        common: Common,
        /// JSONL of conversations to decode; without it nothing is decoded.
        #[arg(long, value_name = "FILE")]
        prompts: Option<PathBuf>,
        /// Fail below this acceptance length.
        #[arg(long, value_name = "LENGTH", requires = "prompts", value_parser = acceptance_length)]
        min_acceptance: Option<f64>,
        /// Only the first N prompts.
        #[arg(long, default_value_t = 8, value_name = "N", value_parser = at_least_one)]
        limit: usize,
        /// Most new tokens a prompt.
        #[arg(long, default_value_t = 64, value_name = "TOKENS", value_parser = at_least_one)]
        max_new: usize,
        /// Print JSON instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Draft one block after each of the first prompts and write contexts and drafts, for other programs to repeat.
    Walk {
        /// Drafter folder of any format, or GGUF file.
        folder: PathBuf,
        #[command(flatten)]
        common: Common,
        /// JSONL of conversations.
        #[arg(long, value_name = "FILE")]
        prompts: PathBuf,
        /// How many prompts.
        #[arg(long, default_value_t = 10, value_name = "N", value_parser = at_least_one)]
        contexts: usize,
        /// Where to write the walks.
        #[arg(long, value_name = "FILE")]
        json: PathBuf,
        /// Write tap states and hidden states, too.
        #[arg(long)]
        states: bool,
    },
    /// Write prompts as text and token ids and the target's logits after each token of the first, for other programs to repeat.
    Logits(LogitsArgs),
    /// Publish the folder on the Hugging Face hub, in one commit; the token comes from HF_TOKEN alone.
    Push(Push),
    /// Write the drafter as a GGUF file for llama.cpp.
    Gguf(gguf::DrafterArgs),
    /// Write the target as a GGUF file for llama.cpp.
    GgufTarget(gguf::TargetArgs),
}

#[derive(Debug, Args)]
struct Common {
    /// Target model folder (Hugging Face layout).
    #[arg(long, value_name = "FOLDER")]
    target: PathBuf,
    /// Where to compute.
    #[arg(long, default_value = "cpu", value_name = "cpu|metal|cuda")]
    device: String,
    /// Compute type of the target.
    #[arg(long, default_value = "f32", value_enum)]
    dtype: Precision,
    /// Thinking switch for the chat template [default: the template's own].
    #[arg(long, value_enum)]
    thinking: Option<Switch>,
    /// No progress.
    #[arg(long)]
    quiet: bool,
}

impl Command {
    /// Puts folders of this machine in the place of what is named on the hub, `hf://org/name@revision`.
    fn fetch(&mut self) -> Result<()> {
        match self {
            Self::Inspect { folder, target, .. } => {
                settle("FOLDER", folder, false)?;
                target
                    .as_mut()
                    .map_or(Ok(()), |target| settle("--target", target, false))
            }
            Self::Verify { folder, common, .. } | Self::Walk { folder, common, .. } => {
                settle("FOLDER", folder, common.quiet)?;
                settle("--target", &mut common.target, common.quiet)
            }
            Self::Hf(args) => args.fetch(),
            Self::Speculators(args) => args.fetch(),
            Self::Push(args) => args.fetch(),
            Self::Logits(args) => args.fetch(),
            Self::Gguf(args) => args.fetch(),
            Self::GgufTarget(args) => args.fetch(),
        }
    }
}

/// Runs a parsed command line and returns the exit code of the process.
pub fn run(mut cli: Cli) -> ExitCode {
    if let Err(error) = cli.command.fetch() {
        return exit_code(Err(Failure::Input(error)));
    }
    let outcome = match cli.command {
        Command::Inspect { folder, target, json } => run_inspect(&folder, target.as_deref(), json),
        Command::Hf(hf) => hf.run().and_then(|done| run_conversion(&done, hf.json())),
        Command::Speculators(to) => to.run().and_then(|done| run_conversion(&done, to.json())),
        Command::Verify {
            folder,
            common,
            prompts,
            min_acceptance,
            limit,
            max_new,
            json,
        } => run_verify(
            &folder,
            &common,
            prompts.as_deref().map(|prompts| Decode {
                prompts,
                min_acceptance,
                limit,
                max_new,
            }),
            json,
        ),
        Command::Walk {
            folder,
            common,
            prompts,
            contexts,
            json,
            states,
        } => run_walk(&folder, &common, &prompts, contexts, &json, states),
        Command::Logits(args) => run_logits(&args),
        Command::Push(push) => push.run(),
        Command::Gguf(args) => gguf::run_drafter(&args),
        Command::GgufTarget(args) => gguf::run_target(&args),
    };
    exit_code(outcome)
}

fn run_inspect(folder: &Path, target: Option<&Path>, json: bool) -> Result<bool, Failure> {
    let found = inspect(folder, target).map_err(Failure::Input)?;
    print(&found, found.table(), json)?;
    Ok(found.passed())
}

fn run_conversion(done: &Conversion, json: bool) -> Result<bool, Failure> {
    print(done, done.table(), json)?;
    Ok(done.passed())
}

/// The decode of a verification.
#[derive(Clone, Copy)]
struct Decode<'d> {
    prompts: &'d Path,
    min_acceptance: Option<f64>,
    limit: usize,
    max_new: usize,
}

fn run_verify(folder: &Path, common: &Common, decode: Option<Decode<'_>>, json: bool) -> Result<bool, Failure> {
    let folder = &drafter_in(folder).map_err(Failure::Input)?;
    // headers and names first: a folder that is not whole fails before any weight is read
    let found = inspect(folder, Some(&common.target)).map_err(Failure::Input)?;
    if !found.passed() {
        return Err(Failure::Run(anyhow!(
            "{}: {}",
            folder.display(),
            found.problems.join("; ")
        )));
    }
    let (copy, acceptance) = match decode {
        None => {
            let bf16 = common.dtype == Precision::Bf16;
            let target = load_target(&common.target, &common.device, bf16).map_err(Failure::Input)?;
            (compare_copy(folder, target.as_ref()).map_err(Failure::Run)?, None)
        }
        Some(decode) => {
            let loaded = load_all(folder, common, decode.prompts, decode.limit).map_err(Failure::Input)?;
            let copy = compare_copy(folder, loaded.target.as_ref()).map_err(Failure::Run)?;
            let report = measure(&loaded, decode, common.quiet).map_err(Failure::Run)?;
            (copy, Some(report))
        }
    };
    let min_acceptance = decode.and_then(|decode| decode.min_acceptance);
    let verification = Verification {
        folder: folder.display().to_string(),
        target: common.target.display().to_string(),
        failures: failures(
            &copy,
            acceptance.as_ref(),
            common.dtype == Precision::F32,
            min_acceptance,
        ),
        copy,
        acceptance,
        min_acceptance,
    };
    print(&verification, verification.table(), json)?;
    Ok(verification.passed())
}

fn run_walk(
    folder: &Path,
    common: &Common,
    prompts: &Path,
    contexts: usize,
    json: &Path,
    states: bool,
) -> Result<bool, Failure> {
    let prepare = || {
        prepare_output("--json", json)?;
        let loaded = load_all(folder, common, prompts, contexts)?;
        ensure!(
            loaded.prompts.openings().len() == contexts,
            "--contexts {contexts}: {} has only {} prompts",
            prompts.display(),
            loaded.prompts.openings().len()
        );
        Ok(loaded)
    };
    let loaded = prepare().map_err(Failure::Input)?;
    let mut display = Display::new("walk", contexts, common.quiet);
    let (target, drafting) = (loaded.target.as_ref(), loaded.drafting.as_ref());
    let mut found = walks(
        target,
        drafting,
        loaded.prompts.openings(),
        &loaded.setting.stop_ids,
        &mut |done| {
            display.update(dflash_eval::Progress {
                done,
                total: contexts,
                acceptance_length: None,
            });
        },
    )
    .map_err(Failure::Run)?;
    if states {
        let folder = drafter_in(folder).map_err(Failure::Input)?;
        add_states(&mut found, &folder, target).map_err(Failure::Run)?;
    }
    write_json(json, &found).map_err(Failure::Run)?;
    Ok(true)
}

/// Decodes plainly and speculatively, and counts.
fn measure(loaded: &Loaded, decode: Decode<'_>, quiet: bool) -> Result<Report> {
    let mut setting = loaded.setting.clone();
    setting.block_size_used = setting.block_size;
    setting.max_new = decode.max_new;
    let options = Options {
        setting,
        ..Options::new(decode.max_new, loaded.setting.stop_ids.clone())
    };
    let mut display = Display::new("verify", loaded.prompts.openings().len(), quiet);
    let (target, drafting) = (loaded.target.as_ref(), loaded.drafting.as_ref());
    evaluate(target, drafting, &loaded.prompts, &options, &mut |progress| {
        display.update(progress);
        Ok(())
    })
}

fn load_all(folder: &Path, common: &Common, prompts: &Path, limit: usize) -> Result<Loaded> {
    let loaded = load(&Request {
        target: &common.target,
        drafter: folder,
        prompts: PromptSource::File(prompts.to_owned()),
        selection: Selection::default(),
        device: &common.device,
        bf16: common.dtype == Precision::Bf16,
        thinking: match common.thinking {
            None => Thinking::Template,
            Some(Switch::On) => Thinking::On,
            Some(Switch::Off) => Thinking::Off,
        },
        limit: Some(limit),
        without_selector: false,
    })?;
    ensure!(
        !loaded.prompts.openings().is_empty(),
        "{}: no prompts",
        prompts.display()
    );
    Ok(loaded)
}

/// Prints a finding as JSON or as its table.
fn print<T: Serialize>(value: &T, table: String, json: bool) -> Result<(), Failure> {
    let text = if json {
        serde_json::to_string_pretty(value)
            .map(|text| text + "\n")
            .context("JSON")
            .map_err(Failure::Run)?
    } else {
        table
    };
    console::print(&text).map_err(Failure::Run)
}

fn acceptance_length(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(length) if length.is_finite() && length >= 1.0 => Ok(length),
        Ok(_) => Err("expected a finite number of at least 1, the length of an always rejected draft".into()),
        Err(error) => Err(format!("{error}")),
    }
}
