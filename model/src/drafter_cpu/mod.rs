//! The drafter's decoding form on the CPU: packed weights, every layer on plain f32 slices.
//!
//! The same arithmetic as [`crate::drafter`], which stays for training and other devices and which the tests hold this
//! form to. A proposal is some fifty small operations; as tensor operations they cost more than their arithmetic. The
//! matrices are the drafter's own, shared.

mod layer;
mod select;
mod session;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};

use crate::buffer::Buffer;
use crate::drafter::Drafter;
use crate::drafter_config::DrafterConfig;
use crate::ops::{LogitShape, Weight};
use crate::packed::{Packed, joined};
use crate::selector::CandidateSelector;
use crate::target::TargetHead;
use crate::target::kernels::rms_norm;
use layer::{Layer, Projected};
use select::Selector;
pub(crate) use session::CpuSession;

/// A bound drafter in the form that this machine's CPU runs fastest.
#[derive(Debug)]
pub(crate) struct CpuDrafter {
    config: DrafterConfig,
    fc: Arc<Packed>,
    hidden_norm: Vec<f32>,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    embed: Tensor,
    head: Arc<Packed>,
    shape: LogitShape,
    selector: Option<Selector>,
    /// Input row of a slot to be predicted, `[H]`.
    mask: Vec<f32>,
    /// The first layer's projections of a slot that sees nothing but such rows.
    masked: Projected,
}

impl CpuDrafter {
    /// This form of a drafter, if it is frozen on the CPU and its codebooks are tables.
    pub(crate) fn new(drafter: &Drafter, head: &TargetHead, logits: &Weight) -> Result<Option<Self>> {
        let frozen = drafter.fc.packed().is_some() && logits.packed().is_some();
        let factored = drafter.selector.as_ref().is_some_and(CandidateSelector::is_factored);
        if !frozen || factored || !head.embed.device().is_cpu() {
            return Ok(None);
        }
        let config = drafter.config.clone();
        let layers = drafter.layers.iter().map(|layer| Layer::new(layer, &config));
        let mut cpu = Self {
            fc: shared(&drafter.fc)?,
            hidden_norm: floats(&drafter.hidden_norm)?,
            layers: layers.collect::<Result<_>>()?,
            norm: floats(&drafter.norm)?,
            embed: head.embed.clone(),
            head: shared(logits)?,
            shape: drafter.logit_shape(),
            selector: drafter.selector.as_ref().map(Selector::new).transpose()?,
            mask: Vec::new(),
            masked: Projected::default(),
            config,
        };
        cpu.mask = cpu.input_row(cpu.config.mask_token_id)?;
        let reach = cpu.reach();
        if let Some(first) = cpu.layers.first() {
            cpu.masked = first.project(&cpu.mask.repeat(reach + 1)).last(reach);
        }
        Ok(Some(cpu))
    }

    /// Slots whose first projections depend on the anchor: the convolution hands it on to the next ones.
    fn reach(&self) -> usize {
        self.config.conv.map_or(1, |conv| conv.kernel_size)
    }

    /// A token's embedding as the first layer takes it, `[H]`.
    fn input_row(&self, token: u32) -> Result<Vec<f32>> {
        let v = self.config.vocab_size;
        if token as usize >= v {
            bail!("anchor token {token}: the drafter's vocabulary has {v} rows")
        }
        let mut row = floats(&self.embed.narrow(0, token as usize, 1)?)?;
        let scale = self.config.input_embedding_scale as f32;
        for x in &mut row {
            *x *= scale;
        }
        Ok(row)
    }

    /// Keys and values of every layer, `[rows, layers * 2 * kv_heads * D]`: layer by layer k | v, neither normed nor
    /// rotated. `taps`: [rows, n_taps * H].
    fn context(&self, taps: &[f32]) -> Buffer {
        let rows = rms_norm(
            &self.fc.product(taps),
            &self.hidden_norm,
            self.config.rms_norm_eps as f32,
        );
        let matrices: Vec<&Packed> = self.layers.iter().flat_map(Layer::key_value_matrices).collect();
        joined(&matrices, &rows)
    }

    /// Projections of the first layer for [anchor, MASK, MASK, ...]: most slots see no anchor yet and are all the same.
    fn open(&self, layer: &Layer, x: &[f32]) -> Projected {
        let h = self.config.hidden_size;
        let slots = x.len() / h;
        let own = self.reach().min(slots);
        layer.project(&x[..own * h]).followed_by(&self.masked, slots - own)
    }

    /// Shaped logits [rows, V] of post-norm hidden rows.
    fn logits(&self, hidden: &[f32]) -> Buffer {
        let mut logits = self.head.product(hidden);
        select::shape(&mut logits, self.shape, self.config.vocab_size);
        logits
    }
}

/// The packed matrix of a frozen weight.
fn shared(weight: &Weight) -> Result<Arc<Packed>> {
    match weight.packed() {
        Some(packed) => Ok(packed),
        None => bail!("drafter: expected packed matrices throughout, came a plain one"),
    }
}

/// A small tensor's values.
fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}
