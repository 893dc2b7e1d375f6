//! Rows of x laid out for products with a packed matrix: tiles as tall as the registers allow.
#![expect(
    clippy::inline_always,
    reason = "asked of the vector unit that the product is compiled for"
)]

use pulp::{Simd, bytemuck};

use super::View;
use super::view::Word;
use crate::buffer::Buffer;
use crate::simd::vectorised;

/// Rows of x in tiles of about equal height.
pub(crate) struct Tiles {
    pub(super) values: Values,
    rows: usize,
    pub(crate) k: usize,
    /// How many there are.
    pub(crate) count: usize,
}

/// The numbers of one tile after the other.
pub(super) enum Values {
    /// Each tile interleaved `[K][height]`.
    Floats(Buffer),
    /// Each tile `[ceil(K / 2)][height]`, pairs along K rounded to BF16.
    Halves(Buffer),
}

impl Tiles {
    /// Tiles of x, [rows, K].
    pub(crate) fn new(x: View<'_>) -> Self {
        let mut values = Buffer::stale(x.rows * x.depth);
        let tiles = Self::empty(x.rows, x.depth);
        tiles.fill::<f32>(x, &mut values);
        let values = Values::Floats(values);
        Self { values, ..tiles }
    }

    /// Tiles of x rounded to BF16.
    pub(super) fn rounded(x: View<'_>) -> Self {
        let mut values = Buffer::stale(x.rows * x.words::<u32>());
        let tiles = Self::empty(x.rows, x.depth);
        tiles.fill::<u32>(x, bytemuck::cast_slice_mut(&mut values));
        let values = Values::Halves(values);
        Self { values, ..tiles }
    }

    fn fill<W: Word>(&self, x: View<'_>, words: &mut [W]) {
        let depth = x.words::<W>();
        vectorised(
            #[inline(always)]
            || {
                for (from, piece) in x.pieces::<W>() {
                    let words_here = piece.words::<W>();
                    for tile in 0..self.count {
                        let (first, height) = self.tile(tile);
                        let out = &mut words[first * depth + from * height..][..words_here * height];
                        macro_rules! interleave {
                            ($($height:literal)*) => {
                                match height {
                                    $($height => piece.interleave::<W, $height>(first, out),)*
                                    _ => {}
                                }
                            };
                        }
                        interleave!(1 2 3 4 5 6 7 8 9 10 11 12);
                    }
                }
            },
        );
    }

    fn empty(rows: usize, k: usize) -> Self {
        Self {
            values: Values::Halves(Buffer::stale(0)),
            rows,
            k,
            count: rows.div_ceil(pulp::Arch::new().dispatch(TallestTile)),
        }
    }

    /// First row and height of a tile: heights differ by one at most, so that no tile is left with a few rows.
    pub(crate) fn tile(&self, tile: usize) -> (usize, usize) {
        let (each, more) = (self.rows / self.count, self.rows % self.count);
        (tile * each + tile.min(more), each + usize::from(tile < more))
    }
}

/// Most rows of a tile: two sums a row, two vectors of W and one of x fit the registers.
struct TallestTile;

impl pulp::WithSimd for TallestTile {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        if S::REGISTER_COUNT >= 32 { 12 } else { 6 }
    }
}
