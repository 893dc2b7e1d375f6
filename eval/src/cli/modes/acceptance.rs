//! `dflash-eval acceptance`: the real loop over prompts, here or (`--server`) in an engine that serves the drafter.

use anyhow::Context;
use clap::Args;

use crate::cli::arguments::{
    DraftArguments, OutputArguments, PageArguments, PromptArguments, SamplingArguments, TargetArguments, prepare,
};
use crate::cli::modes::server::{Given, ServerArguments, run_given};
use crate::console::{Failure, print};
use crate::evaluate::evaluate;
use crate::folder::Folder;
use crate::progress::Display;
use crate::prompts::Prompts;
use crate::table;

/// Options that mean nothing to a server.
const HERE_ONLY: [&str; 11] = [
    "target",
    "drafter",
    "device",
    "dtype",
    "threads",
    "block",
    "without_selector",
    "exact_verify",
    "include_truncated",
    "csv",
    "html",
];

/// Options that mean something to a server only.
const THERE_ONLY: [&str; 5] = ["engine", "model", "concurrency", "timeout", "api_key_env"];

/// Options of the mode.
#[derive(Debug, Args)]
#[command(mut_arg("target", |target| {
    target.required(false).required_unless_present("server").conflicts_with_all(THERE_ONLY)
}))]
pub(crate) struct Arguments {
    #[command(flatten)]
    target: TargetArguments,
    /// Drafter folder, or hf://org/name@revision.
    #[arg(long, value_name = "FOLDER", required_unless_present = "server")]
    drafter: Option<Folder>,
    /// Measure what a server of vLLM, SGLang or llama.cpp accepts instead: http://HOST:PORT.
    #[arg(long, value_name = "URL", conflicts_with_all = HERE_ONLY)]
    server: Option<String>,
    #[command(flatten)]
    remote: ServerArguments,
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
    #[command(flatten)]
    page: PageArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<bool, Failure> {
    if let Some(url) = &arguments.server {
        return run_given(&Given {
            url,
            server: &arguments.remote,
            prompts: &arguments.prompts,
            sampling: &arguments.sampling,
            seed: arguments.seed,
            quiet: arguments.target.quiet,
            output: &arguments.output,
        });
    }
    let prepared = || {
        arguments.page.check(Some(&arguments.output))?;
        let sampling = arguments.sampling.config()?;
        prepare(
            &arguments.target,
            arguments.drafter.as_ref().context("--drafter is missing")?,
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
    arguments.page.write(&report)?;
    Ok(true)
}
