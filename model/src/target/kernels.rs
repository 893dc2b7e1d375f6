//! Row kernels of the CPU target: norms, activations, convolution, rotary embedding on plain f32 slices.
//!
//! Each row's result depends on that row alone and is summed in one fixed order, so one row of a decode step and
//! the same row among many come out the same to the bit. Loops are written so that the compiler vectorises them
//! inside [`wide`], which picks AVX-512, AVX2 or NEON when the program runs.
#![expect(
    clippy::inline_always,
    reason = "a kernel must be inlined into the function compiled for the wide unit"
)]

use rayon::prelude::*;

use crate::awake::awake;
use crate::buffer::Buffer;
use crate::packed::nearest;
use crate::simd::{exp_within, vectorised};

/// A loop that [`wide`] runs. A type rather than a closure or a function value: `run` is called by its name and so is
/// inlined into the function that is compiled for the wide unit; a closure's body may stay outside, compiled for any x86.
pub(crate) trait Kernel {
    /// What the loop works on.
    type Args<'a>;
    /// The loop; every implementation is `#[inline(always)]`.
    fn run(args: Self::Args<'_>);
}

/// Runs a kernel with the widest vector unit of this machine.
#[inline(always)]
pub(crate) fn wide<K: Kernel>(args: K::Args<'_>) {
    struct Work<'a, K: Kernel>(K::Args<'a>);
    impl<K: Kernel> pulp::NullaryFnOnce for Work<'_, K> {
        type Output = ();
        #[inline(always)]
        fn call(self) {
            K::run(self.0);
        }
    }
    pulp::Arch::new().dispatch(Work::<K>(args));
}

/// Calls `row(index, out_row)` for each row of `out` ([rows, width]), on several threads when the whole is worth it.
pub(crate) fn each_row(out: &mut [f32], width: usize, row: impl Fn(usize, &mut [f32]) + Sync) {
    let rows = out.len() / width;
    let least = if awake() { AWAKE_FLOATS } else { PARALLEL_FLOATS };
    if rows * width < least || rows < 2 {
        out.chunks_exact_mut(width).enumerate().for_each(|(i, out)| row(i, out));
    } else {
        let grain = (least / 2 / width).max(1);
        out.par_chunks_mut(grain * width).enumerate().for_each(|(chunk, out)| {
            out.chunks_exact_mut(width)
                .enumerate()
                .for_each(|(i, out)| row(chunk * grain + i, out));
        });
    }
}

/// Rounds to the nearest BF16 numbers.
pub(crate) fn round_to_halves(x: &mut [f32]) {
    /// Numbers that one thread rounds at a time.
    const PIECE: usize = 1024;
    let round = |_: usize, piece: &mut [f32]| {
        vectorised(
            #[inline(always)]
            || {
                for x in piece.iter_mut() {
                    *x = f32::from_bits(nearest(*x) << 16);
                }
            },
        );
    };
    // pieces of one size, and what is left over
    let (pieces, rest) = x.split_at_mut(x.len() - x.len() % PIECE);
    each_row(pieces, PIECE, round);
    round(0, rest);
}

/// Below this many output floats a thread hand-over costs more than it saves.
const PARALLEL_FLOATS: usize = 16 * 1024;
/// The same while the threads are kept awake.
const AWAKE_FLOATS: usize = 4 * 1024;

/// e^x to about 2 ulp; exactly 0 below -70, a huge finite number above 88.
///
/// What is 4e-31 of its neighbours adds nothing to an f32 sum, but as a denormal it would slow every product it is in.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let value = exp_within(x.clamp(SMALLEST_EXPONENT, 88.0));
    if x < SMALLEST_EXPONENT { 0.0 } else { value }
}

/// e^x for a log decay x <= 0, as exact as the library's, with the cut of [`exp`].
pub(crate) fn decay(x: f64) -> f32 {
    if x < f64::from(SMALLEST_EXPONENT) {
        0.0
    } else {
        x.exp() as f32
    }
}

const SMALLEST_EXPONENT: f32 = -70.0;

/// 1 / (1 + e^-x).
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x * sigmoid(x).
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// ln(1 + e^x), linear above 20 as PyTorch's.
pub(crate) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Sum of squares in sixteen fixed lanes.
#[inline(always)]
pub(crate) fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = [0f32; 16];
    let chunks = x.chunks_exact(16);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x * x;
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += x * x;
    }
    lanes.iter().sum()
}

/// out = x * rsqrt(mean(x^2) + eps) * scale, one row.
pub(crate) struct RmsNormRow;

impl Kernel for RmsNormRow {
    type Args<'a> = (&'a [f32], &'a [f32], f32, &'a mut [f32]);

    #[inline(always)]
    fn run((x, scale, eps, out): Self::Args<'_>) {
        let inverse = 1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt();
        for ((out, x), scale) in out.iter_mut().zip(x).zip(scale) {
            *out = x * inverse * scale;
        }
    }
}

/// RMS norm of every row of `x` [rows, width].
pub(crate) fn rms_norm(x: &[f32], scale: &[f32], eps: f32) -> Buffer {
    let width = scale.len();
    let mut out = Buffer::stale(x.len());
    each_row(&mut out, width, |i, out| {
        wide::<RmsNormRow>((&x[i * width..][..width], scale, eps, out));
    });
    out
}

/// sum += x.
pub(crate) fn add(sum: &mut [f32], x: &[f32]) {
    wide::<AddRow>((sum, x));
}

struct AddRow;

impl Kernel for AddRow {
    type Args<'a> = (&'a mut [f32], &'a [f32]);

    #[inline(always)]
    fn run((sum, x): Self::Args<'_>) {
        for (sum, x) in sum.iter_mut().zip(x) {
            *sum += x;
        }
    }
}

/// silu(gate) * up for rows [gate | up] of width 2 I; the result is [rows, I].
pub(crate) fn swiglu(gate_up: &[f32], width: usize) -> Buffer {
    let mut out = Buffer::stale(gate_up.len() / 2);
    each_row(&mut out, width, |i, out| {
        let (gate, up) = gate_up[2 * i * width..][..2 * width].split_at(width);
        wide::<SiluGateRow>((gate, up, out));
    });
    out
}

/// out = silu(gate) * x.
pub(crate) struct SiluGateRow;

impl Kernel for SiluGateRow {
    type Args<'a> = (&'a [f32], &'a [f32], &'a mut [f32]);

    #[inline(always)]
    fn run((gate, x, out): Self::Args<'_>) {
        for ((out, gate), x) in out.iter_mut().zip(gate).zip(x) {
            *out = silu(*gate) * x;
        }
    }
}

/// out = sigmoid(gate) * x.
pub(crate) struct SigmoidGateRow;

impl Kernel for SigmoidGateRow {
    type Args<'a> = (&'a [f32], &'a [f32], &'a mut [f32]);

    #[inline(always)]
    fn run((gate, x, out): Self::Args<'_>) {
        for ((out, gate), x) in out.iter_mut().zip(gate).zip(x) {
            *out = sigmoid(*gate) * x;
        }
    }
}

/// out *= silu(gate).
pub(crate) struct SiluGateInPlace;

impl Kernel for SiluGateInPlace {
    type Args<'a> = (&'a [f32], &'a mut [f32]);

    #[inline(always)]
    fn run((gate, out): Self::Args<'_>) {
        for (out, gate) in out.iter_mut().zip(gate) {
            *out *= silu(*gate);
        }
    }
}

/// out *= sigmoid(gate).
pub(crate) struct SigmoidGateInPlace;

impl Kernel for SigmoidGateInPlace {
    type Args<'a> = (&'a [f32], &'a mut [f32]);

    #[inline(always)]
    fn run((gate, out): Self::Args<'_>) {
        for (out, gate) in out.iter_mut().zip(gate) {
            *out *= sigmoid(*gate);
        }
    }
}

/// Depthwise causal convolution and SiLU: `out[t]` = silu(sum over j of `taps[j]` * u[t + j]), j from the oldest.
///
/// `u` is [taps - 1 + rows, channels], the earlier inputs first; `taps` is [taps, channels]; the result [rows, channels].
pub(crate) fn conv_silu(u: &[f32], taps: &[f32], channels: usize) -> Buffer {
    let width = taps.len() / channels;
    let rows = u.len() / channels + 1 - width;
    let mut out = Buffer::stale(rows * channels);
    each_row(&mut out, channels, |t, out| {
        wide::<ConvRow>((&u[t * channels..], taps, out));
    });
    out
}

struct ConvRow;

impl Kernel for ConvRow {
    type Args<'a> = (&'a [f32], &'a [f32], &'a mut [f32]);

    #[inline(always)]
    fn run((u, taps, out): Self::Args<'_>) {
        let channels = out.len();
        if let Some((taps, u)) = four_rows(taps, u, channels) {
            for (c, out) in out.iter_mut().enumerate() {
                let sum = taps[0][c] * u[0][c] + taps[1][c] * u[1][c];
                *out = silu(sum + taps[2][c] * u[2][c] + taps[3][c] * u[3][c]);
            }
            return;
        }
        out.fill(0.0);
        for (taps, u) in taps.chunks_exact(channels).zip(u.chunks_exact(channels)) {
            for ((out, tap), u) in out.iter_mut().zip(taps).zip(u) {
                *out += tap * u;
            }
        }
        for out in out.iter_mut() {
            *out = silu(*out);
        }
    }
}

type FourRows<'a> = [&'a [f32]; 4];

/// The released width, 4, as four equally long rows each, so that one pass over the channels suffices.
#[inline(always)]
fn four_rows<'a>(taps: &'a [f32], u: &'a [f32], channels: usize) -> Option<(FourRows<'a>, FourRows<'a>)> {
    let split = |x: &'a [f32]| -> FourRows<'a> { std::array::from_fn(|j| &x[j * channels..][..channels]) };
    (taps.len() == 4 * channels).then(|| (split(taps), split(u)))
}

/// cos and sin of `rows` positions from `start`, [rows, half] each: angle = position * theta^(-2 j / (2 half)).
///
/// The product is rounded to f32 before the cosine, as the published models were trained.
pub(crate) fn rope_table(start: usize, rows: usize, half: usize, theta: f64) -> (Vec<f32>, Vec<f32>) {
    let inverse: Vec<f32> = (0..half)
        .map(|j| theta.powf(-(j as f64) / half as f64) as f32)
        .collect();
    let angle = |i: usize| (start + i / half) as f32 * inverse[i % half];
    (
        (0..rows * half).map(|i| angle(i).cos()).collect(),
        (0..rows * half).map(|i| angle(i).sin()).collect(),
    )
}

/// One position's heads on their way to attention.
pub(crate) struct Heads<'a> {
    /// Projections of the position; head i starts at i * `stride`.
    pub(crate) source: &'a [f32],
    pub(crate) stride: usize,
    /// Norm scale, `[D]`.
    pub(crate) norm: &'a [f32],
    pub(crate) eps: f32,
    /// Multiplies the result.
    pub(crate) scale: f32,
    /// Angles of the position, rotary dim / 2 each.
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
    /// [heads, D].
    pub(crate) out: &'a mut [f32],
}

/// Norm of each head, then rotation of channels j and j + half by the position's angles; channels past 2 half stay.
pub(crate) struct NormAndRotate;

impl Kernel for NormAndRotate {
    type Args<'a> = Heads<'a>;

    #[inline(always)]
    fn run(heads: Self::Args<'_>) {
        let (dim, half) = (heads.norm.len(), heads.cos.len());
        for (i, out) in heads.out.chunks_exact_mut(dim).enumerate() {
            RmsNormRow::run((
                &heads.source[i * heads.stride..][..dim],
                heads.norm,
                heads.eps,
                &mut *out,
            ));
            let (first, second) = out[..2 * half].split_at_mut(half);
            for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(heads.cos).zip(heads.sin) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
            for x in out {
                *x *= heads.scale;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_three_epsilon_and_saturates() {
        for i in -7000..8700 {
            let x = i as f32 * 0.01;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 3.0 * f64::from(f32::EPSILON), "exp({x}) off by {error:e}");
        }
        assert!(exp(-70.1) == 0.0 && exp(-1e30) == 0.0 && exp(1e30).is_finite() && exp(f32::NAN).is_nan());
    }

    #[test]
    fn a_convolution_of_width_four_equals_the_general_loop() {
        let channels = 37;
        let value = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
        let u: Vec<f32> = (0..8 * channels).map(value).collect();
        let taps: Vec<f32> = (0..4 * channels).map(|i| value(i + 7777)).collect();
        let fast = conv_silu(&u, &taps, channels);
        // a fifth, zero tap in front sends the same numbers through the general loop
        let wider: Vec<f32> = std::iter::repeat_n(0.0, channels).chain(taps.iter().copied()).collect();
        let longer: Vec<f32> = std::iter::repeat_n(1.0, channels).chain(u.iter().copied()).collect();
        let general = conv_silu(&longer, &wider, channels);
        for (a, b) in fast.iter().zip(general.iter()) {
            assert!((a - b).abs() <= 1e-6 * (1.0 + b.abs()), "{a} {b}");
        }
    }
}
