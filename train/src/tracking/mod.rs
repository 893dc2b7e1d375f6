//! Where the numbers of a training go: `metrics.jsonl` and `validation.jsonl` always, and what the run file's `tracking`
//! lists beside them.
//!
//! ```text
//! fit.rs -> Tracking::step, ::validation    the two files of JSON lines, written at once
//!        -> Tracking::commit                the same numbers, as one Row, to every Tracker
//! ```
//!
//! A number is called as its key in the file, below the file's word: `train/loss`, `train/slot_accuracy/01`,
//! `validation/acceptance_length`. A tracker that cannot write ends the run with an error that names its file. One that
//! ends before the step that a run goes on from, cut short or listed late, first gets the steps between from the two files.

pub mod appended;
pub mod clock;
pub mod proto;
pub mod tensorboard;
pub mod wandb;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use dflash_eval::Report;
use serde::Serialize;
use serde_json::{Number, Value, json};

use crate::config::{RunConfig, TrackerName};
use crate::config_file;
use crate::metrics::{StepLines, StepRecord, Validation};
use tensorboard::EventFile;
use wandb::{From, OfflineRun};

/// The two files of JSON lines in a run's folder.
const METRICS: &str = "metrics.jsonl";
const VALIDATIONS: &str = "validation.jsonl";

/// What a step is known by: its number and the names and numbers of what was measured.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Row {
    /// Optimizer steps made.
    pub step: u64,
    /// Numbers by name, as they stand in the file of JSON lines.
    pub values: Vec<(String, Number)>,
}

impl Row {
    fn new(step: u64) -> Self {
        Self {
            step,
            values: Vec::new(),
        }
    }

    /// Adds every number of `record` below `prefix`; lists count from 01, the step and what is absent are left out.
    fn add<T: Serialize>(&mut self, prefix: &str, record: &T) -> Result<()> {
        let mut value = serde_json::to_value(record)?;
        if let Some(fields) = value.as_object_mut() {
            fields.remove("step");
        }
        self.add_value(prefix.to_owned(), &value);
        Ok(())
    }

    fn add_value(&mut self, name: String, value: &Value) {
        match value {
            Value::Number(number) => self.values.push((name, number.clone())),
            Value::Array(items) => {
                for (i, item) in items.iter().enumerate() {
                    self.add_value(format!("{name}/{:02}", i + 1), item);
                }
            }
            Value::Object(fields) => {
                for (key, field) in fields {
                    self.add_value(format!("{name}/{key}"), field);
                }
            }
            Value::Null | Value::Bool(_) | Value::String(_) => {}
        }
    }

    /// Names and numbers, integers as the nearest double.
    fn numbers(&self) -> impl Iterator<Item = (&str, f64)> {
        let numbers = self.values.iter();
        numbers.filter_map(|(name, number)| Some((name.as_str(), number.as_f64()?)))
    }
}

/// Another place for the numbers of a run. Every call has written when it returns.
pub trait Tracker {
    /// The last step whose numbers it holds; 0 without any.
    fn held(&self) -> u64;
    /// Takes what one step measured.
    fn row(&mut self, row: &Row) -> Result<()>;
    /// Takes what stands for the run as a whole, after `row.step` steps.
    fn summary(&mut self, row: &Row) -> Result<()>;
    /// Takes a line that the run said.
    fn say(&mut self, text: &str) -> Result<()>;
    /// The process is done with the run, with an exit code.
    fn finish(&mut self, exit_code: i32) -> Result<()>;
}

/// All places that a training writes its numbers to.
pub struct Tracking {
    metrics: StepLines,
    validations: StepLines,
    trackers: Vec<Box<dyn Tracker>>,
    row: Row,
    /// What is said of the row.
    said: Option<String>,
}

impl Tracking {
    /// Opens everything for a training that goes on after `step`; what was written about later steps goes.
    pub fn open(config: &RunConfig, step: u64) -> Result<Self> {
        let [metrics, validations] =
            [METRICS, VALIDATIONS].map(|name| StepLines::open(&config.run_dir.join(name), step));
        Ok(Self {
            metrics: metrics?,
            validations: validations?,
            trackers: trackers(config, From::Step(step), step)?,
            row: Row::default(),
            said: None,
        })
    }

    /// What is to be said of steps up to `step`, the one to go on from, whose numbers are lost.
    pub fn missing(&self, step: u64) -> Option<String> {
        self.metrics.missing(step)
    }

    /// Writes the line of a step; its numbers wait for [`Self::commit`].
    pub fn step(&mut self, record: &StepRecord) -> Result<()> {
        self.metrics.append(record)?;
        self.row = Row::new(record.step);
        self.row.add("train", record)
    }

    /// Writes the line of the validation of the present step.
    pub fn validation(&mut self, validation: &Validation) -> Result<()> {
        self.validations.append(validation)?;
        self.row.add("validation", validation)
    }

    /// Takes what is said of the present step; it follows the step's numbers.
    pub fn remark(&mut self, text: String) {
        self.said = Some(text);
    }

    /// Hands what was measured and said of the present step to the trackers.
    pub fn commit(&mut self) -> Result<()> {
        let row = std::mem::take(&mut self.row);
        self.trackers.iter_mut().try_for_each(|tracker| tracker.row(&row))?;
        self.said.take().map_or(Ok(()), |said| self.say(&said))
    }

    /// Hands a line that the run said to the trackers.
    pub fn say(&mut self, text: &str) -> Result<()> {
        self.trackers.iter_mut().try_for_each(|tracker| tracker.say(text))
    }

    /// Ends the training's part.
    pub fn finish(&mut self, exit_code: i32) -> Result<()> {
        self.trackers
            .iter_mut()
            .try_for_each(|tracker| tracker.finish(exit_code))
    }
}

/// Adds the headline numbers of the final evaluation, as `evaluation/...`, to what a run of `step` steps has tracked.
pub fn evaluation(config: &RunConfig, step: u64, report: &Report) -> Result<()> {
    let headlines = json!({
        "acceptance_length": report.acceptance_length,
        "acceptance_length_macro": report.acceptance_length_macro,
        "acceptance_length_ci95": report.acceptance_length_ci95,
        "draft_acceptance_rate": report.draft_acceptance_rate,
        "accept_at_pos": report.accept_at_pos,
        "accept_cond": report.accept_cond,
        "rounds": report.rounds,
        "drafted": report.drafted,
        "accepted": report.accepted,
        "tokens_per_verify_e2e": report.tokens_per_verify_e2e,
        "plain_tokens_per_s": report.plain_tokens_per_s,
        "spec_tokens_per_s": report.spec_tokens_per_s,
        "speedup": report.speedup,
        "prompts": report.prompts,
        "differing_prompts": report.differing.len(),
        "degenerate_prompts": report.degenerate_prompts,
    });
    let mut row = Row::new(step);
    row.add("evaluation", &headlines)?;
    for mut tracker in trackers(config, From::End, step)? {
        tracker.summary(&row)?;
        tracker.finish(0)?;
    }
    Ok(())
}

/// Opens the trackers of a run that has made `step` steps; none of them lacks one that the JSON lines have.
fn trackers(config: &RunConfig, from: From, step: u64) -> Result<Vec<Box<dyn Tracker>>> {
    let mut found: Vec<Box<dyn Tracker>> = Vec::new();
    for name in &config.tracking {
        match name {
            // the files of JSON lines are always written
            TrackerName::Jsonl => {}
            TrackerName::Tensorboard => {
                let folder = config.run_dir.join("tensorboard");
                let after = match from {
                    From::Step(after) => Some(after),
                    From::End => None,
                };
                let mut events = EventFile::create(&folder, after)?;
                if after.is_some() {
                    let text = format!("```toml\n{}```\n", config_file::to_toml(config)?);
                    events.text(step, "config", &text)?;
                }
                found.push(Box::new(events));
            }
            TrackerName::Wandb => found.push(Box::new(OfflineRun::open(config, from)?)),
        }
    }
    fill(&config.run_dir, step, &mut found)?;
    Ok(found)
}

/// Writes the steps that a tracker lacks at its end, up to `step`, from the JSON lines.
fn fill(run_dir: &Path, step: u64, trackers: &mut [Box<dyn Tracker>]) -> Result<()> {
    let held = trackers.iter().map(|tracker| tracker.held()).min();
    let Some(first) = held.filter(|&held| held < step).map(|held| held + 1) else {
        return Ok(());
    };
    let mut rows = BTreeMap::new();
    for (name, prefix) in [(METRICS, "train"), (VALIDATIONS, "validation")] {
        for (at, record) in StepLines::read(&run_dir.join(name), first..=step)? {
            rows.entry(at).or_insert_with(|| Row::new(at)).add(prefix, &record)?;
        }
    }
    for tracker in trackers {
        let held = tracker.held();
        rows.values()
            .filter(|row| row.step > held)
            .try_for_each(|row| tracker.row(row))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_name_and_nothing_else_has() {
        let record = serde_json::json!({
            "step": 7, "loss": 0.5, "recall": null, "slots": 12,
            "slot_accuracy": [0.25, null, 1], "costs": {"total": 2}, "kind": "x", "identical": true,
        });
        let mut row = Row::new(7);
        row.add("train", &record).unwrap();
        let found: Vec<(&str, f64)> = row.numbers().collect();
        let expected = [
            ("train/loss", 0.5),
            ("train/slots", 12.0),
            ("train/slot_accuracy/01", 0.25),
            ("train/slot_accuracy/03", 1.0),
            ("train/costs/total", 2.0),
        ];
        assert_eq!(found, expected);
    }
}
