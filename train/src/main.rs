//! `dflash-train`: see `dflash-train --help`.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use dflash_train::cli::CommandLine;
use dflash_train::run::obey;

fn main() -> ExitCode {
    dflash_model::keep_freed_memory();
    dflash_model::leave_threads_to_rayon();
    match obey(&CommandLine::parse()) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            let (error, code) = failure.into_parts();
            let _closed = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::from(code)
        }
    }
}
