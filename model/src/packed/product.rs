//! Products with packed matrices: who computes what.
//!
//! Several matrices may take the same rows in one pass: the rows are laid out once and the threads share all panels.

use rayon::prelude::*;

use super::halves::available;
use super::{PANEL, Packed, Panels, Tiles, View};
use crate::awake::awake;
use crate::buffer::Buffer;

/// Rows of x that one thread takes at a time when there are many.
const ROW_BLOCK: usize = 96;
/// One thread does it all below this many multiply-adds and this many bytes of matrix: about 150 microseconds of work
/// from cache or of reading from memory. Measured: waking another thread costs 50.
const PARALLEL_WORK: usize = 6 << 20;
/// See [`PARALLEL_WORK`].
const PARALLEL_BYTES: usize = 4 << 20;
/// The same while the threads are kept awake, when another thread takes over in one or two.
const AWAKE_WORK: usize = 256 << 10;
/// See [`AWAKE_WORK`].
const AWAKE_BYTES: usize = 64 << 10;
/// Pieces a thread that the columns are cut into.
const PIECES: usize = 1;

impl Packed {
    /// x W^T: x is [rows, K], the result [rows, N].
    pub(crate) fn product(&self, x: &[f32]) -> Buffer {
        joined(&[self], x)
    }
}

/// x [W0; W1; ...]^T for matrices of one depth: x is [rows, K], the result [rows, N0 + N1 + ...].
///
/// An element is the same, to the bit, as in the product with its matrix alone.
pub(crate) fn joined(matrices: &[&Packed], x: &[f32]) -> Buffer {
    let x = View::new(x, matrices[0].k);
    let mut out = Buffer::stale(x.rows * width(matrices));
    joined_into(matrices, x, &mut out, false);
    out
}

/// [`joined`] in the place of `out` or, with `add`, added to it.
pub(crate) fn joined_into(matrices: &[&Packed], x: View<'_>, out: &mut [f32], add: bool) {
    fill(
        matrices,
        x.rows,
        &|first, rows| Tiles::new(x.some(first, rows)),
        out,
        add,
    );
}

/// As [`joined_into`], with x rounded to BF16 and, where the processor has them, its BF16 products: then two numbers
/// neighbouring along K enter a sum together, so that the last bits differ from those of [`joined_into`].
pub(crate) fn joined_rounded_into(matrices: &[&Packed], x: View<'_>, out: &mut [f32], add: bool) {
    let halves = matrices.iter().all(|matrix| matches!(matrix.panels, Panels::Bf16(_)));
    if halves && available() {
        fill(
            matrices,
            x.rows,
            &|first, rows| Tiles::rounded(x.some(first, rows)),
            out,
            add,
        );
    } else {
        let rounded = x.to_rounded();
        joined_into(matrices, View::new(&rounded, x.depth), out, add);
    }
}

fn width(matrices: &[&Packed]) -> usize {
    matrices.iter().map(|matrix| matrix.n).sum()
}

/// The products of `rows` rows, whose tiles `tiles(first, count)` makes, in the place of `out` or added to it.
fn fill(matrices: &[&Packed], rows: usize, tiles: &(dyn Fn(usize, usize) -> Tiles + Sync), out: &mut [f32], add: bool) {
    let (k, width) = (matrices[0].k, width(matrices));
    if out.is_empty() {
        return;
    }
    let threads = rayon::current_num_threads();
    let (work, bytes) = if awake() {
        (AWAKE_WORK, AWAKE_BYTES)
    } else {
        (PARALLEL_WORK, PARALLEL_BYTES)
    };
    let read = matrices.iter().map(|matrix| matrix.bytes()).sum::<usize>();
    let small = (rows * width * k < work && read < bytes) || threads == 1;
    if let (false, Some(block)) = (small, row_block(rows)) {
        out.par_chunks_mut(block * width).enumerate().for_each(|(i, out)| {
            let tiles = tiles(i * block, out.len() / width);
            for mut piece in pieces(matrices, usize::MAX / PANEL, out, width) {
                piece.fill(&tiles, add);
            }
        });
        return;
    }
    let tiles = tiles(0, rows);
    let count = matrices.iter().map(|matrix| matrix.n.div_ceil(PANEL)).sum::<usize>();
    let grain = if small { count } else { count.div_ceil(threads * PIECES) };
    // few rows: the threads share the panels instead, since reading the matrices is what takes the time
    let mut pieces = pieces(matrices, grain, out, width);
    if small {
        for piece in &mut pieces {
            piece.fill(&tiles, add);
        }
    } else {
        pieces.par_iter_mut().for_each(|piece| piece.fill(&tiles, add));
    }
}

/// Calls `work(first, rows)` for blocks of the rows of `x` [rows, width], which threads share when there are many, and otherwise
/// for all of them: a product inside is then shared among the threads itself.
pub(crate) fn by_rows(x: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    match row_block(x.len() / width) {
        Some(block) => {
            let blocks = x.par_chunks_mut(block * width).enumerate();
            blocks.for_each(|(i, rows)| work(i * block, rows));
        }
        None => work(0, x),
    }
}

/// Rows of one block, as many for each thread, where there are enough for all threads.
fn row_block(rows: usize) -> Option<usize> {
    let threads = rayon::current_num_threads();
    let enough = rows >= threads * ROW_BLOCK / 2;
    enough.then(|| rows.div_ceil(rows.div_ceil(ROW_BLOCK).next_multiple_of(threads)))
}

/// Some neighbouring columns of every row, all of one matrix.
struct Piece<'m, 'o> {
    matrix: &'m Packed,
    /// Panel of the first column.
    first: usize,
    columns: usize,
    out: Vec<&'o mut [f32]>,
}

impl Piece<'_, '_> {
    fn fill(&mut self, tiles: &Tiles, add: bool) {
        self.matrix.columns(self.first, tiles, &mut self.out, add);
    }
}

/// Cuts the columns of `out` [rows, width] where a matrix ends and after every `grain` panels.
fn pieces<'m, 'o>(matrices: &[&'m Packed], grain: usize, out: &'o mut [f32], width: usize) -> Vec<Piece<'m, 'o>> {
    let rows = out.len() / width;
    let mut pieces = Vec::with_capacity(matrices.len());
    for matrix in matrices {
        for first in (0..matrix.n.div_ceil(PANEL)).step_by(grain.max(1)) {
            pieces.push(Piece {
                matrix,
                first,
                columns: (matrix.n - first * PANEL).min(grain * PANEL),
                out: Vec::with_capacity(rows),
            });
        }
    }
    for mut row in out.chunks_exact_mut(width) {
        for piece in &mut pieces {
            let (part, rest) = row.split_at_mut(piece.columns);
            piece.out.push(part);
            row = rest;
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Result, Tensor};

    use super::*;

    #[test]
    fn every_row_is_in_one_block_whatever_the_number_of_rows_and_threads() {
        for threads in [1, 2, 3, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for rows in [1, 2, 95, 96, 97, 191, 192, 400, 513, 1500] {
                let mut x = vec![0f32; rows * 3];
                pool.install(|| {
                    by_rows(&mut x, 3, |first, block| {
                        for (i, row) in block.chunks_exact_mut(3).enumerate() {
                            for x in row {
                                *x += (first + i + 1) as f32;
                            }
                        }
                    });
                });
                let expected: Vec<f32> = (0..rows * 3).map(|i| (i / 3 + 1) as f32).collect();
                assert_eq!(x, expected, "{threads} threads, {rows} rows");
            }
        }
    }

    #[test]
    fn joined_matrices_give_the_bits_of_each_alone_on_any_number_of_threads() -> Result<()> {
        let k = 37;
        let values = |count: usize| {
            (0..count)
                .map(|i| ((i * 2_654_435_761) % 2003) as f32 / 1001.0 - 1.0)
                .collect()
        };
        let mut matrices = Vec::new();
        for (i, n) in [5, 64, 200, 1, 130].into_iter().enumerate() {
            let dtype = if i % 2 == 0 { DType::BF16 } else { DType::F32 };
            let w = Tensor::from_vec(values(n * k), (n, k), &Device::Cpu)?.to_dtype(dtype)?;
            matrices.push(Packed::stack(&[&w])?);
        }
        let matrices: Vec<&Packed> = matrices.iter().collect();
        for threads in [1, 2, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for rows in [1, 8, 1500] {
                let x: Vec<f32> = values(rows * k);
                let all = pool.install(|| joined(&matrices, &x));
                let mut from = 0;
                let width = all.len() / rows;
                for matrix in &matrices {
                    let alone = matrix.product(&x);
                    for (row, alone) in all.chunks_exact(width).zip(alone.chunks_exact(matrix.n)) {
                        assert_eq!(&row[from..][..matrix.n], alone, "{threads} threads, {rows} rows");
                    }
                    from += matrix.n;
                }
            }
        }
        Ok(())
    }
}
