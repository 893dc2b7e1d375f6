//! The target on the CPU: weights packed once, every layer on plain f32 slices.
//!
//! One routine, [`CpuTarget::run`], serves prefill, decode, verify and tap capture. In f32 a row's numbers do not
//! depend on how many rows came with it, except that the delta rule runs in chunks above sixteen rows. With `bf16` the
//! tensors that a bf16 model would hold are rounded where it would round them; state, decay, norms and sums stay f32.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::attention::KvCache;
use super::config::{GateActivation, LinearConfig, Mixer, TargetConfig};
use super::kernels::{
    Heads, NormAndRotate, RmsNormRow, SigmoidGateInPlace, SigmoidGateRow, SiluGateInPlace, add, conv_silu, each_row,
    rms_norm, rope_table, round_to_halves, sigmoid, softplus, swiglu, wide,
};
use super::weights::{Weights, layer_prefix};
use super::{Session, Target, TargetHead, TargetInfo, check_taps, check_tokens, cpu_session, delta};
use crate::buffer::Buffer;
use crate::packed::{Packed, View, joined_rounded};
use crate::small_matmul::Matrix;

/// Rows of one pass; longer inputs are fed piece by piece, which bounds memory and stays in cache.
const SEGMENT: usize = 512;

/// A target whose forward pass runs on this machine's CPU.
pub(crate) struct CpuTarget {
    pub(crate) config: TargetConfig,
    head: TargetHead,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    lm_head: Packed,
    bf16: bool,
}

struct Layer {
    input_norm: Vec<f32>,
    post_norm: Vec<f32>,
    mixer: MixerWeights,
    gate_up: Packed,
    down: Packed,
}

impl Layer {
    /// The packed matrices in the order of their use.
    fn matrices(&mut self) -> [&mut Packed; 4] {
        let (MixerWeights::Full { input, output, .. } | MixerWeights::Linear { input, output, .. }) = &mut self.mixer;
        [input, output, &mut self.gate_up, &mut self.down]
    }
}

enum MixerWeights {
    Full {
        /// Queries (with gates, head by head), keys, values.
        input: Packed,
        query_norm: Vec<f32>,
        key_norm: Vec<f32>,
        output: Packed,
    },
    Linear {
        shape: LinearConfig,
        /// q | k | v, z, b, a.
        input: Packed,
        /// [taps, channels].
        conv: Vec<f32>,
        /// -exp(A_log).
        decay: Vec<f32>,
        dt_bias: Vec<f32>,
        norm: Vec<f32>,
        output: Packed,
    },
}

/// What one layer remembers of a sequence.
pub(crate) enum Cache {
    /// Roped keys, and values.
    Full(KvCache),
    /// The last taps - 1 inputs of the convolution, [taps - 1, channels], and S [nv, dk, dv].
    Linear { tail: Vec<f32>, state: Vec<f32> },
}

/// What a pass that is not kept leaves behind for one gated-delta-net layer.
pub(crate) struct Pending {
    /// Inputs of the convolution, the tail before the pass first, [taps - 1 + rows, channels].
    pub(crate) conv_input: Buffer,
    pub(crate) stash: delta::Stash,
    /// S after all rows.
    pub(crate) state: Vec<f32>,
}

/// A pass over some tokens.
pub(crate) struct Pass {
    /// Residual stream after the last layer that ran, [rows, H].
    pub(crate) hidden: Buffer,
    /// One entry a layer when the pass was not to be kept; `None` for full attention.
    pub(crate) pending: Vec<Option<Pending>>,
}

impl CpuTarget {
    pub(crate) fn load(weights: &Weights<'_>, config: TargetConfig, bf16: bool) -> Result<Self> {
        let cpu = &Device::Cpu;
        let get = |name: &str| weights.get(name, cpu);
        let matrix = |name: &str| {
            let stored = get(name)?;
            if bf16 { stored.to_dtype(DType::BF16) } else { Ok(stored) }
        };
        let vector = |name: &str| {
            weights
                .get(name, cpu)?
                .to_dtype(DType::F32)?
                .flatten_all()?
                .to_vec1::<f32>()
        };
        // Qwen3.5 stores norm scales around zero
        let scale = |name: &str| -> Result<Vec<f32>> {
            let stored = vector(name)?;
            Ok(if config.qwen3_5 {
                stored.iter().map(|w| 1.0 + w).collect()
            } else {
                stored
            })
        };
        let mut layers = Vec::with_capacity(config.layers.len());
        for (i, mixer) in config.layers.iter().enumerate() {
            let name = |part: &str| format!("{}{part}", layer_prefix(i));
            let mixer = match (mixer, &config.linear) {
                (Mixer::Linear, Some(shape)) => {
                    let part = |part: &str| matrix(&name(&format!("linear_attn.{part}.weight")));
                    let taps = get(&name("linear_attn.conv1d.weight"))?
                        .squeeze(1)?
                        .to_dtype(DType::F32)?;
                    MixerWeights::Linear {
                        shape: shape.clone(),
                        input: Packed::stack(&[
                            &part("in_proj_qkv")?,
                            &part("in_proj_z")?,
                            &part("in_proj_b")?,
                            &part("in_proj_a")?,
                        ])?,
                        conv: taps.t()?.contiguous()?.flatten_all()?.to_vec1()?,
                        decay: vector(&name("linear_attn.A_log"))?.iter().map(|a| -a.exp()).collect(),
                        dt_bias: vector(&name("linear_attn.dt_bias"))?,
                        norm: vector(&name("linear_attn.norm.weight"))?,
                        output: Packed::stack(&[&part("out_proj")?])?,
                    }
                }
                (Mixer::Full, _) | (Mixer::Linear, None) => {
                    let part = |part: &str| matrix(&name(&format!("self_attn.{part}.weight")));
                    MixerWeights::Full {
                        input: Packed::stack(&[&part("q_proj")?, &part("k_proj")?, &part("v_proj")?])?,
                        query_norm: scale(&name("self_attn.q_norm.weight"))?,
                        key_norm: scale(&name("self_attn.k_norm.weight"))?,
                        output: Packed::stack(&[&part("o_proj")?])?,
                    }
                }
            };
            layers.push(Layer {
                input_norm: scale(&name("input_layernorm.weight"))?,
                post_norm: scale(&name("post_attention_layernorm.weight"))?,
                mixer,
                gate_up: Packed::stack(&[
                    &matrix(&name("mlp.gate_proj.weight"))?,
                    &matrix(&name("mlp.up_proj.weight"))?,
                ])?,
                down: Packed::stack(&[&matrix(&name("mlp.down_proj.weight"))?])?,
            });
        }
        let head = weights.head(cpu)?;
        let stored = if bf16 { DType::BF16 } else { head.head.dtype() };
        let mut lm_head = Packed::stack(&[&head.head.to_dtype(stored)?])?;
        let norm = scale("norm.weight")?;
        let matrices = layers.iter_mut().flat_map(Layer::matrices).chain([&mut lm_head]);
        Packed::gather(matrices)?;
        Ok(Self {
            config,
            head,
            layers,
            norm,
            lm_head,
            bf16,
        })
    }

    /// Empty caches for the first `layers` layers.
    pub(crate) fn caches(&self, layers: usize) -> Vec<Cache> {
        let cache = |layer: &Layer| match &layer.mixer {
            MixerWeights::Full { .. } => Cache::Full(KvCache::new(self.config.num_kv_heads, self.config.head_dim)),
            MixerWeights::Linear { shape, .. } => Cache::Linear {
                tail: vec![0.0; (shape.conv_width - 1) * shape.conv_channels()],
                state: vec![0.0; shape.value_heads * shape.key_dim * shape.value_dim],
            },
        };
        self.layers[..layers].iter().map(cache).collect()
    }

    /// Feeds tokens at positions from `start` through as many layers as there are caches and appends the tap states,
    /// [rows, taps * H], to `tapped`. With `keep` the caches advance; without, a gated-delta-net layer's stay as they
    /// are, and attention rows past `start` are scratch that the next pass overwrites.
    pub(crate) fn run(
        &self,
        tokens: &[u32],
        caches: &mut [Cache],
        start: usize,
        taps: &[usize],
        tapped: &mut Vec<f32>,
        keep: bool,
    ) -> Result<Pass> {
        let (rows, hidden_size, eps) = (tokens.len(), self.config.info.hidden_size, self.eps());
        let ids = Tensor::new(tokens, &Device::Cpu)?;
        let embedded = self.head.embed.index_select(&ids, 0)?.to_dtype(DType::F32)?;
        let mut hidden = Buffer::from(embedded.flatten_all()?.to_vec1::<f32>()?);
        let first = tapped.len();
        tapped.resize(first + rows * taps.len() * hidden_size, 0.0);
        let tapped = &mut tapped[first..];
        let mut pending = Vec::with_capacity(caches.len());
        for (i, (layer, cache)) in self.layers.iter().zip(caches).enumerate() {
            let normed = self.settle(rms_norm(&hidden, &layer.input_norm, eps));
            let (mixed, left) = match (&layer.mixer, cache) {
                (MixerWeights::Full { .. }, Cache::Full(cache)) => {
                    (self.attention(&layer.mixer, &normed, cache, start), None)
                }
                (MixerWeights::Linear { .. }, Cache::Linear { tail, state }) => {
                    self.delta_net(&layer.mixer, &normed, tail, state, keep)
                }
                _ => bail!("layer {i}: the cache is of another kind than the layer"),
            };
            pending.push(left);
            add(&mut hidden, &mixed);
            hidden = self.settle(hidden);
            let normed = self.settle(rms_norm(&hidden, &layer.post_norm, eps));
            let gate_up = self.settle(self.times(&layer.gate_up, &normed));
            let active = self.settle(swiglu(&gate_up, self.config.info.intermediate_size));
            add(&mut hidden, &self.settle(self.times(&layer.down, &active)));
            hidden = self.settle(hidden);
            if let Some(slot) = taps.iter().position(|tap| *tap == i) {
                for (out, row) in tapped
                    .chunks_exact_mut(taps.len() * hidden_size)
                    .zip(hidden.chunks_exact(hidden_size))
                {
                    out[slot * hidden_size..][..hidden_size].copy_from_slice(row);
                }
            }
        }
        Ok(Pass { hidden, pending })
    }

    /// f32 logits [rows, V] of rows of the last layer's output.
    pub(crate) fn logits(&self, hidden: &[f32]) -> Result<Tensor> {
        let rows = hidden.len() / self.norm.len();
        let normed = self.settle(rms_norm(hidden, &self.norm, self.eps()));
        Tensor::from_vec(
            self.times(&self.lm_head, &normed).into_vec(),
            (rows, self.lm_head.width()),
            &Device::Cpu,
        )
    }

    /// Tap states as a tensor of the compute type.
    pub(crate) fn tap_tensor(&self, tapped: Vec<f32>, rows: usize) -> Result<Tensor> {
        let width = tapped.len() / rows;
        let taps = Tensor::from_vec(tapped, (rows, width), &Device::Cpu)?;
        if self.bf16 {
            taps.to_dtype(DType::BF16)
        } else {
            Ok(taps)
        }
    }

    fn eps(&self) -> f32 {
        self.config.info.rms_norm_eps as f32
    }

    /// x W^T; with `bf16` in the processor's BF16 arithmetic, where it has one.
    fn times(&self, matrix: &Packed, x: &[f32]) -> Buffer {
        if self.bf16 {
            joined_rounded(&[matrix], View::new(x, matrix.depth()))
        } else {
            matrix.product(x)
        }
    }

    /// Rounds to bf16 what a bf16 model would store as such.
    fn settle(&self, mut x: Buffer) -> Buffer {
        if self.bf16 {
            round_to_halves(&mut x);
        }
        x
    }

    fn attention(&self, weights: &MixerWeights, x: &[f32], cache: &mut KvCache, start: usize) -> Buffer {
        let MixerWeights::Full {
            input,
            query_norm,
            key_norm,
            output,
        } = weights
        else {
            return Buffer::zeros(0);
        };
        let (eps, dim, kv_heads, heads) = (
            self.eps(),
            self.config.head_dim,
            self.config.num_kv_heads,
            self.config.num_heads,
        );
        let (group, half) = (heads / kv_heads, self.config.rotary_dim / 2);
        let projected = self.settle(self.times(input, x));
        let stride = input.width();
        let rows = projected.len() / stride;
        // query rows of a head: D of query, then with an output gate D of gate
        let per_head = if self.config.qwen3_5 { 2 * dim } else { dim };
        let (keys_at, values_at) = (heads * per_head, heads * per_head + kv_heads * dim);
        let (cos, sin) = rope_table(start, rows, half, self.config.info.rope_theta);
        let angles = |t: usize| (&cos[t * half..][..half], &sin[t * half..][..half]);

        let mut keys = Buffer::stale(rows * kv_heads * dim);
        each_row(&mut keys, kv_heads * dim, |t, out| {
            let (cos, sin) = angles(t);
            let source = &projected[t * stride + keys_at..];
            wide::<NormAndRotate>(Heads {
                source,
                stride: dim,
                norm: key_norm,
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
        let mut queries = Buffer::stale(rows * heads * dim);
        each_row(&mut queries, group * dim, |i, out| {
            let (kv, t) = (i / rows, i % rows);
            let (cos, sin) = angles(t);
            let source = &projected[t * stride + kv * group * per_head..];
            wide::<NormAndRotate>(Heads {
                source,
                stride: per_head,
                norm: query_norm,
                eps,
                scale,
                cos,
                sin,
                out,
            });
        });
        let attended = self.settle(cache.attend(start, &queries, group));
        let mut flat = Buffer::stale(rows * heads * dim);
        each_row(&mut flat, heads * dim, |t, out| {
            for (h, out) in out.chunks_exact_mut(dim).enumerate() {
                let from = &attended[((h / group * rows + t) * group + h % group) * dim..][..dim];
                if self.config.qwen3_5 {
                    let gate = &projected[t * stride + h * per_head + dim..][..dim];
                    wide::<SigmoidGateRow>((gate, from, out));
                } else {
                    out.copy_from_slice(from);
                }
            }
        });
        self.settle(self.times(output, &self.settle(flat)))
    }

    fn delta_net(
        &self,
        weights: &MixerWeights,
        x: &[f32],
        tail: &mut [f32],
        state: &mut Vec<f32>,
        keep: bool,
    ) -> (Buffer, Option<Pending>) {
        let MixerWeights::Linear {
            shape,
            input,
            conv,
            decay,
            dt_bias,
            norm,
            output,
        } = weights
        else {
            return (Buffer::zeros(0), None);
        };
        let (channels, values, nv, dv) = (
            shape.conv_channels(),
            shape.value_channels(),
            shape.value_heads,
            shape.value_dim,
        );
        let eps = self.eps();
        let projected = self.settle(self.times(input, x));
        let stride = input.width();
        let rows = projected.len() / stride;
        let mut conv_input = Buffer::stale(tail.len() + rows * channels);
        let (before, inputs) = conv_input.split_at_mut(tail.len());
        before.copy_from_slice(tail);
        for (input, row) in inputs.chunks_exact_mut(channels).zip(projected.chunks_exact(stride)) {
            input.copy_from_slice(&row[..channels]);
        }
        let qkv = self.settle(conv_silu(&conv_input, conv, channels));
        let (mut betas, mut decays) = (Vec::with_capacity(rows * nv), Vec::with_capacity(rows * nv));
        for row in projected.chunks_exact(stride) {
            let (strength, rate) = row[channels + values..].split_at(nv);
            betas.extend(strength.iter().map(|b| sigmoid(*b)));
            decays.extend(
                rate.iter()
                    .zip(decay)
                    .zip(dt_bias)
                    .map(|((a, decay), dt)| decay * softplus(a + dt)),
            );
        }
        let chunk = if rows <= delta::STEP_ROWS { 0 } else { delta::CHUNK };
        let mut next = if keep { std::mem::take(state) } else { state.clone() };
        let pass = delta::run(
            shape,
            delta::Inputs {
                qkv: &qkv,
                decays,
                betas: &betas,
            },
            &mut next,
            chunk,
        );

        let read = self.settle(pass.out);
        let mut gated = Buffer::stale(rows * values);
        each_row(&mut gated, values, |t, out| {
            let gates = &projected[t * stride + channels..][..values];
            for (h, (out, gate)) in out.chunks_exact_mut(dv).zip(gates.chunks_exact(dv)).enumerate() {
                wide::<RmsNormRow>((&read[(h * rows + t) * dv..][..dv], norm, eps, &mut *out));
                match shape.gate {
                    GateActivation::Silu => wide::<SiluGateInPlace>((gate, out)),
                    GateActivation::Sigmoid => wide::<SigmoidGateInPlace>((gate, out)),
                }
            }
        });
        let mixed = self.settle(self.times(output, &self.settle(gated)));
        if keep {
            *state = next;
            tail.copy_from_slice(&conv_input[rows * channels..]);
            (mixed, None)
        } else {
            (
                mixed,
                Some(Pending {
                    conv_input,
                    stash: pass.stash,
                    state: next,
                }),
            )
        }
    }
}

impl Target for CpuTarget {
    fn info(&self) -> &TargetInfo {
        &self.config.info
    }

    fn head(&self) -> &TargetHead {
        &self.head
    }

    fn session(&self, taps: &[usize]) -> Result<Box<dyn Session + '_>> {
        check_taps(taps, &self.config.info)?;
        Ok(Box::new(cpu_session::CpuSession::new(self, taps)))
    }

    fn taps(&self, tokens: &[u32], taps: &[usize]) -> Result<Tensor> {
        check_taps(taps, &self.config.info)?;
        check_tokens(tokens, 0, &self.config.info)?;
        let Some(last) = taps.last() else {
            bail!("taps of no layer were asked for")
        };
        let mut caches = self.caches(last + 1);
        let mut tapped = Vec::with_capacity(tokens.len() * taps.len() * self.config.info.hidden_size);
        for (i, piece) in segments(tokens).enumerate() {
            self.run(piece, &mut caches, i * SEGMENT, taps, &mut tapped, true)?;
        }
        self.tap_tensor(tapped, tokens.len())
    }
}

/// The pieces in which a long input is fed.
pub(crate) fn segments(tokens: &[u32]) -> impl Iterator<Item = &[u32]> {
    tokens.chunks(SEGMENT)
}
