//! `dflash-train`: see `dflash-train --help`.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use dflash_train::cli::Args;
use dflash_train::run::{Failure, run};

fn main() -> ExitCode {
    let (error, code) = match run(&Args::parse()) {
        Ok(code) => return ExitCode::from(code),
        Err(Failure::Input(error)) => (error, 2),
        Err(Failure::Work(error)) => (error, 1),
    };
    let _closed = writeln!(std::io::stderr(), "error: {error:#}");
    ExitCode::from(code)
}
