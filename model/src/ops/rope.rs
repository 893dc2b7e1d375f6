//! Rotary position embedding over the whole head, rotate-half (NeoX) form.
//!
//! For frequency j < D/2 with angle p * theta^(-2j/D): y_j = x_j cos - x_{j+D/2} sin and
//! y_{j+D/2} = x_{j+D/2} cos + x_j sin. The backward is the rotation by the negative angle.

use super::{on_cpu, rows_per_task, slice_of, with_slice};
use crate::simd::vectorised;
use candle_core::{CpuStorage, CustomOp1, D, Device, Layout, Result, Shape, Tensor};
use rayon::prelude::*;
use std::sync::Arc;

/// Cosines and sines of a list of positions.
#[derive(Debug, Clone)]
pub struct Rotation {
    /// [rows, D/2], row-major.
    cos: Arc<Vec<f32>>,
    /// [rows, D/2], row-major.
    sin: Arc<Vec<f32>>,
    half: usize,
}

impl Rotation {
    /// Angles of `positions` for heads of `head_dim` channels and base `theta`, computed in f64 and rounded once.
    pub fn new(positions: impl IntoIterator<Item = usize>, head_dim: usize, theta: f64) -> Self {
        let half = head_dim / 2;
        let frequencies: Vec<f64> = (0..half)
            .map(|j| f64::from(theta.powf(-2.0 * j as f64 / head_dim as f64) as f32))
            .collect();
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in positions {
            for frequency in &frequencies {
                // The angle is rounded to f32 first, as every reference does.
                let angle = f64::from((position as f64 * frequency) as f32);
                cos.push(angle.cos() as f32);
                sin.push(angle.sin() as f32);
            }
        }
        Self {
            cos: Arc::new(cos),
            sin: Arc::new(sin),
            half,
        }
    }

    /// Positions held.
    pub fn rows(&self) -> usize {
        self.cos.len() / self.half
    }

    /// Rotates [rows, heads, 2 * half] data by the angle times `direction` (1 or -1).
    fn rotate(&self, x: &[f32], heads: usize, direction: f32) -> Vec<f32> {
        let (half, width) = (self.half, heads * self.half * 2);
        let rows = rows_per_task(width);
        let mut y = vec![0f32; x.len()];
        y.par_chunks_mut(rows * width)
            .zip(x.par_chunks(rows * width))
            .enumerate()
            .for_each(|(task, (y, x))| {
                vectorised(
                    #[inline(always)]
                    || {
                        for (r, (y, x)) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)).enumerate() {
                            let at = (task * rows + r) * half;
                            let (cos, sin) = (&self.cos[at..at + half], &self.sin[at..at + half]);
                            for (y, x) in y.chunks_exact_mut(2 * half).zip(x.chunks_exact(2 * half)) {
                                let ((y0, y1), (x0, x1)) = (y.split_at_mut(half), x.split_at(half));
                                for j in 0..half {
                                    let s = sin[j] * direction;
                                    y0[j] = x0[j] * cos[j] - x1[j] * s;
                                    y1[j] = x1[j] * cos[j] + x0[j] * s;
                                }
                            }
                        }
                    },
                );
            });
        y
    }

    fn tensors(&self, device: &Device) -> Result<(Tensor, Tensor)> {
        let shape = (self.rows(), 1, self.half);
        let make = |v: &Vec<f32>| Tensor::from_slice(v, shape, device);
        Ok((make(&self.cos)?, make(&self.sin)?))
    }
}

/// Rotates `x` [rows, heads, head_dim], row i by position i of `rotation`.
///
/// # Errors
/// When rows or head size differ from the rotation's.
pub fn rope(x: &Tensor, rotation: &Rotation) -> Result<Tensor> {
    let (rows, _, head_dim) = x.dims3()?;
    if rows != rotation.rows() || head_dim != 2 * rotation.half {
        candle_core::bail!(
            "rope: input {:?} against {} positions of head size {}",
            x.shape(),
            rotation.rows(),
            2 * rotation.half
        )
    }
    if on_cpu(&[x]) {
        x.contiguous()?.apply_op1(Rope {
            rotation: rotation.clone(),
        })
    } else {
        composed(x, rotation)
    }
}

/// The same from candle's own operations.
pub fn composed(x: &Tensor, rotation: &Rotation) -> Result<Tensor> {
    let (cos, sin) = rotation.tensors(x.device())?;
    let (x0, x1) = (
        x.narrow(D::Minus1, 0, rotation.half)?,
        x.narrow(D::Minus1, rotation.half, rotation.half)?,
    );
    let y0 = (x0.broadcast_mul(&cos)? - x1.broadcast_mul(&sin)?)?;
    let y1 = (x1.broadcast_mul(&cos)? + x0.broadcast_mul(&sin)?)?;
    Tensor::cat(&[y0, y1], D::Minus1)
}

struct Rope {
    rotation: Rotation,
}

impl CustomOp1 for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let heads = layout.dims()[1];
        let y = self.rotation.rotate(slice_of(x, layout, self.name())?, heads, 1.0);
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let dx = with_slice(dy, self.name(), |dy| Ok(self.rotation.rotate(dy, x.dim(1)?, -1.0)))?;
        Tensor::from_vec(dx, x.shape(), x.device()).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{distance, same_value_and_gradients, tensor, var};

    #[test]
    fn equals_its_composed_twin_with_gradients() {
        let x = var(1, &[9, 3, 8]);
        let rotation = Rotation::new([0, 1, 5, 100, 7, 2, 3, 4, 2047], 8, 1e4);
        same_value_and_gradients(&[&x], || rope(&x, &rotation), || composed(&x, &rotation), 1e-5);
    }

    #[test]
    fn scores_depend_on_the_distance_only() {
        let (q, k) = (tensor(1, &[1, 1, 64]), tensor(2, &[1, 1, 64]));
        let score = |qp: usize, kp: usize| {
            let q = rope(&q, &Rotation::new([qp], 64, 1e7)).unwrap();
            let k = rope(&k, &Rotation::new([kp], 64, 1e7)).unwrap();
            (q * k).unwrap().sum_all().unwrap().reshape(1).unwrap()
        };
        assert!(distance(&score(10, 3), &score(110, 103)) < 1e-4);
    }
}
