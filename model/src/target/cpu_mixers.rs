//! What mixes positions in a layer of the CPU target: attention with an output gate, and the gated delta net.
//!
//! Each takes the layer's projections of all rows, leaves behind what it read from the past head by head, and then, for any
//! block of rows, sets the heads beside each other and gates them for the output projection.

use super::attention::KvCache;
use super::config::{GateActivation, LinearConfig};
use super::cpu::{CpuTarget, Pending};
use super::delta;
use super::kernels::{
    Heads, NormAndRotate, RmsNormRow, SigmoidGateInPlace, SigmoidGateRow, SiluGateInPlace, conv_silu, each_row,
    rope_table, sigmoid, softplus, wide,
};
use crate::buffer::Buffer;
use crate::packed::Packed;
use crate::small_matmul::Matrix;

/// Weights of full attention.
pub(super) struct Full {
    /// Queries (with gates, head by head), keys, values.
    pub(super) input: Packed,
    pub(super) query_norm: Vec<f32>,
    pub(super) key_norm: Vec<f32>,
    pub(super) output: Packed,
}

/// Weights of a gated delta net.
pub(super) struct Linear {
    pub(super) shape: LinearConfig,
    /// q | k | v, z, b, a.
    pub(super) input: Packed,
    /// [taps, channels].
    pub(super) conv: Vec<f32>,
    /// -exp(A_log).
    pub(super) decay: Vec<f32>,
    pub(super) dt_bias: Vec<f32>,
    pub(super) norm: Vec<f32>,
    pub(super) output: Packed,
}

/// `count` rows of a pass from `first` on, after the mixer.
#[derive(Clone, Copy)]
pub(super) struct Read<'a> {
    /// Projections of all rows of the pass.
    pub(super) projected: &'a [f32],
    /// What the mixer read, of all rows, head by head.
    pub(super) mixed: &'a [f32],
    pub(super) first: usize,
    pub(super) count: usize,
}

impl CpuTarget {
    /// Attention of all rows, which stand at positions from `start`: `[kv heads][rows][group][D]`.
    pub(super) fn attend(&self, weights: &Full, projected: &[f32], cache: &mut KvCache, start: usize) -> Buffer {
        let (eps, shape) = (self.eps(), self.heads());
        let (dim, group, kv_heads) = (shape.dim, shape.group, shape.kv_heads);
        let stride = weights.input.width();
        let rows = projected.len() / stride;
        let half = self.config.rotary_dim / 2;
        let queries_wide = kv_heads * group * shape.per_head;
        let (keys_at, values_at) = (queries_wide, queries_wide + kv_heads * dim);
        let (cos, sin) = rope_table(start, rows, half, self.config.info.rope_theta);
        let angles = |t: usize| (&cos[t * half..][..half], &sin[t * half..][..half]);

        let mut keys = Buffer::stale(rows * kv_heads * dim);
        each_row(&mut keys, kv_heads * dim, |t, out| {
            let (cos, sin) = angles(t);
            let source = &projected[t * stride + keys_at..];
            wide::<NormAndRotate>(Heads {
                source,
                stride: dim,
                norm: &weights.key_norm,
                eps,
                scale: 1.0,
                cos,
                sin,
                out,
            });
        });
        let keys = self.settle(keys);
        cache.write(
            start,
            Matrix(&keys, kv_heads * dim),
            Matrix(&projected[values_at..], stride),
            rows,
        );

        let scale = 1.0 / (dim as f32).sqrt();
        let mut queries = Buffer::stale(rows * kv_heads * group * dim);
        each_row(&mut queries, group * dim, |i, out| {
            let (kv, t) = (i / rows, i % rows);
            let (cos, sin) = angles(t);
            let source = &projected[t * stride + kv * group * shape.per_head..];
            wide::<NormAndRotate>(Heads {
                source,
                stride: shape.per_head,
                norm: &weights.query_norm,
                eps,
                scale,
                cos,
                sin,
                out,
            });
        });
        self.settle(cache.attend(start, &queries, group))
    }

    /// Some rows of [`Self::attend`] with their output gates, [count, heads * D].
    pub(super) fn gated_heads(&self, weights: &Full, read: Read<'_>) -> Buffer {
        let Shape {
            dim,
            group,
            kv_heads,
            per_head,
        } = self.heads();
        let stride = weights.input.width();
        let rows = read.projected.len() / stride;
        let width = kv_heads * group * dim;
        let mut flat = Buffer::stale(read.count * width);
        each_row(&mut flat, width, |i, out| {
            let t = read.first + i;
            for (h, out) in out.chunks_exact_mut(dim).enumerate() {
                let from = &read.mixed[((h / group * rows + t) * group + h % group) * dim..][..dim];
                if self.config.qwen3_5 {
                    let gate = &read.projected[t * stride + h * per_head + dim..][..dim];
                    wide::<SigmoidGateRow>((gate, from, out));
                } else {
                    out.copy_from_slice(from);
                }
            }
        });
        self.settle(flat)
    }

    fn heads(&self) -> Shape {
        let config = &self.config;
        Shape {
            dim: config.head_dim,
            group: config.num_heads / config.num_kv_heads,
            kv_heads: config.num_kv_heads,
            per_head: if config.qwen3_5 {
                2 * config.head_dim
            } else {
                config.head_dim
            },
        }
    }

    /// The gated delta rule over all rows, `[nv][rows][dv]`. With `keep`, tail and state advance; without, what they would
    /// become is left pending.
    pub(super) fn recur(
        &self,
        weights: &Linear,
        projected: &[f32],
        tail: &mut [f32],
        state: &mut Vec<f32>,
        keep: bool,
    ) -> (Buffer, Option<Pending>) {
        let shape = &weights.shape;
        let (channels, nv) = (shape.conv_channels(), shape.value_heads);
        let stride = weights.input.width();
        let rows = projected.len() / stride;
        let mut conv_input = Buffer::stale(tail.len() + rows * channels);
        let (before, inputs) = conv_input.split_at_mut(tail.len());
        before.copy_from_slice(tail);
        each_row(inputs, channels, |t, input| {
            input.copy_from_slice(&projected[t * stride..][..channels]);
        });
        let qkv = self.settle(conv_silu(&conv_input, &weights.conv, channels));
        let gates = |t: usize| projected[t * stride + channels + shape.value_channels()..][..2 * nv].split_at(nv);
        let (mut betas, mut decays) = (Buffer::stale(rows * nv), Buffer::stale(rows * nv));
        each_row(&mut betas, nv, |t, out| {
            for (beta, b) in out.iter_mut().zip(gates(t).0) {
                *beta = sigmoid(*b);
            }
        });
        each_row(&mut decays, nv, |t, out| {
            let per_head = weights.decay.iter().zip(&weights.dt_bias);
            for ((g, a), (decay, dt)) in out.iter_mut().zip(gates(t).1).zip(per_head) {
                *g = decay * softplus(a + dt);
            }
        });
        let chunk = if rows <= delta::STEP_ROWS { 0 } else { delta::CHUNK };
        let mut next = if keep { std::mem::take(state) } else { state.clone() };
        let inputs = delta::Inputs {
            qkv: &qkv,
            decays,
            betas: &betas,
        };
        let pass = delta::run(shape, inputs, &mut next, chunk);
        let read = self.settle(pass.out);
        if keep {
            *state = next;
            tail.copy_from_slice(&conv_input[rows * channels..]);
            return (read, None);
        }
        let pending = Pending {
            conv_input,
            stash: pass.stash,
            state: next,
        };
        (read, Some(pending))
    }

    /// Some rows of [`Self::recur`], normed and gated, [count, nv * dv].
    pub(super) fn gated_reads(&self, weights: &Linear, read: Read<'_>) -> Buffer {
        let shape = &weights.shape;
        let (values, dv, stride) = (shape.value_channels(), shape.value_dim, weights.input.width());
        let rows = read.projected.len() / stride;
        let mut gated = Buffer::stale(read.count * values);
        each_row(&mut gated, values, |i, out| {
            let t = read.first + i;
            let gates = &read.projected[t * stride + shape.conv_channels()..][..values];
            for (h, (out, gate)) in out.chunks_exact_mut(dv).zip(gates.chunks_exact(dv)).enumerate() {
                let from = &read.mixed[(h * rows + t) * dv..][..dv];
                wide::<RmsNormRow>((from, &weights.norm, self.eps(), &mut *out));
                match shape.gate {
                    GateActivation::Silu => wide::<SiluGateInPlace>((gate, out)),
                    GateActivation::Sigmoid => wide::<SigmoidGateInPlace>((gate, out)),
                }
            }
        });
        self.settle(gated)
    }
}

/// Heads of an attention layer.
struct Shape {
    dim: usize,
    /// Query heads of a key/value head.
    group: usize,
    kv_heads: usize,
    /// Floats of a query head in the projections: D of query, then with an output gate D of gate.
    per_head: usize,
}
