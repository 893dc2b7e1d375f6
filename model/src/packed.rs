//! A frozen matrix in panels, and products with it: out = x W^T for any number of rows, f32.
//!
//! W [N, K] is stored as ceil(N / 64) panels, each `[K][64]`, so that the product streams memory in order. BF16
//! checkpoints stay BF16 in memory (half the traffic; widening is exact): a panel row then is 32 words, column i in the
//! low half of word i and column i + 32 in the high half.
//!
//! Every output element is one chain of multiply-adds over k = 0, 1, 2, ... whatever the number of rows. So a row of a
//! verify pass equals the same row of a decode step to the bit, and greedy speculative decoding is lossless by
//! construction.
#![expect(
    clippy::inline_always,
    reason = "a kernel must be inlined into the function compiled for the wide unit"
)]

use candle_core::{DType, Result, Tensor};
use pulp::Simd;
use rayon::prelude::*;

use crate::buffer::Buffer;

/// Columns of a panel.
const PANEL: usize = 64;
/// Rows of x that one thread takes at a time when there are many.
const ROW_BLOCK: usize = 96;
/// Depth of one pass over a panel, so that panel and rows stay in the second-level cache.
const DEPTH: usize = 1024;
/// One thread does it all below this many multiply-adds and this many bytes of matrix: about 150 microseconds of work
/// from cache or of reading from memory. Measured: waking another thread costs 50.
const PARALLEL_WORK: usize = 6 << 20;
/// See [`PARALLEL_WORK`].
const PARALLEL_BYTES: usize = 4 << 20;

/// A frozen [N, K] matrix, packed.
#[derive(Debug)]
pub(crate) struct Packed {
    n: usize,
    k: usize,
    panels: Panels,
}

#[derive(Debug)]
enum Panels {
    F32(Vec<f32>),
    Bf16(Vec<u32>),
}

impl Packed {
    /// Packs matrices of equal width one below the other: the product with all of them is one pass.
    pub(crate) fn stack(parts: &[&Tensor]) -> Result<Self> {
        let k = parts[0].dim(1)?;
        let n = parts.iter().map(|part| part.dims()[0]).sum::<usize>();
        let count = n.div_ceil(PANEL);
        let panels = if parts.iter().all(|part| part.dtype() == DType::BF16) {
            let mut panels = vec![0u32; count * k * PANEL / 2];
            scatter(parts, |column, row: &[half::bf16]| {
                let (panel, lane) = (column / PANEL, column % PANEL);
                let shift = if lane < PANEL / 2 { 0 } else { 16 };
                let words = &mut panels[panel * k * PANEL / 2..][..k * PANEL / 2];
                for (word, x) in words.iter_mut().skip(lane % (PANEL / 2)).step_by(PANEL / 2).zip(row) {
                    *word |= u32::from(x.to_bits()) << shift;
                }
            })?;
            Panels::Bf16(panels)
        } else {
            let mut panels = vec![0f32; count * k * PANEL];
            let parts: Vec<Tensor> = parts
                .iter()
                .map(|part| part.to_dtype(DType::F32))
                .collect::<Result<_>>()?;
            scatter(&parts.iter().collect::<Vec<_>>(), |column, row: &[f32]| {
                let panel = &mut panels[column / PANEL * k * PANEL..][..k * PANEL];
                for (slot, x) in panel.iter_mut().skip(column % PANEL).step_by(PANEL).zip(row) {
                    *slot = *x;
                }
            })?;
            Panels::F32(panels)
        };
        Ok(Self { n, k, panels })
    }

    /// Columns of x, K.
    pub(crate) fn depth(&self) -> usize {
        self.k
    }

    /// Columns of the product, N.
    pub(crate) fn width(&self) -> usize {
        self.n
    }

    /// x W^T: x is [rows, K], the result [rows, N].
    pub(crate) fn product(&self, x: &[f32]) -> Buffer {
        let rows = x.len() / self.k;
        let mut out = Buffer::zeros(rows * self.n);
        let threads = rayon::current_num_threads();
        let bytes = match &self.panels {
            Panels::F32(floats) => floats.len() * 4,
            Panels::Bf16(words) => words.len() * 4,
        };
        let small = (rows * self.n * self.k < PARALLEL_WORK && bytes < PARALLEL_BYTES) || threads == 1;
        let count = self.n.div_ceil(PANEL);
        if small || rows >= threads * ROW_BLOCK / 2 {
            let work = |(x, out): (&[f32], &mut [f32])| {
                let tiles = Tiles::new(x, self.k);
                for panel in 0..count {
                    let from = panel * PANEL;
                    let columns = Columns {
                        stride: self.n,
                        from,
                        width: PANEL.min(self.n - from),
                    };
                    self.panel(panel, &tiles, out, columns);
                }
            };
            if small {
                work((x, &mut out));
            } else {
                x.par_chunks(ROW_BLOCK * self.k)
                    .zip(out.par_chunks_mut(ROW_BLOCK * self.n))
                    .for_each(work);
            }
            return out;
        }
        // few rows: the threads share the panels instead, since reading the matrix is what takes the time
        let tiles = Tiles::new(x, self.k);
        let grain = count.div_ceil(threads * 2);
        let mut by_panel = Buffer::zeros(count * rows * PANEL);
        by_panel
            .par_chunks_mut(grain * rows * PANEL)
            .enumerate()
            .for_each(|(chunk, out)| {
                for (i, out) in out.chunks_exact_mut(rows * PANEL).enumerate() {
                    self.panel(
                        chunk * grain + i,
                        &tiles,
                        out,
                        Columns {
                            stride: PANEL,
                            from: 0,
                            width: PANEL,
                        },
                    );
                }
            });
        if rows == 1 {
            out.copy_from_slice(&by_panel[..self.n]);
            return out;
        }
        for (r, out) in out.chunks_exact_mut(self.n).enumerate() {
            for (panel, out) in out.chunks_mut(PANEL).enumerate() {
                out.copy_from_slice(&by_panel[(panel * rows + r) * PANEL..][..out.len()]);
            }
        }
        out
    }

    /// The product of all rows with one panel, into `columns` of `out`.
    fn panel(&self, panel: usize, tiles: &Tiles, out: &mut [f32], columns: Columns) {
        pulp::Arch::new().dispatch(PanelProduct {
            matrix: self,
            panel,
            tiles,
            out,
            columns,
        });
    }
}

/// The columns of a row-major matrix that one panel fills.
#[derive(Clone, Copy)]
struct Columns {
    stride: usize,
    from: usize,
    width: usize,
}

/// Calls `put(column, row)` for every row of the stacked parts.
fn scatter<T: candle_core::WithDType>(parts: &[&Tensor], mut put: impl FnMut(usize, &[T])) -> Result<()> {
    let mut column = 0;
    for part in parts {
        let k = part.dim(1)?;
        for row in part.flatten_all()?.to_vec1::<T>()?.chunks_exact(k) {
            put(column, row);
            column += 1;
        }
    }
    Ok(())
}

/// Rows of x, six at a time and interleaved `[K][6]`; the last tile may be narrower.
struct Tiles {
    values: Buffer,
    rows: usize,
    k: usize,
}

const TILE: usize = 6;

impl Tiles {
    fn new(x: &[f32], k: usize) -> Self {
        let rows = x.len() / k;
        let mut values = Buffer::zeros(x.len());
        for (tile, values) in x.chunks(TILE * k).zip(values.chunks_mut(TILE * k)) {
            let width = tile.len() / k;
            for (r, row) in tile.chunks_exact(k).enumerate() {
                for (slot, x) in values[r..].iter_mut().step_by(width).zip(row) {
                    *slot = *x;
                }
            }
        }
        Self { values, rows, k }
    }
}

struct PanelProduct<'a> {
    matrix: &'a Packed,
    panel: usize,
    tiles: &'a Tiles,
    out: &'a mut [f32],
    columns: Columns,
}

impl pulp::WithSimd for PanelProduct<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let k = self.matrix.k;
        match &self.matrix.panels {
            Panels::F32(panels) => {
                let panel = &panels[self.panel * k * PANEL..][..k * PANEL];
                product::<S, FloatRows>(simd, panel, self.tiles, self.out, self.columns);
            }
            Panels::Bf16(panels) => {
                let panel = &panels[self.panel * k * PANEL / 2..][..k * PANEL / 2];
                product::<S, HalfRows>(simd, panel, self.tiles, self.out, self.columns);
            }
        }
    }
}

/// How a panel row becomes vectors. Group g of `PANEL / (4 * lanes)` holds the column runs 2g and 2g + 1 of either half.
trait PanelRows {
    type Word: Copy;
    const WORDS: usize;
    fn load<S: Simd>(simd: S, row: &[Self::Word], group: usize) -> [S::f32s; 4];
}

struct FloatRows;
impl PanelRows for FloatRows {
    type Word = f32;
    const WORDS: usize = PANEL;
    #[inline(always)]
    fn load<S: Simd>(_: S, row: &[f32], group: usize) -> [S::f32s; 4] {
        let (vectors, _) = S::as_simd_f32s(row);
        let half = PANEL / 2 / S::F32_LANES;
        [
            vectors[2 * group],
            vectors[2 * group + 1],
            vectors[half + 2 * group],
            vectors[half + 2 * group + 1],
        ]
    }
}

struct HalfRows;
impl PanelRows for HalfRows {
    type Word = u32;
    const WORDS: usize = PANEL / 2;
    #[inline(always)]
    fn load<S: Simd>(simd: S, row: &[u32], group: usize) -> [S::f32s; 4] {
        let (vectors, _) = S::as_simd_u32s(row);
        let (a, b) = (vectors[2 * group], vectors[2 * group + 1]);
        let (sixteen, high) = (simd.splat_u32s(16), simd.splat_u32s(0xffff_0000));
        [
            simd.transmute_f32s_u32s(simd.wrapping_dyn_shl_u32s(a, sixteen)),
            simd.transmute_f32s_u32s(simd.wrapping_dyn_shl_u32s(b, sixteen)),
            simd.transmute_f32s_u32s(simd.and_u32s(a, high)),
            simd.transmute_f32s_u32s(simd.and_u32s(b, high)),
        ]
    }
}

#[inline(always)]
fn product<S: Simd, R: PanelRows>(simd: S, panel: &[R::Word], tiles: &Tiles, out: &mut [f32], columns: Columns) {
    let k = tiles.k;
    for from in (0..k).step_by(DEPTH) {
        let to = k.min(from + DEPTH);
        let depth = &panel[from * R::WORDS..to * R::WORDS];
        for first in (0..tiles.rows).step_by(TILE) {
            let width = TILE.min(tiles.rows - first);
            let x = &tiles.values[first * k + from * width..first * k + to * width];
            let out = &mut out[first * columns.stride..];
            match width {
                1 => tile::<S, R, 1>(simd, depth, x, out, columns, from > 0),
                2 => tile::<S, R, 2>(simd, depth, x, out, columns, from > 0),
                3 => tile::<S, R, 3>(simd, depth, x, out, columns, from > 0),
                4 => tile::<S, R, 4>(simd, depth, x, out, columns, from > 0),
                5 => tile::<S, R, 5>(simd, depth, x, out, columns, from > 0),
                _ => tile::<S, R, TILE>(simd, depth, x, out, columns, from > 0),
            }
        }
    }
}

/// `M` rows times one panel; `resume` continues the sums that stand in `out`.
#[inline(always)]
fn tile<S: Simd, R: PanelRows, const M: usize>(
    simd: S,
    panel: &[R::Word],
    x: &[f32],
    out: &mut [f32],
    at: Columns,
    resume: bool,
) {
    let lanes = S::F32_LANES;
    for group in 0..PANEL / (4 * lanes) {
        let mut start = [[simd.splat_f32s(0.0); 4]; M];
        let columns = [
            2 * group * lanes,
            (2 * group + 1) * lanes,
            PANEL / 2 + 2 * group * lanes,
            PANEL / 2 + (2 * group + 1) * lanes,
        ];
        if resume {
            for (r, sums) in start.iter_mut().enumerate() {
                let out = &out[r * at.stride + at.from..][..at.width];
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = simd.partial_load_f32s(&out[column.min(at.width)..]);
                }
            }
        }
        let sums = accumulate::<S, R, M>(simd, panel, x, group, start);
        for (r, sums) in sums.iter().enumerate() {
            let out = &mut out[r * at.stride + at.from..][..at.width];
            for (sum, column) in sums.iter().zip(columns) {
                if column + lanes <= at.width {
                    let (vectors, _) = S::as_mut_simd_f32s(&mut out[column..][..lanes]);
                    vectors[0] = *sum;
                } else if column < at.width {
                    simd.partial_store_f32s(&mut out[column..], *sum);
                }
            }
        }
    }
}

/// The sums of `M` rows with the four vectors of one group, continued from `sums`. Apart from loading and storing, so that
/// the sums are only ever indexed by constants and stay in registers.
#[inline(always)]
fn accumulate<S: Simd, R: PanelRows, const M: usize>(
    simd: S,
    panel: &[R::Word],
    x: &[f32],
    group: usize,
    mut sums: [[S::f32s; 4]; M],
) -> [[S::f32s; 4]; M] {
    for (row, x) in panel.chunks_exact(R::WORDS).zip(x.chunks_exact(M)) {
        let w = R::load(simd, row, group);
        for r in 0..M {
            let x = simd.splat_f32s(x[r]);
            for v in 0..4 {
                sums[r][v] = simd.mul_add_f32s(x, w[v], sums[r][v]);
            }
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn values(count: usize, salt: usize) -> Vec<f32> {
        (0..count)
            .map(|i| (((i + salt) * 2_654_435_761) % 2003) as f32 / 1001.0 - 1.0)
            .collect()
    }

    #[test]
    fn a_row_alone_equals_the_same_row_among_many_to_the_bit_and_the_true_product() -> Result<()> {
        for dtype in [DType::F32, DType::BF16] {
            for (n, k) in [(64, 16), (70, 33), (300, 1100), (8, 5)] {
                let w = Tensor::from_vec(values(n * k, 3), (n, k), &Device::Cpu)?.to_dtype(dtype)?;
                let packed = Packed::stack(&[&w.narrow(0, 0, n / 2)?, &w.narrow(0, n / 2, n - n / 2)?])?;
                assert_eq!(packed.width(), n);
                let all = values(250 * k, 11);
                let exact = Tensor::from_slice(&all, (250, k), &Device::Cpu)?
                    .to_dtype(DType::F64)?
                    .matmul(&w.to_dtype(DType::F64)?.t()?)?
                    .flatten_all()?
                    .to_vec1::<f64>()?;
                let many = packed.product(&all);
                for (a, b) in many.iter().zip(exact.iter()) {
                    assert!((f64::from(*a) - b).abs() < 1e-4 + 2e-6 * b.abs(), "{a} {b}");
                }
                for rows in [1, 2, 7, 8, 13] {
                    assert_eq!(
                        packed.product(&all[..rows * k])[..],
                        many[..rows * n],
                        "{rows} rows, {n} x {k}"
                    );
                }
            }
        }
        Ok(())
    }
}
