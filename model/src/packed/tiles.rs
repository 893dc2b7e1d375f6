//! Rows of x laid out for products with a packed matrix: tiles as tall as the registers allow.
#![expect(
    clippy::inline_always,
    reason = "asked of the vector unit that the product is compiled for"
)]

use pulp::Simd;

use crate::buffer::Buffer;

/// Rows of x in tiles of about equal height, each interleaved `[K][height]`.
pub(crate) struct Tiles {
    /// `[K][height]` of one tile after the other.
    pub(crate) values: Buffer,
    rows: usize,
    pub(crate) k: usize,
    /// How many there are.
    pub(crate) count: usize,
}

impl Tiles {
    /// Tiles of x, [rows, K].
    pub(crate) fn new(x: &[f32], k: usize) -> Self {
        let rows = x.len() / k;
        let mut tiles = Self {
            values: Buffer::stale(x.len()),
            rows,
            k,
            count: rows.div_ceil(pulp::Arch::new().dispatch(TallestTile)),
        };
        for tile in 0..tiles.count {
            let (first, height) = tiles.tile(tile);
            let x = &x[first * k..][..height * k];
            let out = &mut tiles.values[first * k..][..height * k];
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
        tiles
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
