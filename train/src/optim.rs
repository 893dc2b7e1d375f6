//! AdamW with f32 masters and f32 moments, decoupled decay and a global gradient clip.
//!
//! With s = min(1, clip / |g|) over all gradients, for every parameter w with gradient g, at update t = 1, 2, ...
//!
//! ```text
//! g <- s g
//! m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
//! w <- w - lr d w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
//! ```
//!
//! d is 0 for norms, other 1-D parameters and convolution base kernels: they start at 1, not at 0. Order is by name
//! and chunks have a fixed size, so the same gradients give the same bits with any number of threads.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{CpuStorage, Device, Layout, Tensor, Var};
use dflash_model::simd::vectorised;
use rayon::prelude::*;

use crate::gradient::{Gradient, Gradients};
use crate::moments::{Moments, Rates};

/// Values a thread handles at a time: 256 kB of f32, so that three operands stay in the second-level cache.
pub(crate) const CHUNK: usize = 1 << 16;

/// Constants of the update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of matrices.
    pub weight_decay: f64,
    /// Largest global gradient norm.
    pub clip: f64,
}

/// What one update did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Factor that the clip applied to every gradient, at most 1.
    pub clip_scale: f64,
}

/// The optimizer: moments by parameter name, and the number of updates made.
#[derive(Debug)]
pub struct AdamW {
    settings: AdamWSettings,
    moments: BTreeMap<String, Moments>,
    updates: u64,
}

impl AdamW {
    /// Zero moments for `vars`, which must be f32 and contiguous.
    pub fn new(settings: AdamWSettings, vars: &BTreeMap<String, Var>) -> Result<Self> {
        let mut moments = BTreeMap::new();
        for (name, var) in vars {
            ensure!(
                var.dtype() == candle_core::DType::F32,
                "parameter {name}: expected an f32 master, got {}",
                var.dtype().as_str()
            );
            moments.insert(name.clone(), Moments::zeros(name, var)?);
        }
        Ok(Self {
            settings,
            moments,
            updates: 0,
        })
    }

    /// Updates made so far, t.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// One update of `vars` by `grads`, which must hold exactly the same names.
    ///
    /// # Errors
    /// When a gradient is missing, unexpected, of another shape or not finite. Nothing has changed then.
    pub fn step(&mut self, vars: &BTreeMap<String, Var>, grads: &Gradients, lr: f64) -> Result<Update> {
        self.check_names(vars, grads)?;
        let grad_norm = global_norm(grads)?;
        let clip_scale = if grad_norm > self.settings.clip {
            self.settings.clip / grad_norm
        } else {
            1.0
        };
        self.updates += 1;
        for (name, moments) in &mut self.moments {
            let (var, grad) = (&vars[name], &grads[name]);
            let rates = Rates::new(&self.settings, self.updates, lr, clip_scale, decays(name, var));
            moments
                .update(var, grad, rates)
                .with_context(|| format!("update of {name}"))?;
        }
        Ok(Update { grad_norm, clip_scale })
    }

    /// Writes the moments as safetensors: `{name}.exp_avg`, `{name}.exp_avg_sq`, and `{name}.rows` of a table. The caller
    /// makes the file whole.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut tensors = HashMap::new();
        for (name, moments) in &self.moments {
            moments.save(name, &mut tensors)?;
        }
        candle_core::safetensors::save(&tensors, path).with_context(|| format!("writing {}", path.display()))
    }

    /// Reads what [`AdamW::save`] wrote for the same parameters, after `updates` updates.
    pub fn load(&mut self, path: &Path, updates: u64) -> Result<()> {
        let mut tensors = candle_core::safetensors::load(path, &Device::Cpu)
            .with_context(|| format!("optimizer state {}", path.display()))?;
        for (name, moments) in &mut self.moments {
            moments
                .restore(name, &mut tensors)
                .with_context(|| path.display().to_string())?;
        }
        if let Some(name) = tensors.keys().min() {
            bail!("{}: unexpected tensor {name}", path.display());
        }
        self.updates = updates;
        Ok(())
    }

    fn check_names(&self, vars: &BTreeMap<String, Var>, grads: &Gradients) -> Result<()> {
        for name in self.moments.keys() {
            let Some(grad) = grads.get(name) else {
                bail!("parameter {name} has no gradient")
            };
            let Some(var) = vars.get(name) else {
                bail!("parameter {name} is gone")
            };
            match grad {
                Gradient::Whole(grad) => ensure!(
                    grad.shape() == var.shape(),
                    "gradient of {name}: expected shape {:?}, got {:?}",
                    var.dims(),
                    grad.dims()
                ),
                Gradient::Rows { ids, values } => ensure!(
                    var.dims().len() == 2
                        && values.dims() == [ids.len(), var.dims()[1]]
                        && ids.last().is_none_or(|last| (*last as usize) < var.dims()[0]),
                    "gradient of {name}: {} rows up to {:?} of shape {:?}, the parameter is {:?}",
                    ids.len(),
                    ids.last(),
                    values.dims(),
                    var.dims()
                ),
            }
        }
        if let Some(name) = grads.keys().find(|name| !self.moments.contains_key(*name)) {
            bail!("gradient of {name}: no such parameter");
        }
        Ok(())
    }
}

/// Square root of the sum of squares of all gradients, in f64.
///
/// # Errors
/// Naming the first tensor, by name, that holds a value that is not finite.
pub fn global_norm(grads: &Gradients) -> Result<f64> {
    let mut total = 0.0;
    for (name, grad) in grads {
        let squares = sum_of_squares(grad.values()).with_context(|| format!("gradient of {name}"))?;
        // finite f32 values cannot overflow an f64 sum of squares
        ensure!(
            squares.is_finite(),
            "gradient of {name} is not finite: stopped before the update"
        );
        total += squares;
    }
    Ok(total.sqrt())
}

fn sum_of_squares(tensor: &Tensor) -> Result<f64> {
    if !tensor.device().is_cpu() {
        let norm = tensor.sqr()?.sum_all()?.to_scalar::<f32>()?;
        return Ok(f64::from(norm));
    }
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let candle_core::Storage::Cpu(storage) = &*storage else {
        bail!("expected CPU storage")
    };
    let values = f32_values(storage, layout)?;
    let partial: Vec<f64> = values.par_chunks(CHUNK).map(vectorised_squares).collect();
    Ok(partial.iter().sum())
}

/// Sum of squares in eight f64 sums, so that the loop vectorises.
fn vectorised_squares(values: &[f32]) -> f64 {
    vectorised(
        #[inline(always)]
        || {
            let mut sums = [0f64; 8];
            let (eights, rest) = values.as_chunks::<8>();
            for eight in eights {
                for (sum, value) in sums.iter_mut().zip(eight) {
                    *sum += f64::from(*value) * f64::from(*value);
                }
            }
            let rest: f64 = rest.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
            sums.iter().sum::<f64>() + rest
        },
    )
}

/// Refuses a CPU tensor that holds NaN or an infinity, at the first of them.
pub fn check_finite(tensor: &Tensor) -> Result<()> {
    if tensor.dtype() != candle_core::DType::F32 {
        // whoever reads it refuses the type
        return Ok(());
    }
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let candle_core::Storage::Cpu(storage) = &*storage else {
        bail!("expected CPU storage")
    };
    let values = f32_values(storage, layout)?;
    let Some(at) = values.par_iter().position_first(|value| !value.is_finite()) else {
        return Ok(());
    };
    bail!("value {at} is {}, expected finite numbers", values[at])
}

/// Whether weight decay applies to a parameter.
fn decays(name: &str, var: &Var) -> bool {
    var.dims().len() >= 2 && !name.ends_with("base_kernel")
}

pub(crate) fn f32_values<'s>(storage: &'s CpuStorage, layout: &Layout) -> candle_core::Result<&'s [f32]> {
    let CpuStorage::F32(values) = storage else {
        candle_core::bail!("expected f32 values")
    };
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("expected contiguous values")
    };
    Ok(&values[start..end])
}
