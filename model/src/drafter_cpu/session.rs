//! One sequence drafted on slices: the context's keys and values, and what a proposal makes of them.

use candle_core::{DType, Result, Tensor, bail};

use super::CpuDrafter;
use crate::buffer::Buffer;
use crate::drafting::{DraftSession, Proposal, Sampling};
use crate::ops::with_slice;
use crate::target::attention::KvCache;
use crate::target::kernels::rms_norm;
use crate::walk::check_width;

/// A decoding session of a [`CpuDrafter`].
///
/// A block's own keys and values are written behind the context's and left there: nothing reads past `len`, and the next
/// extension or proposal writes over them.
pub(crate) struct CpuSession<'d> {
    drafter: &'d CpuDrafter,
    len: usize,
    caches: Vec<KvCache>,
    angles: Angles,
}

impl<'d> CpuSession<'d> {
    pub(crate) fn new(drafter: &'d CpuDrafter) -> Self {
        Self {
            drafter,
            len: 0,
            caches: drafter.layers.iter().map(super::Layer::cache).collect(),
            angles: Angles::new(drafter.config.head_dim, drafter.config.rope_theta),
        }
    }

    /// Post-norm hidden of the slots 1..=width after `anchor`, [width, H].
    pub(super) fn hidden(&mut self, anchor: u32, width: usize) -> Result<Buffer> {
        let drafter = self.drafter;
        let mut x = drafter.input_row(anchor)?;
        for _ in 0..width {
            x.extend_from_slice(&drafter.mask);
        }
        self.angles.upto(self.len + width + 1);
        for (i, (layer, cache)) in drafter.layers.iter().zip(&mut self.caches).enumerate() {
            let projected = if i == 0 {
                drafter.open(layer, &x)
            } else {
                layer.project(&x)
            };
            layer.run(&mut x, projected, cache, self.len, &self.angles);
        }
        let (h, eps) = (drafter.config.hidden_size, drafter.config.rms_norm_eps as f32);
        Ok(rms_norm(&x[h..], &drafter.norm, eps))
    }
}

impl DraftSession for CpuSession<'_> {
    fn len(&self) -> usize {
        self.len
    }

    fn extend(&mut self, taps: &Tensor) -> Result<()> {
        let (m, width) = taps.dims2()?;
        if m == 0 {
            return Ok(());
        }
        let drafter = self.drafter;
        if width != drafter.fc.depth() {
            bail!(
                "linear: input {:?} against a weight of {} columns",
                taps.shape(),
                drafter.fc.depth()
            )
        }
        let rows = with_slice(&taps.to_dtype(DType::F32)?, "extend", |taps| Ok(drafter.context(taps)))?;
        self.angles.upto(self.len + m);
        let stride = rows.len() / m;
        let each = stride / drafter.layers.len();
        for (i, (layer, cache)) in drafter.layers.iter().zip(&mut self.caches).enumerate() {
            layer.remember(cache, self.len, &rows, (stride, i * each), &self.angles);
        }
        self.len += m;
        Ok(())
    }

    fn propose(&mut self, anchor: u32, width: usize, sampling: &mut Sampling<'_>) -> Result<Proposal> {
        check_width(self.drafter.config.block_size, width)?;
        let hidden = self.hidden(anchor, width)?;
        let logits = self.drafter.logits(&hidden);
        self.drafter.walk(&hidden, &logits, anchor, sampling)
    }
}

/// Cosines and sines of all positions so far, each computed once; as [`crate::ops::Rotation`] has them.
pub(super) struct Angles {
    frequencies: Vec<f64>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Angles {
    fn new(head_dim: usize, theta: f64) -> Self {
        let frequency = |j: usize| f64::from(theta.powf(-2.0 * j as f64 / head_dim as f64) as f32);
        Self {
            frequencies: (0..head_dim / 2).map(frequency).collect(),
            cos: Vec::new(),
            sin: Vec::new(),
        }
    }

    /// Sees to it that positions below `end` are there.
    fn upto(&mut self, end: usize) {
        for position in self.cos.len() / self.frequencies.len()..end {
            for frequency in &self.frequencies {
                let angle = f64::from((position as f64 * frequency) as f32);
                self.cos.push(angle.cos() as f32);
                self.sin.push(angle.sin() as f32);
            }
        }
    }

    /// One position's cosines and sines, D / 2 each.
    pub(super) fn of(&self, position: usize) -> (&[f32], &[f32]) {
        let half = self.frequencies.len();
        (
            &self.cos[position * half..][..half],
            &self.sin[position * half..][..half],
        )
    }
}
