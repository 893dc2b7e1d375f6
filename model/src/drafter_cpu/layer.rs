//! One drafter layer on slices: projections, attention and feed-forward, each between the sides of its convolution.

use std::sync::Arc;

use candle_core::Result;

use super::session::Angles;
use super::{floats, shared};
use crate::buffer::Buffer;
use crate::drafter::{self, GroupedDynamicConv};
use crate::drafter_config::{DrafterConfig, LayerRule};
use crate::packed::{Packed, joined};
use crate::small_matmul::Matrix;
use crate::target::attention::{KvCache, Sight};
use crate::target::kernels::{Heads, Kernel, NormAndRotate, add, each_row, rms_norm, swiglu, wide};

#[derive(Debug)]
pub(super) struct Layer {
    rule: LayerRule,
    heads: usize,
    kv_heads: usize,
    eps: f32,
    input_norm: Vec<f32>,
    post_norm: Vec<f32>,
    q: Arc<Packed>,
    k: Arc<Packed>,
    v: Arc<Packed>,
    o: Arc<Packed>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    gate: Arc<Packed>,
    up: Arc<Packed>,
    down: Arc<Packed>,
    attention_conv: Option<Conv>,
    mlp_conv: Option<Conv>,
}

/// What a layer computes of its input rows before any of them looks at another's keys.
#[derive(Debug, Default)]
pub(super) struct Projected {
    /// Dynamic coefficients of the convolution, [rows, 2 * K * G]; empty without one.
    delta: Vec<f32>,
    /// [rows, (heads + 2 kv_heads) * D]: q | k | v.
    qkv: Vec<f32>,
}

impl Projected {
    /// Row `row` alone.
    pub(super) fn last(&self, row: usize) -> Self {
        let part = |x: &[f32]| x[x.len() / (row + 1) * row..].to_vec();
        Self {
            delta: part(&self.delta),
            qkv: part(&self.qkv),
        }
    }

    /// These rows and `count` times the one of `row`.
    pub(super) fn followed_by(mut self, row: &Self, count: usize) -> Self {
        for _ in 0..count {
            self.delta.extend_from_slice(&row.delta);
            self.qkv.extend_from_slice(&row.qkv);
        }
        self
    }
}

impl Layer {
    pub(super) fn new(layer: &drafter::Layer, config: &DrafterConfig) -> Result<Self> {
        let conv = |conv: &Option<GroupedDynamicConv>| conv.as_ref().map(Conv::new).transpose();
        Ok(Self {
            rule: layer.rule,
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            eps: config.rms_norm_eps as f32,
            input_norm: floats(&layer.input_layernorm)?,
            post_norm: floats(&layer.post_attention_layernorm)?,
            q: shared(&layer.q_proj)?,
            k: shared(&layer.k_proj)?,
            v: shared(&layer.v_proj)?,
            o: shared(&layer.o_proj)?,
            q_norm: floats(&layer.q_norm)?,
            k_norm: floats(&layer.k_norm)?,
            gate: shared(&layer.gate_proj)?,
            up: shared(&layer.up_proj)?,
            down: shared(&layer.down_proj)?,
            attention_conv: conv(&layer.attention_conv)?,
            mlp_conv: conv(&layer.mlp_conv)?,
        })
    }

    /// The matrices that context rows pass.
    pub(super) fn key_value_matrices(&self) -> [&Packed; 2] {
        [&self.k, &self.v]
    }

    fn dim(&self) -> usize {
        self.q_norm.len()
    }

    /// An empty cache.
    pub(super) fn cache(&self) -> KvCache {
        KvCache::new(self.kv_heads, self.dim())
    }

    /// Queries, keys and values of the rows of a block, x [rows, H].
    pub(super) fn project(&self, x: &[f32]) -> Projected {
        let a = rms_norm(x, &self.input_norm, self.eps);
        let matrices: [&Packed; 3] = [&self.q, &self.k, &self.v];
        match &self.attention_conv {
            None => Projected {
                delta: Vec::new(),
                qkv: joined(&matrices, &a).into_vec(),
            },
            Some(conv) => {
                let delta = conv.projection.product(&a);
                Projected {
                    qkv: joined(&matrices, &conv.apply(&a, &delta, 0)).into_vec(),
                    delta: delta.into_vec(),
                }
            }
        }
    }

    /// Writes keys (normed and rotated here) and values of positions from `start` into the cache.
    ///
    /// `rows` holds one projection of `stride` floats a position, its keys, then its values, from `at`.
    pub(super) fn remember(
        &self,
        cache: &mut KvCache,
        start: usize,
        rows: &[f32],
        (stride, at): (usize, usize),
        angles: &Angles,
    ) {
        let width = self.kv_heads * self.dim();
        let count = rows.len() / stride;
        let mut keys = Buffer::stale(count * width);
        each_row(&mut keys, width, |t, out| {
            let (cos, sin) = angles.of(start + t);
            wide::<NormAndRotate>(Heads {
                source: &rows[t * stride + at..],
                stride: self.dim(),
                norm: &self.k_norm,
                eps: self.eps,
                scale: 1.0,
                cos,
                sin,
                out,
            });
        });
        let values = Matrix(&rows[at + width..], stride);
        cache.write(start, Matrix(&keys, width), values, count);
    }

    /// The whole layer but its projections: adds attention and feed-forward to x [rows, H], a block at `start`.
    pub(super) fn run(&self, x: &mut [f32], projected: Projected, cache: &mut KvCache, start: usize, angles: &Angles) {
        let Projected { delta, qkv } = projected;
        let stride = (self.heads + 2 * self.kv_heads) * self.dim();
        self.remember(cache, start, &qkv, (stride, self.heads * self.dim()), angles);
        let attended = self.o.product(&self.attend(cache, start, &qkv, angles));
        match &self.attention_conv {
            None => add(x, &attended),
            Some(conv) => add(x, &conv.apply(&attended, &delta, 1)),
        }
        let m = rms_norm(x, &self.post_norm, self.eps);
        match &self.mlp_conv {
            None => add(x, &self.feed_forward(&m)),
            Some(conv) => {
                let delta = conv.projection.product(&m);
                let out = self.feed_forward(&conv.apply(&m, &delta, 0));
                add(x, &conv.apply(&out, &delta, 1));
            }
        }
    }

    fn feed_forward(&self, m: &[f32]) -> Buffer {
        let gate_up = joined(&[&self.gate, &self.up], m);
        self.down.product(&swiglu(&gate_up, self.gate.width()))
    }

    /// Attention of a block whose own keys are in the cache behind the context's, [rows, heads * D].
    fn attend(&self, cache: &KvCache, start: usize, qkv: &[f32], angles: &Angles) -> Buffer {
        let (dim, heads, group) = (self.dim(), self.heads, self.heads / self.kv_heads);
        let stride = (heads + 2 * self.kv_heads) * dim;
        let rows = qkv.len() / stride;
        let scale = 1.0 / (dim as f32).sqrt();
        let mut queries = Buffer::stale(rows * heads * dim);
        each_row(&mut queries, group * dim, |i, out| {
            let (kv, t) = (i / rows, i % rows);
            let (cos, sin) = angles.of(start + t);
            wide::<NormAndRotate>(Heads {
                source: &qkv[t * stride + kv * group * dim..],
                stride: dim,
                norm: &self.q_norm,
                eps: self.eps,
                scale,
                cos,
                sin,
                out,
            });
        });
        let sight = Sight {
            window: self.rule.window,
            causal: self.rule.causal,
            end: start + rows,
        };
        let attended = cache.attend_within(start, &queries, group, sight);
        let mut flat = queries;
        for (t, row) in flat.chunks_exact_mut(heads * dim).enumerate() {
            for (kv, out) in row.chunks_exact_mut(group * dim).enumerate() {
                out.copy_from_slice(&attended[(kv * rows + t) * group * dim..][..group * dim]);
            }
        }
        flat
    }
}

/// The grouped dynamic convolution around a sublayer; see [`crate::ops::grouped_conv`].
#[derive(Debug)]
struct Conv {
    /// [2, K, H]: side, tap, channel.
    base: Vec<f32>,
    taps: usize,
    projection: Arc<Packed>,
}

impl Conv {
    fn new(conv: &GroupedDynamicConv) -> Result<Self> {
        Ok(Self {
            base: floats(&conv.base_kernel)?,
            taps: conv.base_kernel.dim(1)?,
            projection: shared(&conv.kernel_projection)?,
        })
    }

    /// One side over one block: y [rows, H], delta [rows, 2 * K * G].
    fn apply(&self, y: &[f32], delta: &[f32], side: usize) -> Buffer {
        let (h, coefficients) = (self.base.len() / (2 * self.taps), self.projection.width());
        let groups = coefficients / (2 * self.taps);
        let mut out = Buffer::zeros(y.len());
        each_row(&mut out, h, |t, out| {
            for tap in 0..self.taps.min(t + 1) {
                let at = side * self.taps + tap;
                wide::<ConvTap>((
                    &y[(t - tap) * h..][..h],
                    &self.base[at * h..][..h],
                    &delta[t * coefficients + at * groups..][..groups],
                    &mut *out,
                ));
            }
        });
        out
    }
}

/// out += (base + delta of the channel's group) * y.
struct ConvTap;

impl Kernel for ConvTap {
    type Args<'a> = (&'a [f32], &'a [f32], &'a [f32], &'a mut [f32]);

    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "must be inlined into the function compiled for the wide unit"
    )]
    fn run((y, base, delta, out): Self::Args<'_>) {
        let g = y.len() / delta.len();
        let groups = out.chunks_exact_mut(g).zip(y.chunks_exact(g)).zip(base.chunks_exact(g));
        for (((out, y), base), delta) in groups.zip(delta) {
            for ((out, y), base) in out.iter_mut().zip(y).zip(base) {
                *out += (base + delta) * y;
            }
        }
    }
}
