//! `dflash-eval`: acceptance and losslessness of a drafter on its target.

use std::process::ExitCode;

use clap::Parser;
use dflash_eval::cli::{Cli, run};

fn main() -> ExitCode {
    dflash_model::leave_threads_to_rayon();
    run(Cli::parse())
}
