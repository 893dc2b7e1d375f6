//! `dflash-eval compare`: several drafters, one set of prompts.

use anyhow::{Context, ensure};
use clap::Args;
use dflash_model::Drafting;

use crate::cli::arguments::{
    DraftArguments, OutputArguments, PromptArguments, SamplingArguments, TargetArguments, prepare,
};
use crate::compare::compare;
use crate::console::{Failure, print};
use crate::folder::Folder;
use crate::load::bind;
use crate::progress::Display;
use crate::prompts::Prompts;
use crate::table;

/// Options of the mode.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    target: TargetArguments,
    /// A drafter folder; give the option twice or more. The first is what the others are compared with.
    #[arg(long = "drafter", value_name = "FOLDER", required = true)]
    drafters: Vec<Folder>,
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
    let (of, draft) = (&arguments.target, &arguments.draft);
    let prepared = || {
        arguments.output.check()?;
        ensure!(
            arguments.drafters.len() >= 2,
            "--drafter: {} folder, expected at least two to compare",
            arguments.drafters.len()
        );
        let sampling = arguments.sampling.config()?;
        let mut first = prepare(
            of,
            &arguments.drafters[0],
            draft,
            &arguments.prompts,
            sampling,
            arguments.seed,
        )?;
        first.options.include_truncated = arguments.include_truncated;
        let mut others = Vec::new();
        for folder in &arguments.drafters[1..] {
            let mut options = first.options.clone();
            let bound = bind(
                folder.place("--drafter", of.quiet)?,
                draft.without_selector,
                first.loaded.target.as_ref(),
                &mut options.setting,
            )?;
            let named = || format!("--block for {}", folder.named().display());
            options.setting.block_size_used = options.width(&bound).with_context(named)?.most() + 1;
            others.push((bound, options));
        }
        Ok((first, others))
    };
    let (first, others) = prepared().map_err(Failure::Input)?;
    let mut drafters = vec![(first.loaded.drafting.as_ref(), first.options.clone())];
    drafters.extend(
        others
            .iter()
            .map(|(bound, options)| (bound as &dyn Drafting, options.clone())),
    );
    let prompts = &first.loaded.prompts;
    let mut displays: Vec<Display> = drafters
        .iter()
        .map(|_| Display::new("compare", prompts.len(), of.quiet))
        .collect();
    let report = compare(
        first.loaded.target.as_ref(),
        &drafters,
        prompts,
        &mut |drafter, progress| {
            displays[drafter].update(progress);
            Ok(())
        },
    )
    .map_err(Failure::Run)?;
    print(&table::compared(&report)).map_err(Failure::Run)?;
    arguments.output.write(&report)?;
    Ok(true)
}
