//! Replay acceptance of held-out responses: what serving would accept, without running the target.
//!
//! Token accuracy says little about acceptance: only leading runs count, and each round starts where the last one
//! stopped. The walk of the selector is part of it.

use std::time::Instant;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use dflash_data::source::TapSource;
use dflash_eval::acceptance::{Counts, Tally};
use dflash_eval::replay::{Recording, replay, response_range};
use dflash_model::Drafting;
use rayon::prelude::*;

use crate::metrics::Validation;

/// Replays the samples `indices` of `source`; none when no round counts.
///
/// `stops` are the tokens that end a text; `device` is where the drafter lies.
pub fn validate(
    drafting: &dyn Drafting,
    source: &TapSource,
    indices: &[usize],
    stops: &[u32],
    step: u64,
    device: &Device,
) -> Result<Option<Validation>> {
    let started = Instant::now();
    let width = drafting.block_size() - 1;
    let tallies: Vec<Tally> = indices
        .par_iter()
        .map(|&index| replay_sample(drafting, source, index, stops, device).with_context(|| format!("sample {index}")))
        .collect::<Result<_>>()?;
    let mut total = Tally::new(width);
    for tally in &tallies {
        total.merge(tally);
    }
    let counts: Counts = total.counted(false);
    Ok(counts.acceptance_length().map(|acceptance_length| Validation {
        step,
        acceptance_length,
        rounds: counts.rounds,
        samples: indices.len(),
        accept_at_pos: counts.accept_at_pos(),
        seconds: started.elapsed().as_secs_f64(),
    }))
}

fn replay_sample(
    drafting: &dyn Drafting,
    source: &TapSource,
    index: usize,
    stops: &[u32],
    device: &Device,
) -> Result<Tally> {
    let width = drafting.block_size() - 1;
    let sample = source.sample(index)?;
    let response = response_range(&sample.loss_mask)?;
    let shape = (sample.tokens.len(), sample.tap_width);
    let taps = Tensor::from_slice(&sample.taps, shape, device)?.to_dtype(DType::F32)?;
    let stopped = stops.contains(&sample.tokens[response.end - 1]);
    let recording = Recording {
        tokens: &sample.tokens,
        response,
        taps: &taps,
        stopped,
        max_new: None,
    };
    Ok(Tally::of_text(&replay(drafting, &recording, width)?, width))
}
