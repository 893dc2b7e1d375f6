//! Products of two matrices that both change from one to the next: those of training.
//!
//! The right factor is packed for the one product, in memory that the next one uses again, the left one by the thread that
//! multiplies it. Either may be read along its columns, so that a layer's three products (x W^T, dy W, dy^T x) need no
//! transposed copy. Sums are f32; operands are f32 or rounded to BF16.

use pulp::bytemuck;
use rayon::prelude::*;

use super::product::{joined_into, joined_rounded_into};
use super::view::{Number, View, Word};
use super::{PANEL, Packed, Panels, STRIP, Stored};
use crate::buffer::Buffer;
use crate::simd::vectorised;

impl Packed {
    /// Packs a matrix for one product, as it is.
    fn floats<T: Number>(matrix: View<'_, T>) -> Self {
        let mut panels = Buffer::stale(size::<f32>(matrix.rows, matrix.depth));
        strips::<T, f32>(matrix, &mut panels);
        Self {
            n: matrix.rows,
            k: matrix.depth,
            panels: Panels::F32(Stored::Lent(panels)),
        }
    }

    /// Packs a matrix for one product, rounded to BF16.
    fn rounded<T: Number>(matrix: View<'_, T>) -> Self {
        let mut panels = Buffer::stale(size::<u32>(matrix.rows, matrix.depth));
        strips::<T, u32>(matrix, bytemuck::cast_slice_mut(&mut panels));
        Self {
            n: matrix.rows,
            k: matrix.depth,
            panels: Panels::Bf16(Stored::Lent(panels)),
        }
    }
}

/// Words of the panels of a matrix.
fn size<W: Word>(rows: usize, depth: usize) -> usize {
    rows.div_ceil(PANEL) * PANEL * depth.div_ceil(W::NUMBERS)
}

/// Strips that one thread lays out together: of a matrix that is read along its columns, they take lines of the cache whole.
const TOGETHER: usize = 8;

fn strips<T: Number, W: Word + Send>(matrix: View<'_, T>, panels: &mut [W]) {
    let size = matrix.words::<W>() * STRIP;
    let together = (panels.len() / size)
        .div_ceil(rayon::current_num_threads())
        .clamp(1, TOGETHER);
    panels
        .par_chunks_mut(size * together)
        .enumerate()
        .for_each(|(group, strips)| {
            vectorised(
                #[inline(always)]
                || {
                    for (from, piece) in matrix.pieces::<W>() {
                        let words = piece.words::<W>();
                        for (i, strip) in strips.chunks_exact_mut(size).enumerate() {
                            let first = (group * together + i) * STRIP;
                            piece.strip(first, &mut strip[from * STRIP..][..words * STRIP]);
                        }
                    }
                },
            );
        });
}

/// out = x w^T, or out += x w^T with `add`; `out` is [rows of x, rows of w], both factors have one depth.
pub(crate) fn multiply<T: Number>(x: View<'_>, w: View<'_, T>, rounded: bool, out: &mut [f32], add: bool) {
    if rounded {
        joined_rounded_into(&[&Packed::rounded(w)], x, out, add);
    } else {
        joined_into(&[&Packed::floats(w)], x, out, add);
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;
    use crate::packed::tests::values;

    fn turned<T: Copy>(values: &[T], columns: usize) -> Vec<T> {
        let rows = values.len() / columns;
        (0..values.len())
            .map(|i| values[i % rows * columns + i / rows])
            .collect()
    }

    proptest! {
        #[test]
        fn a_product_is_exact_but_for_its_sum_and_the_same_bits_row_by_row_either_way_round_and_from_any_type(
            rows in 1usize..30, n in 1usize..150, k in 1usize..90, rounded: bool,
        ) {
            // numbers that BF16 holds, so that rounding a factor changes nothing
            let round = |x: Vec<f32>| -> Vec<bf16> { x.into_iter().map(bf16::from_f32).collect() };
            let (x, halves) = (values(rows * k, 11), round(values(n * k, 3)));
            let w: Vec<f32> = halves.iter().map(|w| w.to_f32()).collect();
            let product = |x: View<'_>, w: View<'_>| {
                let mut out = vec![f32::NAN; rows * n];
                multiply(x, w, rounded, &mut out, false);
                out
            };
            let all = product(View::new(&x, k), View::new(&w, k));
            let seen = |x: f32| f64::from(if rounded { bf16::from_f32(x).to_f32() } else { x });
            for r in 0..rows {
                for c in 0..n {
                    let exact: f64 = (0..k).map(|i| seen(x[r * k + i]) * f64::from(w[c * k + i])).sum();
                    prop_assert!((f64::from(all[r * n + c]) - exact).abs() < 1e-4, "{r} {c}");
                }
                let mut alone = vec![f32::NAN; n];
                multiply(View::new(&x[r * k..][..k], k), View::new(&w, k), rounded, &mut alone, false);
                prop_assert_eq!(&alone[..], &all[r * n..][..n]);
            }
            let (tx, tw) = (turned(&x, k), turned(&w, k));
            let (tx, tw) = (View::new(&tx, rows).transposed(), View::new(&tw, n).transposed());
            for (x, w) in [(tx, tw), (tx, View::new(&w, k)), (View::new(&x, k), tw)] {
                prop_assert_eq!(&product(x, w), &all);
            }
            let turned_halves = turned(&halves, k);
            for w in [View::new(&halves[..], k), View::new(&turned_halves[..], n).transposed()] {
                let mut out = vec![1f32; rows * n];
                multiply(View::new(&x, k), w, rounded, &mut out, true);
                for (sum, product) in out.iter().zip(&all) {
                    prop_assert_eq!(sum.to_bits(), (1.0 + product).to_bits());
                }
            }
        }
    }

    #[test]
    fn products_of_every_number_of_rows_and_threads_are_the_same_bits() {
        let (n, k) = (70, 2100);
        let (x, w) = (values(300 * k, 11), values(n * k, 3));
        for rounded in [false, true] {
            let mut bits: Vec<f32> = Vec::new();
            for threads in [1, 2, 3] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                for rows in [300, 299, 97, 25, 1] {
                    let mut out = vec![f32::NAN; rows * n];
                    pool.install(|| multiply(View::new(&x[..rows * k], k), View::new(&w, k), rounded, &mut out, false));
                    if bits.is_empty() {
                        bits.clone_from(&out);
                    }
                    assert_eq!(out, bits[..rows * n], "{threads} threads, {rows} rows");
                }
            }
        }
    }
}
