//! `dflash-eval replay`: acceptance along recorded texts.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use dflash_data::recipes::Order;

use crate::cli::arguments::{DraftArguments, OutputArguments, PromptArguments, TargetArguments, prepare};
use crate::console::{Failure, print};
use crate::evaluate::Block;
use crate::folder::Folder;
use crate::progress::Display;
use crate::recorded::{Comparison, Record, drafting_differences, from_conversations, from_report, replay_all};
use crate::report::Report;
use crate::sampling::SamplingConfig;
use crate::table;

/// Options of the mode.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    target: TargetArguments,
    /// Drafter folder, or hf://org/name@revision.
    #[arg(long, value_name = "FOLDER")]
    drafter: Folder,
    #[command(flatten)]
    draft: DraftArguments,
    #[command(flatten)]
    prompts: PromptArguments,
    /// Replay the texts of this saved acceptance report and compare round by round; without it, the answers that end the
    /// conversations of --prompts.
    #[arg(long, value_name = "REPORT.json")]
    recorded: Option<PathBuf>,
    /// Count rounds that the end of the text narrowed or cut, too.
    #[arg(long)]
    include_truncated: bool,
    /// Seed of the bootstrap.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    output: OutputArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<bool, Failure> {
    let prepared = || {
        arguments.output.check()?;
        if let (Some(json), Some(recorded)) = (&arguments.output.json, &arguments.recorded) {
            ensure!(
                json.canonicalize()
                    .ok()
                    .is_none_or(|json| Some(json) != recorded.canonicalize().ok()),
                "--json {}: is the report that --recorded reads; name a new file",
                json.display()
            );
        }
        ensure!(
            arguments.draft.block != Some(Block::Auto),
            "--block auto: a replay has no times to choose by; expected a number of slots"
        );
        let greedy = SamplingConfig::default();
        let mut prepared = prepare(
            &arguments.target,
            &arguments.drafter,
            &arguments.draft,
            &arguments.prompts,
            greedy,
            arguments.seed,
        )?;
        prepared.options.include_truncated = arguments.include_truncated;
        let records = records(arguments, &prepared.loaded)?;
        Ok((prepared, records))
    };
    let (prepared, records) = prepared().map_err(Failure::Input)?;
    let (loaded, options) = (&prepared.loaded, &prepared.options);
    let mut display = Display::new("replay", records.len(), arguments.target.quiet);
    let (target, drafting) = (loaded.target.as_ref(), loaded.drafting.as_ref());
    let report = replay_all(target, drafting, &records, options, &mut |progress| {
        display.update(progress);
        Ok(())
    })
    .map_err(Failure::Run)?;
    print(&table::replayed(&report)).map_err(Failure::Run)?;
    arguments.output.write(&report)?;
    // in f32 a text of this target and drafter has one sequence of rounds; elsewhere rounding may part them
    let differs = |found: &Comparison| found.equal_texts < report.texts;
    Ok(loaded.setting.dtype != "f32" || !report.against_generation.as_ref().is_some_and(differs))
}

fn records(arguments: &Arguments, loaded: &crate::load::Loaded) -> Result<Vec<Record>> {
    let Some(path) = &arguments.recorded else {
        let prompts = &arguments.prompts;
        let Some(file) = prompts
            .prompts
            .as_ref()
            .filter(|_| prompts.samples.is_none() && prompts.order == Order::File)
        else {
            anyhow::bail!("without --recorded a replay takes all answers of --prompts in the order of the file")
        };
        return from_conversations(file, loaded, prompts.limit);
    };
    let named = || format!("--recorded {}", path.display());
    let text = std::fs::read_to_string(path).with_context(named)?;
    let report: Report = serde_json::from_str(&text)
        .with_context(named)
        .context("expected a report of dflash-eval acceptance")?;
    let records = from_report(&report, loaded).with_context(named)?;
    let differences = drafting_differences(&report.setting, &loaded.setting);
    if !differences.is_empty() {
        eprintln!(
            "note: rounds are not compared with {}, which was drafted otherwise: {}",
            path.display(),
            differences.join("; ")
        );
    }
    Ok(records)
}
