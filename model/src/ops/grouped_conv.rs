//! DFlash 2's grouped dynamic depthwise convolution, one side of it.
//!
//! Inside a block, for output slot t and channel c of group q = c / g:
//! ```text
//! z_t[c] = sum over k = 0..min(K-1, t) of (base[s,k,c] + delta[s,k,q](t)) * y_{t-k}[c]
//! ```
//! The coefficient belongs to the output slot t for every tap k; nothing crosses a block. `delta` holds both sides,
//! laid out [side, tap, group] in its last axis, so one projection serves the call before and the call after.
//!
//! Backward, with gz = dL/dz:
//! ```text
//! gy_t             = sum over k of coefficient(t+k) * gz_{t+k}
//! gbase[s,k,c]     = sum over blocks and t of gz_t[c] * y_{t-k}[c]
//! gdelta[s,k,q](t) = sum over c in q of gz_t[c] * y_{t-k}[c]
//! ```

use super::{on_cpu, slice_of, with_slice};
use crate::simd::{dot, vectorised};
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

/// Blocks a worker takes at once.
const BLOCKS_PER_TASK: usize = 8;

/// Convolves `y` [R, H] along the slots of each block of `block_size` rows.
///
/// `delta`: [R, 2 * K * G], `base`: [2, K, H]; `side` 0 is before the sublayer, 1 after it. G divides H.
///
/// # Errors
/// When the sizes do not fit together.
pub fn grouped_conv(y: &Tensor, delta: &Tensor, base: &Tensor, side: usize, block_size: usize) -> Result<Tensor> {
    let ((rows, h), (sides, k, base_h)) = (y.dims2()?, base.dims3()?);
    let (delta_rows, coefficients) = delta.dims2()?;
    let groups = coefficients / (2 * k);
    if sides != 2 || side > 1 || base_h != h || delta_rows != rows || groups * 2 * k != coefficients {
        candle_core::bail!(
            "grouped_conv: rows {:?}, dynamic coefficients {:?}, base {:?}",
            y.shape(),
            delta.shape(),
            base.shape()
        )
    }
    if groups == 0 || h % groups != 0 || block_size == 0 || rows % block_size != 0 {
        candle_core::bail!("grouped_conv: {h} channels in {groups} groups, {rows} rows in blocks of {block_size}")
    }
    if on_cpu(&[y, delta, base]) {
        let op = GroupedConv {
            side,
            block_size,
            h,
            k,
            groups,
        };
        y.contiguous()?.apply_op3(&delta.contiguous()?, &base.contiguous()?, op)
    } else {
        composed(y, delta, base, side, block_size)
    }
}

/// The same from candle's own operations.
pub fn composed(y: &Tensor, delta: &Tensor, base: &Tensor, side: usize, block_size: usize) -> Result<Tensor> {
    let ((rows, h), (_, k, _)) = (y.dims2()?, base.dims3()?);
    let groups = delta.dim(1)? / (2 * k);
    let (n, b, g) = (rows / block_size, block_size, h / groups);
    let y = y.reshape((n, b, groups, g))?;
    let delta = delta.reshape((n, b, 2, k, groups))?.narrow(2, side, 1)?.squeeze(2)?;
    let base = base.narrow(0, side, 1)?.reshape((k, groups, g))?;
    let mut total: Option<Tensor> = None;
    for tap in 0..k.min(b) {
        let shifted = y.narrow(1, 0, b - tap)?.pad_with_zeros(1, tap, 0)?;
        let dynamic = delta.narrow(2, tap, 1)?.squeeze(2)?.unsqueeze(3)?; // [N, B, G, 1]
        let coefficient = base.narrow(0, tap, 1)?.unsqueeze(0)?.broadcast_add(&dynamic)?;
        let term = (shifted * coefficient)?;
        total = Some(match total {
            Some(sum) => (sum + term)?,
            None => term,
        });
    }
    let Some(total) = total else {
        candle_core::bail!("grouped_conv: kernel size 0")
    };
    total.reshape((rows, h))
}

struct GroupedConv {
    side: usize,
    block_size: usize,
    h: usize,
    k: usize,
    groups: usize,
}

impl GroupedConv {
    /// Offset of (this side, tap) in a row of dynamic coefficients, in units of `groups`.
    fn dynamic_at(&self, tap: usize) -> usize {
        (self.side * self.k + tap) * self.groups
    }

    /// This side's base coefficients of one tap, `[H]`.
    fn base<'b>(&self, base: &'b [f32], tap: usize) -> &'b [f32] {
        &base[(self.side * self.k + tap) * self.h..][..self.h]
    }

    fn backward(&self, y: &[f32], delta: &[f32], base: &[f32], gz: &[f32]) -> [Vec<f32>; 3] {
        let (b, h, k, g) = (self.block_size, self.h, self.k, self.h / self.groups);
        let width = 2 * k * self.groups;
        let rows = BLOCKS_PER_TASK * b;
        let (mut gy, mut gdelta) = (vec![0f32; y.len()], vec![0f32; delta.len()]);
        let parts: Vec<Vec<f32>> = gy
            .par_chunks_mut(rows * h)
            .zip(gdelta.par_chunks_mut(rows * width))
            .zip(
                y.par_chunks(rows * h)
                    .zip(delta.par_chunks(rows * width))
                    .zip(gz.par_chunks(rows * h)),
            )
            .map(|((gy, gdelta), ((y, delta), gz))| {
                vectorised(
                    #[inline(always)]
                    || {
                        let mut gbase = vec![0f32; k * h];
                        for t in 0..gz.len() / h {
                            let gz = &gz[t * h..][..h];
                            for tap in 0..k.min(t % b + 1) {
                                let (y, gy) = (&y[(t - tap) * h..][..h], &mut gy[(t - tap) * h..][..h]);
                                let gbase = &mut gbase[tap * h..][..h];
                                let (base, at) = (self.base(base, tap), t * width + self.dynamic_at(tap));
                                for q in 0..self.groups {
                                    let (c, dynamic) = (q * g..(q + 1) * g, delta[at + q]);
                                    gdelta[at + q] = dot(&gz[c.clone()], &y[c.clone()]);
                                    let (gy, gbase) = (&mut gy[c.clone()], &mut gbase[c.clone()]);
                                    let (gz, y, base) = (&gz[c.clone()], &y[c.clone()], &base[c]);
                                    for i in 0..g {
                                        gy[i] += (base[i] + dynamic) * gz[i];
                                        gbase[i] += gz[i] * y[i];
                                    }
                                }
                            }
                        }
                        gbase
                    },
                )
            })
            .collect();
        let mut gbase = vec![0f32; 2 * k * h];
        let mine = &mut gbase[self.side * k * h..][..k * h];
        for part in parts {
            for (total, part) in mine.iter_mut().zip(part) {
                *total += part;
            }
        }
        [gy, gdelta, gbase]
    }
}

impl CustomOp3 for GroupedConv {
    fn name(&self) -> &'static str {
        "grouped_conv"
    }

    fn cpu_fwd(
        &self,
        y: &CpuStorage,
        yl: &Layout,
        delta: &CpuStorage,
        dl: &Layout,
        base: &CpuStorage,
        bl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (y, delta) = (slice_of(y, yl, self.name())?, slice_of(delta, dl, self.name())?);
        let base = slice_of(base, bl, self.name())?;
        let (b, h, g) = (self.block_size, self.h, self.h / self.groups);
        let width = 2 * self.k * self.groups;
        let rows = BLOCKS_PER_TASK * b;
        let mut z = vec![0f32; y.len()];
        z.par_chunks_mut(rows * h)
            .zip(y.par_chunks(rows * h).zip(delta.par_chunks(rows * width)))
            .for_each(|(z, (y, delta))| {
                vectorised(
                    #[inline(always)]
                    || {
                        for t in 0..z.len() / h {
                            let z = &mut z[t * h..][..h];
                            for tap in 0..self.k.min(t % b + 1) {
                                let y = &y[(t - tap) * h..][..h];
                                let (base, at) = (self.base(base, tap), t * width + self.dynamic_at(tap));
                                for q in 0..self.groups {
                                    let (c, dynamic) = (q * g..(q + 1) * g, delta[at + q]);
                                    let (z, y, base) = (&mut z[c.clone()], &y[c.clone()], &base[c]);
                                    for i in 0..g {
                                        z[i] += (base[i] + dynamic) * y[i];
                                    }
                                }
                            }
                        }
                    },
                );
            });
        Ok((CpuStorage::F32(z), yl.shape().clone()))
    }

    fn bwd(
        &self,
        y: &Tensor,
        delta: &Tensor,
        base: &Tensor,
        _z: &Tensor,
        gz: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [gy, gdelta, gbase] = with_slice(&y.detach(), self.name(), |y| {
            with_slice(&delta.detach(), self.name(), |delta| {
                with_slice(&base.detach(), self.name(), |base| {
                    with_slice(gz, self.name(), |gz| Ok(self.backward(y, delta, base, gz)))
                })
            })
        })?;
        let shaped = |values, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device()).map(Some);
        Ok((shaped(gy, y)?, shaped(gdelta, delta)?, shaped(gbase, base)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{distance, same_value_and_gradients, tensor, var};

    #[test]
    fn equals_its_composed_twin_with_gradients() {
        for (blocks, b, h, groups, k) in [(3, 4, 8, 2, 2), (19, 8, 32, 2, 2), (2, 5, 12, 4, 3), (2, 2, 6, 3, 4)] {
            let (y, base) = (var(1, &[blocks * b, h]), var(3, &[2, k, h]));
            let delta = var(2, &[blocks * b, 2 * k * groups]);
            for side in 0..2 {
                let fast = || grouped_conv(&y, &delta, &base, side, b);
                same_value_and_gradients(
                    &[&y, &delta, &base],
                    fast,
                    || composed(&y, &delta, &base, side, b),
                    1e-5,
                );
            }
        }
    }

    #[test]
    fn taps_do_not_cross_a_block() {
        let (b, h) = (4, 6);
        let y = var(1, &[2 * b, h]);
        let z = grouped_conv(&y, &tensor(2, &[2 * b, 8]), &tensor(3, &[2, 2, h]), 0, b).unwrap();
        let second_block = z.narrow(0, b, b).unwrap().sum_all().unwrap();
        let grads = second_block.backward().unwrap();
        let first_rows = grads.get(&y).unwrap().narrow(0, 0, b).unwrap();
        assert_eq!(
            first_rows
                .abs()
                .unwrap()
                .sum_all()
                .unwrap()
                .to_scalar::<f32>()
                .unwrap()
                .to_bits(),
            0
        );
    }

    #[test]
    fn identity_base_and_zero_dynamics_change_nothing() {
        let y = tensor(1, &[8, 6]);
        let identity = Tensor::cat(
            &[
                Tensor::ones((1, 6), candle_core::DType::F32, y.device()).unwrap(),
                Tensor::zeros((1, 6), candle_core::DType::F32, y.device()).unwrap(),
            ],
            0,
        )
        .unwrap();
        let base = Tensor::stack(&[&identity, &identity], 0).unwrap();
        let delta = Tensor::zeros((8, 8), candle_core::DType::F32, y.device()).unwrap();
        assert!(distance(&grouped_conv(&y, &delta, &base, 1, 4).unwrap(), &y) == 0.0);
    }
}
