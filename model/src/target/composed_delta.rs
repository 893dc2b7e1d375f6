//! A gated-delta-net layer composed of candle tensor operations: convolution, chunked delta rule, gated norm.
//!
//! The formulas are in [`super::delta`], which holds the CPU kernels of the same rule.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::ops;

use super::composed::{linear, rms_norm};
use super::config::{GateActivation, LinearConfig};

/// Tokens of a chunk of the delta rule.
const CHUNK: usize = 64;
/// Weights of one gated-delta-net layer.
pub(crate) struct DeltaNet {
    pub(crate) shape: LinearConfig,
    pub(crate) qkv: Tensor,
    pub(crate) z: Tensor,
    pub(crate) b: Tensor,
    pub(crate) a: Tensor,
    /// [taps, C].
    pub(crate) conv: Tensor,
    /// -exp(A_log), f32.
    pub(crate) decay: Tensor,
    pub(crate) dt_bias: Tensor,
    pub(crate) norm: Tensor,
    pub(crate) output: Tensor,
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

/// The layer over `x` [rows, H]: advances the convolution tail and S, and returns the layer's output and its writes.
pub(crate) fn delta_net(
    net: &DeltaNet,
    x: &Tensor,
    tail: &mut Tensor,
    state: &mut Tensor,
    eps: f64,
) -> Result<(Tensor, Pending)> {
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

/// ln(1 + e^x) without overflow.
fn softplus(x: &Tensor) -> Result<Tensor> {
    x.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?
}
