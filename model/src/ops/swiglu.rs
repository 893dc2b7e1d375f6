//! y = silu(gate) * up, the feed-forward activation.
//!
//! Backward, with s = sigmoid(g): dup = dy * g * s; dgate = dy * up * s * (1 + g * (1 - s)).

use super::{on_cpu, slice_of, with_slice};
use crate::simd::{sigmoid, vectorised};
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

/// Elements a worker takes at once.
const TASK: usize = 16 * 1024;

/// Element-wise silu(gate) * up of two tensors of one shape.
///
/// # Errors
/// When the shapes differ.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.shape() != up.shape() {
        candle_core::bail!("swiglu: gate {:?} against up {:?}", gate.shape(), up.shape())
    }
    if on_cpu(&[gate, up]) {
        gate.contiguous()?.apply_op2(&up.contiguous()?, SwiGlu)
    } else {
        composed(gate, up)
    }
}

/// The same from candle's own operations.
pub fn composed(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gate.silu()?.mul(up)
}

struct SwiGlu;

impl CustomOp2 for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(&self, g: &CpuStorage, gl: &Layout, u: &CpuStorage, ul: &Layout) -> Result<(CpuStorage, Shape)> {
        let (g, u) = (slice_of(g, gl, self.name())?, slice_of(u, ul, self.name())?);
        let mut y = vec![0f32; g.len()];
        y.par_chunks_mut(TASK)
            .zip(g.par_chunks(TASK))
            .zip(u.par_chunks(TASK))
            .for_each(|((y, g), u)| {
                vectorised(
                    #[inline(always)]
                    || {
                        for ((y, g), u) in y.iter_mut().zip(g).zip(u) {
                            *y = g * sigmoid(*g) * u;
                        }
                    },
                );
            });
        Ok((CpuStorage::F32(y), gl.shape().clone()))
    }

    fn bwd(&self, gate: &Tensor, up: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (gate, up, dy) = (gate.detach(), up.detach(), dy.contiguous()?);
        let count = dy.elem_count();
        let (mut dgate, mut dup) = (vec![0f32; count], vec![0f32; count]);
        with_slice(&gate, self.name(), |g| {
            with_slice(&up, self.name(), |u| {
                with_slice(&dy, self.name(), |dy| {
                    dgate
                        .par_chunks_mut(TASK)
                        .zip(dup.par_chunks_mut(TASK))
                        .zip(g.par_chunks(TASK).zip(u.par_chunks(TASK)).zip(dy.par_chunks(TASK)))
                        .for_each(|((dgate, dup), ((g, u), dy))| {
                            vectorised(
                                #[inline(always)]
                                || {
                                    for i in 0..dy.len() {
                                        let s = sigmoid(g[i]);
                                        dup[i] = dy[i] * g[i] * s;
                                        dgate[i] = dy[i] * u[i] * s * (1.0 + g[i] * (1.0 - s));
                                    }
                                },
                            );
                        });
                    Ok(())
                })
            })
        })?;
        let shaped = |values| Tensor::from_vec(values, dy.shape(), dy.device());
        Ok((Some(shaped(dgate)?), Some(shaped(dup)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{same_value_and_gradients, var};

    #[test]
    fn equals_its_composed_twin_with_gradients() {
        let (g, u) = (var(1, &[37, 11]), var(2, &[37, 11]));
        same_value_and_gradients(&[&g, &u], || swiglu(&g, &u), || composed(&g, &u), 1e-5);
    }
}
