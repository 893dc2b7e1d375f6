//! What AdamW remembers of a parameter, and its update.

use std::collections::HashMap;
use std::sync::Mutex;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{CpuStorage, DType, Device, InplaceOp2, Layout, Tensor, Var};
use dflash_model::simd::vectorised;
use rayon::prelude::*;

use crate::gradient::{Gradient, by_rows};
use crate::optim::{AdamWSettings, CHUNK, check_finite, f32_values};

/// First and second moment of one parameter, f32.
#[derive(Debug)]
pub(crate) enum Moments {
    /// Beside the CPU's parameters, updated in one pass.
    Host { first: Vec<f32>, second: Vec<f32> },
    /// Of a table on the CPU: only of the rows that ever had a gradient. The others have not moved, and a row rests in the
    /// steps that do not use it, as in PyTorch's SparseAdam.
    Rows(RowMoments),
    /// On an accelerator, updated by tensor operations.
    Device { first: Tensor, second: Tensor },
}

/// Moments by rows, in the order in which the rows came.
#[derive(Debug)]
pub(crate) struct RowMoments {
    columns: usize,
    /// Place of every row of the table, or [`NOWHERE`].
    places: Vec<u32>,
    /// The rows that have moments.
    ids: Vec<u32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

/// The place of a row without moments.
const NOWHERE: u32 = u32::MAX;

impl RowMoments {
    fn new(rows: usize, columns: usize) -> Self {
        Self {
            columns,
            places: vec![NOWHERE; rows],
            ids: Vec::new(),
            first: Vec::new(),
            second: Vec::new(),
        }
    }

    /// Makes room for rows that have none.
    fn reach(&mut self, ids: &[u32]) {
        for id in ids {
            let place = &mut self.places[*id as usize];
            if *place == NOWHERE {
                *place = self.ids.len() as u32;
                self.ids.push(*id);
            }
        }
        let count = self.ids.len() * self.columns;
        self.first.resize(count, 0.0);
        self.second.resize(count, 0.0);
    }

    /// Updates the rows `ids`, which have moments, of the table `weights`.
    fn update(&mut self, ids: &[u32], weights: &mut [f32], grads: &[f32], rates: Rates) {
        let columns = self.columns;
        for (id, grads) in ids.iter().zip(grads.chunks_exact(columns)) {
            let (row, place) = (*id as usize * columns, self.places[*id as usize] as usize * columns);
            let (first, second) = (
                &mut self.first[place..][..columns],
                &mut self.second[place..][..columns],
            );
            update_chunk(&mut weights[row..][..columns], grads, first, second, rates);
        }
    }
}

/// The scalars of one parameter's update.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rates {
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
    pub(crate) fn new(settings: &AdamWSettings, updates: u64, lr: f64, clip_scale: f64, decays: bool) -> Self {
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
    pub(crate) fn zeros(name: &str, var: &Var) -> Result<Self> {
        if by_rows(name, var) {
            let (rows, columns) = var.dims2()?;
            return Ok(Self::Rows(RowMoments::new(rows, columns)));
        }
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

    pub(crate) fn update(&mut self, var: &Var, grad: &Gradient, rates: Rates) -> Result<()> {
        let values = grad.values().contiguous()?;
        match (self, grad) {
            (Self::Host { first, second }, Gradient::Whole(_)) => {
                // one pass over parameter, gradient and both moments
                let update = HostUpdate(Mutex::new(|weights: &mut [f32], grads: &[f32]| {
                    weights
                        .par_chunks_mut(CHUNK)
                        .zip(grads.par_chunks(CHUNK))
                        .zip(first.par_chunks_mut(CHUNK).zip(second.par_chunks_mut(CHUNK)))
                        .for_each(|((w, g), (m, v))| update_chunk(w, g, m, v, rates));
                }));
                var.as_tensor().inplace_op2(&values, &update)?;
            }
            (Self::Rows(moments), Gradient::Rows { ids, .. }) => {
                moments.reach(ids);
                if !ids.is_empty() {
                    let update = |weights: &mut [f32], grads: &[f32]| moments.update(ids, weights, grads, rates);
                    var.as_tensor().inplace_op2(&values, &HostUpdate(Mutex::new(update)))?;
                }
            }
            (Self::Device { first, second }, Gradient::Whole(_)) => {
                let grad = (values * f64::from(rates.clip_scale))?;
                *first = ((&*first * f64::from(rates.beta1))? + (&grad * f64::from(rates.keep1))?)?;
                *second = ((&*second * f64::from(rates.beta2))? + (grad.sqr()? * f64::from(rates.keep2))?)?;
                let root = ((second.sqrt()? * f64::from(rates.second_scale))? + f64::from(rates.eps))?;
                let change = (first.div(&root)? * f64::from(rates.step_size))?;
                var.set(&((var.as_tensor() * f64::from(rates.shrink))? - change)?)?;
            }
            (Self::Rows(_), Gradient::Whole(_)) => bail!("expected a gradient by rows, got a whole one"),
            (_, Gradient::Rows { .. }) => bail!("expected a whole gradient, got one by rows"),
        }
        Ok(())
    }

    /// The tensors of a saved state, `{name}.exp_avg` and `{name}.exp_avg_sq`; of a table also `{name}.rows`, which rows
    /// they are.
    pub(crate) fn save(&self, name: &str, into: &mut HashMap<String, Tensor>) -> Result<()> {
        let cpu = &Device::Cpu;
        let (first, second) = match self {
            Self::Host { first, second } => (
                Tensor::from_slice(first, first.len(), cpu)?,
                Tensor::from_slice(second, second.len(), cpu)?,
            ),
            Self::Rows(moments) => {
                let shape = (moments.ids.len(), moments.columns);
                let ids = Tensor::from_slice(&moments.ids, moments.ids.len(), cpu)?;
                into.insert(format!("{name}.rows"), ids);
                (
                    Tensor::from_slice(&moments.first, shape, cpu)?,
                    Tensor::from_slice(&moments.second, shape, cpu)?,
                )
            }
            Self::Device { first, second } => (
                first.to_device(cpu)?.flatten_all()?,
                second.to_device(cpu)?.flatten_all()?,
            ),
        };
        into.insert(format!("{name}.exp_avg"), first);
        into.insert(format!("{name}.exp_avg_sq"), second);
        Ok(())
    }

    /// Takes what [`Self::save`] wrote out of `saved`.
    pub(crate) fn restore(&mut self, name: &str, saved: &mut HashMap<String, Tensor>) -> Result<()> {
        let mut take = |suffix: &str| {
            let key = format!("{name}.{suffix}");
            let tensor = saved.remove(&key).with_context(|| format!("tensor {key} is missing"))?;
            check_finite(&tensor).with_context(|| format!("tensor {key}"))?;
            Ok::<_, anyhow::Error>(tensor)
        };
        let (saved_first, saved_second) = (take("exp_avg")?, take("exp_avg_sq")?);
        let numbers = |tensor: &Tensor, count: usize| {
            let numbers = tensor.flatten_all()?.to_vec1::<f32>()?;
            ensure!(
                numbers.len() == count,
                "moments of {name}: expected {count} values, got {}",
                numbers.len()
            );
            Ok(numbers)
        };
        match self {
            Self::Host { first, second } => {
                *first = numbers(&saved_first, first.len())?;
                *second = numbers(&saved_second, second.len())?;
            }
            Self::Rows(moments) => {
                let key = format!("{name}.rows");
                let ids = take("rows")?;
                ensure!(
                    ids.dtype() == DType::U32,
                    "tensor {key}: expected u32, got {}",
                    ids.dtype().as_str()
                );
                let ids = ids.flatten_all()?.to_vec1::<u32>()?;
                let mut fresh = RowMoments::new(moments.places.len(), moments.columns);
                if let Some(id) = ids.iter().find(|id| **id as usize >= fresh.places.len()) {
                    bail!("tensor {key}: row {id} of a table of {} rows", fresh.places.len())
                }
                fresh.reach(&ids);
                ensure!(fresh.ids.len() == ids.len(), "tensor {key}: a row is listed twice");
                fresh.first = numbers(&saved_first, ids.len() * fresh.columns)?;
                fresh.second = numbers(&saved_second, ids.len() * fresh.columns)?;
                *moments = fresh;
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

/// A host update: gets the parameter's numbers and the gradient's.
struct HostUpdate<F>(Mutex<F>);

impl<F: FnMut(&mut [f32], &[f32])> InplaceOp2 for HostUpdate<F> {
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
        let weights = weights_of(weights, weight_layout)?;
        let Ok(mut update) = self.0.lock() else {
            candle_core::bail!("adamw: an earlier update panicked")
        };
        update(weights, grads);
        Ok(())
    }
}

fn weights_of<'w>(storage: &'w mut CpuStorage, layout: &Layout) -> candle_core::Result<&'w mut [f32]> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("adamw: a parameter is not contiguous")
    };
    let CpuStorage::F32(weights) = storage else {
        candle_core::bail!("adamw: a parameter is not f32")
    };
    Ok(&mut weights[start..end])
}

fn update_chunk(weights: &mut [f32], grads: &[f32], first: &mut [f32], second: &mut [f32], r: Rates) {
    vectorised(
        #[inline(always)]
        || {
            for (((w, &g), m), v) in weights.iter_mut().zip(grads).zip(first).zip(second) {
                let g = g * r.clip_scale;
                *m = *m * r.beta1 + g * r.keep1;
                *v = *v * r.beta2 + g * g * r.keep2;
                *w = *w * r.shrink - r.step_size * *m / (v.sqrt() * r.second_scale + r.eps);
            }
        },
    );
}
