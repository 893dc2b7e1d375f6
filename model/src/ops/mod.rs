//! The drafter's operations, each with an explicit backward.
//!
//! candle's fused operations lose gradients without an error and its `matmul` differentiates frozen operands. Each
//! file here holds one operation: a CPU kernel over f32 slices with a backward written out, and a *composed* twin
//! of candle operations that every other device runs and that the tests hold the kernel to.
//!
//! Shapes: R rows (blocks x slots), T context rows, H hidden, V vocabulary, N blocks, B slots a block.

mod best;
mod block_attention;
mod cross_entropy_row;
mod gathered_dot;
mod grouped_conv;
mod linear;
mod linear_cross_entropy;
mod rms_norm;
mod rope;
mod swiglu;

pub use best::top_k;
pub use block_attention::{AttentionPlan, attend_one_block, block_attention};
pub use gathered_dot::gathered_dot;
pub use grouped_conv::grouped_conv;
pub use linear::{Compute, Frozen, Weight, linear};
pub use linear_cross_entropy::{CrossEntropy, LogitShape, linear_cross_entropy};
pub use rms_norm::rms_norm;
pub use rope::{Rotation, rope};
pub use swiglu::swiglu;

/// The composed twins, for other devices and for tests.
pub mod composed {
    pub use super::block_attention::composed as block_attention;
    pub use super::gathered_dot::composed as gathered_dot;
    pub use super::grouped_conv::composed as grouped_conv;
    pub use super::linear_cross_entropy::composed as linear_cross_entropy;
    pub use super::rms_norm::composed as rms_norm;
    pub use super::rope::composed as rope;
    pub use super::swiglu::composed as swiglu;
}

use candle_core::{CpuStorage, DType, Layout, Result, Tensor, WithDType};

/// The contiguous f32 slice behind a custom operation's argument.
fn slice_of<'s>(storage: &'s CpuStorage, layout: &Layout, op: &str) -> Result<&'s [f32]> {
    numbers_of(storage, layout, op)
}

/// The contiguous slice of numbers of type `T` in a storage.
fn numbers_of<'s, T: WithDType>(storage: &'s CpuStorage, layout: &Layout, op: &str) -> Result<&'s [T]> {
    let came = candle_core::backend::BackendStorage::dtype(storage);
    if came != T::DTYPE {
        candle_core::bail!("{op}: expected {}, came {}", T::DTYPE.as_str(), came.as_str())
    }
    let data = storage.as_slice::<T>()?;
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("{op}: expected a contiguous tensor, came strides {:?}", layout.stride())
    };
    Ok(&data[start..end])
}

/// Whether the CPU kernel applies to all of these tensors.
fn on_cpu(tensors: &[&Tensor]) -> bool {
    tensors.iter().all(|t| t.device().is_cpu() && t.dtype() == DType::F32)
}

/// Reads a contiguous f32 CPU tensor without copying it.
pub(crate) fn with_slice<R>(tensor: &Tensor, op: &str, read: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    with_numbers(tensor, op, read)
}

/// Reads a contiguous CPU tensor of numbers of type `T` without copying it.
fn with_numbers<T: WithDType, R>(tensor: &Tensor, op: &str, read: impl FnOnce(&[T]) -> Result<R>) -> Result<R> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        candle_core::Storage::Cpu(cpu) => read(numbers_of(cpu, layout, op)?),
        _ => candle_core::bail!("{op}: the CPU kernel was given a tensor of another device"),
    }
}

/// Rows a worker takes at once: enough work to outweigh the hand-over, few enough to balance.
fn rows_per_task(row_elements: usize) -> usize {
    (32 * 1024 / row_elements.max(1)).max(1)
}

#[cfg(test)]
pub(crate) mod check {
    //! Shared by the operations' tests: seeded tensors, and gradients compared three ways.

    use candle_core::{Device, Result, Tensor, Var};

    /// Seeded values, roughly normal, of a given shape.
    pub(crate) fn tensor(seed: u64, shape: &[usize]) -> Tensor {
        let count: usize = shape.iter().product();
        let values = crate::init::normal(seed, count, 1.0);
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    /// A trainable copy.
    pub(crate) fn var(seed: u64, shape: &[usize]) -> Var {
        Var::from_tensor(&tensor(seed, shape)).unwrap()
    }

    /// Largest difference relative to the largest magnitude of `b`.
    pub(crate) fn distance(a: &Tensor, b: &Tensor) -> f64 {
        let diff = (a - b)
            .unwrap()
            .abs()
            .unwrap()
            .flatten_all()
            .unwrap()
            .max(0)
            .unwrap()
            .to_scalar::<f32>()
            .unwrap();
        let scale = b
            .abs()
            .unwrap()
            .flatten_all()
            .unwrap()
            .max(0)
            .unwrap()
            .to_scalar::<f32>()
            .unwrap();
        f64::from(diff) / f64::from(scale.max(1e-6))
    }

    /// Holds value and gradients of `fast` to those of `twin`, and one directional derivative to finite differences.
    pub(crate) fn same_value_and_gradients(
        vars: &[&Var],
        fast: impl Fn() -> Result<Tensor>,
        twin: impl Fn() -> Result<Tensor>,
        tolerance: f64,
    ) {
        let (a, b) = (fast().unwrap(), twin().unwrap());
        assert_eq!(a.dims(), b.dims());
        assert!(distance(&a, &b) < tolerance, "values differ by {}", distance(&a, &b));
        // A fixed random functional of the output, so that no gradient cancels by symmetry.
        let probe = tensor(999, a.dims());
        let loss = |t: Tensor| (t * &probe).unwrap().sum_all().unwrap();
        let fast_grads = loss(a).backward().unwrap();
        let twin_grads = loss(b).backward().unwrap();
        for (i, var) in vars.iter().enumerate() {
            let (Some(x), Some(y)) = (fast_grads.get(var), twin_grads.get(var)) else {
                panic!("argument {i} got no gradient");
            };
            assert!(
                distance(x, y) < tolerance,
                "gradient of argument {i} differs by {}",
                distance(x, y)
            );
            let direction = tensor(77 + i as u64, var.dims());
            let origin = var.as_tensor().copy().unwrap();
            let step = 3e-3;
            let at = |s: f64| {
                var.set(&(&origin + (&direction * s).unwrap()).unwrap()).unwrap();
                f64::from(loss(fast().unwrap()).to_scalar::<f32>().unwrap())
            };
            let numeric = (at(step) - at(-step)) / (2.0 * step);
            var.set(&origin).unwrap();
            let analytic = f64::from((x * &direction).unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap());
            let scale = analytic.abs().max(numeric.abs()).max(1.0);
            assert!(
                (numeric - analytic).abs() / scale < 2e-2,
                "argument {i}: finite differences {numeric}, backward {analytic}"
            );
        }
    }
}
