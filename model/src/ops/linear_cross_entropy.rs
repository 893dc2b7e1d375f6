//! Cross-entropy of hidden rows against a frozen head, without ever holding all the logits.
//!
//! For row r with logits u = shape(hidden_r . head^T): `loss_r = logsumexp(u) - u[label_r]`. The same pass yields the
//! gradient of sum over r of weight_r * loss_r with respect to hidden, and each row's k best tokens.
//!
//! `shape` is u = cap * tanh(m * l / cap) (or m * l without a cap), l the plain product.
//!
//! One pass over the head, a tile of its rows at a time, does both products, as streaming attention does: each row keeps
//! its largest logit so far, the sum of exponentials relative to it, and the sum of head rows weighted by them; where a
//! tile brings a larger logit, both sums shrink to the new scale. So the logits of a tile are all that exist at once:
//! memory does not grow with R or V, and the head is packed a tile at a time, from the type that it is stored in. Where few
//! tokens of a tile matter to a row, as to nearly all rows of a trained drafter, its second product is made of those alone
//! ([`super::cross_entropy_row`]).

use super::cross_entropy_row::Row;
use super::linear::Compute;
use super::{top_k, with_numbers, with_slice};
use crate::buffer::Buffer;
use crate::packed::{Number, View, multiply};
use candle_core::{D, DType, Result, Tensor};
use half::bf16;
use rayon::prelude::*;

/// Rows of hidden, and rows of the head, whose logits are held at once (16 MiB of f32).
const TILE: (usize, usize) = (1024, 4096);

/// What happens to the plain product before it counts as a logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitShape {
    /// Multiplier m of the plain product.
    pub multiplier: f64,
    /// Soft cap; none when absent.
    pub softcap: Option<f64>,
}

impl LogitShape {
    /// Applies the shape to plain products (differentiable).
    pub fn apply(&self, product: &Tensor) -> Result<Tensor> {
        let scaled = if self.multiplier.to_bits() == 1f64.to_bits() {
            product.clone()
        } else {
            (product * self.multiplier)?
        };
        match self.softcap {
            Some(cap) => (scaled / cap)?.tanh()? * cap,
            None => Ok(scaled),
        }
    }

    pub(super) fn apply_to(&self, products: &mut [f32]) {
        if self.multiplier.to_bits() != 1f64.to_bits() {
            let by = self.multiplier as f32;
            for x in products.iter_mut() {
                *x *= by;
            }
        }
        if let Some(cap) = self.softcap {
            let cap = cap as f32;
            for x in products {
                *x = (*x / cap).tanh() * cap;
            }
        }
    }
}

/// Result of [`linear_cross_entropy`].
#[derive(Debug, Clone)]
pub struct CrossEntropy {
    /// Loss of each row in nats, R.
    pub losses: Vec<f32>,
    /// The k best tokens of each row, best first, ties to the lower id; R * k. Unspecified where the loss is NaN.
    pub top: Vec<u32>,
    /// Gradient of sum of weight * loss with respect to hidden, [R, H].
    pub hidden_gradient: Tensor,
}

/// Losses, gradient and k best tokens of `hidden` [R, H] f32 against `head` [V, H] in any float type (no gradient flows
/// through the call). On the CPU both products are computed in `compute`; elsewhere in f32.
///
/// # Errors
/// When sizes differ, a label is not below V, or k is 0 or above V.
pub fn linear_cross_entropy(
    hidden: &Tensor,
    head: &Tensor,
    labels: &[u32],
    weights: &[f32],
    shape: LogitShape,
    k: usize,
    compute: Compute,
) -> Result<CrossEntropy> {
    check(hidden, head, labels, weights, k)?;
    if hidden.device().is_cpu() {
        tiled(hidden, head, labels, weights, shape, k, compute, TILE)
    } else {
        composed(hidden, head, labels, weights, shape, k)
    }
}

/// The CPU's form, with the logits of `tile` (rows, tokens) at a time.
fn tiled(
    hidden: &Tensor,
    head: &Tensor,
    labels: &[u32],
    weights: &[f32],
    shape: LogitShape,
    k: usize,
    compute: Compute,
    tile: (usize, usize),
) -> Result<CrossEntropy> {
    let ((rows, h), (v, _)) = (hidden.dims2()?, head.dims2()?);
    let head = head.detach();
    let (mut losses, mut top) = (vec![0f32; rows], vec![0u32; rows * k]);
    let mut gradient = vec![0f32; rows * h];
    let mut logits = Buffer::stale(tile.0.min(rows) * tile.1.min(v));
    for start in (0..rows).step_by(tile.0) {
        let count = tile.0.min(rows - start);
        let some = start..start + count;
        let mut pass = Pass {
            hidden: hidden.detach().narrow(0, start, count)?.contiguous()?,
            states: labels[some.clone()]
                .iter()
                .map(|label| Row::new(*label, k, v, compute))
                .collect(),
            gradient: &mut gradient[start * h..(start + count) * h],
            logits: &mut logits,
            shape,
            rounded: compute == Compute::Bf16,
        };
        for first in (0..v).step_by(tile.1) {
            let part = head.narrow(0, first, tile.1.min(v - first))?.contiguous()?;
            if part.dtype() == DType::BF16 {
                with_numbers::<bf16, _>(&part, NAME, |part| pass.take(part, first))?;
            } else {
                with_slice(&part.to_dtype(DType::F32)?, NAME, |part| pass.take(part, first))?;
            }
        }
        let ids = Tensor::from_slice(&labels[some.clone()], count, hidden.device())?;
        let label_rows = head.index_select(&ids, 0)?.to_dtype(DType::F32)?;
        with_slice(&label_rows, NAME, |label_rows| {
            let gradients = pass.gradient.chunks_exact_mut(h).zip(label_rows.chunks_exact(h));
            for (i, (state, (gradient, label))) in pass.states.iter().zip(gradients).enumerate() {
                let scale = weights[start + i] * shape.multiplier as f32;
                state.finish(gradient, label, scale, shape.softcap);
                losses[start + i] = state.loss();
                state.best.write(&mut top[(start + i) * k..(start + i + 1) * k]);
            }
            Ok(())
        })?;
    }
    Ok(CrossEntropy {
        losses,
        top,
        hidden_gradient: Tensor::from_vec(gradient, (rows, h), hidden.device())?,
    })
}

const NAME: &str = "linear_cross_entropy";

/// Some rows on their way through the vocabulary.
struct Pass<'p> {
    /// [rows, H].
    hidden: Tensor,
    states: Vec<Row>,
    /// Sums of head rows weighted by exponentials, [rows, H].
    gradient: &'p mut [f32],
    /// Room for the logits of a tile.
    logits: &'p mut [f32],
    shape: LogitShape,
    rounded: bool,
}

impl Pass<'_> {
    /// Takes the tokens from `first`, whose head rows are `head` [tokens, H].
    fn take<T: Number>(&mut self, head: &[T], first: usize) -> Result<()> {
        let h = self.gradient.len() / self.states.len();
        let tokens = head.len() / h;
        let logits = &mut self.logits[..self.states.len() * tokens];
        with_slice(&self.hidden, NAME, |hidden| {
            multiply(View::new(hidden, h), View::new(head, h), self.rounded, logits, false);
            Ok(())
        })?;
        logits
            .par_chunks_exact_mut(tokens)
            .zip(&mut self.states)
            .zip(self.gradient.par_chunks_exact_mut(h))
            .for_each(|((logits, state), gradient)| {
                state.take(logits, first, self.shape, gradient);
            });
        self.weigh(head, tokens);
        Ok(())
    }

    /// Adds the head rows, weighted by what [`Row::take`] left of the logits, to the gradient: of rows to which few of them
    /// matter those few, of the others all in one product.
    fn weigh<T: Number>(&mut self, head: &[T], tokens: usize) {
        let h = head.len() / tokens;
        let weights = &mut self.logits[..self.states.len() * tokens];
        let dense: Vec<usize> = (0..self.states.len()).filter(|i| !self.states[*i].few).collect();
        let columns = View::new(head, h).transposed();
        // a product of nearly all rows takes no longer than one of all
        if dense.len() * 8 > self.states.len() * 7 {
            multiply(View::new(weights, tokens), columns, self.rounded, self.gradient, true);
            return;
        }
        weights
            .par_chunks_exact(tokens)
            .zip(&self.states)
            .zip(self.gradient.par_chunks_exact_mut(h))
            .filter(|((_, state), _)| state.few)
            .for_each(|((weights, state), gradient)| state.add_few(weights, head, gradient));
        if dense.is_empty() {
            return;
        }
        for (to, from) in dense.iter().enumerate() {
            weights.copy_within(from * tokens..(from + 1) * tokens, to * tokens);
        }
        let mut sums = Buffer::stale(dense.len() * h);
        let weights = View::new(&weights[..dense.len() * tokens], tokens);
        multiply(weights, columns, self.rounded, &mut sums, false);
        for (row, sums) in dense.iter().zip(sums.chunks_exact(h)) {
            for (gradient, sum) in self.gradient[row * h..].iter_mut().zip(sums) {
                *gradient += sum;
            }
        }
    }
}

/// The same from candle's own operations, for other devices and as the twin in tests; logits of all rows at once.
pub fn composed(
    hidden: &Tensor,
    head: &Tensor,
    labels: &[u32],
    weights: &[f32],
    shape: LogitShape,
    k: usize,
) -> Result<CrossEntropy> {
    check(hidden, head, labels, weights, k)?;
    let rows = hidden.dim(0)?;
    let device = hidden.device();
    let head = head.detach().to_dtype(DType::F32)?;
    let logits = shape.apply(&hidden.detach().matmul(&head.t()?)?)?;
    let labels = Tensor::from_slice(labels, (rows, 1), device)?;
    let weights = Tensor::from_slice(weights, (rows, 1), device)?;
    let log_probs = candle_nn::ops::log_softmax(&logits, D::Minus1)?;
    let losses = log_probs.gather(&labels, 1)?.neg()?.flatten_all()?.to_vec1::<f32>()?;
    let probs = log_probs.exp()?;
    let one_hot = probs
        .zeros_like()?
        .scatter_add(&labels, &Tensor::ones((rows, 1), DType::F32, device)?, 1)?;
    let gradient = chain((probs - one_hot)?.broadcast_mul(&weights)?, &logits, shape)?;
    let mut top = vec![0u32; rows * k];
    for (logits, top) in logits.to_vec2::<f32>()?.iter().zip(top.chunks_exact_mut(k)) {
        top_k(logits, top);
    }
    Ok(CrossEntropy {
        losses,
        top,
        hidden_gradient: gradient.matmul(&head)?,
    })
}

/// d(plain product) from d(logit): the derivative of the shape, written with the shaped logits.
fn chain(gradient: Tensor, logits: &Tensor, shape: LogitShape) -> Result<Tensor> {
    let gradient = match shape.softcap {
        Some(cap) => (gradient * ((logits / cap)?.sqr()?.neg()? + 1.0)?)?,
        None => gradient,
    };
    if shape.multiplier.to_bits() == 1f64.to_bits() {
        Ok(gradient)
    } else {
        gradient * shape.multiplier
    }
}

fn check(hidden: &Tensor, head: &Tensor, labels: &[u32], weights: &[f32], k: usize) -> Result<()> {
    let ((rows, h), (v, head_h)) = (hidden.dims2()?, head.dims2()?);
    if h != head_h || labels.len() != rows || weights.len() != rows {
        candle_core::bail!(
            "linear_cross_entropy: hidden {:?}, head {:?}, {} labels, {} weights",
            hidden.shape(),
            head.shape(),
            labels.len(),
            weights.len()
        )
    }
    if k == 0 || k > v {
        candle_core::bail!("linear_cross_entropy: the best {k} of {v} tokens")
    }
    if let Some(label) = labels.iter().find(|label| **label as usize >= v) {
        candle_core::bail!("linear_cross_entropy: label {label} in a vocabulary of {v}")
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{distance, tensor, var};

    const SHAPES: [LogitShape; 3] = [
        LogitShape {
            multiplier: 1.0,
            softcap: None,
        },
        LogitShape {
            multiplier: 0.3,
            softcap: None,
        },
        LogitShape {
            multiplier: 0.7,
            softcap: Some(2.5),
        },
    ];

    fn same(a: &CrossEntropy, b: &CrossEntropy) {
        assert_eq!(a.top, b.top);
        assert!(distance(&a.hidden_gradient, &b.hidden_gradient) < 1e-5);
        for (a, b) in a.losses.iter().zip(&b.losses) {
            assert!((a - b).abs() < 1e-4, "{a} {b}");
        }
    }

    #[test]
    fn equals_its_composed_twin() {
        let (hidden, head) = (tensor(1, &[45, 12]), tensor(2, &[300, 12]));
        let labels: Vec<u32> = (0..45).map(|i| i * 6).collect();
        let weights: Vec<f32> = (0..45).map(|i| 1.0 / (i + 1) as f32).collect();
        for shape in SHAPES {
            let a = linear_cross_entropy(&hidden, &head, &labels, &weights, shape, 5, Compute::F32).unwrap();
            let b = composed(&hidden, &head, &labels, &weights, shape, 5).unwrap();
            same(&a, &b);
        }
    }

    #[test]
    fn tiles_of_any_size_and_a_bf16_head_change_nothing() {
        let (hidden, head) = (tensor(1, &[45, 12]), tensor(2, &[300, 12]));
        let head = (head * 3.0).unwrap().to_dtype(DType::BF16).unwrap();
        let labels: Vec<u32> = (0..45).map(|i| (i * 97) % 300).collect();
        let weights = vec![0.5; 45];
        for shape in SHAPES {
            let b = composed(&hidden, &head, &labels, &weights, shape, 5).unwrap();
            for tile in [(1, 1), (7, 64), (45, 299), (64, 300)] {
                let a = tiled(&hidden, &head, &labels, &weights, shape, 5, Compute::F32, tile).unwrap();
                same(&a, &b);
            }
        }
    }

    #[test]
    fn rows_to_which_few_tokens_matter_have_the_gradient_of_all_beside_rows_of_the_other_kind() {
        let head = (tensor(2, &[300, 40]) * 2.0).unwrap();
        let own = head.narrow(0, 100, 45).unwrap();
        let labels: Vec<u32> = (0..45).map(|i| (100 + i * 2) % 300).collect();
        let weights = vec![0.5; 45];
        for (dtype, tile) in [
            (DType::F32, (45, 300)),
            (DType::BF16, (45, 100)),
            (DType::F32, (20, 64)),
        ] {
            let head = head.to_dtype(dtype).unwrap();
            for every in [1, 3] {
                // of 3 rows one has flat logits
                let strength: Vec<f32> = (0..45)
                    .map(|i| if every == 3 && i % 3 == 0 { 0.01 } else { 1.0 })
                    .collect();
                let strength = Tensor::from_vec(strength, (45, 1), own.device()).unwrap();
                let hidden = own.broadcast_mul(&strength).unwrap();
                for compute in [Compute::F32, Compute::Bf16] {
                    let a = tiled(&hidden, &head, &labels, &weights, SHAPES[0], 5, compute, tile).unwrap();
                    let b = composed(&hidden, &head, &labels, &weights, SHAPES[0], 5).unwrap();
                    let off = distance(&a.hidden_gradient, &b.hidden_gradient);
                    assert!(off < if compute == Compute::F32 { 1e-5 } else { 2e-2 }, "{off}");
                }
            }
        }
    }

    #[test]
    fn in_bf16_loss_and_gradient_are_near_those_in_f32() {
        let (hidden, head) = (tensor(1, &[45, 64]), tensor(2, &[300, 64]));
        let labels: Vec<u32> = (0..45).map(|i| (i * 97) % 300).collect();
        let weights = vec![0.5; 45];
        let exact = composed(&hidden, &head, &labels, &weights, SHAPES[1], 1).unwrap();
        let near = tiled(
            &hidden,
            &head,
            &labels,
            &weights,
            SHAPES[1],
            1,
            Compute::Bf16,
            (16, 100),
        )
        .unwrap();
        let off = distance(&near.hidden_gradient, &exact.hidden_gradient);
        assert!(off > 1e-6 && off < 2e-2, "{off}");
        for (a, b) in near.losses.iter().zip(&exact.losses) {
            assert!((a - b).abs() < 2e-2, "{a} {b}");
        }
    }

    #[test]
    fn the_gradient_is_that_of_the_weighted_loss() {
        let (hidden, head) = (var(1, &[3, 12]), tensor(2, &[30, 12]));
        let (labels, weights) = ([3u32, 29, 0], [1f32, 0.5, 0.0]);
        for shape in SHAPES {
            let fused = linear_cross_entropy(&hidden, &head, &labels, &weights, shape, 1, Compute::F32).unwrap();
            let logits = shape.apply(&hidden.matmul(&head.t().unwrap()).unwrap()).unwrap();
            let log_probs = candle_nn::ops::log_softmax(&logits, 1).unwrap();
            let picked = log_probs
                .gather(&Tensor::from_slice(&labels, (3, 1), hidden.device()).unwrap(), 1)
                .unwrap();
            let weights = Tensor::from_slice(&weights, (3, 1), hidden.device()).unwrap();
            let loss = (picked.neg().unwrap() * weights).unwrap().sum_all().unwrap();
            let grads = loss.backward().unwrap();
            assert!(distance(&fused.hidden_gradient, grads.get(&hidden).unwrap()) < 1e-5);
        }
    }

    #[test]
    fn a_nan_row_gives_a_nan_loss() {
        let mut values = vec![0.5f32; 24];
        values[7] = f32::NAN;
        let hidden = Tensor::from_vec(values, (2, 12), &candle_core::Device::Cpu).unwrap();
        let out = linear_cross_entropy(
            &hidden,
            &tensor(2, &[30, 12]),
            &[1, 1],
            &[1.0, 1.0],
            SHAPES[0],
            2,
            Compute::F32,
        )
        .unwrap();
        assert!(out.losses[0].is_nan() && out.losses[1].is_finite());
    }
}
