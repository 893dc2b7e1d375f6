//! `dflash-train`: see `dflash-train --help`.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use dflash_train::cli::Args;
use dflash_train::run::run;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            let (error, code) = failure.into_parts();
            let _closed = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::from(code)
        }
    }
}
