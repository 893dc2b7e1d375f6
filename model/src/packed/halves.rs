//! Products in the processor's own BF16 arithmetic (AVX512-BF16): one instruction multiplies sixteen pairs of BF16 numbers
//! by another pair and adds both products to sixteen f32 sums.
//!
//! An element is a chain over pairs of k, whatever the number of rows, as in the f32 kernels.

/// The BF16 number nearest to `x`, ties to even, as the low half of a word; NaN stays NaN.
#[inline(always)]
pub(crate) fn nearest(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if x.is_nan() { 0x7fc0 } else { rounded }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{available, columns};

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn available() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn columns(_: [&[u32]; 2], _: &super::Tiles, _: &[u32], _: &mut [&mut [f32]], _: usize, _: bool) {}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m512, __m512bh, __m512i, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_set1_epi32, _mm512_setzero_ps,
    };

    use super::super::{AHEAD, DEPTH, STRIP, Tiles, fetch};

    /// Lanes of a vector of sums.
    const LANES: usize = 16;

    /// Whether this processor has the instruction.
    pub(in super::super) fn available() -> bool {
        is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")
    }

    /// All rows, laid out in `words`, times one panel, into the columns from `column` or, with `add`, added to them.
    pub(in super::super) fn columns(
        strips: [&[u32]; 2],
        tiles: &Tiles,
        words: &[u32],
        out: &mut [&mut [f32]],
        column: usize,
        add: bool,
    ) {
        assert!(available(), "asked for only where it is available");
        #[expect(unsafe_code, reason = "compiled for a processor feature")]
        // SAFETY: the processor has the features, as just asserted.
        unsafe {
            panel(strips, tiles, words, out, column, add);
        }
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn panel(strips: [&[u32]; 2], tiles: &Tiles, words: &[u32], out: &mut [&mut [f32]], column: usize, add: bool) {
        let pairs = tiles.k.div_ceil(2);
        for from in (0..pairs).step_by(DEPTH / 2) {
            let to = pairs.min(from + DEPTH / 2);
            let [a, b] = strips.map(|strip| &strip[from * STRIP..to * STRIP]);
            for number in 0..tiles.count {
                let (first, height) = tiles.tile(number);
                let x = &words[first * pairs + from * height..first * pairs + to * height];
                let out = &mut out[first..first + height];
                macro_rules! both_strips_or_one_after_the_other {
                    ($($few:literal)*; $($many:literal)*) => {
                        match height {
                            $($few => tile::<$few, 2>([a, b], x, out, column, add || from > 0),)*
                            $($many => {
                                tile::<$many, 1>([a], x, out, column, add || from > 0);
                                tile::<$many, 1>([b], x, out, column + STRIP, add || from > 0);
                            })*
                            _ => unreachable!("no tile is taller"),
                        }
                    };
                }
                both_strips_or_one_after_the_other!(1 2 3 4 5 6; 7 8 9 10 11 12);
            }
        }
    }

    /// `M` rows times `N` strips, into the columns from `at`, those that there are, or added to them.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn tile<const M: usize, const N: usize>(
        strips: [&[u32]; N],
        x: &[u32],
        out: &mut [&mut [f32]],
        at: usize,
        add: bool,
    ) {
        let column = |strip: usize, half: usize| at + strip * STRIP + half * LANES;
        let sums = accumulate::<M, N>(strips, x);
        for (sums, out) in sums.iter().zip(out.iter_mut()) {
            for (strip, pair) in sums.iter().enumerate() {
                for (half, sum) in pair.iter().enumerate() {
                    let column = column(strip, half);
                    if let Some(whole) = out.get_mut(column..).and_then(<[f32]>::first_chunk_mut) {
                        *whole = lanes(if add { _mm512_add_ps(floats(*whole), *sum) } else { *sum });
                    } else if let Some(part) = out.get_mut(column..) {
                        for (out, sum) in part.iter_mut().zip(lanes(*sum)) {
                            *out = if add { *out + sum } else { sum };
                        }
                    }
                }
            }
        }
    }

    /// The sums of `M` rows with `N` strips. Apart from storing, so that they are only ever indexed by constants and stay in
    /// registers.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn accumulate<const M: usize, const N: usize>(strips: [&[u32]; N], x: &[u32]) -> [[[__m512; 2]; N]; M] {
        let mut sums = [[[_mm512_setzero_ps(); 2]; N]; M];
        let (x, _) = x.as_chunks::<M>();
        let strips = strips.map(|strip| &strip.as_chunks::<STRIP>().0[..x.len()]);
        for (i, x) in x.iter().enumerate() {
            let mut w = [[halves([0; LANES]); 2]; N];
            for s in 0..N {
                let ahead = strips[s].as_ptr().wrapping_add(i + AHEAD / 2).cast::<u32>();
                fetch(ahead);
                fetch(ahead.wrapping_add(LANES));
                let (vectors, _) = strips[s][i].as_chunks::<LANES>();
                w[s] = [halves(vectors[0]), halves(vectors[1])];
            }
            for r in 0..M {
                let x = splat(x[r]);
                for s in 0..N {
                    for half in 0..2 {
                        sums[r][s][half] = _mm512_dpbf16_ps(sums[r][s][half], x, w[s][half]);
                    }
                }
            }
        }
        sums
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn splat(word: u32) -> __m512bh {
        let words = _mm512_set1_epi32(word.cast_signed());
        #[expect(unsafe_code, reason = "the language has no other conversion")]
        // SAFETY: both are 64 bytes without an invalid value.
        unsafe {
            std::mem::transmute::<__m512i, __m512bh>(words)
        }
    }

    #[inline(always)]
    fn halves(words: [u32; LANES]) -> __m512bh {
        #[expect(unsafe_code, reason = "the language has no other conversion")]
        // SAFETY: both are 64 bytes without an invalid value.
        unsafe {
            std::mem::transmute::<[u32; LANES], __m512bh>(words)
        }
    }

    #[inline(always)]
    fn floats(lanes: [f32; LANES]) -> __m512 {
        #[expect(unsafe_code, reason = "the language has no other conversion")]
        // SAFETY: both are sixteen f32.
        unsafe {
            std::mem::transmute::<[f32; LANES], __m512>(lanes)
        }
    }

    #[inline(always)]
    fn lanes(floats: __m512) -> [f32; LANES] {
        #[expect(unsafe_code, reason = "the language has no other conversion")]
        // SAFETY: both are sixteen f32.
        unsafe {
            std::mem::transmute::<__m512, [f32; LANES]>(floats)
        }
    }
}
