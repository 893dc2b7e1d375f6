//! C += A B for small dense f32 matrices that sit in cache: the products inside a chunk and inside attention.
//!
//! Each element of C is one chain of multiply-adds over the inner index, in order, whatever the other sizes.

use pulp::Simd;

/// A row-major matrix and the distance between its rows, in floats.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a>(pub(crate) &'a [f32], pub(crate) usize);

/// C [m, n] += A [m, k] B [k, n]; `sizes` is (m, k, n), C's rows are `stride` apart.
pub(crate) fn multiply_add(a: Matrix<'_>, b: Matrix<'_>, c: &mut [f32], stride: usize, sizes: (usize, usize, usize)) {
    pulp::Arch::new().dispatch(Product { a, b, c, stride, sizes });
}

struct Product<'a> {
    a: Matrix<'a>,
    b: Matrix<'a>,
    c: &'a mut [f32],
    stride: usize,
    sizes: (usize, usize, usize),
}

impl pulp::WithSimd for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (m, _, n) = self.sizes;
        let (lanes, mut from) = (S::F32_LANES, 0);
        while from < n {
            let vectors = ((n - from) / lanes).min(4);
            let width = if vectors == 0 {
                n - from
            } else {
                lanes * if vectors == 3 { 2 } else { vectors }
            };
            let mut row = 0;
            while row < m {
                let rows = (m - row).min(4);
                let at = Corner { row, from, width };
                match (vectors, rows) {
                    (4, 4) => tile::<S, 4, 4>(simd, self.a, self.b, self.c, self.stride, self.sizes.1, at),
                    (4, _) => tile::<S, 1, 4>(simd, self.a, self.b, self.c, self.stride, self.sizes.1, at),
                    (2 | 3, 4) => tile::<S, 4, 2>(simd, self.a, self.b, self.c, self.stride, self.sizes.1, at),
                    (2 | 3, _) => tile::<S, 1, 2>(simd, self.a, self.b, self.c, self.stride, self.sizes.1, at),
                    (1, 4) => tile::<S, 4, 1>(simd, self.a, self.b, self.c, self.stride, self.sizes.1, at),
                    (1, _) => tile::<S, 1, 1>(simd, self.a, self.b, self.c, self.stride, self.sizes.1, at),
                    _ => ragged::<S>(simd, self.a, self.b, self.c, self.stride, self.sizes.1, at),
                }
                row += if vectors > 0 && rows == 4 { 4 } else { 1 };
            }
            from += width;
        }
    }
}

struct Corner {
    row: usize,
    from: usize,
    width: usize,
}

#[inline(always)]
fn tile<S: Simd, const M: usize, const V: usize>(
    simd: S,
    a: Matrix<'_>,
    b: Matrix<'_>,
    c: &mut [f32],
    stride: usize,
    depth: usize,
    at: Corner,
) {
    let lanes = S::F32_LANES;
    let a: [&[f32]; M] = std::array::from_fn(|r| &a.0[(at.row + r) * a.1..][..depth]);
    let mut sums = [[simd.splat_f32s(0.0); V]; M];
    for r in 0..M {
        let (vectors, _) = S::as_simd_f32s(&c[(at.row + r) * stride + at.from..][..V * lanes]);
        sums[r].copy_from_slice(vectors);
    }
    for i in 0..depth {
        let (row, _) = S::as_simd_f32s(&b.0[i * b.1 + at.from..][..V * lanes]);
        for r in 0..M {
            let x = simd.splat_f32s(a[r][i]);
            for v in 0..V {
                sums[r][v] = simd.mul_add_f32s(x, row[v], sums[r][v]);
            }
        }
    }
    for r in 0..M {
        let (vectors, _) = S::as_mut_simd_f32s(&mut c[(at.row + r) * stride + at.from..][..V * lanes]);
        vectors.copy_from_slice(&sums[r]);
    }
}

/// One row, fewer columns than a vector.
#[inline(always)]
fn ragged<S: Simd>(simd: S, a: Matrix<'_>, b: Matrix<'_>, c: &mut [f32], stride: usize, depth: usize, at: Corner) {
    let c = &mut c[at.row * stride + at.from..][..at.width];
    let mut sum = simd.partial_load_f32s(c);
    for (i, x) in a.0[at.row * a.1..][..depth].iter().enumerate() {
        let row = simd.partial_load_f32s(&b.0[i * b.1 + at.from..][..at.width]);
        sum = simd.mul_add_f32s(simd.splat_f32s(*x), row, sum);
    }
    simd.partial_store_f32s(c, sum);
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
        }
    }
}
