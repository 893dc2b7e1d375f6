//! `dflash-eval speed`: the parts, timed.

use clap::Args;
use dflash_model::Drafting;

use crate::cli::arguments::{OutputArguments, TargetArguments, use_threads};
use crate::console::{Failure, Precision, at_least_one, print};
use crate::folder::Folder;
use crate::load::{load_target, setting};
use crate::speed::{check, speed};
use crate::table;

/// Rows timed without a drafter that says how many.
const ROWS: usize = 8;

/// Options of the mode.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    target: TargetArguments,
    /// Drafter folder; without one only the target is timed.
    #[arg(long, value_name = "FOLDER")]
    drafter: Option<Folder>,
    /// Leave the selector out.
    #[arg(long, requires = "drafter")]
    without_selector: bool,
    /// Context lengths, in tokens.
    #[arg(long, value_delimiter = ',', default_value = "128,1024", value_name = "TOKENS", value_parser = at_least_one)]
    contexts: Vec<usize>,
    /// Most rows of a verify pass [default: the drafter's block, 8 without one].
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    rows: Option<usize>,
    #[command(flatten)]
    output: OutputArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<bool, Failure> {
    let of = &arguments.target;
    let prepared = || {
        arguments.output.check()?;
        use_threads(of.threads)?;
        let bf16 = of.dtype == Precision::Bf16;
        let mut setting = setting(of.folder()?, &of.device, bf16)?;
        let target = load_target(of.folder()?, &of.device, bf16)?;
        let drafter = arguments.drafter.as_ref();
        let drafting = of.bind(drafter, arguments.without_selector, target.as_ref(), &mut setting)?;
        let rows = arguments
            .rows
            .or(drafting.as_ref().map(Drafting::block_size))
            .unwrap_or(ROWS);
        let drafter = drafting.as_ref().map(|drafting| drafting as &dyn Drafting);
        check(target.as_ref(), drafter, &arguments.contexts, rows)?;
        Ok((setting, target, drafting, rows))
    };
    let (setting, target, drafting, rows) = prepared().map_err(Failure::Input)?;
    let drafting = drafting.as_ref().map(|drafting| drafting as &dyn Drafting);
    let contexts = &arguments.contexts;
    let report = speed(target.as_ref(), drafting, contexts, rows, &setting, &mut |done| {
        if !of.quiet {
            eprintln!("speed: {done}/{} contexts", contexts.len());
        }
    })
    .map_err(Failure::Run)?;
    print(&table::speed(&report)).map_err(Failure::Run)?;
    arguments.output.write(&report)?;
    Ok(true)
}
