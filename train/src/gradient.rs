//! Gradients of a pass: whole tensors, and of a free codebook only the rows that were used.

use std::collections::BTreeMap;

use candle_core::{DType, Result, Tensor};
use dflash_model::params::{PREDECESSOR_CODEBOOK, SUCCESSOR_CODEBOOK};

/// Gradients by variable name.
pub type Gradients = BTreeMap<String, Gradient>;

/// The gradient of one variable.
#[derive(Debug, Clone)]
pub enum Gradient {
    /// Of the variable's shape.
    Whole(Tensor),
    /// Zero but for some rows of a matrix.
    Rows {
        /// The rows, ascending.
        ids: Vec<u32>,
        /// Their numbers, [ids, columns].
        values: Tensor,
    },
}

/// Whether a variable gets gradients by rows on the CPU: it is a table of which a step uses a small part.
pub fn by_rows(name: &str, variable: &Tensor) -> bool {
    matches!(name, PREDECESSOR_CODEBOOK | SUCCESSOR_CODEBOOK) && variable.device().is_cpu()
}

impl Gradient {
    /// Of a variable that had no part in the loss.
    pub fn zero(name: &str, variable: &Tensor) -> Result<Self> {
        if by_rows(name, variable) {
            let values = Tensor::zeros((0, variable.dim(1)?), DType::F32, variable.device())?;
            let ids = Vec::new();
            return Ok(Self::Rows { ids, values });
        }
        variable.zeros_like().map(Self::Whole)
    }

    /// The stored numbers: all that are not zero are among them.
    pub fn values(&self) -> &Tensor {
        match self {
            Self::Whole(values) | Self::Rows { values, .. } => values,
        }
    }

    /// In the shape of its variable.
    pub fn whole(&self, variable: &Tensor) -> Result<Tensor> {
        match self {
            Self::Whole(values) => Ok(values.clone()),
            Self::Rows { ids, values } => spread(ids, values, variable.dim(0)?),
        }
    }

    /// The sum of two gradients of one variable.
    ///
    /// # Errors
    /// When their shapes differ, or one is whole and the other is not.
    pub fn plus(self, other: &Self) -> Result<Self> {
        match (self, other) {
            (Self::Whole(a), Self::Whole(b)) => Ok(Self::Whole((a + b)?)),
            (Self::Rows { ids: a, values: x }, Self::Rows { ids: b, values: y }) => {
                let mut ids = [&a[..], b].concat();
                ids.sort_unstable();
                ids.dedup();
                let places = |of: &[u32]| -> Vec<u32> {
                    let place = |id: &u32| ids.partition_point(|other| other < id) as u32;
                    of.iter().map(place).collect()
                };
                let values = (spread(&places(&a), &x, ids.len())? + spread(&places(b), y, ids.len())?)?;
                Ok(Self::Rows { ids, values })
            }
            _ => candle_core::bail!("gradients of one variable, one whole and one by rows"),
        }
    }
}

/// `values` at the rows `ids` of `rows` rows of zeros.
fn spread(ids: &[u32], values: &Tensor, rows: usize) -> Result<Tensor> {
    let zeros = Tensor::zeros((rows, values.dim(1)?), DType::F32, values.device())?;
    if ids.is_empty() {
        return Ok(zeros);
    }
    zeros.index_add(&Tensor::from_slice(ids, ids.len(), values.device())?, values, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use proptest::prelude::*;

    fn rows(of: &std::collections::BTreeMap<u32, f32>) -> Gradient {
        let values: Vec<f32> = of.values().flat_map(|x| [*x, -x]).collect();
        Gradient::Rows {
            ids: of.keys().copied().collect(),
            values: Tensor::from_vec(values, (of.len(), 2), &Device::Cpu).unwrap(),
        }
    }

    proptest! {
        #[test]
        fn sums_by_rows_equal_sums_of_whole_tensors(
            a in prop::collection::btree_map(0u32..20, -3f32..3.0, 0..20),
            b in prop::collection::btree_map(0u32..20, -3f32..3.0, 0..20),
        ) {
            let table = Tensor::zeros((20, 2), DType::F32, &Device::Cpu).unwrap();
            let apart = (rows(&a).whole(&table).unwrap() + rows(&b).whole(&table).unwrap()).unwrap();
            let sum = rows(&a).plus(&rows(&b)).unwrap();
            let together = sum.whole(&table).unwrap();
            prop_assert_eq!(apart.to_vec2::<f32>().unwrap(), together.to_vec2::<f32>().unwrap());
            let Gradient::Rows { ids, values } = sum else { panic!() };
            prop_assert!(ids.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert_eq!(values.dims(), &[ids.len(), 2]);
        }
    }
}
