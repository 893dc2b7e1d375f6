//! `dflash-export`: inspects, verifies and walks drafter folders.

use std::process::ExitCode;

use clap::Parser;
use dflash_export::cli::{Cli, run};

fn main() -> ExitCode {
    dflash_model::leave_threads_to_rayon();
    run(Cli::parse())
}
