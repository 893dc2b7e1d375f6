//! Rows of x laid out for products with a packed matrix: tiles as tall as the registers allow.
#![expect(
    clippy::inline_always,
    reason = "asked of the vector unit that the product is compiled for"
)]

use pulp::Simd;

use super::View;
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
    Halves(Vec<u32>),
}

impl Tiles {
    /// Tiles of x, [rows, K].
    pub(crate) fn new(x: &[f32], k: usize) -> Self {
        let mut values = Buffer::stale(x.len());
        let tiles = Self::empty(x.len() / k, k);
        for tile in 0..tiles.count {
            let (first, height) = tiles.tile(tile);
            let x = &x[first * k..][..height * k];
            let out = &mut values[first * k..][..height * k];
            macro_rules! interleave {
                ($($height:literal)*) => {
                    match height {
                        $($height => interleave::<$height>(x, out),)*
                        _ => {}
                    }
                };
            }
            interleave!(1 2 3 4 5 6 7 8 9 10 11 12);
        }
        let values = Values::Floats(values);
        Self { values, ..tiles }
    }

    /// Tiles of x rounded to BF16.
    pub(super) fn rounded(x: View<'_>) -> Self {
        let pairs = x.depth.div_ceil(2);
        let mut words = vec![0u32; x.rows * pairs];
        let tiles = Self::empty(x.rows, x.depth);
        vectorised(
            #[inline(always)]
            || {
                for tile in 0..tiles.count {
                    let (first, height) = tiles.tile(tile);
                    let out = &mut words[first * pairs..][..height * pairs];
                    macro_rules! interleave {
                        ($($height:literal)*) => {
                            match height {
                                $($height => x.interleave::<$height>(first, out),)*
                                _ => {}
                            }
                        };
                    }
                    interleave!(1 2 3 4 5 6 7 8 9 10 11 12);
                }
            },
        );
        let values = Values::Halves(words);
        Self { values, ..tiles }
    }

    fn empty(rows: usize, k: usize) -> Self {
        Self {
            values: Values::Halves(Vec::new()),
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

/// `M` rows of x, [M, K], as `[K][M]`.
fn interleave<const M: usize>(x: &[f32], out: &mut [f32]) {
    let k = x.len() / M;
    let rows: [&[f32]; M] = std::array::from_fn(|r| &x[r * k..][..k]);
    let (out, _) = out.as_chunks_mut::<M>();
    for (i, out) in out.iter_mut().enumerate() {
        *out = std::array::from_fn(|r| rows[r][i]);
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
