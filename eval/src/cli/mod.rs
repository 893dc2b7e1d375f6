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
    /// Check that speculative decoding gives plain decoding's text, with good and with hostile drafters.
    Lossless(modes::lossless::Arguments),
    /// Measure a drafter that vLLM, SGLang or llama.cpp serves, by that engine's own counters and by our definitions.
    Server(modes::server::Arguments),
}

/// Runs a parsed command line and returns the exit code of the process.
pub fn run(cli: Cli) -> ExitCode {
    exit_code(match cli.command {
        Command::Acceptance(arguments) => modes::acceptance::run(&arguments),
        Command::Lossless(arguments) => modes::lossless::run(&arguments),
        Command::Server(arguments) => modes::server::run(&arguments),
    })
}
