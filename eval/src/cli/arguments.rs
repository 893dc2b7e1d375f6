//! Options that several modes share, and what they load.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use dflash_data::recipes::{Order, Recipe, Selection, Source};
use dflash_model::{BoundDrafter, Target};
use serde::Serialize;

use crate::console::{Failure, Precision, at_least_one, threads};
use crate::evaluate::{Block, Options};
use crate::folder::Folder;
use crate::load::{Loaded, PromptSource, Request, Thinking, bind, load};
use crate::prompts::Prompts;
use crate::report::{Report, Setting, csv, html, prepare_output, write_json, write_text};
use crate::sampling::SamplingConfig;

/// The target and how it computes.
#[derive(Debug, Clone, Args)]
pub(crate) struct TargetArguments {
    /// Target model folder (Hugging Face layout), or hf://org/name@revision.
    // optional here because `acceptance --server` has none; every other mode requires it
    #[arg(long, value_name = "FOLDER", required = true)]
    pub(crate) target: Option<Folder>,
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

impl TargetArguments {
    /// The folder; modes that can do without one say so to the parser.
    ///
    /// # Errors
    /// When there is none, or the hub does not have it.
    pub(crate) fn folder(&self) -> Result<&Path> {
        let target = self.target.as_ref().context("expected --target FOLDER")?;
        target.place("--target", self.quiet)
    }
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
    /// JSONL or Parquet of conversations; a last assistant turn is left out.
    #[arg(
        long,
        value_name = "FILE",
        required_unless_present = "recipe",
        conflicts_with = "recipe"
    )]
    pub(crate) prompts: Option<PathBuf>,
    /// Known prompts: gsm8k, math500, humaneval, mbpp, mt-bench, aime or alpaca.
    #[arg(long, value_name = "NAME", value_parser = Recipe::by_name)]
    pub(crate) recipe: Option<&'static Recipe>,
    /// Where the recipe's rows are: a Parquet, JSONL or JSON file, a folder of Parquet files, or `hub`.
    #[arg(long, default_value = "hub", value_name = "PATH|hub", requires = "recipe")]
    pub(crate) from: Source,
    /// Draw this many prompts; an error when there are fewer.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) samples: Option<usize>,
    /// In which order prompts are drawn: `file` or `shuffled`.
    #[arg(long, default_value_t, value_name = "ORDER")]
    pub(crate) order: Order,
    /// Seed of a shuffled order.
    #[arg(long, default_value_t = 0, value_name = "SEED")]
    pub(crate) order_seed: u64,
    /// At most the first N of the prompts drawn.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) limit: Option<usize>,
    /// Thinking switch for the chat template [default: the template's own].
    #[arg(long, value_enum)]
    pub(crate) thinking: Option<ThinkingName>,
    /// Most new tokens a prompt.
    #[arg(long, default_value_t = 256, value_name = "TOKENS", value_parser = at_least_one)]
    pub(crate) max_new: usize,
}

impl PromptArguments {
    /// Where the prompts are.
    ///
    /// # Errors
    /// When nothing was named.
    pub(crate) fn source(&self) -> Result<PromptSource> {
        match (&self.prompts, self.recipe) {
            (Some(file), _) => Ok(PromptSource::File(file.clone())),
            (None, Some(recipe)) => Ok(PromptSource::Recipe(recipe, self.from.clone())),
            (None, None) => bail!("expected --prompts or --recipe"),
        }
    }

    /// Which of them.
    pub(crate) fn selection(&self) -> Selection {
        Selection {
            samples: self.samples,
            seed: self.order_seed,
            order: self.order,
        }
    }
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
        check_outputs(&[("--json", &self.json)])
    }

    /// Writes the report.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write<T: Serialize>(&self, report: &T) -> Result<(), Failure> {
        let Some(path) = &self.json else { return Ok(()) };
        write_json(path, report).map_err(Failure::Run)
    }
}

/// The forms of an acceptance report besides JSON.
#[derive(Debug, Clone, Args)]
pub(crate) struct PageArguments {
    /// Write one row a prompt here.
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Write a page with charts here; it needs nothing else.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

impl PageArguments {
    /// As [`OutputArguments::check`], with the outputs `beside` these if there are any.
    ///
    /// # Errors
    /// Names the option and the path.
    pub(crate) fn check(&self, beside: Option<&OutputArguments>) -> Result<()> {
        let json = beside.map_or(&None, |output| &output.json);
        check_outputs(&[("--json", json), ("--csv", &self.csv), ("--html", &self.html)])
    }

    /// Writes what was asked for.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub(crate) fn write(&self, report: &Report) -> Result<(), Failure> {
        let page = |path: &Option<PathBuf>, render: fn(&Report) -> String| match path {
            Some(path) => write_text(path, &render(report)),
            None => Ok(()),
        };
        page(&self.csv, csv)
            .and_then(|()| page(&self.html, html))
            .map_err(Failure::Run)
    }
}

fn check_outputs(outputs: &[(&str, &Option<PathBuf>)]) -> Result<()> {
    let named: Vec<(&str, &PathBuf)> = outputs
        .iter()
        .filter_map(|(option, path)| path.as_ref().map(|path| (*option, path)))
        .collect();
    for (i, (option, path)) in named.iter().enumerate() {
        prepare_output(option, path)?;
        for (other, same) in &named[..i] {
            ensure!(
                std::path::absolute(path)? != std::path::absolute(same)?,
                "{option} {}: {other} names the same file",
                path.display()
            );
        }
    }
    Ok(())
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
    drafter: &Folder,
    draft: &DraftArguments,
    prompts: &PromptArguments,
    sampling: SamplingConfig,
    seed: u64,
) -> Result<Prepared> {
    use_threads(target.threads)?;
    let mut loaded = load(&request(target, drafter, draft.without_selector, prompts)?)?;
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

/// What the options ask to load.
pub(crate) fn request<'r>(
    target: &'r TargetArguments,
    drafter: &'r Folder,
    without_selector: bool,
    prompts: &'r PromptArguments,
) -> Result<Request<'r>> {
    Ok(Request {
        target: target.folder()?,
        drafter: drafter.place("--drafter", target.quiet)?,
        prompts: prompts.source()?,
        selection: prompts.selection(),
        device: &target.device,
        bf16: target.dtype == Precision::Bf16,
        thinking: thinking(prompts.thinking),
        limit: prompts.limit,
        without_selector,
    })
}

impl TargetArguments {
    /// Loads a drafter onto its target, where one is named, and notes it in `setting`.
    ///
    /// # Errors
    /// As [`bind`].
    pub(crate) fn bind(
        &self,
        drafter: Option<&Folder>,
        without_selector: bool,
        target: &dyn Target,
        setting: &mut Setting,
    ) -> Result<Option<BoundDrafter>> {
        let Some(folder) = drafter else { return Ok(None) };
        let place = folder.place("--drafter", self.quiet)?;
        bind(place, without_selector, target, setting).map(Some)
    }
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
fn thinking(name: Option<ThinkingName>) -> Thinking {
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
