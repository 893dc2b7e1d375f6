//! y = x W^T without bias, whose backward forms only the products that somebody wants.
//!
//! candle's `matmul` always computes both operands' gradients; for a frozen weight or a constant input that is half
//! of the backward's work thrown away. With [`Compute::Bf16`] the operands of all three products are rounded to BF16 and
//! the sums stay f32; weights and gradients are f32 either way.
//!
//! On the CPU the products are this toolkit's own ([`crate::packed`]), unless candle was built over a vendor's library.

use super::{slice_of, with_slice};
use crate::beside::Beside;
use crate::packed::{Packed, View, multiply};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, DType, Layout, MetalStorage, Result, Shape, Tensor, Var};
use std::sync::Arc;

/// What a product's operands are rounded to; sums are f32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Compute {
    /// Not at all.
    #[default]
    F32,
    /// BF16.
    Bf16,
}

/// Multiplies rows by a weight in the published orientation.
///
/// `x`: [R, in], `weight`: [out, in]; returns [R, out]. Gradients flow to whichever of the two is a variable or
/// depends on one.
///
/// # Errors
/// When the inner sizes differ.
pub fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    linear_in(x, weight, Compute::F32)
}

/// As [`linear`], with operands rounded as `compute` says.
pub(super) fn linear_in(x: &Tensor, weight: &Tensor, compute: Compute) -> Result<Tensor> {
    check_sizes(x, weight)?;
    if compute == Compute::Bf16 && !x.device().is_cpu() {
        return rounded(&x.contiguous()?, weight);
    }
    x.contiguous()?.apply_op2(&weight.contiguous()?, Linear { compute })
}

fn check_sizes(x: &Tensor, weight: &Tensor) -> Result<()> {
    let ((_, x_in), (_, w_in)) = (x.dims2()?, weight.dims2()?);
    if x_in != w_in {
        candle_core::bail!("linear: input {:?} against weight {:?}", x.shape(), weight.shape())
    }
    Ok(())
}

/// The BF16 form from candle's own operations.
fn rounded(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let weight = weight.to_dtype(DType::BF16)?;
    x.to_dtype(DType::BF16)?
        .apply_op2(&weight, Linear { compute: Compute::F32 })?
        .to_dtype(DType::F32)
}

/// A matrix as a layer holds it: trainable, or frozen in the form that is fastest for few rows.
#[derive(Debug, Clone)]
pub enum Weight {
    /// [out, in] f32, possibly with a gradient, and how products with it are computed.
    Plain(Tensor, Compute),
    /// Trainable on the CPU, its gradient formed beside candle's store.
    Trained(Trained),
    /// Frozen on the CPU: packed once, BF16 kept as BF16, computed in f32.
    Frozen(Frozen),
}

/// A trainable [out, in] f32 matrix that candle's graph does not know; a ticket stands for it there.
#[derive(Debug, Clone)]
pub struct Trained {
    matrix: Tensor,
    /// One number, a variable, so that the graph reaches a product whose rows are constants.
    ticket: Tensor,
    compute: Compute,
    beside: Beside,
}

/// A packed [out, in] matrix.
#[derive(Debug, Clone)]
pub struct Frozen(Arc<Packed>);

impl Weight {
    /// Freezes a matrix of any float type: packed on the CPU, widened to f32 elsewhere.
    pub fn frozen(matrix: &Tensor) -> Result<Self> {
        if matrix.device().is_cpu() {
            Ok(Self::Frozen(Frozen(Arc::new(Packed::stack(&[matrix])?))))
        } else {
            Ok(Self::Plain(matrix.to_dtype(DType::F32)?, Compute::F32))
        }
    }

    /// A matrix to be trained: its gradient goes to `beside` where this toolkit's own products form it, to candle's store
    /// elsewhere.
    pub(crate) fn trained(matrix: Tensor, compute: Compute, beside: &Beside) -> Result<Self> {
        if !matrix.device().is_cpu() || by_library(compute) {
            return Ok(Self::Plain(matrix, compute));
        }
        let ticket = Var::zeros(1, DType::F32, matrix.device())?.into_inner();
        let beside = beside.clone();
        Ok(Self::Trained(Trained {
            matrix,
            ticket,
            compute,
            beside,
        }))
    }

    /// The packed matrix behind a frozen weight.
    pub(crate) fn packed(&self) -> Option<Arc<Packed>> {
        match self {
            Self::Plain(..) | Self::Trained(_) => None,
            Self::Frozen(Frozen(packed)) => Some(packed.clone()),
        }
    }

    /// Moves frozen matrices that nobody shares yet into memory that is read faster.
    pub(crate) fn gather<'w>(weights: impl IntoIterator<Item = &'w mut Self>) -> Result<()> {
        let packed = weights.into_iter().filter_map(|weight| match weight {
            Self::Frozen(Frozen(packed)) => Arc::get_mut(packed),
            Self::Plain(..) | Self::Trained(_) => None,
        });
        Packed::gather(packed)
    }

    /// x W^T for `x` [R, in]; a frozen weight passes no gradient on.
    ///
    /// # Errors
    /// When the inner sizes differ.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Plain(weight, compute) => linear_in(x, weight, *compute),
            Self::Trained(trained) => {
                check_sizes(x, &trained.matrix)?;
                x.contiguous()?.apply_op2(&trained.ticket, trained.clone())
            }
            Self::Frozen(Frozen(packed)) => {
                let (rows, inner) = x.dims2()?;
                if inner != packed.depth() {
                    candle_core::bail!(
                        "linear: input {:?} against a weight of {} columns",
                        x.shape(),
                        packed.depth()
                    )
                }
                let y = with_slice(x, "linear", |x| Ok(packed.product(x).into_vec()))?;
                Tensor::from_vec(y, (rows, packed.width()), x.device())
            }
        }
    }
}

struct Linear {
    compute: Compute,
}

/// The same call on every backend's own storage: (rows, out, in) with the weight read transposed.
fn product<S: BackendStorage>(x: &S, x_layout: &Layout, w: &S, w_layout: &Layout) -> Result<(S, Shape)> {
    let (rows, inner) = x_layout.shape().dims2()?;
    let outer = w_layout.shape().dims2()?.0;
    let y = x.matmul(w, (1, rows, outer, inner), x_layout, &w_layout.transpose(0, 1)?)?;
    Ok((y, Shape::from((rows, outer))))
}

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, xl: &Layout, w: &CpuStorage, wl: &Layout) -> Result<(CpuStorage, Shape)> {
        if by_library(self.compute) {
            return product(x, xl, w, wl);
        }
        forward(
            self.compute,
            slice_of(x, xl, self.name())?,
            slice_of(w, wl, self.name())?,
            xl.shape(),
            wl.shape(),
        )
    }

    fn cuda_fwd(&self, x: &CudaStorage, xl: &Layout, w: &CudaStorage, wl: &Layout) -> Result<(CudaStorage, Shape)> {
        product(x, xl, w, wl)
    }

    fn metal_fwd(&self, x: &MetalStorage, xl: &Layout, w: &MetalStorage, wl: &Layout) -> Result<(MetalStorage, Shape)> {
        product(x, xl, w, wl)
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (want_dx, want_dw) = (x.track_op(), w.track_op());
        let (x, w, dy) = (x.detach(), w.detach(), dy.contiguous()?);
        if by_library(self.compute) || !dy.device().is_cpu() {
            let dx = want_dx.then(|| dy.matmul(&w)).transpose()?;
            let dw = want_dw.then(|| dy.t()?.matmul(&x)).transpose()?;
            return Ok((dx, dw));
        }
        let dx = want_dx.then(|| input_gradient(self.compute, &dy, &w)).transpose()?;
        let dw = || {
            let mut dw = vec![0f32; w.elem_count()];
            weight_gradient(self.compute, &dy, &x, &mut dw, false)?;
            Tensor::from_vec(dw, w.shape(), w.device())
        };
        Ok((dx, want_dw.then(dw).transpose()?))
    }
}

impl CustomOp2 for Trained {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, xl: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = slice_of(x, xl, self.name())?;
        with_slice(&self.matrix, self.name(), |w| {
            forward(self.compute, x, w, xl.shape(), self.matrix.shape())
        })
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dy = dy.contiguous()?;
        let dx = || input_gradient(self.compute, &dy, &self.matrix);
        let dx = x.track_op().then(dx).transpose()?;
        self.beside
            .form(&self.matrix, |dw, add| weight_gradient(self.compute, &dy, x, dw, add))?;
        Ok((dx, None))
    }
}

/// Whether candle's product is a vendor library's, which knows its processor better.
fn by_library(compute: Compute) -> bool {
    compute == Compute::F32 && cfg!(any(feature = "accelerate", feature = "mkl"))
}

/// x w^T of slices of these shapes.
fn forward(compute: Compute, x: &[f32], w: &[f32], x_shape: &Shape, w_shape: &Shape) -> Result<(CpuStorage, Shape)> {
    let ((rows, inner), (outer, _)) = (x_shape.dims2()?, w_shape.dims2()?);
    let mut y = vec![0f32; rows * outer];
    multiply(
        View::new(x, inner),
        View::new(w, inner),
        compute == Compute::Bf16,
        &mut y,
        false,
    );
    Ok((CpuStorage::F32(y), Shape::from((rows, outer))))
}

/// dy w.
fn input_gradient(compute: Compute, dy: &Tensor, w: &Tensor) -> Result<Tensor> {
    let ((rows, outer), inner) = (dy.dims2()?, w.dim(1)?);
    let mut dx = vec![0f32; rows * inner];
    with_slice(dy, "linear", |dy| {
        with_slice(w, "linear", |w| {
            let (dy, w) = (View::new(dy, outer), View::new(w, inner).transposed());
            multiply(dy, w, compute == Compute::Bf16, &mut dx, false);
            Ok(())
        })
    })?;
    Tensor::from_vec(dx, (rows, inner), dy.device())
}

/// dw = dy^T x, or dw += dy^T x with `add`.
fn weight_gradient(compute: Compute, dy: &Tensor, x: &Tensor, dw: &mut [f32], add: bool) -> Result<()> {
    let (outer, inner) = (dy.dim(1)?, x.dim(1)?);
    with_slice(dy, "linear", |dy| {
        with_slice(x, "linear", |x| {
            let (dy, x) = (View::new(dy, outer).transposed(), View::new(x, inner).transposed());
            multiply(dy, x, compute == Compute::Bf16, dw, add);
            Ok(())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{distance, same_value_and_gradients, tensor, var};

    #[test]
    fn equals_matmul_with_its_gradients() {
        let (x, w) = (var(1, &[5, 7]), var(2, &[3, 7]));
        same_value_and_gradients(&[&x, &w], || linear(&x, &w), || x.matmul(&w.t()?), 1e-5);
    }

    #[test]
    fn bf16_products_and_gradients_are_those_of_rounded_operands() {
        let round = |x: &Tensor| x.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
        for (rows, inner, outer) in [(1, 1, 1), (5, 7, 3), (40, 33, 70), (230, 64, 129), (25, 1030, 65)] {
            let (x, w) = (var(1, &[rows, inner]), var(2, &[outer, inner]));
            let probe = tensor(3, &[rows, outer]);
            let (rx, rw, rp) = (round(&x), round(&w), round(&probe));
            let y = linear_in(&x, &w, Compute::Bf16).unwrap();
            assert!(distance(&y, &rx.matmul(&rw.t().unwrap()).unwrap()) < 1e-5);
            let grads = (y * &probe).unwrap().sum_all().unwrap().backward().unwrap();
            assert!(distance(grads.get(&x).unwrap(), &rp.matmul(&rw).unwrap()) < 1e-5);
            assert!(distance(grads.get(&w).unwrap(), &rp.t().unwrap().matmul(&rx).unwrap()) < 1e-5);
        }
    }

    #[test]
    fn a_nan_survives_rounding() {
        for (nan_in_x, nan_in_w) in [(true, false), (false, true)] {
            let with = |nan: bool| if nan { f32::from_bits(0x7fff_ffff) } else { 1.0 };
            let x = Tensor::new(&[[1f32, with(nan_in_x)]], &candle_core::Device::Cpu).unwrap();
            let w = Tensor::new(&[[with(nan_in_w), 2f32]], &candle_core::Device::Cpu).unwrap();
            let y = linear_in(&x, &w, Compute::Bf16).unwrap().to_vec2::<f32>().unwrap();
            assert!(y[0][0].is_nan());
        }
    }

    #[test]
    fn a_packed_weight_gives_the_same_product() {
        for rows in [1, 7, 200] {
            let (x, w) = (tensor(1, &[rows, 70]), tensor(2, &[130, 70]));
            for w in [w.clone(), w.to_dtype(DType::BF16).unwrap()] {
                let plain = linear(&x, &w.to_dtype(DType::F32).unwrap()).unwrap();
                let packed = Weight::frozen(&w).unwrap().apply(&x).unwrap();
                assert!(crate::ops::check::distance(&packed, &plain) < 1e-5);
            }
        }
        assert!(
            Weight::frozen(&tensor(2, &[3, 7]))
                .unwrap()
                .apply(&tensor(1, &[2, 8]))
                .is_err()
        );
    }

    #[test]
    fn a_gradient_beside_candles_store_is_the_same_and_sums_over_uses() {
        for compute in [Compute::F32, Compute::Bf16] {
            let (x, z, w) = (var(1, &[5, 7]), tensor(4, &[9, 7]), var(2, &[3, 7]));
            let twice = |weight: &Weight| {
                let sum = |x: &Tensor| weight.apply(x).unwrap().sqr().unwrap().sum_all().unwrap();
                (sum(&x) + sum(&z)).unwrap().backward().unwrap()
            };
            let beside = Beside::default();
            let inner = twice(&Weight::trained(w.as_tensor().clone(), compute, &beside).unwrap());
            let plain = twice(&Weight::Plain(w.as_tensor().clone(), compute));
            let found = beside.take().unwrap();
            assert_eq!(found.get_ids().count(), 1);
            assert!(distance(found.get(&w).unwrap(), plain.get(&w).unwrap()) < 1e-6);
            assert!(distance(inner.get(&x).unwrap(), plain.get(&x).unwrap()) < 1e-6);
            assert!(beside.take().unwrap().get(&w).is_none());
        }
    }

    #[test]
    fn a_frozen_operand_gets_no_gradient() {
        let (x, w) = (var(1, &[5, 7]), tensor(2, &[3, 7]));
        let grads = linear(&x, &w).unwrap().sum_all().unwrap().backward().unwrap();
        assert!(grads.get(&x).is_some() && grads.get(&w).is_none());
        assert!(linear(&x, &tensor(3, &[3, 8])).is_err());
    }
}
