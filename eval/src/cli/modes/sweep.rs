//! `dflash-eval sweep`: a grid of block sizes and context lengths.

use anyhow::Context;
use clap::Args;
use dflash_model::Drafting;

use std::ffi::OsString;

use crate::cli::arguments::{OutputArguments, PromptArguments, TargetArguments, request, use_threads};
use crate::console::{Failure, Precision, print};
use crate::evaluate::Options;
use crate::folder::Folder;
use crate::load::{load_prompts, load_target, setting};
use crate::progress::Display;
use crate::prompts::Prompts;
use crate::sweep::{Drafter, Grid, check, sweep};
use crate::table;

/// Options of the mode.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    target: TargetArguments,
    /// Drafter folder; with --scripted only its time is taken.
    #[arg(long, value_name = "FOLDER", required_unless_present = "scripted")]
    drafter: Option<Folder>,
    /// A scripted drafter instead: each draft is right with this chance, given the ones before.
    #[arg(long, value_name = "CHANCE")]
    scripted: Option<f64>,
    /// Leave the selector out.
    #[arg(long, requires = "drafter")]
    without_selector: bool,
    #[command(flatten)]
    prompts: PromptArguments,
    /// Slots of a block, anchor included [default: 2 to the drafter's own; 2 to 8 without one].
    #[arg(long, value_delimiter = ',', value_name = "SLOTS")]
    blocks: Vec<usize>,
    /// Context lengths, in tokens; 0 leaves the prompts as they are.
    #[arg(long, value_delimiter = ',', default_value = "0", value_name = "TOKENS")]
    contexts: Vec<usize>,
    /// Seed of the script.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    output: OutputArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<bool, Failure> {
    let (of, from) = (&arguments.target, &arguments.prompts);
    let prepared = || {
        arguments.output.check()?;
        use_threads(of.threads)?;
        let mut setting = setting(of.folder()?, &of.device, of.dtype == Precision::Bf16)?;
        let no_drafter = Folder::from(OsString::new());
        let folder = arguments.drafter.as_ref().unwrap_or(&no_drafter);
        let prompts = load_prompts(&request(of, folder, arguments.without_selector, from)?, &mut setting)?;
        let target = load_target(of.folder()?, &of.device, of.dtype == Precision::Bf16)?;
        let drafter = arguments.drafter.as_ref();
        let drafting = of.bind(drafter, arguments.without_selector, target.as_ref(), &mut setting)?;
        setting.max_new = from.max_new;
        Ok((setting, prompts, target, drafting))
    };
    let (setting, prompts, target, drafting) = prepared().map_err(Failure::Input)?;
    let drafting = drafting.as_ref().map(|drafting| drafting as &dyn Drafting);
    let drafter = match (arguments.scripted, drafting) {
        (Some(chance), shadow) => Drafter::Scripted { chance, shadow },
        (None, Some(real)) => Drafter::Real(real),
        (None, None) => return Err(Failure::Input(anyhow::anyhow!("expected --drafter or --scripted"))),
    };
    let most = drafting.map_or(8, Drafting::block_size);
    let grid = Grid {
        blocks: if arguments.blocks.is_empty() {
            (2..=most).collect()
        } else {
            arguments.blocks.clone()
        },
        contexts: arguments.contexts.clone(),
    };
    let options = Options {
        seed: arguments.seed,
        setting: setting.clone(),
        ..Options::new(from.max_new, setting.stop_ids.clone())
    };
    let fits = || check(target.as_ref(), drafter, &grid, &options).context("the grid");
    fits().map_err(Failure::Input)?;
    let mut display = Display::new("sweep", grid.contexts.len() * prompts.len(), of.quiet);
    let report = sweep(target.as_ref(), drafter, &prompts, &grid, &options, &mut |progress| {
        display.update(progress);
        Ok(())
    })
    .map_err(Failure::Run)?;
    print(&table::sweep(&report)).map_err(Failure::Run)?;
    arguments.output.write(&report)?;
    Ok(report.cells.iter().all(|cell| cell.identical) || of.dtype != Precision::F32)
}
