//! `s[r, c] = x[r] . table[id[r, c]]`: logits of a few candidates a row against a frozen matrix.
//!
//! The selector needs the head on its k candidates only; gathering the rows would cost R * k * H memory. Backward:
//! `dx[r] = sum over c of ds[r, c] table[id[r, c]]`. The table is frozen and gets no gradient.

use super::{on_cpu, slice_of, with_slice};
use crate::simd::{add_scaled, dot, vectorised};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use rayon::prelude::*;
use std::sync::Arc;

/// Scores `k` candidates a row. `x`: [R, H], `table`: [V, H] f32, `ids`: R * k row numbers below V; returns [R, k].
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
    if on_cpu(&[x, table]) {
        x.contiguous()?.apply_op1(GatheredDot {
            table: table.detach().contiguous()?,
            ids: ids.clone(),
            k,
        })
    } else {
        composed(x, table, ids, k)
    }
}

/// The same from candle's own operations.
pub fn composed(x: &Tensor, table: &Tensor, ids: &Arc<Vec<u32>>, k: usize) -> Result<Tensor> {
    let (rows, h) = x.dims2()?;
    let ids = Tensor::from_slice(ids, ids.len(), x.device())?;
    let gathered = table.detach().index_select(&ids, 0)?.reshape((rows, k, h))?;
    gathered.broadcast_mul(&x.unsqueeze(1)?)?.sum(2)
}

struct GatheredDot {
    table: Tensor,
    ids: Arc<Vec<u32>>,
    k: usize,
}

impl CustomOp1 for GatheredDot {
    fn name(&self) -> &'static str {
        "gathered_dot"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = slice_of(x, layout, self.name())?;
        let (rows, h) = layout.shape().dims2()?;
        let mut scores = vec![0f32; rows * self.k];
        with_slice(&self.table, self.name(), |table| {
            scores
                .par_chunks_mut(self.k)
                .zip(self.ids.par_chunks(self.k))
                .zip(x.par_chunks(h))
                .for_each(|((scores, ids), x)| {
                    vectorised(
                        #[inline(always)]
                        || {
                            for (score, id) in scores.iter_mut().zip(ids) {
                                *score = dot(x, &table[*id as usize * h..][..h]);
                            }
                        },
                    );
                });
            Ok(())
        })?;
        Ok((CpuStorage::F32(scores), Shape::from((rows, self.k))))
    }

    fn bwd(&self, x: &Tensor, _scores: &Tensor, ds: &Tensor) -> Result<Option<Tensor>> {
        let (rows, h) = x.dims2()?;
        let mut dx = vec![0f32; rows * h];
        with_slice(ds, self.name(), |ds| {
            with_slice(&self.table, self.name(), |table| {
                dx.par_chunks_mut(h)
                    .zip(self.ids.par_chunks(self.k))
                    .zip(ds.par_chunks(self.k))
                    .for_each(|((dx, ids), ds)| {
                        vectorised(
                            #[inline(always)]
                            || {
                                for (ds, id) in ds.iter().zip(ids) {
                                    add_scaled(dx, *ds, &table[*id as usize * h..][..h]);
                                }
                            },
                        );
                    });
                Ok(())
            })
        })?;
        Tensor::from_vec(dx, (rows, h), x.device()).map(Some)
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
    fn an_id_outside_the_table_is_refused() {
        let error = gathered_dot(&tensor(1, &[1, 4]), &tensor(2, &[3, 4]), &Arc::new(vec![0, 3]), 2).unwrap_err();
        assert!(error.to_string().contains("id 3 in a table of 3 rows"), "{error}");
    }
}
