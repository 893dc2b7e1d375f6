//! Matrices in slices, read along either axis, and how they become the rows and strips of a product.
#![expect(
    clippy::inline_always,
    reason = "a kernel must be inlined into the function compiled for the wide unit"
)]

use half::bf16;

use super::STRIP;
use super::halves::nearest;
use super::turn::{SIDE, turned};

/// Words of every row that are laid out before the next: a piece of the matrix this deep stays in the second-level cache
/// while tile after tile or strip after strip takes its part, whichever way it is stored.
const PIECE: usize = 64;

/// A stored number.
pub(crate) trait Number: Copy + Send + Sync {
    fn float(self) -> f32;
    /// The nearest BF16 number, as the low half of a word.
    fn half(self) -> u32;
}

impl Number for f32 {
    #[inline(always)]
    fn float(self) -> f32 {
        self
    }

    #[inline(always)]
    fn half(self) -> u32 {
        nearest(self)
    }
}

impl Number for bf16 {
    #[inline(always)]
    fn float(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn half(self) -> u32 {
        u32::from(self.to_bits())
    }
}

/// What a kernel reads: a number, or two that are neighbours along the depth, rounded to BF16.
pub(super) trait Word: Copy {
    /// Numbers in a word.
    const NUMBERS: usize;
    const ZERO: Self;
    /// The word of `first` and what follows it; past the end follows 0.
    fn of<T: Number>(first: T, second: Option<T>) -> Self;
    fn bits(self) -> u32;
    fn from_bits(bits: u32) -> Self;
}

impl Word for f32 {
    const NUMBERS: usize = 1;
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn of<T: Number>(first: T, _: Option<T>) -> Self {
        first.float()
    }

    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits()
    }

    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        Self::from_bits(bits)
    }
}

impl Word for u32 {
    const NUMBERS: usize = 2;
    const ZERO: Self = 0;

    #[inline(always)]
    fn of<T: Number>(first: T, second: Option<T>) -> Self {
        first.half() | second.map_or(0, Number::half) << 16
    }

    #[inline(always)]
    fn bits(self) -> u32 {
        self
    }

    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        bits
    }
}

/// A matrix [rows, depth]: either its rows or its columns are contiguous.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a, T = f32> {
    values: &'a [T],
    pub(super) rows: usize,
    pub(super) depth: usize,
    /// Distance of a row from the next, and of a number from the next along the depth; one of them is 1.
    row: usize,
    step: usize,
}

impl<'a, T: Number> View<'a, T> {
    /// `values` as [len / depth, depth].
    pub(crate) fn new(values: &'a [T], depth: usize) -> Self {
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
            .map(|x| f32::from_bits(x.half() << 16))
            .collect()
    }

    /// Pieces of [`PIECE`] words along the depth, each with its first word.
    #[inline(always)]
    pub(super) fn pieces<W: Word>(self) -> impl Iterator<Item = (usize, Self)> {
        (0..self.words::<W>()).step_by(PIECE).map(move |from| {
            let first = from * W::NUMBERS;
            let depth = (PIECE * W::NUMBERS).min(self.depth - first);
            let values = &self.values[first * self.step..];
            (from, Self { values, depth, ..self })
        })
    }

    /// Words along the depth.
    pub(super) fn words<W: Word>(self) -> usize {
        self.depth.div_ceil(W::NUMBERS)
    }

    /// Words `[words][M]` of the `M` rows from `first`.
    #[inline(always)]
    pub(super) fn interleave<W: Word, const M: usize>(self, first: usize, out: &mut [W]) {
        let (out, _) = out.as_chunks_mut::<M>();
        if self.step == 1 {
            turn(std::array::from_fn(|r| self.line(first + r)), out);
            return;
        }
        for (i, out) in out.iter_mut().enumerate() {
            let (k, next) = (i * W::NUMBERS, i * W::NUMBERS + 1);
            let line = |k: usize| self.values[k * self.step + first..].first_chunk::<M>();
            let (Some(a), b) = (
                line(k),
                (W::NUMBERS > 1 && next < self.depth).then(|| line(next)).flatten(),
            ) else {
                unreachable!("a view holds its rows")
            };
            *out = match b {
                Some(b) => std::array::from_fn(|r| W::of(a[r], Some(b[r]))),
                None => std::array::from_fn(|r| W::of(a[r], None)),
            };
        }
    }

    /// Words `[words][STRIP]` of the rows from `first`; where there are fewer, what stands in their columns is nobody's.
    #[inline(always)]
    pub(super) fn strip<W: Word>(self, first: usize, out: &mut [W]) {
        let count = STRIP.min(self.rows.saturating_sub(first));
        if count == 0 {
            out.fill(W::ZERO);
        } else if count == STRIP {
            self.interleave::<W, STRIP>(first, out);
        } else if self.step == 1 {
            let last = self.rows - 1;
            let (out, _) = out.as_chunks_mut::<STRIP>();
            turn::<T, W, STRIP>(std::array::from_fn(|r| self.line((first + r).min(last))), out);
        } else {
            for (i, out) in out.chunks_exact_mut(STRIP).enumerate() {
                let line = |k: usize| &self.values[k * self.step + first..][..count];
                let (k, next) = (i * W::NUMBERS, i * W::NUMBERS + 1);
                let following = (W::NUMBERS > 1 && next < self.depth).then(|| line(next));
                out.fill(W::ZERO);
                for (c, (word, a)) in out.iter_mut().zip(line(k)).enumerate() {
                    *word = W::of(*a, following.map(|line| line[c]));
                }
            }
        }
    }

    /// A row whose numbers are neighbours.
    #[inline(always)]
    fn line(self, row: usize) -> &'a [T] {
        &self.values[row * self.row..][..self.depth]
    }
}

/// Words of `M` rows, one row after the other, as words `[words][M]`.
#[inline(always)]
fn turn<T: Number, W: Word, const M: usize>(rows: [&[T]; M], out: &mut [[W; M]]) {
    let squares = rows[0].len() / (SIDE * W::NUMBERS);
    let (whole, rest) = out.split_at_mut(squares * SIDE);
    for (i, out) in whole.as_chunks_mut::<SIDE>().0.iter_mut().enumerate() {
        let from = i * SIDE * W::NUMBERS;
        for first in (0..M).step_by(SIDE) {
            let count = SIDE.min(M - first);
            let mut square = [[0; SIDE]; SIDE];
            for r in 0..count {
                let numbers = &rows[first + r][from..][..SIDE * W::NUMBERS];
                for (word, numbers) in square[r].iter_mut().zip(numbers.chunks_exact(W::NUMBERS)) {
                    *word = W::of(numbers[0], numbers.get(1).copied()).bits();
                }
            }
            let square = turned(&square);
            for (out, words) in out.iter_mut().zip(&square) {
                for (out, word) in out[first..][..count].iter_mut().zip(words) {
                    *out = W::from_bits(*word);
                }
            }
        }
    }
    for (i, out) in rest.iter_mut().enumerate() {
        let k = (squares * SIDE + i) * W::NUMBERS;
        for r in 0..M {
            out[r] = W::of(rows[r][k], rows[r].get(k + 1).copied());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::tests::values;

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
            assert_eq!(nearest(x), u32::from(bf16::from_f32(x).to_bits()), "{x}");
        }
        assert!(f32::from_bits(nearest(f32::from_bits(0x7f80_0001)) << 16).is_nan());
    }
}
