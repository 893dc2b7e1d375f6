//! Two readings of a drafter held against each other: the same hidden states, logits and walks on the same target.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use dflash_model::formats::Source;
use dflash_model::{BoundDrafter, Drafter, Drafting, Sampling, Target, TargetHead};
use serde::Serialize;

/// Context rows, in tokens, before each compared block.
const CONTEXTS: [usize; 3] = [1, 17, 64];

/// How two readings of the same drafter compare.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Compared {
    /// Whether both hold the same numbers, so that nothing may differ.
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

impl Compared {
    /// The numbers in one line.
    pub fn line(&self) -> String {
        format!(
            "{} blocks: hidden differs by {:e}, logits by {:e}, {} walks the same",
            self.blocks, self.hidden, self.logits, self.same_walks
        )
    }

    /// What is wrong with it; nothing when both drafted alike, or finitely where rounding lies between them.
    pub fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        // written so that a NaN fails
        let equal = self.hidden == 0.0 && self.logits == 0.0 && self.same_walks == self.blocks;
        if self.blocks == 0 {
            failures.push("no block was compared: the target has too few positions".to_owned());
        }
        if self.exact && !equal {
            failures.push(format!(
                "the reloaded copy drafts differently: hidden differs by {:e}, logits by {:e}, {} of {} walks the same",
                self.hidden, self.logits, self.same_walks, self.blocks
            ));
        }
        if !(self.hidden.is_finite() && self.logits.is_finite()) {
            failures.push("hidden states or logits are not finite".to_owned());
        }
        failures
    }
}

/// Drafts the same blocks with both on `target`; `exact` says that their numbers are the same.
///
/// # Errors
/// When one of them does not fit the target, they tap different layers, or one cannot be computed.
pub fn compare(a: &Source, b: &Source, exact: bool, target: &dyn Target) -> Result<Compared> {
    for source in [a, b] {
        source.config.check_target(target.info())?;
    }
    let head = target.head().in_f32()?;
    let device = head.embed.device();
    let (ours, theirs) = (bind(a, &head, device)?, bind(b, &head, device)?);
    ensure!(
        ours.taps() == theirs.taps(),
        "the one taps layers {:?}, the other {:?}",
        ours.taps(),
        theirs.taps()
    );
    let taps = example_taps(target, ours.taps())?;
    let mut result = Compared {
        exact,
        blocks: 0,
        hidden: 0.0,
        logits: 0.0,
        same_walks: 0,
    };
    for rows in CONTEXTS.iter().filter(|&&rows| rows <= taps.dims()[0]) {
        let anchor = example_token(*rows, a.config.vocab_size);
        let context = taps.narrow(0, 0, *rows)?;
        let (first, second) = (block(&ours, &context, anchor)?, block(&theirs, &context, anchor)?);
        result.blocks += 1;
        result.hidden = result.hidden.max(difference(&first.hidden, &second.hidden)?);
        result.logits = result.logits.max(difference(&first.logits, &second.logits)?);
        result.same_walks += usize::from(first.walk == second.walk);
    }
    Ok(result)
}

/// One drafted block: final hidden states and logits of slots 1..B, [B - 1, H] and [B - 1, V], and the greedy walk.
pub(crate) struct Block {
    pub(crate) hidden: Tensor,
    logits: Tensor,
    walk: Vec<u32>,
}

pub(crate) fn bind(source: &Source, head: &TargetHead, device: &Device) -> Result<BoundDrafter> {
    Ok(BoundDrafter::new(Drafter::from_source(source, device)?, head)?)
}

pub(crate) fn block(bound: &BoundDrafter, taps: &Tensor, anchor: u32) -> Result<Block> {
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
