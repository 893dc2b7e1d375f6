//! `dflash-eval acceptance`: the real loop over prompts.

use std::path::PathBuf;

use clap::Args;

use crate::cli::arguments::{
    DraftArguments, OutputArguments, PromptArguments, SamplingArguments, TargetArguments, prepare,
};
use crate::console::{Failure, print};
use crate::evaluate::evaluate;
use crate::progress::Display;
use crate::prompts::Prompts;
use crate::table;

/// Options of the mode.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    target: TargetArguments,
    /// Drafter folder (published layout).
    #[arg(long, value_name = "FOLDER")]
    drafter: PathBuf,
    #[command(flatten)]
    draft: DraftArguments,
    #[command(flatten)]
    prompts: PromptArguments,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// Count rounds that the budget narrowed or a stop token cut, too.
    #[arg(long)]
    include_truncated: bool,
    /// Seed of sampling and of the bootstrap.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    output: OutputArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<bool, Failure> {
    let prepared = || {
        arguments.output.check()?;
        let sampling = arguments.sampling.config()?;
        prepare(
            &arguments.target,
            &arguments.drafter,
            &arguments.draft,
            &arguments.prompts,
            sampling,
            arguments.seed,
        )
    };
    let mut prepared = prepared().map_err(Failure::Input)?;
    prepared.options.include_truncated = arguments.include_truncated;
    let (loaded, options) = (&prepared.loaded, &prepared.options);
    let mut display = Display::new("acceptance", loaded.prompts.len(), arguments.target.quiet);
    let (target, drafting) = (loaded.target.as_ref(), loaded.drafting.as_ref());
    let report = evaluate(target, drafting, &loaded.prompts, options, &mut |progress| {
        display.update(progress);
        Ok(())
    })
    .map_err(Failure::Run)?;
    print(&table::acceptance(&report)).map_err(Failure::Run)?;
    arguments.output.write(&report)?;
    Ok(true)
}
