//! Training batches: several samples one after another, each with its own context rows and blocks.
//!
//! A block at anchor p of a sample sees that sample's context rows 0..p and nothing of any other sample, which
//! [`Blocks`] states by `context_start` and `anchor`. Rows from the sample's last anchor on are seen by no block and
//! are left out. Slot k is supervised while tokens p..=p+k all belong to the response.

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use dflash_model::{Block, Blocks};
use half::bf16;

use crate::rng::Stream;
use crate::source::Sample;

/// Keeps the order stream apart from all other streams of the same seed.
const ORDER_STREAM: u64 = 0x6F72_6465_72;

/// What one pass of the drafter trains on.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Blocks, labels and context positions.
    pub blocks: Blocks,
    /// Tap states of the context rows, [T, n_taps * H], row-major.
    pub taps: Vec<bf16>,
    /// Length of a tap row, n_taps * H.
    pub tap_width: usize,
    /// Tokens of the samples, context rows that were left out included.
    pub tokens: usize,
    /// Samples in it, those without an anchor included.
    pub samples: usize,
}

impl Batch {
    /// Number of supervised slots: the most that a loss can be averaged over.
    pub fn supervised_slots(&self) -> usize {
        self.blocks.supervised.iter().filter(|on| **on).count()
    }

    /// The taps as a tensor, [T, n_taps * H].
    pub fn taps_tensor(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        let shape = (self.blocks.context_positions.len(), self.tap_width);
        Ok(Tensor::from_slice(&self.taps, shape, device)?.to_dtype(dtype)?)
    }
}

/// Puts samples one after another. `anchors[i]` are the ascending anchors of `samples[i]`.
///
/// # Errors
/// When lists differ in length, an anchor is no supervised pair, or taps do not fit the tokens.
pub fn pack(samples: &[Sample], anchors: &[Vec<usize>], block_size: usize) -> Result<Batch> {
    ensure!(
        samples.len() == anchors.len(),
        "{} samples but anchors of {}",
        samples.len(),
        anchors.len()
    );
    let Some(tap_width) = samples.first().map(|sample| sample.tap_width) else {
        bail!("a batch of no samples")
    };
    let mut blocks = no_blocks(block_size)?;
    let context: usize = anchors.iter().filter_map(|own| own.last()).sum();
    let mut taps = Vec::with_capacity(context * tap_width);
    for (i, (sample, own)) in samples.iter().zip(anchors).enumerate() {
        ensure!(
            sample.tap_width == tap_width && sample.taps.len() == sample.tokens.len() * tap_width,
            "sample {i} of the batch: {} tap values of width {} for {} tokens, expected width {tap_width}",
            sample.taps.len(),
            sample.tap_width,
            sample.tokens.len()
        );
        add_sample(&mut blocks, &sample.tokens, &sample.loss_mask, own)
            .map_err(|error| error.context(format!("sample {i} of the batch")))?;
        let rows = own.last().copied().unwrap_or(0);
        taps.extend_from_slice(&sample.taps[..rows * tap_width]);
    }
    Ok(Batch {
        blocks,
        taps,
        tap_width,
        tokens: samples.iter().map(|sample| sample.tokens.len()).sum(),
        samples: samples.len(),
    })
}

/// Blocks over no context.
///
/// # Errors
/// When `block_size` leaves no slot to predict.
pub fn no_blocks(block_size: usize) -> Result<Blocks> {
    ensure!(block_size >= 2, "block size {block_size}: expected an anchor and at least one slot");
    Ok(Blocks {
        block_size,
        blocks: Vec::new(),
        anchors: Vec::new(),
        context_positions: Vec::new(),
        labels: Vec::new(),
        supervised: Vec::new(),
    })
}

/// Appends the blocks of one sample; its context rows 0..last anchor follow those already there.
///
/// # Errors
/// When the anchors are not ascending supervised pairs of the sample.
pub fn add_sample(blocks: &mut Blocks, tokens: &[u32], loss_mask: &[bool], anchors: &[usize]) -> Result<()> {
    ensure!(
        tokens.len() == loss_mask.len(),
        "{} tokens but a loss mask of {}",
        tokens.len(),
        loss_mask.len()
    );
    for (i, &anchor) in anchors.iter().enumerate() {
        let pair = loss_mask.get(anchor..anchor + 2) == Some(&[true, true]);
        ensure!(pair, "anchor {anchor}: it and the next token must both be supervised ({} tokens)", tokens.len());
        ensure!(i == 0 || anchors[i - 1] < anchor, "anchors are not ascending: {} then {anchor}", anchors[i - 1]);
    }
    let context_start = blocks.context_positions.len();
    let rows = anchors.last().copied().unwrap_or(0);
    blocks.context_positions.extend(0..rows as u32);
    for &anchor in anchors {
        blocks.blocks.push(Block { context_start, anchor });
        blocks.anchors.push(tokens[anchor]);
        let response = loss_mask[anchor..].iter().take_while(|on| **on).count();
        for slot in 0..blocks.block_size {
            let supervised = slot > 0 && slot < response;
            blocks.supervised.push(supervised);
            blocks.labels.push(if supervised { tokens[anchor + slot] } else { 0 });
        }
    }
    Ok(())
}

/// Order and grouping of an epoch: which samples make each micro-batch, a pure function of its arguments.
///
/// Samples in a random order fill a micro-batch until the next one would exceed `pack_tokens`; a sample that is
/// longer by itself stands alone. Every sample appears once.
pub fn plan_epoch(lengths: &[usize], pack_tokens: usize, seed: u64, epoch: u64) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    Stream::new(&[ORDER_STREAM, seed, epoch]).shuffle(&mut order);
    let mut plan: Vec<Vec<usize>> = Vec::new();
    let mut filled = 0_usize;
    for sample in order {
        match plan.last_mut() {
            Some(open) if filled + lengths[sample] <= pack_tokens => {
                open.push(sample);
                filled += lengths[sample];
            }
            _ => {
                plan.push(vec![sample]);
                filled = lengths[sample];
            }
        }
    }
    plan
}
