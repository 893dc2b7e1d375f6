//! `s[r, c] = x[r] . table[id[r, c]]`: scores of a few candidates a row.
//!
//! The selector needs the head, and its own codebook, on k candidates only; gathering the rows would cost R * k * H memory.
//! Backward: `dx[r] = sum over c of ds[r, c] table[id[r, c]]`, and where the table is trained
//! `dtable[id] = sum over the (r, c) that chose it of ds[r, c] x[r]`.

use super::{slice_of, with_slice};
use crate::simd::{add_scaled, dot, vectorised};
use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Storage, Tensor};
use half::bf16;
use rayon::prelude::*;
use std::sync::Arc;

/// Scores `k` candidates a row. `x`: [R, H] f32, `table`: [V, H] f32, or BF16 without a gradient; `ids`: R * k row numbers
/// below V; returns [R, k].
///
/// # Errors
/// When sizes differ or an id is not below V.
pub fn gathered_dot(x: &Tensor, table: &Tensor, ids: &Arc<Vec<u32>>, k: usize) -> Result<Tensor> {
    let ((rows, h), (v, table_h)) = (x.dims2()?, table.dims2()?);
    if h != table_h || ids.len() != rows * k {
        candle_core::bail!(
            "gathered_dot: {:?} against {:?} with {} ids of {k} a row",
            x.shape(),
            table.shape(),
            ids.len()
        )
    }
    if let Some(id) = ids.iter().find(|id| **id as usize >= v) {
        candle_core::bail!("gathered_dot: id {id} in a table of {v} rows")
    }
    if x.device().is_cpu() && matches!(table.dtype(), DType::F32 | DType::BF16) {
        let ids = ids.clone();
        x.contiguous()?.apply_op2(&table.contiguous()?, GatheredDot { ids, k })
    } else {
        composed(x, table, ids, k)
    }
}

/// The same from candle's own operations.
pub fn composed(x: &Tensor, table: &Tensor, ids: &Arc<Vec<u32>>, k: usize) -> Result<Tensor> {
    let (rows, h) = x.dims2()?;
    let ids = Tensor::from_slice(ids, ids.len(), x.device())?;
    let gathered = table
        .index_select(&ids, 0)?
        .to_dtype(DType::F32)?
        .reshape((rows, k, h))?;
    gathered.broadcast_mul(&x.unsqueeze(1)?)?.sum(2)
}

struct GatheredDot {
    ids: Arc<Vec<u32>>,
    k: usize,
}

/// A table's numbers as they are stored.
enum Table<'t> {
    F32(&'t [f32]),
    Bf16(&'t [bf16]),
}

impl<'t> Table<'t> {
    fn new(storage: &'t CpuStorage, layout: &Layout) -> Result<Self> {
        match (storage, layout.contiguous_offsets()) {
            (CpuStorage::BF16(values), Some((start, end))) => Ok(Self::Bf16(&values[start..end])),
            _ => Ok(Self::F32(slice_of(storage, layout, "gathered_dot")?)),
        }
    }

    /// Row `id`, of `wide.len()` numbers, in `wide` if it has to be widened.
    fn row<'r>(&'r self, id: u32, wide: &'r mut [f32]) -> &'r [f32] {
        let (h, at) = (wide.len(), id as usize * wide.len());
        match self {
            Self::F32(values) => &values[at..][..h],
            Self::Bf16(values) => {
                for (wide, x) in wide.iter_mut().zip(&values[at..][..h]) {
                    *wide = x.to_f32();
                }
                wide
            }
        }
    }
}

impl GatheredDot {
    fn scores(&self, x: &[f32], table: &Table<'_>, h: usize) -> Vec<f32> {
        let mut scores = vec![0f32; x.len() / h * self.k];
        scores
            .par_chunks_mut(self.k)
            .zip(self.ids.par_chunks(self.k))
            .zip(x.par_chunks(h))
            .for_each_init(
                || vec![0f32; h],
                |wide, ((scores, ids), x)| {
                    vectorised(
                        #[inline(always)]
                        || {
                            for (score, id) in scores.iter_mut().zip(ids) {
                                *score = dot(x, table.row(*id, wide));
                            }
                        },
                    );
                },
            );
        scores
    }

    fn row_gradient(&self, ds: &[f32], table: &Table<'_>, h: usize) -> Vec<f32> {
        let mut dx = vec![0f32; ds.len() / self.k * h];
        dx.par_chunks_mut(h)
            .zip(self.ids.par_chunks(self.k))
            .zip(ds.par_chunks(self.k))
            .for_each_init(
                || vec![0f32; h],
                |wide, ((dx, ids), ds)| {
                    vectorised(
                        #[inline(always)]
                        || {
                            for (ds, id) in ds.iter().zip(ids) {
                                add_scaled(dx, *ds, table.row(*id, wide));
                            }
                        },
                    );
                },
            );
        dx
    }

    /// One thread, in the order of the rows: several rows may have chosen one candidate.
    fn table_gradient(&self, ds: &[f32], x: &[f32], h: usize, count: usize) -> Vec<f32> {
        let mut dtable = vec![0f32; count];
        vectorised(
            #[inline(always)]
            || {
                for ((ds, ids), x) in ds.chunks(self.k).zip(self.ids.chunks(self.k)).zip(x.chunks(h)) {
                    for (ds, id) in ds.iter().zip(ids) {
                        add_scaled(&mut dtable[*id as usize * h..][..h], *ds, x);
                    }
                }
            },
        );
        dtable
    }
}

impl CustomOp2 for GatheredDot {
    fn name(&self) -> &'static str {
        "gathered_dot"
    }

    fn cpu_fwd(&self, x: &CpuStorage, xl: &Layout, table: &CpuStorage, tl: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, h) = xl.shape().dims2()?;
        let scores = self.scores(slice_of(x, xl, self.name())?, &Table::new(table, tl)?, h);
        Ok((CpuStorage::F32(scores), Shape::from((rows, self.k))))
    }

    fn bwd(&self, x: &Tensor, table: &Tensor, _: &Tensor, ds: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let h = x.dim(1)?;
        let (want_dx, want_dtable) = (x.track_op(), table.track_op());
        let (x, table) = (x.detach(), table.detach());
        let [dx, dtable] = with_slice(ds, self.name(), |ds| {
            let (storage, layout) = table.storage_and_layout();
            let Storage::Cpu(storage) = &*storage else {
                candle_core::bail!("gathered_dot: the CPU kernel was given a tensor of another device")
            };
            let stored = Table::new(storage, layout)?;
            let dx = want_dx.then(|| self.row_gradient(ds, &stored, h));
            let table_gradient = || {
                with_slice(&x, self.name(), |x| {
                    Ok(self.table_gradient(ds, x, h, table.elem_count()))
                })
            };
            let dtable = want_dtable.then(table_gradient).transpose()?;
            Ok([dx, dtable])
        })?;
        let shaped = |values: Option<Vec<f32>>, like: &Tensor| {
            values
                .map(|values| Tensor::from_vec(values, like.shape(), ds.device()))
                .transpose()
        };
        Ok((shaped(dx, &x)?, shaped(dtable, &table)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{same_value_and_gradients, tensor, var};

    #[test]
    fn equals_its_composed_twin_with_gradients() {
        let (x, table) = (var(1, &[7, 19]), tensor(2, &[11, 19]));
        let ids = Arc::new((0..21).map(|i| (i * 5 % 11) as u32).collect::<Vec<_>>());
        same_value_and_gradients(
            &[&x],
            || gathered_dot(&x, &table, &ids, 3),
            || composed(&x, &table, &ids, 3),
            1e-5,
        );
    }

    #[test]
    fn a_trained_table_gets_the_gradient_of_all_who_chose_a_row() {
        let (x, table) = (var(1, &[7, 19]), var(2, &[11, 19]));
        let ids = Arc::new((0..21).map(|i| (i * 5 % 9) as u32).collect::<Vec<_>>());
        same_value_and_gradients(
            &[&x, &table],
            || gathered_dot(&x, &table, &ids, 3),
            || composed(&x, &table, &ids, 3),
            1e-5,
        );
    }

    #[test]
    fn a_bf16_table_counts_as_its_widened_self() {
        let (x, table) = (var(1, &[7, 19]), tensor(2, &[11, 19]).to_dtype(DType::BF16).unwrap());
        let ids = Arc::new((0..21).map(|i| (i * 5 % 11) as u32).collect::<Vec<_>>());
        let wide = table.to_dtype(DType::F32).unwrap();
        same_value_and_gradients(
            &[&x],
            || gathered_dot(&x, &table, &ids, 3),
            || gathered_dot(&x, &wide, &ids, 3),
            1e-6,
        );
    }

    #[test]
    fn an_id_outside_the_table_is_refused() {
        let error = gathered_dot(&tensor(1, &[1, 4]), &tensor(2, &[3, 4]), &Arc::new(vec![0, 3]), 2).unwrap_err();
        assert!(error.to_string().contains("id 3 in a table of 3 rows"), "{error}");
    }
}
