//! Inner loops for f32 slices, compiled for the best vector unit that the machine turns out to have.
//!
//! [`vectorised`] runs a closure with AVX-512, AVX2 or NEON enabled, whichever is found at run time, so that the
//! plain loops inlined into it vectorise; there is no intrinsic here and none elsewhere in this room. Sums are kept
//! in [`LANES`] partial sums, always in the same order, so a row's result does not depend on its neighbours.

/// Partial sums a reduction keeps. Fixed: it decides the order of additions and so the last bit.
pub const LANES: usize = 16;

/// Runs `work` with the widest vector instructions of this machine.
#[inline(always)]
#[expect(
    clippy::inline_always,
    reason = "the loops must be inlined into the feature-enabled frame to vectorise"
)]
pub fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

/// Sum of the products of two slices of one length.
#[inline(always)]
#[expect(clippy::inline_always, reason = "see vectorised")]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let (a_body, a_tail) = a.split_at(a.len() - a.len() % LANES);
    let (b_body, b_tail) = b.split_at(a_body.len());
    for (x, y) in a_body.chunks_exact(LANES).zip(b_body.chunks_exact(LANES)) {
        for l in 0..LANES {
            sums[l] += x[l] * y[l];
        }
    }
    let mut total = reduce(sums);
    for (x, y) in a_tail.iter().zip(b_tail) {
        total += x * y;
    }
    total
}

/// y += s * x.
#[inline(always)]
#[expect(clippy::inline_always, reason = "see vectorised")]
pub fn add_scaled(y: &mut [f32], s: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += s * x;
    }
}

/// Sum of the squares of a slice.
#[inline(always)]
#[expect(clippy::inline_always, reason = "see vectorised")]
pub fn sum_of_squares(a: &[f32]) -> f32 {
    dot(a, a)
}

/// Largest element; negative infinity for an empty slice.
#[inline(always)]
#[expect(clippy::inline_always, reason = "see vectorised")]
pub fn max(a: &[f32]) -> f32 {
    let mut best = [f32::NEG_INFINITY; LANES];
    let chunks = a.chunks_exact(LANES);
    let tail = chunks.remainder();
    for x in chunks {
        for l in 0..LANES {
            best[l] = if x[l] > best[l] { x[l] } else { best[l] };
        }
    }
    best.into_iter()
        .chain(tail.iter().copied())
        .fold(f32::NEG_INFINITY, f32::max)
}

/// x <- exp(x - shift) for every element; returns the sum.
#[inline(always)]
#[expect(clippy::inline_always, reason = "see vectorised")]
pub fn exp_shifted(x: &mut [f32], shift: f32) -> f32 {
    let mut sums = [0f32; LANES];
    let mut chunks = x.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for l in 0..LANES {
            chunk[l] = exp(chunk[l] - shift);
            sums[l] += chunk[l];
        }
    }
    let mut total = reduce(sums);
    for x in chunks.into_remainder() {
        *x = exp(*x - shift);
        total += *x;
    }
    total
}

/// e^x to about one unit in the last place, without a branch, so that it vectorises. Below -87.3 it is 0-like
/// (1.2e-38), above 88.7 it saturates.
#[inline(always)]
#[expect(clippy::inline_always, reason = "see vectorised")]
pub fn exp(x: f32) -> f32 {
    exp_within(x.clamp(-87.3, 88.7))
}

/// [`exp`] of what is within its range already.
#[inline(always)]
#[expect(clippy::inline_always, reason = "see vectorised")]
pub fn exp_within(x: f32) -> f32 {
    // x = n ln 2 + r, |r| <= ln 2 / 2; ln 2 is split so that n ln 2 is exact in its high part.
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits, where 2^n takes it from: `n as i32`
    // saturates, and the compiler then makes it one lane at a time.
    let shifted = x * std::f32::consts::LOG2_E + 12_582_912.0;
    let n = shifted - 12_582_912.0;
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    // Minimax polynomial of (e^r - 1 - r) / r^2 (Cephes coefficients).
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let value = p * r * r + r + 1.0;
    value * f32::from_bits(shifted.to_bits().wrapping_add(127) << 23)
}

/// 1 / (1 + e^-x).
#[inline(always)]
#[expect(clippy::inline_always, reason = "see vectorised")]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "see vectorised")]
fn reduce(sums: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    let mut sums = sums;
    while width > 0 {
        for l in 0..width {
            sums[l] += sums[l + width];
        }
        width /= 2;
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn exp_is_within_two_ulps_over_its_range() {
        for i in -87_000..88_000 {
            let x = i as f32 * 1e-3;
            let exact = f64::from(x).exp();
            let relative = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(relative < 2.5e-7, "exp({x}) is off by {relative:e}");
        }
        assert!(exp(0.0).to_bits() == 1f32.to_bits(), "exp(0) is exactly 1");
    }

    proptest! {
        #[test]
        fn reductions_equal_the_scalar_loop(a in prop::collection::vec(-3f32..3.0, 0..70)) {
            let b: Vec<f32> = a.iter().map(|x| x * 0.5 + 1.0).collect();
            let exact: f64 = a.iter().zip(&b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
            prop_assert!((f64::from(vectorised(#[inline(always)] || dot(&a, &b))) - exact).abs() < 1e-4);
            let largest = a.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            prop_assert_eq!(max(&a).to_bits(), largest.to_bits());
            let mut e = a.clone();
            let total = exp_shifted(&mut e, 1.0);
            let exact: f64 = a.iter().map(|x| (f64::from(*x) - 1.0).exp()).sum();
            prop_assert!((f64::from(total) - exact).abs() <= 1e-5 * exact.max(1.0));
        }
    }
}
