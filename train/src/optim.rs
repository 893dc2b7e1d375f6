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
use std::sync::Mutex;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{CpuStorage, Device, InplaceOp2, Layout, Tensor, Var};
use rayon::prelude::*;

/// Values a thread handles at a time: 256 kB of f32, so that three operands stay in the second-level cache.
const CHUNK: usize = 1 << 16;

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

/// First and second moment of one parameter, f32.
#[derive(Debug)]
enum Moments {
    /// Beside the CPU's parameters, updated in one pass.
    Host { first: Vec<f32>, second: Vec<f32> },
    /// On an accelerator, updated by tensor operations.
    Device { first: Tensor, second: Tensor },
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
            moments.insert(name.clone(), Moments::zeros(var)?);
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
    pub fn step(&mut self, vars: &BTreeMap<String, Var>, grads: &BTreeMap<String, Tensor>, lr: f64) -> Result<Update> {
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
                .update(var, &grad.contiguous()?, rates)
                .with_context(|| format!("update of {name}"))?;
        }
        Ok(Update { grad_norm, clip_scale })
    }

    /// Writes the moments as safetensors, `{name}.exp_avg` and `{name}.exp_avg_sq`. The caller makes the file whole.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut tensors = HashMap::new();
        for (name, moments) in &self.moments {
            let (first, second) = moments.tensors()?;
            tensors.insert(format!("{name}.exp_avg"), first);
            tensors.insert(format!("{name}.exp_avg_sq"), second);
        }
        candle_core::safetensors::save(&tensors, path).with_context(|| format!("writing {}", path.display()))
    }

    /// Reads what [`AdamW::save`] wrote for the same parameters, after `updates` updates.
    pub fn load(&mut self, path: &Path, updates: u64) -> Result<()> {
        let mut tensors = candle_core::safetensors::load(path, &Device::Cpu)
            .with_context(|| format!("optimizer state {}", path.display()))?;
        for (name, moments) in &mut self.moments {
            let mut take = |suffix: &str| {
                let key = format!("{name}.{suffix}");
                let tensor = tensors
                    .remove(&key)
                    .with_context(|| format!("{}: tensor {key} is missing", path.display()))?;
                check_finite(&tensor).with_context(|| format!("{}: tensor {key}", path.display()))?;
                Ok::<_, anyhow::Error>(tensor)
            };
            let (first, second) = (take("exp_avg")?, take("exp_avg_sq")?);
            moments
                .restore(&first, &second)
                .with_context(|| format!("{}: moments of {name}", path.display()))?;
        }
        if let Some(name) = tensors.keys().min() {
            bail!("{}: unexpected tensor {name}", path.display());
        }
        self.updates = updates;
        Ok(())
    }

    fn check_names(&self, vars: &BTreeMap<String, Var>, grads: &BTreeMap<String, Tensor>) -> Result<()> {
        for name in self.moments.keys() {
            let Some(grad) = grads.get(name) else {
                bail!("parameter {name} has no gradient")
            };
            let Some(var) = vars.get(name) else {
                bail!("parameter {name} is gone")
            };
            ensure!(
                grad.shape() == var.shape(),
                "gradient of {name}: expected shape {:?}, got {:?}",
                var.dims(),
                grad.dims()
            );
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
pub fn global_norm(grads: &BTreeMap<String, Tensor>) -> Result<f64> {
    let mut total = 0.0;
    for (name, grad) in grads {
        let squares = sum_of_squares(grad).with_context(|| format!("gradient of {name}"))?;
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
    let partial: Vec<f64> = values
        .par_chunks(CHUNK)
        .map(|chunk| chunk.iter().map(|&value| f64::from(value) * f64::from(value)).sum())
        .collect();
    Ok(partial.iter().sum())
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

/// The scalars of one parameter's update.
#[derive(Debug, Clone, Copy)]
struct Rates {
    clip_scale: f32,
    beta1: f32,
    beta2: f32,
    keep1: f32,
    keep2: f32,
    /// lr / (1 - b1^t)
    step_size: f32,
    /// 1 / sqrt(1 - b2^t)
    second_scale: f32,
    eps: f32,
    /// 1 - lr d
    shrink: f32,
}

impl Rates {
    fn new(settings: &AdamWSettings, updates: u64, lr: f64, clip_scale: f64, decays: bool) -> Self {
        let exponent = updates as f64;
        let first_bias = 1.0 - settings.beta1.powf(exponent);
        let second_bias = 1.0 - settings.beta2.powf(exponent);
        Self {
            clip_scale: clip_scale as f32,
            beta1: settings.beta1 as f32,
            beta2: settings.beta2 as f32,
            keep1: (1.0 - settings.beta1) as f32,
            keep2: (1.0 - settings.beta2) as f32,
            step_size: (lr / first_bias) as f32,
            second_scale: (1.0 / second_bias.sqrt()) as f32,
            eps: settings.eps as f32,
            shrink: if decays {
                (1.0 - lr * settings.weight_decay) as f32
            } else {
                1.0
            },
        }
    }
}

impl Moments {
    fn zeros(var: &Var) -> Result<Self> {
        if var.device().is_cpu() {
            let count = var.elem_count();
            return Ok(Self::Host {
                first: vec![0.0; count],
                second: vec![0.0; count],
            });
        }
        Ok(Self::Device {
            first: var.zeros_like()?,
            second: var.zeros_like()?,
        })
    }

    fn update(&mut self, var: &Var, grad: &Tensor, rates: Rates) -> Result<()> {
        match self {
            Self::Host { first, second } => {
                let moments = Mutex::new((first.as_mut_slice(), second.as_mut_slice()));
                var.as_tensor().inplace_op2(grad, &FusedUpdate { moments, rates })?;
            }
            Self::Device { first, second } => {
                let grad = (grad * f64::from(rates.clip_scale))?;
                *first = ((&*first * f64::from(rates.beta1))? + (&grad * f64::from(rates.keep1))?)?;
                *second = ((&*second * f64::from(rates.beta2))? + (grad.sqr()? * f64::from(rates.keep2))?)?;
                let root = ((second.sqrt()? * f64::from(rates.second_scale))? + f64::from(rates.eps))?;
                let change = (first.div(&root)? * f64::from(rates.step_size))?;
                var.set(&((var.as_tensor() * f64::from(rates.shrink))? - change)?)?;
            }
        }
        Ok(())
    }

    fn tensors(&self) -> Result<(Tensor, Tensor)> {
        match self {
            Self::Host { first, second } => Ok((
                Tensor::from_slice(first, first.len(), &Device::Cpu)?,
                Tensor::from_slice(second, second.len(), &Device::Cpu)?,
            )),
            Self::Device { first, second } => Ok((
                first.to_device(&Device::Cpu)?.flatten_all()?,
                second.to_device(&Device::Cpu)?.flatten_all()?,
            )),
        }
    }

    fn restore(&mut self, saved_first: &Tensor, saved_second: &Tensor) -> Result<()> {
        match self {
            Self::Host { first, second } => {
                for (values, saved) in [(first, saved_first), (second, saved_second)] {
                    let saved = saved.flatten_all()?.to_vec1::<f32>()?;
                    ensure!(
                        saved.len() == values.len(),
                        "expected {} values, got {}",
                        values.len(),
                        saved.len()
                    );
                    *values = saved;
                }
            }
            Self::Device { first, second } => {
                for (values, saved) in [(first, saved_first), (second, saved_second)] {
                    *values = saved.reshape(values.shape())?.to_device(values.device())?;
                }
            }
        }
        Ok(())
    }
}

/// The host update: one pass over parameter, gradient and both moments.
struct FusedUpdate<'m> {
    moments: Mutex<(&'m mut [f32], &'m mut [f32])>,
    rates: Rates,
}

impl InplaceOp2 for FusedUpdate<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(
        &self,
        weights: &mut CpuStorage,
        weight_layout: &Layout,
        grads: &CpuStorage,
        grad_layout: &Layout,
    ) -> candle_core::Result<()> {
        let grads = f32_values(grads, grad_layout)?;
        let Some((start, end)) = weight_layout.contiguous_offsets() else {
            candle_core::bail!("adamw: a parameter is not contiguous")
        };
        let CpuStorage::F32(weights) = weights else {
            candle_core::bail!("adamw: a parameter is not f32")
        };
        let Ok(mut moments) = self.moments.lock() else {
            candle_core::bail!("adamw: an earlier update panicked")
        };
        let (first, second) = &mut *moments;
        let rates = self.rates;
        weights[start..end]
            .par_chunks_mut(CHUNK)
            .zip(grads.par_chunks(CHUNK))
            .zip(first.par_chunks_mut(CHUNK).zip(second.par_chunks_mut(CHUNK)))
            .for_each(|((w, g), (m, v))| update_chunk(w, g, m, v, rates));
        Ok(())
    }
}

fn update_chunk(weights: &mut [f32], grads: &[f32], first: &mut [f32], second: &mut [f32], r: Rates) {
    for (((w, &g), m), v) in weights.iter_mut().zip(grads).zip(first).zip(second) {
        let g = g * r.clip_scale;
        *m = *m * r.beta1 + g * r.keep1;
        *v = *v * r.beta2 + g * g * r.keep2;
        *w = *w * r.shrink - r.step_size * *m / (v.sqrt() * r.second_scale + r.eps);
    }
}

fn f32_values<'s>(storage: &'s CpuStorage, layout: &Layout) -> candle_core::Result<&'s [f32]> {
    let CpuStorage::F32(values) = storage else {
        candle_core::bail!("expected f32 values")
    };
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("expected contiguous values")
    };
    Ok(&values[start..end])
}
