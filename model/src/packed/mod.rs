//! A frozen matrix in panels, and products with it: out = x W^T for any number of rows, f32.
//!
//! W [N, K] is stored as ceil(N / 64) panels of two strips, each `[K][32]`, so that the product streams memory in order.
//! BF16 checkpoints stay BF16 in memory (half the traffic; widening is exact): a strip then is `[K / 2][32]` words, a column's
//! number of an even k in the low half and its next in the high half, which is also what the processor's own BF16 products
//! take ([`halves`]). A few rows take both strips of a panel at once, more rows one after the other, so that a widened
//! vector serves as many rows as the registers hold.
//!
//! Every output element is a chain of multiply-adds over k = 0, 1, 2, ..., a new one every [`DEPTH`] numbers, the chains added
//! in their order, whatever the number of rows. So a row of a verify pass equals the same row of a decode step to the bit,
//! and greedy speculative decoding is lossless by construction.
#![expect(
    clippy::inline_always,
    reason = "a kernel must be inlined into the function compiled for the wide unit"
)]

mod halves;
mod once;
mod product;
mod tiles;
mod turn;
mod view;

use candle_core::{DType, Result, Tensor};
use pulp::{Simd, bytemuck};

use crate::pages::{Gather, Stored, gather};
pub(crate) use halves::nearest;
pub(crate) use once::multiply;
pub(crate) use product::{by_rows, joined, joined_into, joined_rounded_into};
use tiles::{Tiles, Values};
pub(crate) use view::{Number, View};

/// Columns of a panel: two strips.
const PANEL: usize = 64;
/// Columns of a strip, which lies in memory as `[K][32]`.
const STRIP: usize = 32;
/// Depth of one pass over a panel, so that panel and rows stay in the second-level cache.
const DEPTH: usize = 1024;
/// How far ahead of its use a strip's row is asked for, in rows, since the processor's own look-ahead does not fill the time
/// that a row's arithmetic takes. Measured with 8 rows of x: a tenth less time from cache, a fifth from memory.
const AHEAD: usize = 96;

/// A frozen [N, K] matrix, packed.
#[derive(Debug)]
pub(crate) struct Packed {
    n: usize,
    k: usize,
    panels: Panels,
}

#[derive(Debug)]
enum Panels {
    F32(Stored<f32>),
    Bf16(Stored<u32>),
}

impl Packed {
    /// Packs matrices of equal width one below the other: the product with all of them is one pass.
    pub(crate) fn stack(parts: &[&Tensor]) -> Result<Self> {
        let k = parts[0].dim(1)?;
        let n = parts.iter().map(|part| part.dims()[0]).sum::<usize>();
        let count = n.div_ceil(PANEL);
        let panels = if parts.iter().all(|part| part.dtype() == DType::BF16) {
            let size = k.div_ceil(2) * STRIP;
            let mut panels = vec![0u32; count * 2 * size];
            scatter(parts, |column, row: &[half::bf16]| {
                let words = panels[column / STRIP * size..][..size].iter_mut();
                for (word, pair) in words.skip(column % STRIP).step_by(STRIP).zip(row.chunks(2)) {
                    let high = pair.get(1).map_or(0, |x| u32::from(x.to_bits()) << 16);
                    *word = u32::from(pair[0].to_bits()) | high;
                }
            })?;
            Panels::Bf16(Stored::Own(panels))
        } else {
            let mut panels = vec![0f32; count * k * PANEL];
            let parts: Vec<Tensor> = parts
                .iter()
                .map(|part| part.to_dtype(DType::F32))
                .collect::<Result<_>>()?;
            scatter(&parts.iter().collect::<Vec<_>>(), |column, row: &[f32]| {
                let strip = &mut panels[column / STRIP * k * STRIP..][..k * STRIP];
                for (slot, x) in strip.iter_mut().skip(column % STRIP).step_by(STRIP).zip(row) {
                    *slot = *x;
                }
            })?;
            Panels::F32(Stored::Own(panels))
        };
        Ok(Self { n, k, panels })
    }

    /// Moves packed matrices, in the order in which they are used, into memory that is read faster.
    pub(crate) fn gather<'m>(matrices: impl IntoIterator<Item = &'m mut Self>) -> Result<()> {
        let slices = matrices.into_iter().map(|matrix| match &mut matrix.panels {
            Panels::F32(floats) => floats as &mut dyn Gather,
            Panels::Bf16(words) => words as &mut dyn Gather,
        });
        gather(slices.collect())
    }

    /// Columns of x, K.
    pub(crate) fn depth(&self) -> usize {
        self.k
    }

    /// Columns of the product, N.
    pub(crate) fn width(&self) -> usize {
        self.n
    }

    fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(floats) => floats.len() * 4,
            Panels::Bf16(words) => words.len() * 4,
        }
    }

    /// The product of all rows with the panels from `first`, as many columns as the rows of `out` have, in its place or, with
    /// `add`, added to it.
    fn columns(&self, first: usize, tiles: &Tiles, out: &mut [&mut [f32]], add: bool) {
        match (&tiles.values, &self.panels) {
            (Values::Halves(words), Panels::Bf16(panels)) => {
                let width = out.first().map_or(0, |row| row.len());
                for panel in 0..width.div_ceil(PANEL) {
                    let strips = nth::<HalfRows>(panels, first + panel, self.k);
                    halves::columns(strips, tiles, bytemuck::cast_slice(words), out, panel * PANEL, add);
                }
            }
            (Values::Floats(x), _) => pulp::Arch::new().dispatch(PanelProduct {
                matrix: self,
                first,
                tiles,
                x,
                out,
                add,
            }),
            (Values::Halves(_), Panels::F32(_)) => unreachable!("rows are rounded for BF16 panels only"),
        }
    }
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

struct PanelProduct<'a, 'o> {
    matrix: &'a Packed,
    /// The panel of the first column of `out`.
    first: usize,
    tiles: &'a Tiles,
    x: &'a [f32],
    out: &'a mut [&'o mut [f32]],
    add: bool,
}

impl pulp::WithSimd for PanelProduct<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.out.first().map_or(0, |row| row.len());
        for panel in 0..width.div_ceil(PANEL) {
            let (number, from) = (self.first + panel, panel * PANEL);
            match &self.matrix.panels {
                Panels::F32(panels) => {
                    let panel = nth::<FloatRows>(panels, number, self.matrix.k);
                    product::<S, FloatRows>(simd, panel, self.tiles, self.x, self.out, from, self.add);
                }
                Panels::Bf16(panels) => {
                    let panel = nth::<HalfRows>(panels, number, self.matrix.k);
                    product::<S, HalfRows>(simd, panel, self.tiles, self.x, self.out, from, self.add);
                }
            }
        }
    }
}

/// The two strips of a panel.
fn nth<R: StripRows>(panels: &[R::Word], number: usize, k: usize) -> [&[R::Word]; 2] {
    let strip = k.div_ceil(R::ROWS) * STRIP;
    let panel = &panels[number * 2 * strip..][..2 * strip];
    [&panel[..strip], &panel[strip..]]
}

/// How a strip's rows become vectors.
trait StripRows {
    type Word: Copy;
    /// Rows of a strip in `STRIP` words.
    const ROWS: usize;
    /// Row `row` of `words`: the lanes of the columns from v * lanes and from 16 + v * lanes.
    fn pair<S: Simd>(simd: S, words: &[Self::Word], row: usize, v: usize) -> [S::f32s; 2];
}

struct FloatRows;
impl StripRows for FloatRows {
    type Word = f32;
    const ROWS: usize = 1;
    #[inline(always)]
    fn pair<S: Simd>(_: S, words: &[f32], _: usize, v: usize) -> [S::f32s; 2] {
        let (vectors, _) = S::as_simd_f32s(words);
        [vectors[v], vectors[STRIP / 2 / S::F32_LANES + v]]
    }
}

struct HalfRows;
impl StripRows for HalfRows {
    type Word = u32;
    const ROWS: usize = 2;
    #[inline(always)]
    fn pair<S: Simd>(simd: S, words: &[u32], row: usize, v: usize) -> [S::f32s; 2] {
        let (vectors, _) = S::as_simd_u32s(words);
        let (a, b) = (vectors[v], vectors[STRIP / 2 / S::F32_LANES + v]);
        // no closure: one that is not inlined would leave the function compiled for the wide unit
        let (a, b) = if row == 0 {
            let by = simd.splat_u32s(16);
            (simd.wrapping_dyn_shl_u32s(a, by), simd.wrapping_dyn_shl_u32s(b, by))
        } else {
            let high = simd.splat_u32s(0xffff_0000);
            (simd.and_u32s(a, high), simd.and_u32s(b, high))
        };
        [simd.transmute_f32s_u32s(a), simd.transmute_f32s_u32s(b)]
    }
}

/// All rows times one panel, into the columns from `column`.
#[inline(always)]
fn product<S: Simd, R: StripRows>(
    simd: S,
    strips: [&[R::Word]; 2],
    tiles: &Tiles,
    x: &[f32],
    out: &mut [&mut [f32]],
    column: usize,
    add: bool,
) {
    let k = tiles.k;
    for from in (0..k).step_by(DEPTH) {
        let to = k.min(from + DEPTH);
        let [a, b] = strips.map(|strip| &strip[from / R::ROWS * STRIP..to.div_ceil(R::ROWS) * STRIP]);
        for number in 0..tiles.count {
            let (first, height) = tiles.tile(number);
            let x = &x[first * k + from * height..first * k + to * height];
            let out = &mut out[first..first + height];
            let add = add || from > 0;
            // two strips at a time keep more reads of memory under way; their sums must fit the registers
            match height {
                1 => tile::<S, R, 1, 2>(simd, [a, b], x, out, column, add),
                2 => tile::<S, R, 2, 2>(simd, [a, b], x, out, column, add),
                3 => tile::<S, R, 3, 2>(simd, [a, b], x, out, column, add),
                4 if S::REGISTER_COUNT >= 32 => tile::<S, R, 4, 2>(simd, [a, b], x, out, column, add),
                5 if S::REGISTER_COUNT >= 32 => tile::<S, R, 5, 2>(simd, [a, b], x, out, column, add),
                _ => {
                    for (strip, at) in [(a, column), (b, column + STRIP)] {
                        one_strip::<S, R>(simd, strip, x, out, at, add);
                    }
                }
            }
        }
    }
}

/// A tile of four rows or more times one strip.
#[inline(always)]
fn one_strip<S: Simd, R: StripRows>(
    simd: S,
    strip: &[R::Word],
    x: &[f32],
    out: &mut [&mut [f32]],
    at: usize,
    add: bool,
) {
    macro_rules! by_height {
        ($($height:literal)*) => {
            match out.len() {
                $($height => tile::<S, R, $height, 1>(simd, [strip], x, out, at, add),)*
                _ => {}
            }
        };
    }
    by_height!(4 5 6 7 8 9 10 11 12);
}

/// `M` rows times `N` strips, into the columns from `at`, those that there are, or added to them.
#[inline(always)]
fn tile<S: Simd, R: StripRows, const M: usize, const N: usize>(
    simd: S,
    strips: [&[R::Word]; N],
    x: &[f32],
    out: &mut [&mut [f32]],
    at: usize,
    add: bool,
) {
    let lanes = S::F32_LANES;
    for v in 0..STRIP / 2 / lanes {
        let column = |strip: usize, half: usize| at + strip * STRIP + half * (STRIP / 2) + v * lanes;
        let sums = accumulate::<S, R, M, N>(simd, strips, x, v);
        for (sums, out) in sums.iter().zip(out.iter_mut()) {
            for (strip, pair) in sums.iter().enumerate() {
                for (half, sum) in pair.iter().enumerate() {
                    let column = column(strip, half);
                    if column + lanes <= out.len() {
                        let (vectors, _) = S::as_mut_simd_f32s(&mut out[column..][..lanes]);
                        vectors[0] = if add { simd.add_f32s(vectors[0], *sum) } else { *sum };
                    } else if column < out.len() {
                        let out = &mut out[column..];
                        let before = simd.partial_load_f32s(out);
                        simd.partial_store_f32s(out, if add { simd.add_f32s(before, *sum) } else { *sum });
                    }
                }
            }
        }
    }
}

/// The sums of `M` rows with pair `v` of `N` strips. Apart from storing, so that they are only ever indexed by constants and
/// stay in registers.
#[inline(always)]
fn accumulate<S: Simd, R: StripRows, const M: usize, const N: usize>(
    simd: S,
    strips: [&[R::Word]; N],
    x: &[f32],
    v: usize,
) -> [[[S::f32s; 2]; N]; M] {
    let mut sums = [[[simd.splat_f32s(0.0); 2]; N]; M];
    let steps = (x.len() / M).div_ceil(R::ROWS);
    let strips = strips.map(|strip| &strip[..steps * STRIP]);
    let whole = x.chunks_exact(M * R::ROWS);
    // an odd depth leaves half a step
    let odd = whole.remainder();
    for (i, x) in whole.enumerate() {
        for strip in strips {
            let ahead = strip.as_ptr().wrapping_add((i + AHEAD / R::ROWS) * STRIP);
            for line in 0..R::ROWS {
                fetch(ahead.wrapping_add(line * STRIP / R::ROWS));
            }
        }
        let mut words = strips;
        for s in 0..N {
            words[s] = &strips[s][i * STRIP..(i + 1) * STRIP];
        }
        for row in 0..R::ROWS {
            add_products::<S, R, M, N>(simd, words, row, v, &x[row * M..], &mut sums);
        }
    }
    if !odd.is_empty() {
        let words = strips.map(|strip| &strip[(steps - 1) * STRIP..]);
        add_products::<S, R, M, N>(simd, words, 0, v, odd, &mut sums);
    }
    sums
}

/// Adds the products of one number of each of `M` rows, `x`, with row `row` of `words`.
#[inline(always)]
fn add_products<S: Simd, R: StripRows, const M: usize, const N: usize>(
    simd: S,
    words: [&[R::Word]; N],
    row: usize,
    v: usize,
    x: &[f32],
    sums: &mut [[[S::f32s; 2]; N]; M],
) {
    let mut w = [[simd.splat_f32s(0.0); 2]; N];
    for s in 0..N {
        w[s] = R::pair(simd, words[s], row, v);
    }
    for r in 0..M {
        let x = simd.splat_f32s(x[r]);
        for s in 0..N {
            for half in 0..2 {
                sums[r][s][half] = simd.mul_add_f32s(x, w[s][half], sums[r][s][half]);
            }
        }
    }
}

/// Asks for the cache line at `from`, which need not exist, where the language has a way to ask.
#[inline(always)]
fn fetch<T>(from: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        #[expect(unsafe_code, reason = "declared unsafe for its pointer")]
        // SAFETY: a prefetch reads nothing and cannot fault, whatever the address; every x86-64 processor has it.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(from.cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = from;
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    pub(super) fn values(count: usize, salt: usize) -> Vec<f32> {
        (0..count)
            .map(|i| (((i + salt) * 2_654_435_761) % 2003) as f32 / 1001.0 - 1.0)
            .collect()
    }

    /// The same product with the vector unit given.
    fn with_unit<S: Simd>(unit: S, packed: &Packed, x: &[f32]) -> Vec<f32> {
        let mut out = vec![f32::NAN; x.len() / packed.k * packed.n];
        let mut rows: Vec<&mut [f32]> = out.chunks_exact_mut(packed.n).collect();
        let tiles = Tiles::new(View::new(x, packed.k));
        let Values::Floats(x) = &tiles.values else { panic!() };
        unit.vectorize(PanelProduct {
            matrix: packed,
            first: 0,
            tiles: &tiles,
            x,
            out: &mut rows,
            add: false,
        });
        out
    }

    #[test]
    fn every_vector_unit_gives_the_same_bits() -> Result<()> {
        for dtype in [DType::F32, DType::BF16] {
            let (n, k) = (150, 1030);
            let w = Tensor::from_vec(values(n * k, 3), (n, k), &Device::Cpu)?.to_dtype(dtype)?;
            let packed = Packed::stack(&[&w])?;
            for rows in 1..=25 {
                let x = values(rows * k, 11);
                let product = packed.product(&x);
                assert_eq!(
                    with_unit(pulp::Scalar::new(), &packed, &x),
                    product[..],
                    "scalar, {rows} rows"
                );
                #[cfg(target_arch = "x86_64")]
                if let Some(unit) = pulp::x86::V3::try_new() {
                    assert_eq!(with_unit(unit, &packed, &x), product[..], "AVX2, {rows} rows");
                }
            }
        }
        Ok(())
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
