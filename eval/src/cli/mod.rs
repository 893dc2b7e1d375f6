//! The command line: what was asked for, run and printed. Exit codes: 0 done, 1 failed, 2 bad usage or input.

mod arguments;
mod modes;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::console::exit_code;

/// Measures DFlash drafters: what a target accepts, how fast it gets, and whether its text stays the same.
#[derive(Debug, Parser)]
#[command(name = "dflash-eval", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Decode prompts plainly and with the drafter; report acceptance, speed, and whether the texts are identical.
    Acceptance(modes::acceptance::Arguments),
    /// Draft along recorded texts without decoding them again; on a greedy f32 recording this equals generation.
    Replay(modes::replay::Arguments),
    /// Check that speculative decoding gives plain decoding's text, with good and with hostile drafters.
    Lossless(modes::lossless::Arguments),
    /// Time prefill, plain steps, proposals and verification by number of rows and by context length.
    Speed(modes::speed::Arguments),
    /// Acceptance and speed by block size and context length, with a drafter or a scripted one.
    Sweep(modes::sweep::Arguments),
    /// Several drafters on the same prompts, with paired intervals of their differences.
    Compare(modes::compare::Arguments),
    /// Print a saved report again, or turn it into CSV or HTML.
    InspectRun(modes::inspect::Arguments),
    /// Talk to the target and watch what it accepts.
    Chat(modes::chat::Arguments),
    /// Measure a drafter that vLLM, SGLang or llama.cpp serves, by that engine's own counters and by our definitions.
    Server(modes::server::Arguments),
}

/// Runs a parsed command line and returns the exit code of the process.
pub fn run(cli: Cli) -> ExitCode {
    exit_code(match cli.command {
        Command::Acceptance(arguments) => modes::acceptance::run(&arguments),
        Command::Replay(arguments) => modes::replay::run(&arguments),
        Command::Lossless(arguments) => modes::lossless::run(&arguments),
        Command::Speed(arguments) => modes::speed::run(&arguments),
        Command::Sweep(arguments) => modes::sweep::run(&arguments),
        Command::Compare(arguments) => modes::compare::run(&arguments),
        Command::InspectRun(arguments) => modes::inspect::run(&arguments),
        Command::Chat(arguments) => modes::chat::run(&arguments),
        Command::Server(arguments) => modes::server::run(&arguments),
    })
}
