//! Whether a drafter folder does what it says: written again and reloaded it drafts the same, and a target accepts it.
//!
//! The copy is the canonical export of the folder, so the check covers reading, rounding, writing and both spellings of
//! the configuration. A folder stored in BF16 must come back to the bit; one stored wider is rounded on the way, and the
//! difference is reported instead.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use dflash_eval::{Report, table};
use dflash_model::folder::{Existing, ModelCard, read_config, read_tensors, verify_written, write};
use dflash_model::{BoundDrafter, Drafter, Drafting, Sampling, Target, TargetHead};
use serde::Serialize;
use serde_json::json;

/// Context rows, in tokens, before each compared block.
const CONTEXTS: [usize; 3] = [1, 17, 64];

/// What was checked, and how it went.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verification {
    /// The folder.
    pub folder: String,
    /// The target.
    pub target: String,
    /// The folder against its copy.
    pub copy: Copied,
    /// The decode, when prompts were given.
    pub acceptance: Option<Report>,
    /// The least acceptance length that was asked for.
    pub min_acceptance: Option<f64>,
    /// What failed; empty when nothing did.
    pub failures: Vec<String>,
}

/// How two readings of the same drafter compare.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Copied {
    /// Whether all weights were stored in BF16, so that nothing may differ.
    pub exact: bool,
    /// Blocks compared.
    pub blocks: usize,
    /// Largest difference of the final hidden states.
    pub hidden: f32,
    /// Largest difference of the logits.
    pub logits: f32,
    /// Blocks whose drafted tokens are the same.
    pub same_walks: usize,
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
        let _ = writeln!(
            text,
            "copy        {} blocks, {stored}: hidden differs by {:e}, logits by {:e}, {} walks the same",
            copy.blocks, copy.hidden, copy.logits, copy.same_walks
        );
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

/// Writes the folder's drafter to a temporary folder, reads it back and compares what both draft on `target`.
///
/// # Errors
/// When the folder is not a whole drafter, holds a value that is not finite, or does not fit the target.
pub fn compare_copy(folder: &Path, target: &dyn Target) -> Result<Copied> {
    let config = read_config(folder)?;
    config.check_target(target.info())?;
    let stored = read_tensors(folder, &config, &Device::Cpu)?;
    let place = tempfile::tempdir().context("a temporary folder for the copy")?;
    let copy = place.path().join("drafter");
    write(
        &copy,
        &config,
        &stored,
        &card(folder),
        &json!({"copy_of": folder}),
        Existing::Refuse,
    )?;
    verify_written(&copy, &stored)?;
    let exact = stored.values().all(|tensor| tensor.dtype() == DType::BF16);
    drop(stored);

    let head = target.head().in_f32()?;
    let device = head.embed.device();
    let (ours, copied) = (bind(folder, &head, device)?, bind(&copy, &head, device)?);
    let taps = example_taps(target, ours.taps())?;
    let mut result = Copied {
        exact,
        blocks: 0,
        hidden: 0.0,
        logits: 0.0,
        same_walks: 0,
    };
    for rows in CONTEXTS.iter().filter(|&&rows| rows <= taps.dims()[0]) {
        let context = taps.narrow(0, 0, *rows)?;
        let anchor = example_token(*rows, config.vocab_size);
        let (a, b) = (block(&ours, &context, anchor)?, block(&copied, &context, anchor)?);
        result.blocks += 1;
        result.hidden = result.hidden.max(difference(&a.hidden, &b.hidden)?);
        result.logits = result.logits.max(difference(&a.logits, &b.logits)?);
        result.same_walks += usize::from(a.walk == b.walk);
    }
    Ok(result)
}

/// What a comparison and a decode add up to: one line for each thing that failed.
///
/// `lossless`: whether the target's arithmetic is such that both texts must be the same (f32; in bf16 a pass over a
/// block and a pass over a token differ in the last bits, and near-ties flip).
pub fn failures(copy: &Copied, report: Option<&Report>, lossless: bool, min_acceptance: Option<f64>) -> Vec<String> {
    let mut failures = Vec::new();
    // written so that a NaN fails
    let equal = copy.hidden == 0.0 && copy.logits == 0.0 && copy.same_walks == copy.blocks;
    if copy.blocks == 0 {
        failures.push("no block was compared: the target has too few positions".to_owned());
    }
    if copy.exact && !equal {
        failures.push(format!(
            "the reloaded copy drafts differently: hidden differs by {:e}, logits by {:e}, {} of {} walks the same",
            copy.hidden, copy.logits, copy.same_walks, copy.blocks
        ));
    }
    if !(copy.hidden.is_finite() && copy.logits.is_finite()) {
        failures.push("hidden states or logits are not finite".to_owned());
    }
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

/// One drafted block: final hidden states and logits of slots 1..B, [B - 1, H] and [B - 1, V], and the greedy walk.
struct Block {
    hidden: Tensor,
    logits: Tensor,
    walk: Vec<u32>,
}

fn bind(folder: &Path, head: &TargetHead, device: &Device) -> Result<BoundDrafter> {
    Ok(BoundDrafter::new(Drafter::load(folder, device)?, head)?)
}

fn block(bound: &BoundDrafter, taps: &Tensor, anchor: u32) -> Result<Block> {
    let width = bound.block_size() - 1;
    let mut context = bound.drafter().decoding_context();
    bound.drafter().extend(&mut context, taps)?;
    let (hidden, logits) = bound.slots(&context, anchor, width)?;
    let mut session = bound.session()?;
    session.extend(taps)?;
    let walk = session.propose(anchor, width, &mut Sampling::Greedy)?.tokens();
    Ok(Block { hidden, logits, walk })
}

/// Taps of a fixed sequence, as long as the longest compared context or as the target allows.
fn example_taps(target: &dyn Target, taps: &[usize]) -> Result<Tensor> {
    let info = target.info();
    let longest = CONTEXTS.into_iter().max().unwrap_or(1).min(info.max_positions);
    let tokens: Vec<u32> = (0..longest).map(|i| example_token(i, info.vocab_size)).collect();
    Ok(target.taps(&tokens, taps)?)
}

/// Any tokens do, since both readings see the same; these are spread over the vocabulary.
fn example_token(i: usize, vocab_size: usize) -> u32 {
    (i * 7919 % vocab_size) as u32
}

fn difference(a: &Tensor, b: &Tensor) -> Result<f32> {
    let values = |tensor: &Tensor| tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>();
    let (a, b) = (values(a)?, values(b)?);
    let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs());
    // f32::max would drop a NaN
    Ok(worst.fold(0.0, |worst, now| if now.is_nan() || now > worst { now } else { worst }))
}

/// The copy's card; nobody keeps it.
fn card(folder: &Path) -> ModelCard {
    ModelCard {
        name: folder.display().to_string(),
        base_model: String::from("the target of the original"),
        base_revision: None,
        license: None,
        thinking: None,
        data: None,
        training_length: None,
        acceptance: Vec::new(),
    }
}
