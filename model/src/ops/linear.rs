//! y = x W^T without bias, whose backward forms only the products that somebody wants.
//!
//! candle's `matmul` always computes both operands' gradients; for a frozen weight or a constant input that is half
//! of the backward's work thrown away.

use crate::packed::Packed;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, DType, Layout, MetalStorage, Result, Shape, Tensor};
use std::sync::Arc;

/// Multiplies rows by a weight in the published orientation.
///
/// `x`: [R, in], `weight`: [out, in]; returns [R, out]. Gradients flow to whichever of the two is a variable or
/// depends on one.
///
/// # Errors
/// When the inner sizes differ.
pub fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let ((_, x_in), (_, w_in)) = (x.dims2()?, weight.dims2()?);
    if x_in != w_in {
        candle_core::bail!("linear: input {:?} against weight {:?}", x.shape(), weight.shape())
    }
    x.contiguous()?.apply_op2(weight, Linear)
}

/// A matrix as a layer holds it: trainable, or frozen in the form that is fastest for few rows.
#[derive(Debug, Clone)]
pub enum Weight {
    /// [out, in] f32, possibly with a gradient.
    Plain(Tensor),
    /// Frozen on the CPU: packed once, BF16 kept as BF16, computed in f32.
    Frozen(Frozen),
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
            Ok(Self::Plain(matrix.to_dtype(DType::F32)?))
        }
    }

    /// The packed matrix behind a frozen weight.
    pub(crate) fn packed(&self) -> Option<Arc<Packed>> {
        match self {
            Self::Plain(_) => None,
            Self::Frozen(Frozen(packed)) => Some(packed.clone()),
        }
    }

    /// Moves frozen matrices that nobody shares yet into memory that is read faster.
    pub(crate) fn gather<'w>(weights: impl IntoIterator<Item = &'w mut Self>) -> Result<()> {
        let packed = weights.into_iter().filter_map(|weight| match weight {
            Self::Frozen(Frozen(packed)) => Arc::get_mut(packed),
            Self::Plain(_) => None,
        });
        Packed::gather(packed)
    }

    /// x W^T for `x` [R, in]; a frozen weight passes no gradient on.
    ///
    /// # Errors
    /// When the inner sizes differ.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Plain(weight) => linear(x, weight),
            Self::Frozen(Frozen(packed)) => {
                let (rows, inner) = x.dims2()?;
                if inner != packed.depth() {
                    candle_core::bail!(
                        "linear: input {:?} against a weight of {} columns",
                        x.shape(),
                        packed.depth()
                    )
                }
                let y = super::with_slice(x, "linear", |x| Ok(packed.product(x).into_vec()))?;
                Tensor::from_vec(y, (rows, packed.width()), x.device())
            }
        }
    }
}

struct Linear;

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
        product(x, xl, w, wl)
    }

    fn cuda_fwd(&self, x: &CudaStorage, xl: &Layout, w: &CudaStorage, wl: &Layout) -> Result<(CudaStorage, Shape)> {
        product(x, xl, w, wl)
    }

    fn metal_fwd(&self, x: &MetalStorage, xl: &Layout, w: &MetalStorage, wl: &Layout) -> Result<(MetalStorage, Shape)> {
        product(x, xl, w, wl)
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dx = if x.track_op() {
            Some(dy.matmul(&w.detach())?)
        } else {
            None
        };
        let dw = if w.track_op() {
            Some(dy.t()?.matmul(&x.detach())?)
        } else {
            None
        };
        Ok((dx, dw))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{same_value_and_gradients, tensor, var};

    #[test]
    fn equals_matmul_with_its_gradients() {
        let (x, w) = (var(1, &[5, 7]), var(2, &[3, 7]));
        same_value_and_gradients(&[&x, &w], || linear(&x, &w), || x.matmul(&w.t()?), 1e-5);
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
    fn a_frozen_operand_gets_no_gradient() {
        let (x, w) = (var(1, &[5, 7]), tensor(2, &[3, 7]));
        let grads = linear(&x, &w).unwrap().sum_all().unwrap().backward().unwrap();
        assert!(grads.get(&x).is_some() && grads.get(&w).is_none());
        assert!(linear(&x, &tensor(3, &[3, 8])).is_err());
    }
}
