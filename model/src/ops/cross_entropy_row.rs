//! One row of the cross-entropy on its way through the vocabulary, tile by tile: running maximum, sum and gradient.
//!
//! A trained row gives nearly all its probability to a few tokens. A tile of which the row finds only few tokens above
//! [`SMALLEST`], and [`LEFT_OUT`] in all the others at most, is added to its gradient token by token, the others left out.
//! Loss and best tokens see every logit.

use super::best::Best;
use super::linear::Compute;
use super::linear_cross_entropy::LogitShape;
use crate::packed::Number;
use crate::simd::{exp, exp_shifted, max, vectorised};

/// Share of the row's sum so far, which only grows, below which a token can be left out: beside a gradient of head rows
/// weighted by up to 1, its part is under the resolution of f32.
const SMALLEST: f32 = 1.0 / (1 << 24) as f32;

/// Most of a row's probability that is left out over the whole vocabulary.
const LEFT_OUT: f32 = 1.0 / (1 << 12) as f32;

/// One token in so many: if more of a tile matter, the product of the whole tile is faster. Measured at H 1,024; a product in
/// BF16 takes half the time, and so half as many tokens are few.
const FEW: usize = 24;

/// Columns of the gradient that are summed in registers.
const COLUMNS: usize = 128;

/// What a row has seen of the vocabulary so far.
pub(super) struct Row {
    label: usize,
    vocabulary: usize,
    /// One token in so many may matter where few do.
    one_in: usize,
    /// The label's logit.
    chosen: f32,
    /// Largest logit.
    largest: f32,
    /// Sum of exp(logit - largest).
    total: f64,
    /// Whether no logit was NaN: exp() saturates instead of passing it on.
    numbers: bool,
    /// Whether few tokens of the last tile matter.
    pub(super) few: bool,
    pub(super) best: Best,
}

impl Row {
    pub(super) fn new(label: u32, k: usize, vocabulary: usize, compute: Compute) -> Self {
        Self {
            label: label as usize,
            vocabulary,
            one_in: if compute == Compute::Bf16 { 2 * FEW } else { FEW },
            chosen: f32::NAN,
            largest: f32::NEG_INFINITY,
            total: 0.0,
            numbers: true,
            few: false,
            best: Best::new(k),
        }
    }

    /// Turns the plain products of the tokens from `first` into what multiplies their head rows, on the scale of the largest
    /// logit so far, and brings `gradient`, the sum of earlier tiles, to that scale.
    pub(super) fn take(&mut self, logits: &mut [f32], first: usize, shape: LogitShape, gradient: &mut [f32]) {
        shape.apply_to(logits);
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
                self.total += f64::from(match shape.softcap {
                    None => exp_shifted(logits, largest),
                    Some(cap) => capped(logits, largest, cap as f32),
                });
                let (kept, left_out) = above(logits, self.floor());
                let most = LEFT_OUT * self.total as f32 * logits.len() as f32 / self.vocabulary as f32;
                // a NaN is above nothing and makes the rest NaN
                self.few = kept as usize * self.one_in <= logits.len() && left_out <= most;
            },
        );
    }

    /// What a token's weight must exceed to matter.
    fn floor(&self) -> f32 {
        SMALLEST * self.total as f32
    }

    /// Adds to `gradient` the rows of `head` [tokens, H] that matter, weighted by what [`Self::take`] left.
    pub(super) fn add_few<T: Number>(&self, weights: &[f32], head: &[T], gradient: &mut [f32]) {
        let (floor, h) = (self.floor(), gradient.len());
        let kept: Vec<(f32, &[T])> = weights
            .chunks(64)
            .zip(head.chunks(64 * h))
            .filter(|(weights, _)| {
                vectorised(
                    #[inline(always)]
                    || max(weights),
                ) > floor
            })
            .flat_map(|(weights, head)| weights.iter().copied().zip(head.chunks_exact(h)))
            .filter(|(weight, _)| *weight > floor)
            .collect();
        vectorised(
            #[inline(always)]
            || {
                let (whole, rest) = gradient.as_chunks_mut::<COLUMNS>();
                let done = whole.len() * COLUMNS;
                for (columns, sums) in whole.iter_mut().enumerate() {
                    let mut some = *sums;
                    for (weight, head) in &kept {
                        let head = &head[columns * COLUMNS..][..COLUMNS];
                        for c in 0..COLUMNS {
                            some[c] += *weight * head[c].float();
                        }
                    }
                    *sums = some;
                }
                for (weight, head) in &kept {
                    for (sum, head) in rest.iter_mut().zip(&head[done..]) {
                        *sum += *weight * head.float();
                    }
                }
            },
        );
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

/// How many of `weights` are above `floor`, and the sum of the others.
#[inline(always)]
fn above(weights: &[f32], floor: f32) -> (u32, f32) {
    const LANES: usize = crate::simd::LANES;
    let (mut kept, mut rest) = ([0u32; LANES], [0f32; LANES]);
    let (whole, tail) = weights.as_chunks::<LANES>();
    for weights in whole {
        for l in 0..LANES {
            kept[l] += u32::from(weights[l] > floor);
            rest[l] += if weights[l] > floor { 0.0 } else { weights[l] };
        }
    }
    let mut sums = (kept.iter().sum(), rest.iter().sum());
    for weight in tail {
        sums.0 += u32::from(*weight > floor);
        sums.1 += if *weight > floor { 0.0 } else { *weight };
    }
    sums
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

    /// Takes a tile of a label's logit 0 and `others` logits `rest`; the gradient if few matter.
    fn run(others: usize, rest: f32) -> Option<Vec<f32>> {
        const H: usize = 130;
        let tokens = others + 1;
        let head: Vec<f32> = (0..H * tokens).map(|i| i as f32).collect();
        let mut logits: Vec<f32> = (0..tokens).map(|i| if i == 7 { 0.0 } else { rest }).collect();
        let (mut row, mut gradient) = (Row::new(3, 1, tokens, Compute::F32), vec![0f32; H]);
        let shape = LogitShape {
            multiplier: 1.0,
            softcap: None,
        };
        row.take(&mut logits, 0, shape, &mut gradient);
        row.few.then(|| {
            row.add_few(&logits, &head, &mut gradient);
            gradient
        })
    }

    #[test]
    fn a_row_leaves_out_only_what_is_below_the_stated_probabilities() {
        let only_the_seventh: Vec<f32> = (7 * 130..8 * 130).map(|i| i as f32).collect();
        assert_eq!(run(99, -40.0), Some(only_the_seventh));
        assert!(run(99, -17.0).is_some(), "4e-8 each, 4e-6 together");
        assert!(run(9_999, -17.0).is_none(), "4e-8 each, 4e-4 together");
        assert!(run(99, -16.0).is_none(), "1e-7 each");
        assert!(run(99, f32::NAN).is_none());
    }
}
