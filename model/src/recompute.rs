//! Layers whose activations are not kept for the backward pass but computed again there: less memory, more time.
//!
//! candle's graph holds every intermediate tensor until its gradient has been formed. Here a layer's forward runs on
//! detached inputs, its graph is dropped, and the outer graph sees one operation of two inputs. Its backward runs the
//! layer again, with a graph of its own. The same operations run on the same numbers and sums keep their order, so that
//! gradients are the same bits. (Chen et al., arXiv 1604.06174.)

use crate::beside::Beside;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, MetalStorage, Result, Shape, Tensor, Var};

/// A layer's forward: x [R, H] and the context [T, H] to [R, H], with the layer's variables inside.
pub(crate) trait Forward: Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync + 'static {}
impl<F: Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync + 'static> Forward for F {}

/// `forward(x, context)`, of which only the result stays in memory. Gradients of the variables inside go to `beside`, since
/// the outer graph does not know of them.
///
/// # Errors
/// As `forward`.
pub(crate) fn recomputed(x: &Tensor, context: &Tensor, beside: &Beside, forward: impl Forward) -> Result<Tensor> {
    let y = forward(&x.detach(), &context.detach())?.detach();
    let beside = beside.clone();
    x.contiguous()?
        .apply_op3(&context.contiguous()?, &y.contiguous()?, Again { forward, beside })
}

/// Passes its third input on as the value of `forward` at the first two.
struct Again<F> {
    forward: F,
    beside: Beside,
}

fn third<S: BackendStorage>(y: &S, layout: &Layout) -> Result<(S, Shape)> {
    Ok((y.try_clone(layout)?, layout.shape().clone()))
}

impl<F: Forward> CustomOp3 for Again<F> {
    fn name(&self) -> &'static str {
        "recompute"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        y: &CpuStorage,
        layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        third(y, layout)
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        y: &CudaStorage,
        layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        third(y, layout)
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        y: &MetalStorage,
        layout: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        third(y, layout)
    }

    fn bwd(
        &self,
        x: &Tensor,
        context: &Tensor,
        _y: &Tensor,
        _again: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let leaf = |of: &Tensor| Var::from_tensor(&of.detach());
        let (x_leaf, context_leaf) = (leaf(x)?, leaf(context)?);
        let y = (self.forward)(&x_leaf, &context_leaf)?;
        // the gradient of this sum with respect to y is dy
        let dy = dy.detach();
        let mut found = (y * &dy)?.sum_all()?.backward()?;
        // candle forms it of both factors, and that of dy holds y and so the whole layer
        drop(found.remove(&dy));
        let (dx, dcontext) = (found.remove(&x_leaf), found.remove(&context_leaf));
        self.beside.extend(found)?;
        Ok((
            dx.filter(|_| x.track_op()),
            dcontext.filter(|_| context.track_op()),
            None,
        ))
    }
}
