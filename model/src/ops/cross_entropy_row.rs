//! One row of the cross-entropy as it passes the vocabulary tile by tile: running maximum, sum, gradient.
//!
//! Once a drafter is trained, a row gives nearly all its probability to few tokens. Where few of a tile's tokens have more
//! than [`SMALLEST`] of the row's sum so far and the others together at most [`LEFT_OUT`] of it, spread over V, only those
//! few head rows are added and the tile's second product is made without the row. The sum only grows, so that what is
//! left out of a row's gradient is weighted by less than [`LEFT_OUT`] in all; loss and best tokens see every logit.

use super::best::Best;
use crate::simd::{exp, exp_shifted, max, vectorised};

/// Probability below which a token's head row can be left out of the gradient: beside the row's largest, whose weight
/// is at most 1, its contribution is under the resolution of f32.
const SMALLEST: f32 = 1.0 / (1 << 24) as f32;

/// Most probability that is left out of a row in all.
const LEFT_OUT: f32 = 1.0 / (1 << 16) as f32;

/// A row is added token by token when at most one in so many of a tile's tokens is kept; one large product is faster
/// above.
const SPARSE: usize = 32;

/// What a row has seen of the vocabulary so far.
pub(super) struct Row {
    label: usize,
    /// The label's logit.
    chosen: f32,
    /// Largest logit.
    largest: f32,
    /// Sum of exp(logit - largest).
    total: f64,
    /// Whether no logit was NaN: exp() saturates instead of passing it on.
    numbers: bool,
    /// Whether the last tile's head rows are in the gradient already.
    pub(super) added: bool,
    pub(super) best: Best,
}

impl Row {
    pub(super) fn new(label: u32, k: usize) -> Self {
        Self {
            label: label as usize,
            chosen: f32::NAN,
            largest: f32::NEG_INFINITY,
            total: 0.0,
            numbers: true,
            added: false,
            best: Best::new(k),
        }
    }

    /// Turns the logits of the tokens from `first` into what multiplies their head rows, on the scale of the largest
    /// logit so far, and brings `gradient`, the sum of earlier tiles, to that scale.
    pub(super) fn take(&mut self, logits: &mut [f32], first: usize, softcap: Option<f64>, gradient: &mut [f32]) {
        self.best.offer(logits, first as u32);
        if let Some(logit) = self.label.checked_sub(first).and_then(|at| logits.get(at)) {
            self.chosen = *logit;
        }
        vectorised(
            #[inline(always)]
            || {
                self.numbers &= logits.iter().all(|x| !x.is_nan());
                let largest = max(logits).max(self.largest);
                if largest > self.largest {
                    let scale = exp(self.largest - largest);
                    self.largest = largest;
                    self.total *= f64::from(scale);
                    for sum in gradient.iter_mut() {
                        *sum *= scale;
                    }
                }
                self.total += f64::from(match softcap {
                    None => exp_shifted(logits, largest),
                    Some(cap) => capped(logits, largest, cap as f32),
                });
            },
        );
    }

    /// Adds the head rows of the tile (`head` [tokens, H]) to `gradient` where few of `exponentials`, what [`Row::take`]
    /// left, count; says in `added` whether it did.
    pub(super) fn add_few(&mut self, exponentials: &[f32], head: &[f32], vocabulary: usize, gradient: &mut [f32]) {
        let floor = SMALLEST * self.total as f32;
        let most = LEFT_OUT * self.total as f32 * exponentials.len() as f32 / vocabulary as f32;
        let (mut kept, mut dropped) = (0u32, 0f32);
        vectorised(
            #[inline(always)]
            || {
                for x in exponentials {
                    kept += u32::from(*x > floor);
                    dropped += if *x > floor { 0.0 } else { *x };
                }
            },
        );
        // a NaN is kept by nothing, makes `dropped` NaN and so the tile a dense one
        self.added = kept as usize * SPARSE <= exponentials.len() && dropped <= most;
        if !self.added {
            return;
        }
        for (x, head) in exponentials.iter().zip(head.chunks_exact(gradient.len())) {
            if *x > floor {
                vectorised(
                    #[inline(always)]
                    || {
                        for (sum, head) in gradient.iter_mut().zip(head) {
                            *sum += x * head;
                        }
                    },
                );
            }
        }
    }

    pub(super) fn loss(&self) -> f32 {
        if self.largest.is_finite() && self.numbers {
            self.largest + self.total.ln() as f32 - self.chosen
        } else {
            f32::NAN
        }
    }

    /// d(scale / multiplier * loss) / d(hidden), from the sum of all head rows and the label's own.
    pub(super) fn finish(&self, gradient: &mut [f32], label: &[f32], scale: f32, softcap: Option<f64>) {
        let slope = softcap.map_or(1.0, |cap| 1.0 - (self.chosen / cap as f32).powi(2));
        let shrink = (1.0 / self.total) as f32;
        for (sum, label) in gradient.iter_mut().zip(label) {
            *sum = scale * (*sum * shrink - slope * label);
        }
    }
}

/// As [`exp_shifted`], leaving exp(u - shift) times du/dl = 1 - (u / cap)^2 behind.
#[inline(always)]
#[expect(clippy::inline_always, reason = "see simd::vectorised")]
fn capped(logits: &mut [f32], shift: f32, cap: f32) -> f32 {
    let mut total = 0.0;
    for u in logits {
        let (value, part) = (exp(*u - shift), *u / cap);
        total += value;
        *u = value * (1.0 - part * part);
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes a tile of a label's logit 0 and `others` logits `rest`.
    fn run(others: usize, rest: f32) -> (bool, Vec<f32>) {
        let tokens = others + 1;
        let head: Vec<f32> = (0..2 * tokens).map(|i| i as f32).collect();
        let mut logits: Vec<f32> = (0..tokens).map(|i| if i == 7 { 0.0 } else { rest }).collect();
        let (mut row, mut gradient) = (Row::new(3, 1), vec![0f32; 2]);
        row.take(&mut logits, 0, None, &mut gradient);
        row.add_few(&logits, &head, tokens, &mut gradient);
        (row.added, gradient)
    }

    #[test]
    fn a_row_leaves_out_only_what_is_below_the_stated_probability() {
        assert_eq!(run(99, -40.0), (true, vec![14.0, 15.0]), "the one token that counts");
        assert!(run(99, -17.0).0, "4e-8 each, 4e-6 together");
        assert!(!run(999, -17.0).0, "4e-8 each, 4e-5 together");
        assert!(!run(99, -16.0).0, "1e-7 each");
        assert!(!run(99, f32::NAN).0);
    }
}
