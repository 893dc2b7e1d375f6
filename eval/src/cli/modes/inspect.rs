//! `dflash-eval inspect-run`: a saved report once more.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::cli::arguments::PageArguments;
use crate::console::{Failure, print};
use crate::report::Report;
use crate::table;

/// Options of the mode.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A report that another mode wrote with --json; --csv and --html are forms of an acceptance report.
    #[arg(value_name = "REPORT.json")]
    report: PathBuf,
    #[command(flatten)]
    page: PageArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<bool, Failure> {
    let read = || {
        arguments.page.check(None)?;
        saved(&arguments.report)
    };
    match read().map_err(Failure::Input)? {
        Saved::Acceptance(report) => {
            print(&table::acceptance(&report)).map_err(Failure::Run)?;
            arguments.page.write(&report)?;
        }
        Saved::Other(_) if arguments.page.csv.is_some() || arguments.page.html.is_some() => {
            return Err(Failure::Input(anyhow!(
                "{}: --csv and --html are forms of an acceptance report",
                arguments.report.display()
            )));
        }
        Saved::Other(table) => print(&table).map_err(Failure::Run)?,
    }
    Ok(true)
}

/// A saved report: acceptance has more forms than its table.
enum Saved {
    Acceptance(Box<Report>),
    Other(String),
}

fn saved(path: &Path) -> Result<Saved> {
    let named = || path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(named)?;
    let value: Value = serde_json::from_str(&text).with_context(named)?;
    let kind = value.get("kind").and_then(Value::as_str).unwrap_or("none").to_owned();
    Ok(Saved::Other(match kind.as_str() {
        "acceptance" => return Ok(Saved::Acceptance(Box::new(read(value, path)?))),
        "replay" => table::replayed(&read(value, path)?),
        "lossless" => table::lossless(&read(value, path)?),
        "speed" => table::speed(&read(value, path)?),
        "sweep" => table::sweep(&read(value, path)?),
        "compare" => table::compared(&read(value, path)?),
        "server" => crate::server::table(&read(value, path)?),
        other => bail!(
            "{}: kind {other}, expected a report of acceptance, server, replay, lossless, speed, sweep or compare",
            path.display()
        ),
    }))
}

fn read<T: DeserializeOwned>(value: Value, path: &Path) -> Result<T> {
    serde_json::from_value(value).with_context(|| format!("{}: not a whole report", path.display()))
}
