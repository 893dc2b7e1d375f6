//! `metrics.jsonl`: one line a step; `validation.jsonl`: one line a validation.
//!
//! Sums become averages only here. A line is written in one call, and resuming at step s drops every line behind s
//! and any half-written tail, so that the file of an interrupted run equals that of an uninterrupted one up to
//! times and memory.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use dflash_eval::speed::peak_memory;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::durable::replace_file;
use crate::loss::StepSums;
use crate::optim::Update;
use crate::tracking::appended::Appended;

/// What one step did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepRecord {
    /// Optimizer steps made, this one included.
    pub step: u64,
    /// Epoch of the step, 0-based.
    pub epoch: u64,
    /// base_loss + selector_alpha * selector_loss.
    pub loss: f64,
    /// Sum of weight x cross-entropy / sum of weights, in nats; slots 1..B-1.
    pub base_loss: f64,
    /// The same of the selector over its hits; absent without a hit or a selector.
    pub selector_loss: Option<f64>,
    /// Weight of the selector's loss.
    pub selector_alpha: f64,
    /// Share of right first choices of each slot 1..B-1, teacher-forced; absent where nothing is supervised.
    pub slot_accuracy: Vec<Option<f64>>,
    /// Share of supervised slots whose token is among the candidates; absent without a selector.
    pub recall: Option<f64>,
    /// Selector accuracy minus unary accuracy over the hits, teacher-forced.
    pub selector_lift: Option<f64>,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Factor applied by the clip.
    pub clip_scale: f64,
    /// Learning rate.
    pub lr: f64,
    /// Context rows of the step.
    pub tokens: u64,
    /// Supervised slots of the step.
    pub slots: u64,
    /// Context rows a second.
    pub tokens_per_s: f64,
    /// Supervised slots a second.
    pub slots_per_s: f64,
    /// Seconds of the step.
    pub seconds: f64,
    /// Largest resident memory of the process so far, in bytes, where the system tells it.
    pub peak_memory: Option<u64>,
}

/// Place, rates and time of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSetting {
    /// Optimizer steps made, this one included.
    pub step: u64,
    /// Epoch, 0-based.
    pub epoch: u64,
    /// Learning rate.
    pub lr: f64,
    /// Weight of the selector's loss.
    pub selector_alpha: f64,
    /// Wall-clock time of the step.
    pub elapsed: Duration,
}

impl StepRecord {
    /// Averages the sums of a step.
    pub fn new(setting: StepSetting, sums: &StepSums, update: Update) -> Self {
        let base_loss = sums.base_loss / sums.weight;
        let selector_loss = (sums.selector_weight > 0.0).then(|| sums.selector_loss / sums.selector_weight);
        let seconds = setting.elapsed.as_secs_f64();
        let (hits, slots) = (sums.hits, sums.slots());
        Self {
            step: setting.step,
            epoch: setting.epoch,
            loss: base_loss + selector_loss.map_or(0.0, |loss| setting.selector_alpha * loss),
            base_loss,
            selector_loss,
            selector_alpha: setting.selector_alpha,
            slot_accuracy: sums
                .slot_correct
                .iter()
                .zip(&sums.slot_total)
                .skip(1) // the anchor is never supervised
                .map(|(&correct, &total)| ratio(correct, total))
                .collect(),
            recall: ratio(hits, slots).filter(|_| hits > 0),
            selector_lift: (hits > 0)
                .then(|| (sums.selector_correct as f64 - sums.unary_correct_on_hits as f64) / hits as f64),
            grad_norm: update.grad_norm,
            clip_scale: update.clip_scale,
            lr: setting.lr,
            tokens: sums.context_rows,
            slots,
            tokens_per_s: sums.context_rows as f64 / seconds,
            slots_per_s: slots as f64 / seconds,
            seconds,
            peak_memory: peak_memory(),
        }
    }
}

/// What one validation found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Step of the validated state.
    pub step: u64,
    /// 1 + accepted drafts a round, replayed over the target's recorded responses.
    pub acceptance_length: f64,
    /// Rounds counted.
    pub rounds: u64,
    /// Recorded responses replayed.
    pub samples: usize,
    /// Share of rounds that accept at least i drafts, i = 1..B-1.
    pub accept_at_pos: Vec<Option<f64>>,
    /// Seconds spent.
    pub seconds: f64,
}

/// A file of JSON lines, each with a `step`.
#[derive(Debug)]
pub struct StepLines {
    file: Appended,
    /// Steps of the lines that were there.
    found: BTreeSet<u64>,
}

impl StepLines {
    /// Opens the file for appending after dropping every line behind `step`.
    ///
    /// # Errors
    /// When a whole line is not UTF-8; a half-written one at the end goes whatever its bytes.
    pub fn open(path: &Path, step: u64) -> Result<Self> {
        let bytes = bytes(path)?;
        let mut found = BTreeSet::new();
        let kept: String = text(path, &bytes)?
            .split_inclusive('\n')
            .filter(|line| {
                let at = step_of(line).filter(|&at| at <= step);
                found.extend(at);
                at.is_some()
            })
            .collect();
        if kept.as_bytes() != bytes {
            replace_file(path, kept.as_bytes())?;
        }
        Ok(Self {
            file: Appended::open(path)?,
            found,
        })
    }

    /// What is to be said of the steps up to `step` that had no line when the file was opened.
    pub fn missing(&self, step: u64) -> Option<String> {
        let mut gaps = (1..=step).filter(|at| !self.found.contains(at));
        let first = gaps.next()?;
        let (last, others) = gaps.fold((first, 0_u64), |(_, others), at| (at, others + 1));
        let name = self.file.path().file_name().unwrap_or_default().to_string_lossy();
        Some(match others {
            0 => format!("{name}: step {first} is missing"),
            _ if last - first == others => format!("{name}: steps {first} to {last} are missing"),
            _ => format!("{name}: {} of the steps {first} to {last} are missing", others + 1),
        })
    }

    /// The records of the steps in `steps`, as they stand in the file.
    pub fn read(path: &Path, steps: RangeInclusive<u64>) -> Result<Vec<(u64, Value)>> {
        let bytes = bytes(path)?;
        let records = text(path, &bytes)?.lines().filter_map(|line| {
            let record: Value = serde_json::from_str(line).ok()?;
            let step = record.get("step")?.as_u64()?;
            steps.contains(&step).then_some((step, record))
        });
        Ok(records.collect())
    }

    /// Appends one record as one line.
    pub fn append<T: Serialize>(&mut self, record: &T) -> Result<()> {
        let line = serde_json::to_string(record)? + "\n";
        self.file.write(line.as_bytes())
    }
}

/// The bytes of a file; none where there is no file.
fn bytes(path: &Path) -> Result<Vec<u8>> {
    match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        read => read.with_context(|| path.display().to_string()),
    }
}

/// The whole lines of a file.
fn text<'b>(path: &Path, bytes: &'b [u8]) -> Result<&'b str> {
    let end = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    std::str::from_utf8(&bytes[..end]).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        let line = before.split(|&byte| byte == b'\n').count();
        anyhow!("{}: line {line}: expected UTF-8", path.display())
    })
}

fn step_of(line: &str) -> Option<u64> {
    serde_json::from_str::<Value>(line).ok()?.get("step")?.as_u64()
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resuming_drops_later_lines_and_a_torn_tail() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        fs::write(&path, "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"st").unwrap();
        let mut lines = StepLines::open(&path, 2).unwrap();
        lines.append(&serde_json::json!({"step": 3, "again": true})).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text, "{\"step\":1}\n{\"step\":2}\n{\"step\":3,\"again\":true}\n");
    }

    /// Bytes that no program writes: at the end they are a torn line, before it the file is not ours to repair.
    #[test]
    fn a_torn_tail_may_be_any_bytes_but_a_whole_line_is_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        fs::write(&path, b"{\"step\":1}\n\xff\xfe{\"st").unwrap();
        drop(StepLines::open(&path, 2).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"{\"step\":1}\n");
        let damaged = b"{\"step\":1}\n{\"step\":\xff2}\n{\"step\":3}\n";
        fs::write(&path, damaged).unwrap();
        let error = StepLines::open(&path, 3).unwrap_err().to_string();
        assert_eq!(error, format!("{}: line 2: expected UTF-8", path.display()));
        assert_eq!(fs::read(&path).unwrap(), damaged);
    }

    #[test]
    fn steps_without_a_line_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let missing = |steps: &[u64], step| {
            let lines: Vec<String> = steps.iter().map(|step| format!("{{\"step\":{step}}}\n")).collect();
            let lines = lines.concat();
            fs::write(&path, lines).unwrap();
            StepLines::open(&path, step).unwrap().missing(step).unwrap_or_default()
        };
        assert_eq!(missing(&[], 0), "");
        assert_eq!(missing(&[1, 2, 3], 3), "");
        assert_eq!(missing(&[1, 2, 3], 15), "metrics.jsonl: steps 4 to 15 are missing");
        assert_eq!(missing(&[1, 3], 3), "metrics.jsonl: step 2 is missing");
        assert_eq!(missing(&[2, 3], 5), "metrics.jsonl: 3 of the steps 1 to 5 are missing");
    }

    #[test]
    fn averages_are_sums_over_counts() {
        let sums = StepSums {
            base_loss: 6.0,
            weight: 3.0,
            selector_loss: 2.0,
            selector_weight: 4.0,
            slot_correct: vec![0, 1, 0],
            slot_total: vec![0, 4, 0],
            hits: 2,
            selector_correct: 2,
            unary_correct_on_hits: 1,
            context_rows: 10,
        };
        let setting = StepSetting {
            step: 1,
            epoch: 0,
            lr: 0.1,
            selector_alpha: 0.5,
            elapsed: Duration::from_secs(2),
        };
        let update = Update {
            grad_norm: 2.0,
            clip_scale: 0.5,
        };
        let record = StepRecord::new(setting, &sums, update);
        let near = |a: f64, b: f64| (a - b).abs() < 1e-12;
        assert!(near(record.base_loss, 2.0) && near(record.loss, 2.25));
        assert_eq!(record.slot_accuracy, vec![Some(0.25), None]);
        assert_eq!(record.recall, Some(0.5));
        assert_eq!(record.selector_lift, Some(0.5));
        assert!(near(record.tokens_per_s, 5.0));
    }
}
