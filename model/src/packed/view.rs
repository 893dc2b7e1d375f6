//! Matrices in slices, read along either axis, and how they become the words of BF16 products.
#![expect(
    clippy::inline_always,
    reason = "a kernel must be inlined into the function compiled for the wide unit"
)]

use rayon::prelude::*;

use super::halves::{nearest, pair};
use super::{PANEL, Packed, Panels, STRIP, Stored};
use crate::simd::vectorised;

/// A matrix [rows, depth] of floats: either its rows or its columns are contiguous.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a> {
    values: &'a [f32],
    pub(super) rows: usize,
    pub(super) depth: usize,
    /// Distance of a row from the next, and of a number from the next along the depth; one of them is 1.
    row: usize,
    step: usize,
}

impl<'a> View<'a> {
    /// `values` as [len / depth, depth].
    pub(crate) fn new(values: &'a [f32], depth: usize) -> Self {
        let rows = values.len() / depth;
        Self {
            values,
            rows,
            depth,
            row: depth,
            step: 1,
        }
    }

    /// The same numbers, rows for columns.
    pub(crate) fn transposed(self) -> Self {
        Self {
            values: self.values,
            rows: self.depth,
            depth: self.rows,
            row: self.step,
            step: self.row,
        }
    }

    /// Some of the rows.
    pub(super) fn some(self, first: usize, rows: usize) -> Self {
        let values = &self.values[first * self.row..];
        Self { values, rows, ..self }
    }

    /// The numbers rounded to BF16, [rows, depth].
    pub(super) fn to_rounded(self) -> Vec<f32> {
        let rows = 0..self.rows;
        rows.flat_map(|r| (0..self.depth).map(move |k| self.values[r * self.row + k * self.step]))
            .map(|x| f32::from_bits(nearest(x) << 16))
            .collect()
    }

    /// Pairs `[ceil(depth / 2)][M]` of the `M` rows from `first`, rounded.
    #[inline(always)]
    pub(super) fn interleave<const M: usize>(self, first: usize, out: &mut [u32]) {
        let (out, _) = out.as_chunks_mut::<M>();
        if self.step == 1 {
            let rows: [&[f32]; M] = std::array::from_fn(|r| &self.values[(first + r) * self.row..][..self.depth]);
            for (i, out) in out.iter_mut().enumerate() {
                *out = std::array::from_fn(|r| pair(rows[r][2 * i], rows[r].get(2 * i + 1).copied().unwrap_or(0.0)));
            }
        } else {
            let line = |k: usize| -> [f32; M] {
                let part = self.values.get(k * self.step + first..).and_then(<[f32]>::first_chunk);
                part.filter(|_| k < self.depth).copied().unwrap_or([0.0; M])
            };
            for (i, out) in out.iter_mut().enumerate() {
                let (even, odd) = (line(2 * i), line(2 * i + 1));
                *out = std::array::from_fn(|r| pair(even[r], odd[r]));
            }
        }
    }

    /// Words of the strip of the rows from `first`, those that there are.
    #[inline(always)]
    fn strip(self, first: usize, out: &mut [u32]) {
        let count = STRIP.min(self.rows.saturating_sub(first));
        if count == 0 {
            return;
        }
        if self.step == 1 {
            for c in 0..count {
                let row = &self.values[(first + c) * self.row..][..self.depth];
                let (pairs, odd) = row.as_chunks::<2>();
                let words = out.iter_mut().skip(c).step_by(STRIP);
                let last = odd.iter().map(|x| pair(*x, 0.0));
                for (word, value) in words.zip(pairs.iter().map(|[a, b]| pair(*a, *b)).chain(last)) {
                    *word = value;
                }
            }
        } else {
            for (i, out) in out.chunks_exact_mut(STRIP).enumerate() {
                let line = |k: usize| &self.values[k * self.step + first..][..count];
                let even = line(2 * i);
                if 2 * i + 1 < self.depth {
                    for ((word, a), b) in out.iter_mut().zip(even).zip(line(2 * i + 1)) {
                        *word = pair(*a, *b);
                    }
                } else {
                    for (word, a) in out.iter_mut().zip(even) {
                        *word = pair(*a, 0.0);
                    }
                }
            }
        }
    }
}

impl Packed {
    /// Packs a matrix for one product, rounded to BF16.
    pub(crate) fn rounded(matrix: View<'_>) -> Self {
        let size = matrix.depth.div_ceil(2) * STRIP;
        let mut words = vec![0u32; matrix.rows.div_ceil(PANEL) * 2 * size];
        words.par_chunks_mut(size).enumerate().for_each(|(strip, words)| {
            vectorised(
                #[inline(always)]
                || matrix.strip(strip * STRIP, words),
            );
        });
        Self {
            n: matrix.rows,
            k: matrix.depth,
            panels: Panels::Bf16(Stored::Own(words)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::packed::joined_rounded;
    use crate::packed::tests::values;

    fn turned(values: &[f32], columns: usize) -> Vec<f32> {
        let rows = values.len() / columns;
        (0..values.len())
            .map(|i| values[i % rows * columns + i / rows])
            .collect()
    }

    proptest! {
        #[test]
        fn a_rounded_product_is_exact_but_for_its_sum_and_the_same_bits_row_by_row_and_either_way_round(
            rows in 1usize..30, n in 1usize..150, k in 1usize..70,
        ) {
            let (x, w) = (values(rows * k, 11), values(n * k, 3));
            let packed = Packed::rounded(View::new(&w, k));
            let all = joined_rounded(&[&packed], View::new(&x, k));
            let half = |x: f32| f64::from(half::bf16::from_f32(x).to_f32());
            for r in 0..rows {
                for c in 0..n {
                    let exact: f64 = (0..k).map(|i| half(x[r * k + i]) * half(w[c * k + i])).sum();
                    prop_assert!((f64::from(all[r * n + c]) - exact).abs() < 1e-4, "{r} {c}");
                }
                let alone = joined_rounded(&[&packed], View::new(&x[r * k..][..k], k));
                prop_assert_eq!(&alone[..], &all[r * n..][..n]);
            }
            let (x, w) = (turned(&x, k), turned(&w, k));
            let packed = Packed::rounded(View::new(&w, n).transposed());
            prop_assert_eq!(&joined_rounded(&[&packed], View::new(&x, rows).transposed())[..], &all[..]);
        }
    }

    #[test]
    fn rounding_is_that_of_the_half_crate() {
        let edges = [
            0.0,
            -0.0,
            1.0,
            1.003_906_2,
            3.4e38,
            f32::MAX,
            f32::INFINITY,
            1e-40,
            f32::MIN_POSITIVE,
        ];
        for x in edges.into_iter().chain(values(5000, 7)).flat_map(|x| [x, -x, x * 1e-3]) {
            assert_eq!(nearest(x), u32::from(half::bf16::from_f32(x).to_bits()), "{x}");
        }
        assert!(f32::from_bits(nearest(f32::from_bits(0x7f80_0001)) << 16).is_nan());
    }
}
