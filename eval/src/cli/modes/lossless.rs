//! `dflash-eval lossless`: is the text the target's own?

use clap::{Args, ValueEnum};

use crate::cli::arguments::{DraftArguments, OutputArguments, PromptArguments, TargetArguments, prepare};
use crate::console::{Failure, print};
use crate::folder::Folder;
use crate::lossless::{Kind, default_tolerance, lossless};
use crate::progress::Display;
use crate::prompts::Prompts;
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
    /// Drafters to check with.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "trained,random,right,wrong",
        value_name = "KINDS"
    )]
    drafters: Vec<KindName>,
    /// Largest top-two margin, in logits, that passes as a near-tie [default: 0 in f32 on the CPU, 0.001 in f32
    /// elsewhere, 0.25 in bf16].
    #[arg(long, value_name = "LOGITS", value_parser = margin)]
    tie_margin: Option<f32>,
    /// Seed of the random drafter.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    output: OutputArguments,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum KindName {
    Trained,
    Random,
    Right,
    Wrong,
}

pub(crate) fn run(arguments: &Arguments) -> Result<bool, Failure> {
    let mut kinds: Vec<Kind> = Vec::new();
    for kind in arguments.drafters.iter().map(|&name| kind(name)) {
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let prepared = || {
        arguments.output.check()?;
        let greedy = SamplingConfig::default();
        prepare(
            &arguments.target,
            &arguments.drafter,
            &arguments.draft,
            &arguments.prompts,
            greedy,
            arguments.seed,
        )
    };
    let prepared = prepared().map_err(Failure::Input)?;
    let (loaded, options) = (&prepared.loaded, &prepared.options);
    let setting = &options.setting;
    let tolerance = arguments
        .tie_margin
        .unwrap_or_else(|| default_tolerance(&setting.dtype, &setting.device));
    let mut display = Display::new("lossless", loaded.prompts.len(), arguments.target.quiet);
    let (target, drafting) = (loaded.target.as_ref(), loaded.drafting.as_ref());
    let report = lossless(
        target,
        drafting,
        &loaded.prompts,
        &kinds,
        tolerance,
        options,
        &mut |progress| {
            display.update(progress);
            Ok(())
        },
    )
    .map_err(Failure::Run)?;
    print(&table::lossless(&report)).map_err(Failure::Run)?;
    arguments.output.write(&report)?;
    Ok(report.passed)
}

fn kind(name: KindName) -> Kind {
    match name {
        KindName::Trained => Kind::Trained,
        KindName::Random => Kind::Random,
        KindName::Right => Kind::Right,
        KindName::Wrong => Kind::Wrong,
    }
}

fn margin(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(margin) if margin.is_finite() && margin >= 0. => Ok(margin),
        _ => Err("expected a finite number of at least 0".into()),
    }
}
