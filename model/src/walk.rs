//! Drafting with a real drafter: one block pass, then the walk over its candidates.
//!
//! DFlash takes each slot's best token. DFlash 2 walks left to right over the k best of each slot with the
//! selector's pair scores; at temperature T it draws from softmax(S / T) over the k candidates and keeps that row,
//! the realised q, for exact verification. Top-p, penalties and the like never touch the draft side.

use crate::drafter::{DecodingContext, Drafter};
use crate::drafter_cpu::{CpuDrafter, CpuSession};
use crate::drafting::{DraftSession, Drafting, Proposal, ProposalSlot, Sampling};
use crate::ops::{Weight, top_k};
use crate::target::TargetHead;
use candle_core::{DType, Result, Tensor};
use std::sync::Arc;

/// A drafter joined to its target's embedding and head, ready to propose.
#[derive(Debug, Clone)]
pub struct BoundDrafter {
    drafter: Drafter,
    head: TargetHead,
    /// The head again, in the form that few rows are multiplied with.
    logits: Weight,
    /// The same on slices, where that is possible: what a session decodes with.
    slices: Option<Arc<CpuDrafter>>,
}

impl BoundDrafter {
    /// Joins the two.
    ///
    /// # Errors
    /// When the head's sizes are not the drafter's.
    pub fn new(drafter: Drafter, head: &TargetHead) -> Result<Self> {
        let (v, h) = head.head.dims2()?;
        let config = &drafter.config;
        if (v, h) != (config.vocab_size, config.hidden_size) {
            candle_core::bail!(
                "drafter for a vocabulary of {} and hidden size {}: the target's head is [{v}, {h}]",
                config.vocab_size,
                config.hidden_size
            )
        }
        let mut logits = Weight::frozen(&head.head)?;
        Weight::gather([&mut logits])?;
        let slices = CpuDrafter::new(&drafter, head, &logits)?.map(Arc::new);
        Ok(Self {
            drafter,
            head: head.clone(),
            logits,
            slices,
        })
    }

    /// The drafter.
    pub fn drafter(&self) -> &Drafter {
        &self.drafter
    }

    /// The target's embedding and head.
    pub fn head(&self) -> &TargetHead {
        &self.head
    }

    /// A session of tensor operations, on any device.
    pub(crate) fn composed_session(&self) -> impl DraftSession + '_ {
        BoundSession {
            bound: self,
            context: self.drafter.decoding_context(),
        }
    }

    /// The form on slices, if this drafter has one.
    #[cfg(test)]
    pub(crate) fn slices(&self) -> Option<&CpuDrafter> {
        self.slices.as_deref()
    }

    /// Post-norm hidden and logits (shaped) of the slots 1..=width after `anchor`: [width, H] and [width, V].
    pub fn slots(&self, context: &DecodingContext, anchor: u32, width: usize) -> Result<(Tensor, Tensor)> {
        let hidden = self
            .drafter
            .block_hidden(context, anchor, width + 1, &self.head)?
            .narrow(0, 1, width)?;
        let logits = self.drafter.logit_shape().apply(&self.logits.apply(&hidden)?)?;
        Ok((hidden, logits))
    }
}

impl Drafting for BoundDrafter {
    fn block_size(&self) -> usize {
        self.drafter.config.block_size
    }

    fn taps(&self) -> &[usize] {
        &self.drafter.config.target_layer_ids
    }

    fn session(&self) -> Result<Box<dyn DraftSession + '_>> {
        Ok(match &self.slices {
            Some(slices) => Box::new(CpuSession::new(slices)),
            None => Box::new(self.composed_session()),
        })
    }
}

struct BoundSession<'d> {
    bound: &'d BoundDrafter,
    context: DecodingContext,
}

impl DraftSession for BoundSession<'_> {
    fn len(&self) -> usize {
        self.context.len
    }

    fn extend(&mut self, taps: &Tensor) -> Result<()> {
        self.bound.drafter.extend(&mut self.context, taps)
    }

    fn propose(&mut self, anchor: u32, width: usize, sampling: &mut Sampling<'_>) -> Result<Proposal> {
        check_width(self.bound.block_size(), width)?;
        let (hidden, logits) = self.bound.slots(&self.context, anchor, width)?;
        walk(self.bound, &hidden, &logits, anchor, sampling)
    }
}

/// Refuses a proposal that is no part of a block.
pub(crate) fn check_width(block_size: usize, width: usize) -> Result<()> {
    if width == 0 || width >= block_size {
        candle_core::bail!(
            "proposal of {width} tokens: a block of {block_size} has 1 to {}",
            block_size - 1
        )
    }
    Ok(())
}

/// Chooses a token a slot. `hidden`: [width, H], `logits`: [width, V] shaped unary logits.
pub fn walk(
    bound: &BoundDrafter,
    hidden: &Tensor,
    logits: &Tensor,
    anchor: u32,
    sampling: &mut Sampling<'_>,
) -> Result<Proposal> {
    let rows = logits.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    let projected = match &bound.drafter.selector {
        Some(selector) => Some((selector, selector.project(hidden)?)),
        None => None,
    };
    let k = bound.drafter.selector.as_ref().map_or(1, |selector| selector.top_k);
    let mut slots = Vec::with_capacity(rows.len());
    let mut previous = anchor;
    for (i, unary) in rows.iter().enumerate() {
        if has_nan(unary)
            && let Some(id) = unary.iter().position(|u| u.is_nan())
        {
            candle_core::bail!("drafter logits: slot {} has NaN at token {id}", i + 1)
        }
        let mut candidates = vec![0u32; k];
        top_k(unary, &mut candidates);
        let slot = match &projected {
            None => ProposalSlot {
                token: candidates[0],
                candidates: Vec::new(),
                q: Vec::new(),
            },
            Some((selector, z)) => {
                let ids = Arc::new(candidates.clone());
                let edges = selector.edges_of(&z.narrow(0, i, 1)?, &[previous], &ids, &bound.head)?;
                let edges = edges.flatten_all()?.to_vec1::<f32>()?;
                let scores: Vec<f32> = candidates
                    .iter()
                    .zip(&edges)
                    .map(|(id, edge)| unary[*id as usize] + edge)
                    .collect();
                choose(candidates, &scores, sampling)?
            }
        };
        previous = slot.token;
        slots.push(slot);
    }
    Ok(Proposal { slots })
}

/// Whether a NaN is among the values: all are looked at, which vectorises where a search for the first does not.
fn has_nan(values: &[f32]) -> bool {
    values.iter().fold(false, |found, value| found | value.is_nan())
}

/// Probabilities softmax(scores / temperature), f32, summing to 1.
pub fn draft_distribution(scores: &[f32], temperature: f64) -> Vec<f32> {
    let best = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exps: Vec<f64> = scores
        .iter()
        .map(|s| (f64::from(s - best) / temperature).exp())
        .collect();
    let total: f64 = exps.iter().sum();
    exps.iter().map(|e| (e / total) as f32).collect()
}

/// One slot's token by its candidates' scores: the best, or drawn.
pub(crate) fn choose(candidates: Vec<u32>, scores: &[f32], sampling: &mut Sampling<'_>) -> Result<ProposalSlot> {
    if scores.iter().any(|s| s.is_nan()) {
        candle_core::bail!("selector scores: NaN among candidates {candidates:?}")
    }
    match sampling {
        Sampling::Greedy => {
            let mut best = 0;
            for (i, score) in scores.iter().enumerate() {
                if *score > scores[best] {
                    best = i;
                }
            }
            Ok(ProposalSlot {
                token: candidates[best],
                candidates,
                q: Vec::new(),
            })
        }
        Sampling::Random { temperature, uniform } => {
            let q = draft_distribution(scores, *temperature);
            let mut left = uniform();
            let mut chosen = q.len() - 1;
            for (i, p) in q.iter().enumerate() {
                left -= f64::from(*p);
                if left < 0.0 {
                    chosen = i;
                    break;
                }
            }
            // Rounding may leave a remainder behind the last entry: never choose a token of probability zero.
            while q[chosen] == 0.0 && chosen > 0 {
                chosen -= 1;
            }
            Ok(ProposalSlot {
                token: candidates[chosen],
                candidates,
                q,
            })
        }
    }
}
