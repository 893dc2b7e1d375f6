//! The chunked form of the gated delta rule on the CPU: one key head and its value heads, chunk after chunk.
//!
//! The formulas are in [`super::delta`]. K K^T and Q K^T are made once for all value heads of a key head; the triangular
//! system is solved in blocks of eight rows, so that most of it is matrix products.
#![expect(
    clippy::inline_always,
    reason = "a kernel must be inlined into the function compiled for the wide unit"
)]

use super::delta::Inflow;
use super::kernels::{Kernel, decay, exp, wide};
use crate::small_matmul::{Matrix, multiply, multiply_add};

/// Runs all rows of a key head in chunks: `state` `[group][dk][dv]` advances; `out` and `deltas` are `[group][rows][dv]`, `keys`
/// `[rows][dk]`, whatever stood there.
pub(crate) fn chunks(
    of: &Inflow<'_>,
    chunk: usize,
    state: &mut [f32],
    out: &mut [f32],
    deltas: &mut [f32],
    keys: &mut [f32],
) {
    let (dk, dv, rows) = (of.shape.key_dim, of.shape.value_dim, of.rows);
    let mut queries = vec![0f32; chunk * dk];
    let mut keys_t = vec![0f32; dk * chunk];
    let mut scaled_t = vec![0f32; dk * chunk];
    let (mut kk, mut qk) = (vec![0f32; chunk * chunk], vec![0f32; chunk * chunk]);
    let (mut a, mut p) = (vec![0f32; chunk * chunk], vec![0f32; chunk * chunk]);
    // f64: after a strong decay the small differences that follow must not drown in the large sum
    let (mut sums, mut betas) = (vec![0f64; chunk], vec![0f32; chunk]);
    for start in (0..rows).step_by(chunk) {
        let n = chunk.min(rows - start);
        let keys = &mut keys[start * dk..(start + n) * dk];
        let queries = &mut queries[..n * dk];
        wide::<Gather>((of, start, keys, queries));
        for (i, row) in keys_t.chunks_exact_mut(chunk).enumerate() {
            for (t, slot) in row[..n].iter_mut().enumerate() {
                *slot = keys[t * dk + i];
            }
        }
        multiply(Matrix(keys, dk), Matrix(&keys_t, chunk), &mut kk, chunk, (n, dk, n));
        multiply(Matrix(queries, dk), Matrix(&keys_t, chunk), &mut qk, chunk, (n, dk, n));
        for j in 0..of.group() {
            let state = &mut state[j * dk * dv..][..dk * dv];
            let u = &mut deltas[(j * rows + start) * dv..][..n * dv];
            let o = &mut out[(j * rows + start) * dv..][..n * dv];
            let mut sum = 0.0;
            for t in 0..n {
                let (g, beta) = of.gates(start + t, j);
                sum += f64::from(g);
                (sums[t], betas[t]) = (sum, beta);
            }
            let products = ChunkProducts {
                n,
                chunk,
                sums: &sums,
                betas: &betas,
                kk: &kk,
                qk: &qk,
                a: &mut a,
                p: &mut p,
            };
            wide::<DecayedProducts>(products);
            // u = beta (v - e^c K S0) and o = e^c Q S0, through the raw products
            multiply(Matrix(keys, dk), Matrix(state, dv), u, dv, (n, dk, dv));
            multiply(Matrix(queries, dk), Matrix(state, dv), o, dv, (n, dk, dv));
            for t in 0..n {
                let row = t * dv..(t + 1) * dv;
                let factors = (decay(sums[t]), betas[t]);
                wide::<FinishRows>((&mut u[row.clone()], &mut o[row], of.value(start + t, j), factors));
            }
            substitute(&a, chunk, u, dv, n);
            multiply_add(Matrix(&p, chunk), Matrix(u, dv), o, dv, (n, n, dv));
            let last = sums[n - 1];
            for (factor, sum) in betas[..n].iter_mut().zip(&sums) {
                *factor = decay(last - sum);
            }
            wide::<ScaleRows>((state, decay(last), &keys_t, &mut scaled_t, &betas[..n], chunk));
            multiply_add(Matrix(&scaled_t, chunk), Matrix(u, dv), state, dv, (dk, n, dv));
        }
    }
}

struct Gather;

impl Kernel for Gather {
    type Args<'a> = (&'a Inflow<'a>, usize, &'a mut [f32], &'a mut [f32]);

    #[inline(always)]
    fn run((of, start, keys, queries): Self::Args<'_>) {
        let dk = of.shape.key_dim;
        for (t, (key, query)) in keys.chunks_exact_mut(dk).zip(queries.chunks_exact_mut(dk)).enumerate() {
            of.key(start + t, key);
            of.query(start + t, query);
        }
    }
}

/// u = beta (v - e^c u), o = e^c o: one row of the right-hand side and of what S0 contributes to the output.
struct FinishRows;

impl Kernel for FinishRows {
    type Args<'a> = (&'a mut [f32], &'a mut [f32], &'a [f32], (f32, f32));

    #[inline(always)]
    fn run((u, o, value, (grown, beta)): Self::Args<'_>) {
        for (u, v) in u.iter_mut().zip(value) {
            *u = beta * (v - grown * *u);
        }
        for o in o {
            *o *= grown;
        }
    }
}

/// S times its decay over the chunk, and K^T with each column times its decay to the chunk's end.
struct ScaleRows;

impl Kernel for ScaleRows {
    type Args<'a> = (&'a mut [f32], f32, &'a [f32], &'a mut [f32], &'a [f32], usize);

    #[inline(always)]
    fn run((state, kept, keys_t, scaled_t, factors, chunk): Self::Args<'_>) {
        for s in state {
            *s *= kept;
        }
        for (scaled, plain) in scaled_t.chunks_exact_mut(chunk).zip(keys_t.chunks_exact(chunk)) {
            for ((scaled, plain), factor) in scaled.iter_mut().zip(plain).zip(factors) {
                *scaled = plain * factor;
            }
        }
    }
}

/// a = -strict_lower(beta K K^T o D), p = lower(Q K^T o D), n x n with rows `chunk` apart.
struct ChunkProducts<'a> {
    n: usize,
    chunk: usize,
    sums: &'a [f64],
    betas: &'a [f32],
    kk: &'a [f32],
    qk: &'a [f32],
    a: &'a mut [f32],
    p: &'a mut [f32],
}

struct DecayedProducts;

impl Kernel for DecayedProducts {
    type Args<'a> = ChunkProducts<'a>;

    #[inline(always)]
    fn run(x: Self::Args<'_>) {
        for t in 0..x.n {
            let row = t * x.chunk..t * x.chunk + x.n;
            let (a, p) = (&mut x.a[row.clone()], &mut x.p[row.clone()]);
            let (before_a, rest_a) = a.split_at_mut(t);
            let (before_p, rest_p) = p.split_at_mut(t);
            let (sum, beta) = (x.sums[t], -x.betas[t]);
            // only s < t is read: the later differences are positive and could overflow
            let earlier = x.sums.iter().zip(&x.kk[row.clone()]).zip(&x.qk[row.clone()]);
            for ((a, p), ((earlier, kk), qk)) in before_a.iter_mut().zip(before_p).zip(earlier) {
                let decay = exp((sum - earlier) as f32);
                *a = beta * kk * decay;
                *p = qk * decay;
            }
            rest_a.fill(0.0);
            rest_p.fill(0.0);
            rest_p[0] = x.qk[row][t];
        }
    }
}

/// Solves (I - a) u = rhs in place, a strictly lower, in blocks so that most of it is matrix products.
fn substitute(a: &[f32], chunk: usize, u: &mut [f32], dv: usize, n: usize) {
    const BLOCK: usize = 8;
    for first in (0..n).step_by(BLOCK) {
        let last = n.min(first + BLOCK);
        let (solved, rest) = u.split_at_mut(first * dv);
        if first > 0 {
            let left = Matrix(&a[first * chunk..], chunk);
            multiply_add(left, Matrix(solved, dv), rest, dv, (last - first, first, dv));
        }
        wide::<SubstituteBlock>((&a[first * chunk + first..], chunk, rest, dv, last - first));
    }
}

/// The rows of one diagonal block, one after the other.
struct SubstituteBlock;

impl Kernel for SubstituteBlock {
    type Args<'a> = (&'a [f32], usize, &'a mut [f32], usize, usize);

    #[inline(always)]
    fn run((a, chunk, u, dv, rows): Self::Args<'_>) {
        for t in 1..rows {
            let (before, row) = u.split_at_mut(t * dv);
            for (factor, earlier) in a[t * chunk..][..t].iter().zip(before.chunks_exact(dv)) {
                for (u, earlier) in row[..dv].iter_mut().zip(earlier) {
                    *u += factor * earlier;
                }
            }
        }
    }
}
