//! C += A B for small dense f32 matrices that sit in cache: the products inside a chunk and inside attention.
//!
//! Each element of C is one chain of multiply-adds over the inner index, in order, whatever the other sizes.
#![expect(
    clippy::needless_range_loop,
    reason = "sums are indexed by constants, so that they stay in registers"
)]
#![expect(
    clippy::inline_always,
    reason = "a kernel must be inlined into the function compiled for the wide unit"
)]

use pulp::Simd;

/// Steps of the inner index that are made for all rows before the next ones: B's share of them stays in the first cache.
const DEPTH: usize = 128;

/// A row-major matrix and the distance between its rows, in floats.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a>(pub(crate) &'a [f32], pub(crate) usize);

/// The left factor: a matrix, or the transpose of one.
#[derive(Clone, Copy)]
pub(crate) enum Left<'a> {
    AsIs(Matrix<'a>),
    Transposed(Matrix<'a>),
}

impl<'a> From<Matrix<'a>> for Left<'a> {
    fn from(matrix: Matrix<'a>) -> Self {
        Self::AsIs(matrix)
    }
}

/// C [m, n] += A [m, k] B [k, n]; `sizes` is (m, k, n), C's rows are `stride` apart.
pub(crate) fn multiply_add<'a>(
    a: impl Into<Left<'a>>,
    b: Matrix<'_>,
    c: &mut [f32],
    stride: usize,
    sizes: (usize, usize, usize),
) {
    product(a.into(), b, c, stride, sizes, true);
}

/// C = A B, whatever stood in C; otherwise as [`multiply_add`].
pub(crate) fn multiply<'a>(
    a: impl Into<Left<'a>>,
    b: Matrix<'_>,
    c: &mut [f32],
    stride: usize,
    sizes: (usize, usize, usize),
) {
    product(a.into(), b, c, stride, sizes, false);
}

fn product(a: Left<'_>, b: Matrix<'_>, c: &mut [f32], stride: usize, sizes: (usize, usize, usize), add: bool) {
    let arch = pulp::Arch::new();
    match a {
        Left::AsIs(a) => arch.dispatch(Product::<false> {
            a,
            b,
            c,
            stride,
            sizes,
            add,
        }),
        Left::Transposed(a) => arch.dispatch(Product::<true> {
            a,
            b,
            c,
            stride,
            sizes,
            add,
        }),
    }
}

struct Product<'a, const TRANSPOSED: bool> {
    a: Matrix<'a>,
    b: Matrix<'a>,
    c: &'a mut [f32],
    stride: usize,
    sizes: (usize, usize, usize),
    add: bool,
}

/// The part of a product that is made at once.
#[derive(Clone, Copy)]
struct Corner {
    row: usize,
    from: usize,
    width: usize,
    first: usize,
    depth: usize,
    add: bool,
}

impl<const TRANSPOSED: bool> pulp::WithSimd for Product<'_, TRANSPOSED> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let (m, k, n) = self.sizes;
        // Sums of 6 x 4 vectors, with four of B and one of A, fit 32 registers; of 6 x 2, with two and one, 16.
        let most = if S::REGISTER_COUNT >= 32 { 4 } else { 2 };
        let (lanes, mut from) = (S::F32_LANES, 0);
        while from < n {
            let vectors = match ((n - from) / lanes).min(most) {
                3 => 2,
                vectors => vectors,
            };
            let width = if vectors == 0 { n - from } else { lanes * vectors };
            for first in (0..k.max(1)).step_by(DEPTH) {
                let mut at = Corner {
                    row: 0,
                    from,
                    width,
                    first,
                    depth: DEPTH.min(k - first),
                    add: self.add || first > 0,
                };
                while at.row < m {
                    at.row += match (vectors, m - at.row) {
                        (4, 6..) if S::REGISTER_COUNT >= 32 => self.tile::<S, 6, 4>(simd, at),
                        (4, 4..) if S::REGISTER_COUNT >= 32 => self.tile::<S, 4, 4>(simd, at),
                        (4, 2..) if S::REGISTER_COUNT >= 32 => self.tile::<S, 2, 4>(simd, at),
                        (4, _) if S::REGISTER_COUNT >= 32 => self.tile::<S, 1, 4>(simd, at),
                        (2, 6..) => self.tile::<S, 6, 2>(simd, at),
                        (2, 4..) => self.tile::<S, 4, 2>(simd, at),
                        (2, _) => self.tile::<S, 1, 2>(simd, at),
                        (1, 6..) => self.tile::<S, 6, 1>(simd, at),
                        (1, _) => self.tile::<S, 1, 1>(simd, at),
                        (_, 6..) => self.ragged::<S, 6>(simd, at),
                        _ => self.ragged::<S, 1>(simd, at),
                    };
                }
            }
            from += width;
        }
    }
}

impl<const TRANSPOSED: bool> Product<'_, TRANSPOSED> {
    /// M rows of V vectors of C, their sums in registers; returns M.
    #[inline(always)]
    fn tile<S: Simd, const M: usize, const V: usize>(&mut self, simd: S, at: Corner) -> usize {
        let width = V * S::F32_LANES;
        let rows = self.rows::<M>(at);
        let mut sums = [[simd.splat_f32s(0.0); V]; M];
        if at.add {
            for r in 0..M {
                let (vectors, _) = S::as_simd_f32s(&self.c[(at.row + r) * self.stride + at.from..][..width]);
                sums[r].copy_from_slice(vectors);
            }
        }
        for i in 0..at.depth {
            let (b, _) = S::as_simd_f32s(&self.b.0[(at.first + i) * self.b.1 + at.from..][..width]);
            let a = self.column(at, &rows, i);
            for r in 0..M {
                let x = simd.splat_f32s(a[r]);
                for v in 0..V {
                    sums[r][v] = simd.mul_add_f32s(x, b[v], sums[r][v]);
                }
            }
        }
        for r in 0..M {
            let (vectors, _) = S::as_mut_simd_f32s(&mut self.c[(at.row + r) * self.stride + at.from..][..width]);
            vectors.copy_from_slice(&sums[r]);
        }
        M
    }

    /// M rows of fewer columns than a vector; returns M.
    #[inline(always)]
    fn ragged<S: Simd, const M: usize>(&mut self, simd: S, at: Corner) -> usize {
        let rows = self.rows::<M>(at);
        let mut sums = [simd.splat_f32s(0.0); M];
        if at.add {
            for r in 0..M {
                sums[r] = simd.partial_load_f32s(&self.c[(at.row + r) * self.stride + at.from..][..at.width]);
            }
        }
        for i in 0..at.depth {
            let b = simd.partial_load_f32s(&self.b.0[(at.first + i) * self.b.1 + at.from..][..at.width]);
            let a = self.column(at, &rows, i);
            for r in 0..M {
                sums[r] = simd.mul_add_f32s(simd.splat_f32s(a[r]), b, sums[r]);
            }
        }
        for r in 0..M {
            let c = &mut self.c[(at.row + r) * self.stride + at.from..][..at.width];
            simd.partial_store_f32s(c, sums[r]);
        }
        M
    }

    /// The rows of A that a tile walks along, cut to one length so that the walk is not checked; none of a transpose.
    #[inline(always)]
    fn rows<const M: usize>(&self, at: Corner) -> [&[f32]; M] {
        let mut rows: [&[f32]; M] = [&[]; M];
        if !TRANSPOSED {
            for r in 0..M {
                rows[r] = &self.a.0[(at.row + r) * self.a.1 + at.first..][..at.depth];
            }
        }
        rows
    }

    /// Column `i` of a tile's part of A.
    #[inline(always)]
    fn column<const M: usize>(&self, at: Corner, rows: &[&[f32]; M], i: usize) -> [f32; M] {
        let mut column = [0f32; M];
        if TRANSPOSED {
            column.copy_from_slice(&self.a.0[(at.first + i) * self.a.1 + at.row..][..M]);
        } else {
            for r in 0..M {
                column[r] = rows[r][i];
            }
        }
        column
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_matches_the_plain_triple_loop_and_rows_do_not_depend_on_their_number() {
        let value = |i: usize| ((i * 2_654_435_761) % 997) as f32 / 500.0 - 1.0;
        for (m, k, n) in [
            (1, 3, 1),
            (5, 7, 16),
            (4, 64, 64),
            (9, 5, 83),
            (13, 32, 40),
            (3, 16, 130),
            (8, 300, 70),
        ] {
            let (sa, sb, sc) = (k + 2, n + 1, n + 3);
            let a: Vec<f32> = (0..m * sa).map(value).collect();
            let b: Vec<f32> = (0..k * sb).map(|i| value(i + 91)).collect();
            let start: Vec<f32> = (0..m * sc).map(|i| value(i + 17)).collect();
            let mut c = start.clone();
            multiply_add(Matrix(&a, sa), Matrix(&b, sb), &mut c, sc, (m, k, n));
            for i in 0..m {
                for j in 0..sc {
                    let sum: f32 = (0..k)
                        .map(|l| if j < n { a[i * sa + l] * b[l * sb + j] } else { 0.0 })
                        .sum();
                    assert!(
                        (c[i * sc + j] - start[i * sc + j] - sum).abs() < 1e-4,
                        "{m} {k} {n} at {i} {j}"
                    );
                }
                let mut alone = start[i * sc..][..sc].to_vec();
                multiply_add(Matrix(&a[i * sa..], sa), Matrix(&b, sb), &mut alone, sc, (1, k, n));
                assert_eq!(alone, c[i * sc..][..sc], "row {i} alone");
            }
            let st = m + 5;
            let turned: Vec<f32> = (0..k * st)
                .map(|at| a.get(at % st * sa + at / st).copied().unwrap_or(9.0))
                .collect();
            let mut again = start.clone();
            multiply_add(
                Left::Transposed(Matrix(&turned, st)),
                Matrix(&b, sb),
                &mut again,
                sc,
                (m, k, n),
            );
            assert_eq!(again, c, "{m} {k} {n} from the transpose");
            let (mut zero, mut whatever) = (start.clone(), start);
            for row in zero.chunks_exact_mut(sc) {
                row[..n].fill(0.0);
            }
            multiply_add(Matrix(&a, sa), Matrix(&b, sb), &mut zero, sc, (m, k, n));
            multiply(Matrix(&a, sa), Matrix(&b, sb), &mut whatever, sc, (m, k, n));
            assert_eq!(whatever, zero, "{m} {k} {n} whatever stood in C");
        }
    }
}
