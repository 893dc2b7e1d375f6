//! The target on the CPU: weights packed once, every layer on plain f32 slices.
//!
//! One routine, [`CpuTarget::run`], serves prefill, decode, verify and tap capture. Where there are many rows each thread takes
//! blocks of them through everything between one mixer and the next, so that a block's numbers stay in its cache. In f32 a row's numbers do not
//! depend on how many rows came with it, except that the delta rule runs in chunks above sixteen rows. With `bf16` the
//! tensors that a bf16 model would hold are rounded where it would round them; state, decay, norms and sums stay f32.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::attention::KvCache;
use super::config::{Mixer, TargetConfig};
use super::cpu_mixers::{Full, Linear, Read};
use super::kernels::{add, each_row, rms_norm, round_to_halves, swiglu};
use super::weights::{Weights, layer_prefix};
use super::{Session, Target, TargetHead, TargetInfo, check_taps, check_tokens, cpu_session, delta};
use crate::buffer::Buffer;
use crate::packed::{Packed, View, by_rows, joined_into, joined_rounded_into};

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
        let (input, output) = match &mut self.mixer {
            MixerWeights::Full(Full { input, output, .. }) | MixerWeights::Linear(Linear { input, output, .. }) => {
                (input, output)
            }
        };
        [input, output, &mut self.gate_up, &mut self.down]
    }
}

enum MixerWeights {
    Full(Full),
    Linear(Linear),
}

impl MixerWeights {
    fn input(&self) -> &Packed {
        match self {
            Self::Full(full) => &full.input,
            Self::Linear(linear) => &linear.input,
        }
    }

    fn output(&self) -> &Packed {
        match self {
            Self::Full(full) => &full.output,
            Self::Linear(linear) => &linear.output,
        }
    }
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
                    MixerWeights::Linear(Linear {
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
                    })
                }
                (Mixer::Full, _) | (Mixer::Linear, None) => {
                    let part = |part: &str| matrix(&name(&format!("self_attn.{part}.weight")));
                    MixerWeights::Full(Full {
                        input: Packed::stack(&[&part("q_proj")?, &part("k_proj")?, &part("v_proj")?])?,
                        query_norm: scale(&name("self_attn.q_norm.weight"))?,
                        key_norm: scale(&name("self_attn.k_norm.weight"))?,
                        output: Packed::stack(&[&part("o_proj")?])?,
                    })
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
            MixerWeights::Full(_) => Cache::Full(KvCache::new(self.config.num_kv_heads, self.config.head_dim)),
            MixerWeights::Linear(Linear { shape, .. }) => Cache::Linear {
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
            let projected = self.projected(layer, &hidden);
            let (mixed, left) = match (&layer.mixer, cache) {
                (MixerWeights::Full(full), Cache::Full(cache)) => (self.attend(full, &projected, cache, start), None),
                (MixerWeights::Linear(linear), Cache::Linear { tail, state }) => {
                    self.recur(linear, &projected, tail, state, keep)
                }
                _ => bail!("layer {i}: the cache is of another kind than the layer"),
            };
            pending.push(left);
            // what follows looks at one row at a time
            by_rows(&mut hidden, hidden_size, |first, hidden| {
                let read = Read {
                    projected: &projected,
                    mixed: &mixed,
                    first,
                    count: hidden.len() / hidden_size,
                };
                let gated = match &layer.mixer {
                    MixerWeights::Full(full) => self.gated_heads(full, read),
                    MixerWeights::Linear(linear) => self.gated_reads(linear, read),
                };
                self.add_product(layer.mixer.output(), &gated, hidden);
                let normed = self.settle(rms_norm(hidden, &layer.post_norm, eps));
                let gate_up = self.settle(self.times(&layer.gate_up, &normed));
                let active = self.settle(swiglu(&gate_up, self.config.info.intermediate_size));
                self.add_product(&layer.down, &active, hidden);
            });
            if let Some(slot) = taps.iter().position(|tap| *tap == i) {
                each_row(tapped, taps.len() * hidden_size, |t, out| {
                    out[slot * hidden_size..][..hidden_size].copy_from_slice(&hidden[t * hidden_size..][..hidden_size]);
                });
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

    pub(super) fn eps(&self) -> f32 {
        self.config.info.rms_norm_eps as f32
    }

    /// What the mixer of a layer takes, [rows, width]: its projections of the normed rows.
    fn projected(&self, layer: &Layer, hidden: &[f32]) -> Buffer {
        let (input, hidden_size) = (layer.mixer.input(), self.config.info.hidden_size);
        let mut out = Buffer::stale(hidden.len() / hidden_size * input.width());
        by_rows(&mut out, input.width(), |first, out| {
            let rows = out.len() / input.width();
            let hidden = &hidden[first * hidden_size..][..rows * hidden_size];
            self.multiply(
                input,
                &self.settle(rms_norm(hidden, &layer.input_norm, self.eps())),
                out,
            );
            self.round(out);
        });
        out
    }

    /// sum += x W^T.
    fn add_product(&self, matrix: &Packed, x: &[f32], sum: &mut [f32]) {
        add(sum, &self.settle(self.times(matrix, x)));
        self.round(sum);
    }

    /// x W^T.
    fn times(&self, matrix: &Packed, x: &[f32]) -> Buffer {
        let mut out = Buffer::stale(x.len() / matrix.depth() * matrix.width());
        self.multiply(matrix, x, &mut out);
        out
    }

    /// out = x W^T; with `bf16` in the processor's BF16 arithmetic, where it has one.
    fn multiply(&self, matrix: &Packed, x: &[f32], out: &mut [f32]) {
        let x = View::new(x, matrix.depth());
        if self.bf16 {
            joined_rounded_into(&[matrix], x, out, false);
        } else {
            joined_into(&[matrix], x, out, false);
        }
    }

    /// Rounds to bf16 what a bf16 model would store as such.
    fn round(&self, x: &mut [f32]) {
        if self.bf16 {
            round_to_halves(x);
        }
    }

    /// The same, handed on.
    pub(super) fn settle(&self, mut x: Buffer) -> Buffer {
        self.round(&mut x);
        x
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
