//! What the command lines of this room and of those above share: switches, exit codes, standard output.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::ValueEnum;

/// Compute type of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
}

/// Something that is on or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

/// Why a command ended without a result.
pub enum Failure {
    /// Usage or input: exit code 2.
    Input(anyhow::Error),
    /// The work itself: exit code 1.
    Run(anyhow::Error),
}

/// The exit code of a command that passed, did not pass, or failed; a failure is also printed.
pub fn exit_code(outcome: Result<bool, Failure>) -> ExitCode {
    let (code, error) = match outcome {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => return ExitCode::from(1),
        Err(Failure::Run(error)) => (1, error),
        Err(Failure::Input(error)) => (2, error),
    };
    eprintln!("error: {error:#}");
    ExitCode::from(code)
}

/// Writes to standard output. A reader that has seen enough (`| head`) is no error, so the exit code stays that of the
/// work.
pub fn print(text: &str) -> Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.context("standard output"),
    }
}

/// Most threads that may be asked for: more than any machine has, fewer than would exhaust it.
const MOST_THREADS: usize = 1024;

/// Parses a number of threads.
pub fn threads(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        many if many > MOST_THREADS => Err(format!("expected at most {MOST_THREADS}")),
        number => Ok(number),
    }
}

/// Parses a count that may not be 0.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("expected at least 1".into()),
        Ok(number) => Ok(number),
        Err(error) => Err(format!("{error}")),
    }
}
