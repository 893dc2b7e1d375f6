//! `dflash-eval inspect-run`: a saved report once more.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::console::{Failure, print};
use crate::table;

/// Options of the mode.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A report that another mode wrote with --json.
    #[arg(value_name = "REPORT.json")]
    report: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> Result<bool, Failure> {
    let text = render(&arguments.report).map_err(Failure::Input)?;
    print(&text).map_err(Failure::Run)?;
    Ok(true)
}

fn render(path: &Path) -> Result<String> {
    let named = || path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(named)?;
    let value: Value = serde_json::from_str(&text).with_context(named)?;
    let kind = value.get("kind").and_then(Value::as_str).unwrap_or("none").to_owned();
    Ok(match kind.as_str() {
        "acceptance" => table::acceptance(&read(value, path)?),
        "replay" => table::replayed(&read(value, path)?),
        "lossless" => table::lossless(&read(value, path)?),
        "speed" => table::speed(&read(value, path)?),
        "sweep" => table::sweep(&read(value, path)?),
        "compare" => table::compared(&read(value, path)?),
        other => bail!(
            "{}: kind {other}, expected a report of acceptance, replay, lossless, speed, sweep or compare",
            path.display()
        ),
    })
}

fn read<T: DeserializeOwned>(value: Value, path: &Path) -> Result<T> {
    serde_json::from_value(value).with_context(|| format!("{}: not a whole report", path.display()))
}
