//! The DFlash loss and the selector's.
//!
//! Base: L = sum(w_j * CE_j) / sum(w_j) over supervised slots j >= 1, w_j = exp(-(j - 1) / gamma), labels the data
//! tokens. Selector: the same weights over those slots whose label is among the k best (a strict top-k), CE of
//! softmax over the k candidates of u(c) + edge(p, c), p the data token one position before; its own denominator.
//!
//! Teacher forcing is on-policy for acceptance: a slot counts only if all before it were accepted, and then its
//! predecessor is the data token.

use candle_core::{D, Result, Tensor};
use dflash_model::ops::{CrossEntropy, gathered_dot, linear_cross_entropy};
use dflash_model::selector::TouchedRows;
use dflash_model::{Blocks, Drafter, TargetHead};
use std::sync::Arc;

/// Settings of the loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossSettings {
    /// Decay length of the slot weights, in slots; larger is flatter.
    pub gamma: f64,
    /// Factor of the selector's loss; 0 leaves the selector untrained but measured.
    pub selector_alpha: f64,
    /// Replaces the weakest candidate by the label where it is missing, as one peer trainer does. Off: strict.
    pub inject_gold: bool,
    /// Whether the selector's gradient stops before the hidden states.
    pub selector_detached: bool,
}

/// Sums and counts of one or more passes; ratios are formed only when printed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepSums {
    /// Sum of w * CE over supervised slots, nats.
    pub base_loss: f64,
    /// Sum of w over supervised slots.
    pub weight: f64,
    /// Sum of w * selector CE over hits, nats.
    pub selector_loss: f64,
    /// Sum of w over hits.
    pub selector_weight: f64,
    /// Supervised slots by slot index 0..B (index 0 stays 0).
    pub slot_total: Vec<u64>,
    /// Of these, where the best unary token is the label.
    pub slot_correct: Vec<u64>,
    /// Slots whose label is among the k best.
    pub hits: u64,
    /// Of the hits, where the teacher-forced selector picks the label.
    pub selector_correct: u64,
    /// Of the hits, where the best unary token is the label.
    pub unary_correct_on_hits: u64,
    /// Context rows passed through.
    pub context_rows: u64,
}

impl StepSums {
    /// Adds another pass.
    pub fn add(&mut self, other: &Self) {
        self.base_loss += other.base_loss;
        self.weight += other.weight;
        self.selector_loss += other.selector_loss;
        self.selector_weight += other.selector_weight;
        self.slot_total
            .resize(self.slot_total.len().max(other.slot_total.len()), 0);
        self.slot_correct.resize(self.slot_total.len(), 0);
        for (i, (total, correct)) in other.slot_total.iter().zip(&other.slot_correct).enumerate() {
            self.slot_total[i] += total;
            self.slot_correct[i] += correct;
        }
        self.hits += other.hits;
        self.selector_correct += other.selector_correct;
        self.unary_correct_on_hits += other.unary_correct_on_hits;
        self.context_rows += other.context_rows;
    }

    /// Supervised slots.
    pub fn slots(&self) -> u64 {
        self.slot_total.iter().sum()
    }

    /// Base loss in nats a unit of weight; NaN without slots.
    pub fn mean_base_loss(&self) -> f64 {
        self.base_loss / self.weight
    }

    /// Selector loss in nats a unit of weight; 0 without hits.
    pub fn mean_selector_loss(&self) -> f64 {
        if self.selector_weight > 0.0 {
            self.selector_loss / self.selector_weight
        } else {
            0.0
        }
    }

    /// Share of slots whose label is among the k best.
    pub fn recall(&self) -> f64 {
        self.hits as f64 / self.slots().max(1) as f64
    }

    /// Share of slots that the selector wins over the unary choice (negative: loses), teacher-forced.
    pub fn selector_lift(&self) -> f64 {
        (self.selector_correct as f64 - self.unary_correct_on_hits as f64) / self.slots().max(1) as f64
    }
}

/// Weight of each slot 0..B: 0 for the anchor, then exp(-(j - 1) / gamma).
pub fn slot_weights(block_size: usize, gamma: f64) -> Vec<f32> {
    (0..block_size)
        .map(|j| {
            if j == 0 {
                0.0
            } else {
                (-((j - 1) as f64) / gamma).exp() as f32
            }
        })
        .collect()
}

/// Sum of the weights of all supervised slots: the base loss's denominator, known before any forward pass.
pub fn total_weight(blocks: &Blocks, gamma: f64) -> f64 {
    let weights = slot_weights(blocks.block_size, gamma);
    let supervised = blocks.supervised.iter().enumerate().filter(|(_, on)| **on);
    supervised.map(|(i, _)| f64::from(weights[i % blocks.block_size])).sum()
}

/// A scalar whose gradient is that of the loss, with the sums that describe it and the codebook rows in its graph.
///
/// `hidden`: [N * B, H] with history; `head` in any float type. The base loss is divided by `denominator` (the weights of the
/// whole optimizer step); the selector's mean over this pass counts with this pass's share of that denominator.
/// `None` when no slot is supervised.
///
/// # Errors
/// When a slot 0 is marked as supervised, or sizes do not fit.
pub fn loss(
    drafter: &Drafter,
    hidden: &Tensor,
    head: &TargetHead,
    blocks: &Blocks,
    settings: LossSettings,
    denominator: f64,
) -> Result<Option<(Tensor, StepSums, Vec<TouchedRows>)>> {
    let b = blocks.block_size;
    let all_weights = slot_weights(b, settings.gamma);
    let rows: Vec<usize> = (0..blocks.supervised.len()).filter(|i| blocks.supervised[*i]).collect();
    if let Some(row) = rows.iter().find(|row| **row % b == 0) {
        candle_core::bail!("block {}: its anchor slot is marked as supervised", row / b)
    }
    if rows.is_empty() {
        return Ok(None);
    }
    let slots = Slots {
        weights: rows.iter().map(|row| all_weights[row % b]).collect(),
        labels: rows.iter().map(|row| blocks.labels[*row]).collect(),
        predecessors: rows
            .iter()
            .map(|row| {
                if row % b == 1 {
                    blocks.anchors[row / b]
                } else {
                    blocks.labels[row - 1]
                }
            })
            .collect(),
        hidden: select_rows(hidden, &rows)?,
    };
    let shape = drafter.logit_shape();
    let k = drafter.selector.as_ref().map_or(1, |selector| selector.top_k);
    let scaled: Vec<f32> = slots
        .weights
        .iter()
        .map(|w| (f64::from(*w) / denominator) as f32)
        .collect();
    let base = linear_cross_entropy(
        &slots.hidden,
        &head.head,
        &slots.labels,
        &scaled,
        shape,
        k,
        drafter.compute,
    )?;

    let mut sums = StepSums {
        slot_total: vec![0; b],
        slot_correct: vec![0; b],
        weight: slots.weights.iter().map(|w| f64::from(*w)).sum(),
        context_rows: blocks.context_positions.len() as u64,
        ..StepSums::default()
    };
    for (i, row) in rows.iter().enumerate() {
        sums.base_loss += f64::from(slots.weights[i]) * f64::from(base.losses[i]);
        sums.slot_total[row % b] += 1;
        sums.slot_correct[row % b] += u64::from(base.top[i * k] == slots.labels[i]);
    }
    // d/dhidden of sum(hidden * g) is g: the gradient computed with the loss enters the graph here.
    let mut total = (&slots.hidden * base.hidden_gradient.detach())?.sum_all()?;
    let mut touched = Vec::new();
    if let Some((selector, rows)) = selector_loss(drafter, head, &slots, &base, settings, &mut sums)? {
        let share = settings.selector_alpha * sums.weight / denominator;
        total = (total + (selector * share)?)?;
        touched = rows;
    }
    Ok(Some((total, sums, touched)))
}

/// The supervised slots of a pass, one entry a slot.
struct Slots {
    weights: Vec<f32>,
    labels: Vec<u32>,
    /// Data token one position before the label.
    predecessors: Vec<u32>,
    hidden: Tensor, // [slots, H]
}

/// Weighted mean CE of the selector over the hits; `None` without a selector or a hit.
fn selector_loss(
    drafter: &Drafter,
    head: &TargetHead,
    slots: &Slots,
    base: &CrossEntropy,
    settings: LossSettings,
    sums: &mut StepSums,
) -> Result<Option<(Tensor, Vec<TouchedRows>)>> {
    let Some(selector) = &drafter.selector else {
        return Ok(None);
    };
    let k = selector.top_k;
    let (mut rows, mut candidates, mut gold, mut hit) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (i, label) in slots.labels.iter().enumerate() {
        let top = &base.top[i * k..(i + 1) * k];
        let found = top.iter().position(|id| id == label);
        sums.hits += u64::from(found.is_some());
        sums.unary_correct_on_hits += u64::from(found == Some(0));
        let Some(at) = found.or(settings.inject_gold.then_some(k - 1)) else {
            continue;
        };
        rows.push(i);
        candidates.extend_from_slice(top);
        gold.push(at as u32);
        hit.push(found.is_some());
        if found.is_none() {
            let weakest = candidates.len() - 1;
            candidates[weakest] = *label;
        }
    }
    if rows.is_empty() {
        return Ok(None);
    }
    let weights: Vec<f32> = rows.iter().map(|i| slots.weights[*i]).collect();
    let predecessors: Vec<u32> = rows.iter().map(|i| slots.predecessors[*i]).collect();
    let candidates = Arc::new(candidates);
    let mut hidden = select_rows(&slots.hidden, &rows)?;
    if settings.selector_detached {
        hidden = hidden.detach();
    }
    let unary = drafter
        .logit_shape()
        .apply(&gathered_dot(&hidden, &head.head, &candidates, k)?)?;
    let edges = selector.edges(&hidden, &predecessors, &candidates, head)?;
    let scores = (unary + edges.scores)?;
    let log_probs = log_softmax(&scores)?;
    let gold_ids = Tensor::from_slice(&gold, (gold.len(), 1), hidden.device())?;
    let losses = log_probs.gather(&gold_ids, D::Minus1)?.neg()?.squeeze(1)?;

    for ((scores, gold), hit) in scores.to_vec2::<f32>()?.iter().zip(&gold).zip(&hit) {
        let best = (1..k).fold(0, |best, c| if scores[c] > scores[best] { c } else { best });
        sums.selector_correct += u64::from(*hit && best == *gold as usize);
    }
    let weight: f64 = weights.iter().map(|w| f64::from(*w)).sum();
    let weighted = losses
        .to_vec1::<f32>()?
        .iter()
        .zip(&weights)
        .map(|(l, w)| f64::from(*l) * f64::from(*w))
        .sum::<f64>();
    sums.selector_loss += weighted;
    sums.selector_weight += weight;
    let normalised: Vec<f32> = weights.iter().map(|w| (f64::from(*w) / weight) as f32).collect();
    let normalised = Tensor::from_vec(normalised, losses.dim(0)?, hidden.device())?;
    Ok(Some(((losses * normalised)?.sum_all()?, edges.touched)))
}

/// log softmax over the candidates, from differentiable operations.
fn log_softmax(scores: &Tensor) -> Result<Tensor> {
    let shifted = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?;
    shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(D::Minus1)?.log()?)
}

fn select_rows(x: &Tensor, rows: &[usize]) -> Result<Tensor> {
    let ids: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
    x.index_select(&Tensor::from_vec(ids, rows.len(), x.device())?, 0)
}
