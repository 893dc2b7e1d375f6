//! Whether a drafter folder does what it says: written again and reloaded it drafts the same, and a target accepts it.
//!
//! The copy is the canonical export of the folder, so the check covers reading, rounding, writing and both spellings of
//! the configuration. A folder stored in BF16 must come back to the bit; one stored wider is rounded on the way, and the
//! difference is reported instead.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::DType;
use dflash_eval::{Report, table};
use dflash_model::Target;
use dflash_model::folder::{Existing, ModelCard, verify_written, write};
use dflash_model::formats;
use serde::Serialize;
use serde_json::json;

use crate::compare::{Compared, compare};

/// What was checked, and how it went.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verification {
    /// The folder.
    pub folder: String,
    /// The target.
    pub target: String,
    /// The folder against its copy.
    pub copy: Compared,
    /// The decode, when prompts were given.
    pub acceptance: Option<Report>,
    /// The least acceptance length that was asked for.
    pub min_acceptance: Option<f64>,
    /// What failed; empty when nothing did.
    pub failures: Vec<String>,
}

impl Verification {
    /// Whether nothing failed.
    pub fn passed(&self) -> bool {
        self.failures.is_empty()
    }

    /// The result for a terminal.
    pub fn table(&self) -> String {
        let copy = &self.copy;
        let mut text = String::new();
        let _ = writeln!(text, "folder      {}", self.folder);
        let _ = writeln!(text, "target      {}", self.target);
        let stored = if copy.exact {
            "stored in BF16, must be equal"
        } else {
            "stored wider than BF16, rounded"
        };
        let _ = writeln!(text, "copy        {stored}; {}", copy.line());
        if let Some(report) = &self.acceptance {
            text += &table::acceptance(report);
        }
        for failure in &self.failures {
            let _ = writeln!(text, "failed      {failure}");
        }
        let _ = writeln!(
            text,
            "verdict     {}",
            if self.passed() { "verified" } else { "failed" }
        );
        text
    }
}

/// Writes the drafter to a temporary folder, reads it back and compares what both draft on `target`.
///
/// # Errors
/// When the source is not a whole drafter, holds a value that is not finite, or does not fit the target.
pub fn compare_copy(path: &Path, target: &dyn Target) -> Result<Compared> {
    let source = formats::read(path, Some(target.info()))?;
    source.config.check_target(target.info())?;
    source.check_carried(target.head())?;
    let place = tempfile::tempdir().context("a temporary folder for the copy")?;
    let copy = place.path().join("drafter");
    write(
        &copy,
        &source.config,
        &source.tensors,
        // nobody keeps it
        &ModelCard::named(path.display().to_string(), "the target of the original"),
        &json!({"copy_of": path}),
        Existing::Refuse,
    )?;
    verify_written(&copy, &source.tensors)?;
    let exact = source.tensors.values().all(|tensor| tensor.dtype() == DType::BF16);
    compare(&source, &formats::read(&copy, None)?, exact, target)
}

/// What a comparison and a decode add up to: one line for each thing that failed.
///
/// `lossless`: whether the target's arithmetic is such that both texts must be the same (f32; in bf16 a pass over a
/// block and a pass over a token differ in the last bits, and near-ties flip).
pub fn failures(copy: &Compared, report: Option<&Report>, lossless: bool, min_acceptance: Option<f64>) -> Vec<String> {
    let mut failures = copy.failures();
    let Some(report) = report else { return failures };
    if lossless && report.identical == Some(false) {
        failures.push(format!(
            "speculative and plain text differ on {} of {} prompts",
            report.differing.len(),
            report.prompts
        ));
    }
    if let Some(least) = min_acceptance {
        match report.acceptance_length {
            Some(length) if length >= least => {}
            Some(length) => failures.push(format!("acceptance length: expected at least {least}, got {length:.3}")),
            None => failures.push(format!(
                "acceptance length: expected at least {least}, no whole round was measured"
            )),
        }
    }
    failures
}
