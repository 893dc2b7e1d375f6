//! The command line of `dflash-train`.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, Subcommand, ValueEnum};

use crate::bench::StepArguments;
use crate::config::Change;

/// Trains a DFlash or DFlash 2 drafter for one target, from a run file.
///
/// Runs what is missing of: prepare (the target answers the prompts), capture (its hidden states go to disk), train,
/// evaluate (held-out prompts are decoded). Relative paths resolve against the current directory.
///
/// Exit codes: 0 done, 1 failed, 2 bad usage or input, 130 and 143 stopped by SIGINT and SIGTERM; run it again to go on.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "dflash-train",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct CommandLine {
    /// What to do instead of a run.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// A run.
    #[command(flatten)]
    pub run: Option<Args>,
}

/// What is no run.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Times parts of the trainer on this machine.
    #[command(subcommand)]
    Bench(Bench),
}

/// What can be timed.
#[derive(Debug, Clone, Subcommand)]
pub enum Bench {
    /// One training step on random weights and taps, or on a peer's.
    Step(StepArguments),
}

/// A run.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The run file, TOML.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Replaces a key of the run file, as in --set train.lr=1e-3; repeatable, later ones win.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Lets a warm start change what the weights of drafter.init_from were trained with; repeatable, as drafter.allow.
    #[arg(long, value_enum, value_name = "KIND")]
    pub allow: Vec<Change>,
    /// Runs this stage only.
    #[arg(long, value_enum)]
    pub stage: Option<StageName>,
    /// Prints the plan (tokens, disk, memory, steps, time), writes an initialised drafter, and stops.
    #[arg(long)]
    pub dry_run: bool,
    /// auto: continue the newest checkpoint of run_dir; PATH: continue that one; never: refuse a run_dir that has any.
    #[arg(long, value_name = "auto|PATH|never", default_value = "auto")]
    pub resume: Resume,
    /// Prints the resolved run file and stops.
    #[arg(long)]
    pub print_config: bool,
    /// Shows no progress.
    #[arg(long, short)]
    pub quiet: bool,
}

/// A stage of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StageName {
    /// The target answers the prompts.
    Prepare,
    /// The target's tap states go to disk.
    Capture,
    /// The drafter is trained.
    Train,
    /// Held-out prompts are decoded.
    Evaluate,
}

/// Where training starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// At the newest checkpoint of the run folder, if there is one.
    Auto,
    /// At this checkpoint.
    From(PathBuf),
    /// At step 0.
    Never,
}

impl FromStr for Resume {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "auto" => Self::Auto,
            "never" => Self::Never,
            path => Self::From(path.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_documented_command_parses() {
        CommandLine::command().debug_assert();
        let words = [
            "dflash-train",
            "--config",
            "configs/demo.toml",
            "--set",
            "run_dir=x",
            "--set",
            "seed=1",
        ];
        let run = |words: &[&str]| CommandLine::parse_from(words).run.expect("a run");
        let args = run(&words);
        assert_eq!(args.overrides, ["run_dir=x", "seed=1"]);
        assert_eq!(args.resume, Resume::Auto);
        let args = run(&[
            "dflash-train",
            "--config",
            "c",
            "--stage",
            "train",
            "--resume",
            "runs/x/step-000005",
        ]);
        assert_eq!(args.stage, Some(StageName::Train));
        assert_eq!(args.resume, Resume::From("runs/x/step-000005".into()));
        let bench = CommandLine::parse_from(["dflash-train", "bench", "step", "--shape", "08b", "--algo", "dflash"]);
        assert!(bench.run.is_none() && bench.command.is_some());
        for wrong in [
            vec![],
            vec!["--config", "c", "--stage", "publish"],
            vec!["bench"],
            vec!["bench", "step", "--repeats", "0"],
            vec!["--config", "c", "bench", "step"],
        ] {
            assert!(CommandLine::try_parse_from([vec!["dflash-train"], wrong].concat()).is_err());
        }
    }
}
