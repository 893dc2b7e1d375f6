//! From logits to tokens on slices: shape, k best, and the selector's walk.
#![expect(
    clippy::inline_always,
    reason = "a kernel must be inlined into the function compiled for the wide unit"
)]

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use super::{CpuDrafter, shared};
use crate::buffer::Buffer;
use crate::drafting::{Proposal, ProposalSlot, Sampling};
use crate::ops::{LogitShape, with_slice};
use crate::packed::Packed;
use crate::selector::{CandidateSelector, CodebookTensors};
use crate::simd::dot;
use crate::target::kernels::{Kernel, each_row, wide};
use crate::walk::choose;

/// Values of a block, which has one maximum for every [`LANES`]-th of them: no maximum is ever taken across a vector.
const BLOCK: usize = 1024;
const LANES: usize = 16;

/// DFlash 2's selector with its tables.
#[derive(Debug)]
pub(super) struct Selector {
    top_k: usize,
    projection: Arc<Packed>, // [r, H]
    predecessor: Tensor,     // [V, r] f32
    successor: Tensor,       // [V, r] f32
}

impl Selector {
    pub(super) fn new(selector: &CandidateSelector) -> Result<Self> {
        let CodebookTensors::Free { predecessor, successor } = &selector.codebooks else {
            bail!("selector: expected codebooks as tables, came factors")
        };
        Ok(Self {
            top_k: selector.top_k,
            projection: shared(&selector.hidden_projection)?,
            predecessor: predecessor.contiguous()?,
            successor: successor.contiguous()?,
        })
    }
}

impl CpuDrafter {
    /// Chooses a token a slot, as [`crate::walk::walk`]. `hidden`: [width, H], `logits`: [width, V] shaped.
    pub(super) fn walk(
        &self,
        hidden: &[f32],
        logits: &[f32],
        anchor: u32,
        sampling: &mut Sampling<'_>,
    ) -> Result<Proposal> {
        let v = self.config.vocab_size;
        let maxima = lane_maxima(logits, v);
        let rows = logits.chunks_exact(v).zip(maxima.chunks_exact(groups(v))).enumerate();
        let Some(selector) = &self.selector else {
            let best = |(i, (unary, maxima))| {
                Ok(ProposalSlot {
                    token: best(unary, maxima, 1, i + 1)?[0].1,
                    candidates: Vec::new(),
                    q: Vec::new(),
                })
            };
            let slots = rows.map(best).collect::<Result<_>>()?;
            return Ok(Proposal { slots });
        };
        let projected = selector.projection.product(hidden);
        let r = selector.projection.width();
        with_slice(&selector.predecessor, "selector", |predecessors| {
            with_slice(&selector.successor, "selector", |successors| {
                let mut slots = Vec::with_capacity(projected.len() / r);
                let (mut previous, mut paired) = (anchor, Buffer::zeros(r));
                for (i, (unary, maxima)) in rows {
                    let best = best(unary, maxima, selector.top_k, i + 1)?;
                    let candidates: Vec<u32> = best.iter().map(|(_, id)| *id).collect();
                    let mut scores: Vec<f32> = best.iter().map(|(unary, _)| *unary).collect();
                    wide::<AddEdges>(Pairs {
                        predecessor: &predecessors[previous as usize * r..][..r],
                        z: &projected[i * r..][..r],
                        paired: &mut paired,
                        successors,
                        candidates: &candidates,
                        scores: &mut scores,
                    });
                    let slot = choose(candidates, &scores, sampling)?;
                    previous = slot.token;
                    slots.push(slot);
                }
                Ok(Proposal { slots })
            })
        })
    }
}

/// One slot's candidates and what scores them.
struct Pairs<'a> {
    /// Row of the token before, `[r]`.
    predecessor: &'a [f32],
    /// The slot's projected hidden, `[r]`.
    z: &'a [f32],
    /// Their product, `[r]`.
    paired: &'a mut [f32],
    /// [V, r].
    successors: &'a [f32],
    candidates: &'a [u32],
    /// A number a candidate.
    scores: &'a mut [f32],
}

/// scores += pair scores.
struct AddEdges;

impl Kernel for AddEdges {
    type Args<'a> = Pairs<'a>;

    #[inline(always)]
    fn run(pairs: Self::Args<'_>) {
        let r = pairs.z.len();
        for ((paired, a), z) in pairs.paired.iter_mut().zip(pairs.predecessor).zip(pairs.z) {
            *paired = a * z;
        }
        for (score, id) in pairs.scores.iter_mut().zip(pairs.candidates) {
            *score += dot(&pairs.successors[*id as usize * r..][..r], pairs.paired);
        }
    }
}

/// What happens between head and logits, in place; `logits` is [rows, V].
pub(super) fn shape(logits: &mut [f32], shape: LogitShape, v: usize) {
    let plain = shape.multiplier.to_bits() == 1f64.to_bits();
    if plain && shape.softcap.is_none() {
        return;
    }
    let multiplier = shape.multiplier as f32;
    each_row(logits, v, |_, row| {
        if !plain {
            for x in row.iter_mut() {
                *x *= multiplier;
            }
        }
        if let Some(cap) = shape.softcap {
            let (inverse, cap) = ((1.0 / cap) as f32, cap as f32);
            for x in row {
                *x = (*x * inverse).tanh() * cap;
            }
        }
    });
}

/// Maxima of a row of `v` values.
fn groups(v: usize) -> usize {
    v.div_ceil(BLOCK) * LANES
}

/// For every block of a row, the largest of its values 0, 16, 32, ..., then of 1, 17, 33, ... and so on; NaN where one is
/// among them. `logits`: [rows, V].
fn lane_maxima(logits: &[f32], v: usize) -> Buffer {
    let mut maxima = Buffer::zeros(logits.len() / v * groups(v));
    each_row(&mut maxima, groups(v), |i, out| {
        wide::<LaneMaxima>((&logits[i * v..][..v], out));
    });
    maxima
}

struct LaneMaxima;

impl Kernel for LaneMaxima {
    type Args<'a> = (&'a [f32], &'a mut [f32]);

    #[inline(always)]
    fn run((row, maxima): Self::Args<'_>) {
        for (block, maxima) in row.chunks(BLOCK).zip(maxima.chunks_exact_mut(LANES)) {
            let (mut best, mut sick) = ([f32::NEG_INFINITY; LANES], [0u32; LANES]);
            let chunks = block.chunks_exact(LANES);
            let rest = chunks.remainder();
            for chunk in chunks {
                for l in 0..LANES {
                    best[l] = if chunk[l] > best[l] { chunk[l] } else { best[l] };
                    sick[l] |= u32::from(chunk[l].is_nan());
                }
            }
            for (l, x) in rest.iter().enumerate() {
                best[l] = if *x > best[l] { *x } else { best[l] };
                sick[l] |= u32::from(x.is_nan());
            }
            for l in 0..LANES {
                maxima[l] = if sick[l] == 0 { best[l] } else { f32::NAN };
            }
        }
    }
}

/// The k largest values of a row with their ids, best first, ties to the lower id.
///
/// The k-th largest of the maxima is reached by k values at least, so only groups that reach it are looked into.
///
/// # Errors
/// When a value is NaN, naming `slot` and the first such token.
fn best(row: &[f32], maxima: &[f32], k: usize, slot: usize) -> Result<Vec<(f32, u32)>> {
    if maxima.iter().any(|x| x.is_nan())
        && let Some(id) = row.iter().position(|x| x.is_nan())
    {
        bail!("drafter logits: slot {slot} has NaN at token {id}")
    }
    let mut order = maxima.to_vec();
    let threshold = if k <= order.len() {
        *order.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
    } else {
        f32::NEG_INFINITY
    };
    let mut found = Vec::with_capacity(2 * k);
    for (group, _) in maxima.iter().enumerate().filter(|(_, max)| **max >= threshold) {
        let (first, lane) = (group / LANES * BLOCK, group % LANES);
        let block = &row[first..row.len().min(first + BLOCK)];
        for (i, x) in block.iter().enumerate().skip(lane).step_by(LANES) {
            if *x >= threshold {
                found.push((*x, (first + i) as u32));
            }
        }
    }
    found.sort_unstable_by(|(a, i), (b, j)| b.partial_cmp(a).unwrap_or(std::cmp::Ordering::Equal).then(i.cmp(j)));
    found.truncate(k);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_best_are_those_of_top_k_with_ties_and_infinities(
            values in prop::collection::vec(-6i8..7, 1..3000), k in 1usize..20,
        ) {
            let value = |v: &i8| if *v == -6 { f32::NEG_INFINITY } else { f32::from(*v) * 0.5 };
            let row: Vec<f32> = values.iter().map(value).collect();
            let k = k.min(row.len());
            let mut top = vec![0; k];
            crate::ops::top_k(&row, &mut top);
            let ids: Vec<u32> = best(&row, &lane_maxima(&row, row.len()), k, 1).unwrap().iter().map(|b| b.1).collect();
            prop_assert_eq!(ids, top);
        }

        #[test]
        fn a_nan_is_named_by_slot_and_token(len in 1usize..3000, at in 0usize..3000) {
            let mut row = vec![1.0; len];
            row[at % len] = f32::NAN;
            let error = best(&row, &lane_maxima(&row, len), 1, 3).unwrap_err().to_string();
            prop_assert!(error.contains(&format!("slot 3 has NaN at token {}", at % len)), "{}", error);
        }
    }
}
