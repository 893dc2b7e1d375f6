//! The target composed of candle tensor operations: for Metal and CUDA, and the twin that the CPU kernels are tested
//! against. Weights, activations and attention caches have the compute type; norms, the delta rule, S and decay are
//! f32.

use candle_core::{D, DType, Device, Result, Tensor, bail};
use candle_nn::ops;

use super::config::{GateActivation, LinearConfig, Mixer, TargetConfig};
use super::weights::{Weights, layer_prefix};
use super::{Session, Target, TargetHead, TargetInfo, check_taps, check_tokens, composed_session};

/// Tokens of a chunk of the delta rule.
const CHUNK: usize = 64;
/// Rows of one pass when nothing but taps is wanted; longer inputs are fed piece by piece.
const SEGMENT: usize = 1024;

/// A target whose forward pass is made of tensor operations.
pub(crate) struct ComposedTarget {
    pub(crate) config: TargetConfig,
    pub(crate) compute: DType,
    pub(crate) device: Device,
    head: TargetHead,
    layers: Vec<Layer>,
    norm: Tensor,
    lm_head: Tensor,
}

struct Layer {
    input_norm: Tensor,
    post_norm: Tensor,
    mixer: MixerWeights,
    gate_up: Tensor,
    down: Tensor,
}

enum MixerWeights {
    Full {
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_norm: Tensor,
        key_norm: Tensor,
        output: Tensor,
    },
    Linear(Box<DeltaNet>),
}

struct DeltaNet {
    shape: LinearConfig,
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    /// [taps, C].
    conv: Tensor,
    /// -exp(A_log), f32.
    decay: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    output: Tensor,
}

/// What one layer remembers of a sequence. Tensors never change in place, so keeping an old state costs nothing.
#[derive(Clone)]
pub(crate) enum Cache {
    /// Room for more positions than are used: [kv heads, capacity, D] each.
    Full { keys: Tensor, values: Tensor },
    /// Convolution tail [taps - 1, C] and S [nv, dk, dv] in f32.
    Linear { tail: Tensor, state: Tensor },
}

/// The writes of a pass over one gated-delta-net layer.
pub(crate) struct Pending {
    /// [taps - 1 + rows, C].
    pub(crate) conv_input: Tensor,
    /// S before the pass.
    pub(crate) before: Tensor,
    /// Unit keys repeated to the value heads, [nv, rows, dk].
    keys: Tensor,
    /// [nv, rows, dv].
    deltas: Tensor,
    /// Log decay, [nv, rows].
    decays: Tensor,
}

impl Pending {
    /// S after the first n tokens: e^(c_n) S0 + sum over t <= n of e^(c_n - c_t) k_t delta_t^T.
    pub(crate) fn fold(&self, n: usize) -> Result<Tensor> {
        if n == 0 {
            return Ok(self.before.clone());
        }
        let sums = self.decays.narrow(1, 0, n)?.contiguous()?.cumsum(1)?;
        let last = sums.narrow(1, n - 1, 1)?;
        let weights = last.broadcast_sub(&sums)?.exp()?.unsqueeze(2)?;
        let keys = self.keys.narrow(1, 0, n)?.broadcast_mul(&weights)?;
        let written = keys
            .transpose(1, 2)?
            .contiguous()?
            .matmul(&self.deltas.narrow(1, 0, n)?.contiguous()?)?;
        self.before.broadcast_mul(&last.exp()?.unsqueeze(2)?)? + written
    }
}

impl ComposedTarget {
    pub(crate) fn load(weights: &Weights<'_>, config: TargetConfig, device: &Device, compute: DType) -> Result<Self> {
        let get = |name: &str| weights.get(name, device)?.to_dtype(compute);
        let vector = |name: &str| weights.get(name, device)?.to_dtype(DType::F32);
        // Qwen3.5 stores norm scales around zero
        let scale = |name: &str| {
            if config.qwen3_5 {
                vector(name)? + 1.0
            } else {
                vector(name)
            }
        };
        let mut layers = Vec::with_capacity(config.layers.len());
        for (i, mixer) in config.layers.iter().enumerate() {
            let name = |part: &str| format!("{}{part}", layer_prefix(i));
            let mixer = match (mixer, &config.linear) {
                (Mixer::Linear, Some(shape)) => {
                    let part = |part: &str| get(&name(&format!("linear_attn.{part}.weight")));
                    MixerWeights::Linear(Box::new(DeltaNet {
                        shape: shape.clone(),
                        qkv: part("in_proj_qkv")?,
                        z: part("in_proj_z")?,
                        b: part("in_proj_b")?,
                        a: part("in_proj_a")?,
                        conv: part("conv1d")?.squeeze(1)?.t()?.contiguous()?,
                        decay: vector(&name("linear_attn.A_log"))?.exp()?.neg()?,
                        dt_bias: vector(&name("linear_attn.dt_bias"))?,
                        norm: vector(&name("linear_attn.norm.weight"))?,
                        output: part("out_proj")?,
                    }))
                }
                _ => {
                    let part = |part: &str| get(&name(&format!("self_attn.{part}.weight")));
                    MixerWeights::Full {
                        query: part("q_proj")?,
                        key: part("k_proj")?,
                        value: part("v_proj")?,
                        query_norm: scale(&name("self_attn.q_norm.weight"))?,
                        key_norm: scale(&name("self_attn.k_norm.weight"))?,
                        output: part("o_proj")?,
                    }
                }
            };
            let gate_up = [get(&name("mlp.gate_proj.weight"))?, get(&name("mlp.up_proj.weight"))?];
            layers.push(Layer {
                input_norm: scale(&name("input_layernorm.weight"))?,
                post_norm: scale(&name("post_attention_layernorm.weight"))?,
                mixer,
                gate_up: Tensor::cat(&gate_up, 0)?,
                down: get(&name("mlp.down_proj.weight"))?,
            });
        }
        let head = weights.head(device)?;
        let lm_head = head.head.to_dtype(compute)?;
        let norm = scale("norm.weight")?;
        Ok(Self {
            config,
            compute,
            device: device.clone(),
            head,
            layers,
            norm,
            lm_head,
        })
    }

    /// Empty caches for the first `layers` layers.
    pub(crate) fn caches(&self, layers: usize) -> Result<Vec<Cache>> {
        let cache = |layer: &Layer| match &layer.mixer {
            MixerWeights::Full { .. } => {
                let empty = (self.config.num_kv_heads, 0, self.config.head_dim);
                let empty = Tensor::zeros(empty, self.compute, &self.device)?;
                Ok(Cache::Full {
                    keys: empty.clone(),
                    values: empty,
                })
            }
            MixerWeights::Linear(net) => {
                let shape = &net.shape;
                let tail = (shape.conv_width - 1, shape.conv_channels());
                let state = (shape.value_heads, shape.key_dim, shape.value_dim);
                Ok(Cache::Linear {
                    tail: Tensor::zeros(tail, self.compute, &self.device)?,
                    state: Tensor::zeros(state, DType::F32, &self.device)?,
                })
            }
        };
        self.layers[..layers].iter().map(cache).collect()
    }

    /// Feeds tokens at positions from `start` and returns the residual stream [rows, H], the tap states in order, and each
    /// layer's writes. The caches advance; a caller that may take it back keeps [`Pending`].
    pub(crate) fn run(
        &self,
        tokens: &[u32],
        caches: &mut [Cache],
        start: usize,
        taps: &[usize],
    ) -> Result<(Tensor, Vec<Tensor>, Vec<Option<Pending>>)> {
        let eps = self.config.info.rms_norm_eps;
        let ids = Tensor::new(tokens, &self.device)?;
        let mut hidden = self.head.embed.index_select(&ids, 0)?.to_dtype(self.compute)?;
        let (mut tapped, mut left) = (Vec::with_capacity(taps.len()), Vec::with_capacity(caches.len()));
        for (i, (layer, cache)) in self.layers.iter().zip(caches).enumerate() {
            let normed = rms_norm(&hidden, &layer.input_norm, eps)?;
            let (mixed, pending) = match (&layer.mixer, cache) {
                (MixerWeights::Full { .. }, cache @ Cache::Full { .. }) => {
                    (self.attention(&layer.mixer, &normed, cache, start)?, None)
                }
                (MixerWeights::Linear(net), Cache::Linear { tail, state }) => {
                    let (mixed, pending) = delta_net(net, &normed, tail, state, eps)?;
                    (mixed, Some(pending))
                }
                _ => bail!("layer {i}: the cache is of another kind than the layer"),
            };
            left.push(pending);
            hidden = (hidden + mixed)?;
            let normed = rms_norm(&hidden, &layer.post_norm, eps)?;
            let gate_up = linear(&normed, &layer.gate_up)?;
            let width = self.config.info.intermediate_size;
            let active =
                (ops::silu(&gate_up.narrow(1, 0, width)?.contiguous()?)? * gate_up.narrow(1, width, width)?)?;
            hidden = (hidden + linear(&active, &layer.down)?)?;
            if taps.contains(&i) {
                tapped.push(hidden.clone());
            }
        }
        Ok((hidden, tapped, left))
    }

    /// f32 logits of rows of the last layer's output.
    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let normed = rms_norm(hidden, &self.norm, self.config.info.rms_norm_eps)?;
        linear(&normed, &self.lm_head)?.to_dtype(DType::F32)
    }

    fn attention(&self, weights: &MixerWeights, x: &Tensor, cache: &mut Cache, start: usize) -> Result<Tensor> {
        let (
            MixerWeights::Full {
                query,
                key,
                value,
                query_norm,
                key_norm,
                output,
            },
            Cache::Full { keys, values },
        ) = (weights, cache)
        else {
            bail!("full attention without its weights or its cache")
        };
        let (dim, heads, kv_heads, eps) = (
            self.config.head_dim,
            self.config.num_heads,
            self.config.num_kv_heads,
            self.config.info.rms_norm_eps,
        );
        let rows = x.dim(0)?;
        let end = start + rows;
        let projected = linear(x, query)?;
        let (q, gate) = if self.config.qwen3_5 {
            let both = projected.reshape((rows, heads, 2 * dim))?;
            (both.narrow(2, 0, dim)?, Some(both.narrow(2, dim, dim)?.contiguous()?))
        } else {
            (projected.reshape((rows, heads, dim))?, None)
        };
        let by_head = |x: Tensor| x.transpose(0, 1)?.contiguous();
        let q = self.rope(&by_head(rms_norm(&q.contiguous()?, query_norm, eps)?)?, start)?;
        let k = linear(x, key)?.reshape((rows, kv_heads, dim))?;
        let k = self.rope(&by_head(rms_norm(&k, key_norm, eps)?)?, start)?;
        let v = by_head(linear(x, value)?.reshape((rows, kv_heads, dim))?)?;
        for (cached, new) in [(&mut *keys, &k), (&mut *values, &v)] {
            if cached.dim(1)? < end {
                // a fresh tensor half as large again, so that copying stays rare
                let capacity = (end + end / 2).next_multiple_of(64);
                let grown = Tensor::zeros((kv_heads, capacity, dim), self.compute, &self.device)?;
                if start > 0 {
                    grown.slice_set(&cached.narrow(1, 0, start)?.contiguous()?, 1, 0)?;
                }
                *cached = grown;
            }
            cached.slice_set(&new.contiguous()?, 1, start)?;
        }
        let group = heads / kv_heads;
        // query head h reads key/value head h / group: the group becomes further rows
        let q = q.reshape((kv_heads, group * rows, dim))?;
        let k = keys.narrow(1, 0, end)?.contiguous()?;
        let v = values.narrow(1, 0, end)?.contiguous()?;
        let scores = (matmul(&q, &k.transpose(1, 2)?.contiguous()?)?.to_dtype(DType::F32)? / (dim as f64).sqrt())?;
        let scores = scores
            .reshape((kv_heads, group, rows, end))?
            .broadcast_add(&self.mask(start, rows)?)?;
        let weights = ops::softmax(&scores, D::Minus1)?.to_dtype(self.compute)?;
        let mixed = matmul(&weights.reshape((kv_heads, group * rows, end))?, &v)?;
        let mixed = mixed.reshape((heads, rows, dim))?.transpose(0, 1)?.contiguous()?;
        let mixed = match gate {
            Some(gate) => (mixed * ops::sigmoid(&gate)?)?,
            None => mixed,
        };
        linear(&mixed.reshape((rows, heads * dim))?, output)
    }

    /// 0 where key position <= query position, -infinity elsewhere: [1, 1, rows, start + rows].
    fn mask(&self, start: usize, rows: usize) -> Result<Tensor> {
        let end = start + rows;
        let cell = |i: usize| {
            if i % end <= start + i / end {
                0f32
            } else {
                f32::NEG_INFINITY
            }
        };
        Tensor::from_vec((0..rows * end).map(cell).collect(), (1, 1, rows, end), &self.device)
    }

    /// Rotates the first channels of x [heads, rows, D].
    fn rope(&self, x: &Tensor, start: usize) -> Result<Tensor> {
        let (half, dim, rows) = (self.config.rotary_dim / 2, self.config.head_dim, x.dim(1)?);
        let (cos, sin) = super::kernels::rope_table(start, rows, half, self.config.info.rope_theta);
        let table = |values| Tensor::from_vec(values, (1, rows, half), &self.device)?.to_dtype(x.dtype());
        let (cos, sin) = (table(cos)?, table(sin)?);
        let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        if 2 * half == dim {
            return Tensor::cat(&[first, second], 2);
        }
        Tensor::cat(&[first, second, x.narrow(2, 2 * half, dim - 2 * half)?], 2)
    }
}

impl Target for ComposedTarget {
    fn info(&self) -> &TargetInfo {
        &self.config.info
    }

    fn head(&self) -> &TargetHead {
        &self.head
    }

    fn session(&self, taps: &[usize]) -> Result<Box<dyn Session + '_>> {
        check_taps(taps, &self.config.info)?;
        Ok(Box::new(composed_session::ComposedSession::new(self, taps)?))
    }

    fn taps(&self, tokens: &[u32], taps: &[usize]) -> Result<Tensor> {
        check_taps(taps, &self.config.info)?;
        check_tokens(tokens, 0, &self.config.info)?;
        let Some(last) = taps.last() else {
            bail!("taps of no layer were asked for")
        };
        let mut caches = self.caches(last + 1)?;
        let mut pieces = Vec::new();
        for (i, piece) in tokens.chunks(SEGMENT).enumerate() {
            let (_, tapped, _) = self.run(piece, &mut caches, i * SEGMENT, taps)?;
            pieces.push(Tensor::cat(&tapped, 1)?);
        }
        Tensor::cat(&pieces, 0)
    }
}

fn delta_net(net: &DeltaNet, x: &Tensor, tail: &mut Tensor, state: &mut Tensor, eps: f64) -> Result<(Tensor, Pending)> {
    let shape = &net.shape;
    let (nk, nv, dk, dv) = (shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim);
    let rows = x.dim(0)?;
    let conv_input = Tensor::cat(&[&*tail, &linear(x, &net.qkv)?], 0)?;
    // a fixed order of taps, oldest first, for one row as for many
    let mut sum = conv_input
        .narrow(0, 0, rows)?
        .broadcast_mul(&net.conv.narrow(0, 0, 1)?)?;
    for j in 1..shape.conv_width {
        sum = (sum
            + conv_input
                .narrow(0, j, rows)?
                .broadcast_mul(&net.conv.narrow(0, j, 1)?)?)?;
    }
    let mixed = ops::silu(&sum)?.to_dtype(DType::F32)?;
    let heads = |from: usize, count: usize, dim: usize| -> Result<Tensor> {
        let part = mixed
            .narrow(1, from, count * dim)?
            .reshape((rows, count, dim))?
            .transpose(0, 1)?
            .contiguous()?;
        // key head h serves value heads h r .. (h + 1) r
        if count == nv {
            return Ok(part);
        }
        part.unsqueeze(1)?
            .repeat((1, nv / count, 1, 1))?
            .reshape((nv, rows, dim))
    };
    let unit = |x: Tensor| x.broadcast_div(&(x.sqr()?.sum_keepdim(D::Minus1)? + 1e-6)?.sqrt()?);
    let q = (unit(heads(0, nk, dk)?)? / (dk as f64).sqrt())?;
    let k = unit(heads(nk * dk, nk, dk)?)?;
    let v = heads(2 * nk * dk, nv, dv)?;
    let beta = ops::sigmoid(&linear(x, &net.b)?.to_dtype(DType::F32)?)?
        .t()?
        .contiguous()?;
    let rate = linear(x, &net.a)?.to_dtype(DType::F32)?.broadcast_add(&net.dt_bias)?;
    let decays = softplus(&rate)?.broadcast_mul(&net.decay)?.t()?.contiguous()?;
    let before = state.clone();
    let mut now = state.clone();
    let (mut outs, mut deltas) = (Vec::new(), Vec::new());
    let mut masks = Masks::new(CHUNK.min(rows), x.device())?;
    for start in (0..rows).step_by(CHUNK) {
        let n = CHUNK.min(rows - start);
        if n < CHUNK && rows > CHUNK {
            masks = Masks::new(n, x.device())?;
        }
        let part = |x: &Tensor| x.narrow(1, start, n)?.contiguous();
        let inputs = ChunkInputs {
            q: part(&q)?,
            k: part(&k)?,
            v: part(&v)?,
            g: part(&decays)?,
            beta: part(&beta)?,
        };
        let (out, delta, next) = chunk(&inputs, &now, &masks)?;
        outs.push(out);
        deltas.push(delta);
        now = next;
    }
    let read = Tensor::cat(&outs, 1)?.transpose(0, 1)?.contiguous()?;
    let normed = rms_norm(&read.to_dtype(x.dtype())?, &net.norm, eps)?.to_dtype(DType::F32)?;
    let z = linear(x, &net.z)?.to_dtype(DType::F32)?.reshape((rows, nv, dv))?;
    let gate = match shape.gate {
        GateActivation::Silu => ops::silu(&z)?,
        GateActivation::Sigmoid => ops::sigmoid(&z)?,
    };
    let gated = (normed * gate)?.to_dtype(x.dtype())?.reshape((rows, nv * dv))?;
    *tail = conv_input.narrow(0, rows, shape.conv_width - 1)?.contiguous()?;
    *state = now;
    let pending = Pending {
        conv_input,
        before,
        keys: k,
        deltas: Tensor::cat(&deltas, 1)?,
        decays,
    };
    Ok((linear(&gated, &net.output)?, pending))
}

struct ChunkInputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
}

/// One chunk of the gated delta rule: outputs [nv, n, dv], deltas [nv, n, dv], next state.
fn chunk(x: &ChunkInputs, state: &Tensor, masks: &Masks) -> Result<(Tensor, Tensor, Tensor)> {
    let n = x.g.dim(1)?;
    let sums = x.g.cumsum(1)?;
    // masked before the exponential: the masked differences are positive
    let differences = sums
        .unsqueeze(2)?
        .broadcast_sub(&sums.unsqueeze(1)?)?
        .broadcast_mul(&masks.lower)?;
    let decay = differences.exp()?.broadcast_mul(&masks.lower)?;
    let beta = x.beta.unsqueeze(2)?;
    let grown = sums.exp()?.unsqueeze(2)?;
    let keys_t = x.k.transpose(1, 2)?.contiguous()?;
    let a = (x.k.matmul(&keys_t)? * &decay)?
        .broadcast_mul(&beta)?
        .broadcast_mul(&masks.strict)?;
    let rhs = (&x.v - x.k.matmul(state)?.broadcast_mul(&grown)?)?.broadcast_mul(&beta)?;
    let u = solve(&a, &rhs, masks)?;
    let scores = (x.q.matmul(&keys_t)? * &decay)?;
    let out = (x.q.matmul(state)?.broadcast_mul(&grown)? + scores.matmul(&u)?)?;
    let last = sums.narrow(1, n - 1, 1)?;
    let weights = last.broadcast_sub(&sums)?.exp()?.unsqueeze(1)?;
    let written = keys_t.broadcast_mul(&weights)?.matmul(&u)?;
    let next = (state.broadcast_mul(&last.exp()?.unsqueeze(2)?)? + written)?;
    Ok((out, u, next))
}

/// Constant 0/1 matrices of a chunk of n tokens, [1, n, n] each.
struct Masks {
    /// s <= t.
    lower: Tensor,
    /// s < t.
    strict: Tensor,
    /// For block sizes 1, 2, 4, ...: t in the second half and s in the first half of one block of twice the size.
    halves: Vec<Tensor>,
}

impl Masks {
    fn new(n: usize, device: &Device) -> Result<Self> {
        let mask = |keep: &dyn Fn(usize, usize) -> bool| {
            let cell = |i: usize| f32::from(u8::from(keep(i / n, i % n)));
            Tensor::from_vec((0..n * n).map(cell).collect::<Vec<f32>>(), (1, n, n), device)
        };
        let sizes = std::iter::successors(Some(1), |size| Some(2 * size)).take_while(|size| *size < n);
        let half = |size: usize| mask(&|t, s| t / (2 * size) == s / (2 * size) && t / size > s / size);
        let halves = sizes.map(half).collect::<Result<_>>()?;
        Ok(Self {
            lower: mask(&|t, s| s <= t)?,
            strict: mask(&|t, s| s < t)?,
            halves,
        })
    }
}

/// (I + a)^-1 rhs with a strictly lower triangular, n x n. From the inverse M of the diagonal blocks of one size that of
/// twice the size is M - M a' M, a' the blocks between the halves: as stable as substitution, in a handful of products.
fn solve(a: &Tensor, rhs: &Tensor, masks: &Masks) -> Result<Tensor> {
    let (heads, n, _) = a.dims3()?;
    let mut inverse = Tensor::eye(n, DType::F32, a.device())?
        .unsqueeze(0)?
        .broadcast_as((heads, n, n))?
        .contiguous()?;
    for half in &masks.halves {
        let between = a.broadcast_mul(half)?;
        inverse = (&inverse - inverse.matmul(&between)?.matmul(&inverse)?)?;
    }
    inverse.matmul(rhs)
}

/// x W^T for x [rows, K], W [N, K]. candle's CPU has no bf16 product: there the product is f32, rounded once.
fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    matmul(x, &weight.t()?)
}

fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if a.dtype() == DType::BF16 && a.device().is_cpu() {
        return a
            .to_dtype(DType::F32)?
            .matmul(&b.to_dtype(DType::F32)?)?
            .to_dtype(DType::BF16);
    }
    a.matmul(b)
}

/// x * rsqrt(mean(x^2) + eps) * scale over the last dimension, in f32, returned in x's type.
fn rms_norm(x: &Tensor, scale: &Tensor, eps: f64) -> Result<Tensor> {
    let wide = x.to_dtype(DType::F32)?;
    let inverse = (wide.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?.recip()?;
    wide.broadcast_mul(&inverse)?.broadcast_mul(scale)?.to_dtype(x.dtype())
}

/// ln(1 + e^x) without overflow.
fn softplus(x: &Tensor) -> Result<Tensor> {
    x.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?
}
