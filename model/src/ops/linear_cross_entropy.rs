//! Cross-entropy of hidden rows against a frozen head, without ever holding all the logits.
//!
//! For row r with logits u = shape(hidden_r . head^T): `loss_r = logsumexp(u) - u[label_r]`. The same pass yields the
//! gradient of sum over r of weight_r * loss_r with respect to hidden, and each row's k best tokens. Logits exist
//! for one chunk of rows at a time; memory does not grow with R.
//!
//! `shape` is u = cap * tanh(m * l / cap) (or m * l without a cap), l the plain product.

use super::{on_cpu, with_slice};
use crate::simd::{exp_shifted, max, vectorised};
use candle_core::{D, DType, Result, Tensor};
use rayon::prelude::*;

/// Logits held at once, in elements (64 MiB of f32).
const CHUNK_ELEMENTS: usize = 16 << 20;

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
}

/// Result of [`linear_cross_entropy`].
#[derive(Debug, Clone)]
pub struct CrossEntropy {
    /// Loss of each row in nats, R.
    pub losses: Vec<f32>,
    /// The k best tokens of each row, best first, ties to the lower id; R * k.
    pub top: Vec<u32>,
    /// Gradient of sum of weight * loss with respect to hidden, [R, H].
    pub hidden_gradient: Tensor,
}

/// Losses, gradient and k best tokens of `hidden` [R, H] against `head` [V, H] (no gradient flows through the call).
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
) -> Result<CrossEntropy> {
    let ((rows, h), (v, _)) = (hidden.dims2()?, head.dims2()?);
    check(hidden, head, labels, weights, k)?;
    if !on_cpu(&[hidden, head]) {
        return composed(hidden, head, labels, weights, shape, k);
    }
    let (hidden, head) = (hidden.detach(), head.detach());
    let chunk = (CHUNK_ELEMENTS / v).clamp(16, 4096);
    let (mut losses, mut top) = (vec![0f32; rows], vec![0u32; rows * k]);
    let mut gradients = Vec::new();
    for start in (0..rows).step_by(chunk) {
        let count = chunk.min(rows - start);
        let logits = shape.apply(&hidden.narrow(0, start, count)?.matmul(&head.t()?)?)?;
        let mut gradient = vec![0f32; count * v];
        with_slice(&logits, "linear_cross_entropy", |logits| {
            gradient
                .par_chunks_mut(v)
                .zip(logits.par_chunks(v))
                .zip(losses[start..start + count].par_iter_mut())
                .zip(top[start * k..(start + count) * k].par_chunks_mut(k))
                .enumerate()
                .for_each(|(i, (((gradient, logits), loss), top))| {
                    let (label, weight) = (labels[start + i] as usize, weights[start + i]);
                    vectorised(
                        #[inline(always)]
                        || *loss = row(logits, label, weight, gradient),
                    );
                    top_k(logits, top);
                });
            Ok(())
        })?;
        let gradient = Tensor::from_vec(gradient, (count, v), hidden.device())?;
        gradients.push(chain(gradient, &logits, shape)?.matmul(&head)?);
    }
    let hidden_gradient = if rows == 0 {
        Tensor::zeros((0, h), DType::F32, hidden.device())?
    } else {
        Tensor::cat(&gradients, 0)?
    };
    Ok(CrossEntropy {
        losses,
        top,
        hidden_gradient,
    })
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
    let logits = shape.apply(&hidden.detach().matmul(&head.detach().t()?)?)?;
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
        hidden_gradient: gradient.matmul(&head.detach())?,
    })
}

/// Writes the ids of the largest values into `top`, best first, ties to the lower id. NaN is never chosen; where
/// fewer than `top.len()` numbers exist, id 0 fills the rest (the loss is then NaN and stops the step).
pub fn top_k(values: &[f32], top: &mut [u32]) {
    /// Values looked at together before any is compared alone.
    const STRIDE: usize = 64;
    let k = top.len();
    let mut best: Vec<(f32, u32)> = Vec::with_capacity(k + 1);
    for (start, stride) in values.chunks(STRIDE).enumerate() {
        if best.len() == k
            && vectorised(
                #[inline(always)]
                || max(stride),
            ) <= best[k - 1].0
        {
            continue;
        }
        for (i, value) in stride.iter().enumerate() {
            if value.is_nan() || (best.len() == k && *value <= best[k - 1].0) {
                continue;
            }
            let at = best.partition_point(|(other, _)| other >= value);
            best.insert(at, (*value, (start * STRIDE + i) as u32));
            best.truncate(k);
        }
    }
    for (slot, top) in top.iter_mut().enumerate() {
        *top = best.get(slot).map_or(0, |(_, id)| *id);
    }
}

/// One row: writes weight * (softmax - one_hot) and returns the loss.
#[inline(always)]
#[expect(clippy::inline_always, reason = "see simd::vectorised")]
fn row(logits: &[f32], label: usize, weight: f32, gradient: &mut [f32]) -> f32 {
    gradient.copy_from_slice(logits);
    let largest = max(logits);
    let total = exp_shifted(gradient, largest);
    let scale = weight / total;
    for g in gradient.iter_mut() {
        *g *= scale;
    }
    gradient[label] -= weight;
    // exp() saturates instead of passing NaN on, so a NaN row is recognised here.
    if largest.is_finite() && logits.iter().all(|x| !x.is_nan()) {
        largest + total.ln() - logits[label]
    } else {
        f32::NAN
    }
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
    use proptest::prelude::*;

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

    #[test]
    fn equals_its_composed_twin() {
        let (hidden, head) = (tensor(1, &[45, 12]), tensor(2, &[300, 12]));
        let labels: Vec<u32> = (0..45).map(|i| i * 6).collect();
        let weights: Vec<f32> = (0..45).map(|i| 1.0 / (i + 1) as f32).collect();
        for shape in SHAPES {
            let a = linear_cross_entropy(&hidden, &head, &labels, &weights, shape, 5).unwrap();
            let b = composed(&hidden, &head, &labels, &weights, shape, 5).unwrap();
            assert_eq!(a.top, b.top);
            assert!(distance(&a.hidden_gradient, &b.hidden_gradient) < 1e-5);
            for (a, b) in a.losses.iter().zip(&b.losses) {
                assert!((a - b).abs() < 1e-4, "{a} {b}");
            }
        }
    }

    #[test]
    fn the_gradient_is_that_of_the_weighted_loss() {
        let (hidden, head) = (var(1, &[3, 12]), tensor(2, &[30, 12]));
        let (labels, weights) = ([3u32, 29, 0], [1f32, 0.5, 0.0]);
        for shape in SHAPES {
            let fused = linear_cross_entropy(&hidden, &head, &labels, &weights, shape, 1).unwrap();
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
        let out = linear_cross_entropy(&hidden, &tensor(2, &[30, 12]), &[1, 1], &[1.0, 1.0], SHAPES[0], 2).unwrap();
        assert!(out.losses[0].is_nan() && out.losses[1].is_finite());
    }

    proptest! {
        #[test]
        fn the_best_k_equal_a_stable_sort(values in prop::collection::vec(-4i32..4, 1..300), k in 1usize..20) {
            let values: Vec<f32> = values.into_iter().map(|v| v as f32).collect();
            let k = k.min(values.len());
            let mut top = vec![0; k];
            top_k(&values, &mut top);
            let mut order: Vec<u32> = (0..values.len() as u32).collect();
            order.sort_by(|a, b| values[*b as usize].total_cmp(&values[*a as usize]));
            prop_assert_eq!(&top[..], &order[..k]);
        }
    }
}
