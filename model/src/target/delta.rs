//! The gated delta rule on the CPU: step form, chunked form and the fold of a verify pass, all f32.
//!
//! Per value head, with a state S [dk, dv] and per token a unit key k, a scaled unit query q, a value v, a write
//! strength beta and a log decay g <= 0:
//! ```text
//! S <- e^g S;   delta = beta (v - S^T k);   S <- S + k delta^T;   o = S^T q
//! ```
//! The chunked form solves n tokens at once, c_t = g_1 + .. + g_t, D_ts = e^(c_t - c_s) for s <= t:
//! ```text
//! (I + strict_lower(beta K K^T o D)) U = beta (V - e^c K S0)      row t of U is delta_t
//! O = e^c Q S0 + (Q K^T o D) U         S_n = e^(c_n) S0 + (e^(c_n - c) K)^T U
//! ```
//! Both forms leave k and delta behind, and [`fold`] replays any first rows of them into the state. It repeats the step
//! form's own operations, so after a step-form pass the folded state is the stepped state to the bit.
#![expect(
    clippy::inline_always,
    reason = "a kernel must be inlined into the function compiled for the wide unit"
)]

use rayon::prelude::*;

use super::config::LinearConfig;
use super::delta_chunk::chunks;
use super::kernels::{Kernel, decay, sum_of_squares, wide};
use crate::awake::awake;
use crate::buffer::Buffer;

/// Up to this many rows the step form runs: decode and verify passes share it.
pub(crate) const STEP_ROWS: usize = 16;
/// Tokens of a chunk, as in the published implementation.
pub(crate) const CHUNK: usize = 64;

/// What one pass of the rule produces, head by head.
pub(crate) struct Pass {
    /// Outputs, `[nv][rows][dv]`.
    pub(crate) out: Buffer,
    /// What [`fold`] needs.
    pub(crate) stash: Stash,
}

/// The writes of a pass.
pub(crate) struct Stash {
    /// Unit keys, `[nk][rows][dk]`.
    keys: Buffer,
    /// Deltas, `[nv][rows][dv]`.
    deltas: Buffer,
    /// Log decays, `[rows][nv]`.
    decays: Buffer,
}

/// Inputs of a pass over some rows.
pub(crate) struct Inputs<'a> {
    /// Convolved q | k | v, [rows, 2 nk dk + nv dv].
    pub(crate) qkv: &'a [f32],
    /// Log decay g, [rows, nv].
    pub(crate) decays: Buffer,
    /// Write strength beta, [rows, nv].
    pub(crate) betas: &'a [f32],
}

/// Runs the rule over all rows and advances `state` [nv, dk, dv]. `chunk` 0 is the step form.
pub(crate) fn run(shape: &LinearConfig, inputs: Inputs<'_>, state: &mut [f32], chunk: usize) -> Pass {
    let (nv, dk, dv) = (shape.value_heads, shape.key_dim, shape.value_dim);
    let group = nv / shape.key_heads;
    let rows = inputs.betas.len() / nv;
    let mut out = Buffer::stale(rows * nv * dv);
    let mut deltas = Buffer::stale(rows * nv * dv);
    let mut keys = Buffer::stale(rows * shape.key_heads * dk);
    let work = |head: usize, state: &mut [f32], out: &mut [f32], deltas: &mut [f32], keys: &mut [f32]| {
        let rows_of = Inflow {
            shape,
            inputs: &inputs,
            head,
            rows,
        };
        if chunk == 0 {
            wide::<Steps>((&rows_of, state, out, deltas, keys));
        } else {
            chunks(&rows_of, chunk, state, out, deltas, keys);
        }
    };
    let (per_state, per_value, per_key) = (group * dk * dv, group * rows * dv, rows * dk);
    if rows * nv * dk * dv < parallel_cells() {
        let heads = state.chunks_exact_mut(per_state).zip(out.chunks_exact_mut(per_value));
        let heads = heads
            .zip(deltas.chunks_exact_mut(per_value))
            .zip(keys.chunks_exact_mut(per_key));
        heads
            .enumerate()
            .for_each(|(head, (((state, out), deltas), keys))| work(head, state, out, deltas, keys));
    } else {
        let heads = state
            .par_chunks_exact_mut(per_state)
            .zip(out.par_chunks_exact_mut(per_value));
        let heads = heads
            .zip(deltas.par_chunks_exact_mut(per_value))
            .zip(keys.par_chunks_exact_mut(per_key));
        heads
            .enumerate()
            .for_each(|(head, (((state, out), deltas), keys))| work(head, state, out, deltas, keys));
    }
    Pass {
        out,
        stash: Stash {
            keys,
            deltas,
            decays: inputs.decays,
        },
    }
}

/// Writes the first `n` of the stashed tokens into `state` [nv, dk, dv], the state before the pass.
pub(crate) fn fold(shape: &LinearConfig, stash: &Stash, n: usize, state: &mut [f32]) {
    let (nv, dk, dv) = (shape.value_heads, shape.key_dim, shape.value_dim);
    let (rows, group) = (stash.decays.len() / nv, nv / shape.key_heads);
    let work = |(head, state): (usize, &mut [f32])| {
        for t in 0..n {
            let key = &stash.keys[(head / group * rows + t) * dk..][..dk];
            let delta = &stash.deltas[(head * rows + t) * dv..][..dv];
            let decay = decay(f64::from(stash.decays[t * nv + head]));
            wide::<WriteRow>((state, key, delta, decay));
        }
    };
    if n * nv * dk * dv < parallel_cells() {
        state.chunks_exact_mut(dk * dv).enumerate().for_each(work);
    } else {
        state.par_chunks_exact_mut(dk * dv).enumerate().for_each(work);
    }
}

/// S <- decay S + k delta^T.
struct WriteRow;

impl Kernel for WriteRow {
    type Args<'a> = (&'a mut [f32], &'a [f32], &'a [f32], f32);

    #[inline(always)]
    fn run((state, key, delta, decay): Self::Args<'_>) {
        for (row, k) in state.chunks_exact_mut(delta.len()).zip(key) {
            for (s, delta) in row.iter_mut().zip(delta) {
                *s = *s * decay + k * delta;
            }
        }
    }
}

/// Below this many state cells times rows one thread does all heads.
fn parallel_cells() -> usize {
    if awake() { 16 * 1024 } else { 128 * 1024 }
}

/// The inputs of one key head and the value heads that share it.
pub(crate) struct Inflow<'a> {
    pub(crate) shape: &'a LinearConfig,
    pub(crate) inputs: &'a Inputs<'a>,
    pub(crate) head: usize,
    pub(crate) rows: usize,
}

impl Inflow<'_> {
    pub(crate) fn group(&self) -> usize {
        self.shape.value_heads / self.shape.key_heads
    }

    pub(crate) fn row(&self, t: usize) -> &[f32] {
        let width = self.shape.conv_channels();
        &self.inputs.qkv[t * width..][..width]
    }

    #[inline(always)]
    pub(crate) fn key(&self, t: usize, out: &mut [f32]) {
        let dk = self.shape.key_dim;
        unit(&self.row(t)[(self.shape.key_heads + self.head) * dk..][..dk], 1.0, out);
    }

    #[inline(always)]
    pub(crate) fn query(&self, t: usize, out: &mut [f32]) {
        let dk = self.shape.key_dim;
        unit(&self.row(t)[self.head * dk..][..dk], 1.0 / (dk as f32).sqrt(), out);
    }

    /// Value of the `j`-th value head of the group.
    pub(crate) fn value(&self, t: usize, j: usize) -> &[f32] {
        let (dk, dv) = (self.shape.key_dim, self.shape.value_dim);
        &self.row(t)[2 * self.shape.key_heads * dk + (self.head * self.group() + j) * dv..][..dv]
    }

    /// Log decay and write strength of the `j`-th value head of the group.
    pub(crate) fn gates(&self, t: usize, j: usize) -> (f32, f32) {
        let at = t * self.shape.value_heads + self.head * self.group() + j;
        (self.inputs.decays[at], self.inputs.betas[at])
    }
}

/// x scaled to unit length (1e-6 is added to the sum of squares, not to the mean), times `scale`.
#[inline(always)]
fn unit(x: &[f32], scale: f32, out: &mut [f32]) {
    let factor = scale / (sum_of_squares(x) + 1e-6).sqrt();
    for (out, x) in out.iter_mut().zip(x) {
        *out = x * factor;
    }
}

struct Steps;

impl Kernel for Steps {
    type Args<'a> = (
        &'a Inflow<'a>,
        &'a mut [f32],
        &'a mut [f32],
        &'a mut [f32],
        &'a mut [f32],
    );

    #[inline(always)]
    fn run((of, state, out, deltas, keys): Self::Args<'_>) {
        let (dk, dv, rows) = (of.shape.key_dim, of.shape.value_dim, of.rows);
        let mut query = vec![0f32; dk];
        for (t, key) in keys.chunks_exact_mut(dk).enumerate() {
            of.key(t, key);
            of.query(t, &mut query);
            for j in 0..of.group() {
                let state = &mut state[j * dk * dv..][..dk * dv];
                let delta = &mut deltas[(j * rows + t) * dv..][..dv];
                let out = &mut out[(j * rows + t) * dv..][..dv];
                let (g, beta) = of.gates(t, j);
                let decay = decay(f64::from(g));
                delta.fill(0.0);
                out.fill(0.0);
                for (row, k) in state.chunks_exact(dv).zip(key.iter()) {
                    for (sum, s) in delta.iter_mut().zip(row) {
                        *sum += *k * (*s * decay);
                    }
                }
                for (delta, v) in delta.iter_mut().zip(of.value(t, j)) {
                    *delta = beta * (v - *delta);
                }
                for ((row, k), q) in state.chunks_exact_mut(dv).zip(key.iter()).zip(&query) {
                    for ((s, delta), o) in row.iter_mut().zip(delta.iter()).zip(out.iter_mut()) {
                        *s = *s * decay + k * delta;
                        *o += q * *s;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::target::config::GateActivation;

    fn shape(ratio: usize, dk: usize, dv: usize) -> LinearConfig {
        let gate = GateActivation::Silu;
        LinearConfig {
            key_heads: 2,
            value_heads: 2 * ratio,
            key_dim: dk,
            value_dim: dv,
            conv_width: 4,
            gate,
        }
    }

    fn noise(count: usize, seed: u64) -> Vec<f32> {
        let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    /// The recurrence in f64, as the formula reads.
    fn exact(shape: &LinearConfig, qkv: &[f32], g: &[f32], beta: &[f32], state: &mut [f64]) -> Vec<f64> {
        let (nk, nv, dk, dv) = (shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim);
        let rows = g.len() / nv;
        let mut out = vec![0f64; nv * rows * dv];
        for h in 0..nv {
            for t in 0..rows {
                let row: Vec<f64> = qkv[t * shape.conv_channels()..][..shape.conv_channels()]
                    .iter()
                    .map(|x| f64::from(*x))
                    .collect();
                let unit = |x: &[f64]| {
                    let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    x.iter().map(|x| x / norm).collect::<Vec<_>>()
                };
                let kh = h / (nv / nk);
                let (q, k) = (unit(&row[kh * dk..][..dk]), unit(&row[(nk + kh) * dk..][..dk]));
                let v = &row[2 * nk * dk + h * dv..][..dv];
                let (g, beta) = (f64::from(g[t * nv + h]), f64::from(beta[t * nv + h]));
                let s = &mut state[h * dk * dv..][..dk * dv];
                for s in s.iter_mut() {
                    *s *= g.exp();
                }
                for c in 0..dv {
                    let read: f64 = (0..dk).map(|i| s[i * dv + c] * k[i]).sum();
                    let delta = beta * (v[c] - read);
                    (0..dk).for_each(|i| s[i * dv + c] += k[i] * delta);
                    out[(h * rows + t) * dv + c] =
                        (0..dk).map(|i| s[i * dv + c] * q[i]).sum::<f64>() / (dk as f64).sqrt();
                }
            }
        }
        out
    }

    fn close(a: &[f32], b: &[f64]) -> bool {
        let error: f64 = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
        error.sqrt() <= 2e-6 * (1.0 + b.iter().map(|b| b * b).sum::<f64>().sqrt())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        #[test]
        fn chunked_step_and_folded_forms_agree_with_the_recurrence(
            rows in 1usize..150, chunk in 1usize..80, ratio in 1usize..4, dims in 0usize..3, seed in 0u64..1_000_000,
            decay in prop_oneof![Just(0.01f32), Just(1.0), Just(30.0)],
            strength in prop_oneof![Just(0.0f32), Just(1.0), Just(0.5)],
        ) {
            let (dk, dv) = [(16, 16), (5, 9), (32, 40)][dims];
            let shape = shape(ratio, dk, dv);
            let nv = shape.value_heads;
            let qkv = noise(rows * shape.conv_channels(), seed);
            let g: Vec<f32> = noise(rows * nv, seed + 1).iter().map(|x| -decay * x.abs()).collect();
            let beta: Vec<f32> = noise(rows * nv, seed + 2).iter().map(|x| (strength + 0.1 * x).clamp(0.0, 1.0)).collect();
            let start = noise(nv * dk * dv, seed + 3);
            let mut state: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
            let out = exact(&shape, &qkv, &g, &beta, &mut state);
            let n = seed as usize % (rows + 1);
            let mut prefix: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
            exact(&shape, &qkv, &g[..n * nv], &beta[..n * nv], &mut prefix);
            for chunk in [0, chunk, CHUNK] {
                let mut came = start.clone();
                let pass = run(&shape, Inputs { qkv: &qkv, decays: g.clone().into(), betas: &beta }, &mut came, chunk);
                prop_assert!(close(&pass.out, &out), "outputs, chunk {}", chunk);
                prop_assert!(close(&came, &state), "state, chunk {}", chunk);
                let mut folded = start.clone();
                fold(&shape, &pass.stash, n, &mut folded);
                prop_assert!(close(&folded, &prefix), "fold of {}, chunk {}", n, chunk);
                if chunk == 0 {
                    fold(&shape, &pass.stash, rows, &mut { folded.copy_from_slice(&start); folded.clone() });
                    let mut whole = start.clone();
                    fold(&shape, &pass.stash, rows, &mut whole);
                    prop_assert_eq!(whole, came, "a whole fold repeats the steps to the bit");
                }
            }
        }
    }
}
