//! y = x / sqrt(mean(x^2) + eps) * w over the last axis, the plain-weight norm of Qwen3.
//!
//! Backward, with n = x * inv and C channels: dw = sum over rows of dy * n;
//! dx = inv * (dy * w - n * mean(dy * w * n)).

use super::{on_cpu, rows_per_task, slice_of};
use crate::simd::{dot, sum_of_squares, vectorised};
use candle_core::{CpuStorage, CustomOp2, D, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

/// Normalises the last axis of `x` [.., C] and scales it by `weight` `[C]`.
///
/// # Errors
/// When the sizes of the last axis differ.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    if x.dim(D::Minus1)? != weight.dims1()? {
        candle_core::bail!("rms_norm: input {:?} against weight {:?}", x.shape(), weight.shape())
    }
    if on_cpu(&[x, weight]) {
        x.contiguous()?
            .apply_op2(&weight.contiguous()?, RmsNorm { eps: eps as f32 })
    } else {
        composed(x, weight, eps)
    }
}

/// The same from candle's own operations.
pub fn composed(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let inverse = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?.recip()?;
    x.broadcast_mul(&inverse)?.broadcast_mul(weight)
}

struct RmsNorm {
    eps: f32,
}

impl RmsNorm {
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "see simd::vectorised")]
    fn inverse(&self, row: &[f32]) -> f32 {
        1.0 / (sum_of_squares(row) / row.len() as f32 + self.eps).sqrt()
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn cpu_fwd(&self, x: &CpuStorage, xl: &Layout, w: &CpuStorage, wl: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, w) = (slice_of(x, xl, self.name())?, slice_of(w, wl, self.name())?);
        let c = w.len();
        let mut y = vec![0f32; x.len()];
        let rows = rows_per_task(c) * c;
        y.par_chunks_mut(rows).zip(x.par_chunks(rows)).for_each(|(y, x)| {
            vectorised(
                #[inline(always)]
                || {
                    for (y, x) in y.chunks_exact_mut(c).zip(x.chunks_exact(c)) {
                        let inverse = self.inverse(x);
                        for i in 0..c {
                            y[i] = x[i] * inverse * w[i];
                        }
                    }
                },
            );
        });
        Ok((CpuStorage::F32(y), xl.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (want_dx, want_dw) = (x.track_op(), w.track_op());
        let (x, w, dy) = (x.detach(), w.detach(), dy.contiguous()?);
        let c = w.dims1()?;
        let (dx, dw) = super::with_slice(&x, self.name(), |x| {
            super::with_slice(&w, self.name(), |w| {
                super::with_slice(&dy, self.name(), |dy| Ok(self.backward(x, w, dy, c)))
            })
        })?;
        let dx = Tensor::from_vec(dx, dy.shape(), dy.device())?;
        let dw = Tensor::from_vec(dw, c, dy.device())?;
        Ok((want_dx.then_some(dx), want_dw.then_some(dw)))
    }
}

impl RmsNorm {
    /// Both gradients in one pass over the rows; the weight's is summed over tasks in task order.
    fn backward(&self, x: &[f32], w: &[f32], dy: &[f32], c: usize) -> (Vec<f32>, Vec<f32>) {
        let mut dx = vec![0f32; x.len()];
        let rows = rows_per_task(c) * c;
        let parts: Vec<Vec<f32>> = dx
            .par_chunks_mut(rows)
            .zip(x.par_chunks(rows))
            .zip(dy.par_chunks(rows))
            .map(|((dx, x), dy)| {
                vectorised(
                    #[inline(always)]
                    || {
                        let mut dw = vec![0f32; c];
                        for ((dx, x), dy) in dx.chunks_exact_mut(c).zip(x.chunks_exact(c)).zip(dy.chunks_exact(c)) {
                            let inverse = self.inverse(x);
                            for i in 0..c {
                                dx[i] = dy[i] * w[i];
                                dw[i] += dy[i] * x[i] * inverse;
                            }
                            let projection = dot(dx, x) * inverse * inverse / c as f32;
                            for i in 0..c {
                                dx[i] = inverse * (dx[i] - x[i] * projection);
                            }
                        }
                        dw
                    },
                )
            })
            .collect();
        let mut dw = vec![0f32; c];
        for part in parts {
            for (total, part) in dw.iter_mut().zip(part) {
                *total += part;
            }
        }
        (dx, dw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{same_value_and_gradients, var};

    #[test]
    fn equals_its_composed_twin_with_gradients() {
        for (rows, c) in [(1, 3), (5, 16), (700, 50)] {
            let (x, w) = (var(1, &[rows, c]), var(2, &[c]));
            same_value_and_gradients(&[&x, &w], || rms_norm(&x, &w, 1e-6), || composed(&x, &w, 1e-6), 1e-5);
        }
    }
}
