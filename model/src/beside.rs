//! Gradients that backward passes form beside candle's own store.
//!
//! candle adds every gradient to a fresh tensor of zeros, on one thread: three passes over memory more than the product
//! that made it, a tenth of a small step. Those of a drafter's matrices are written, or added to what is there, where
//! they stay.

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Shape, Tensor, TensorId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A drafter's store; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Beside(Arc<Mutex<Found>>);

#[derive(Debug, Default)]
struct Found {
    matrices: HashMap<TensorId, (Vec<f32>, Shape)>,
    others: GradStore,
}

impl Beside {
    /// Has `form` write the gradient of the variable `of` or, told `true`, add to the one that is there.
    pub(crate) fn form(&self, of: &Tensor, form: impl FnOnce(&mut [f32], bool) -> Result<()>) -> Result<()> {
        // not locked meanwhile: `form` hands work to other threads
        let before = self.locked().matrices.remove(&of.id());
        let add = before.is_some();
        let (mut values, shape) = before.unwrap_or_else(|| (vec![0.0; of.elem_count()], of.shape().clone()));
        form(&mut values, add)?;
        self.locked().matrices.insert(of.id(), (values, shape));
        Ok(())
    }

    /// Adds gradients that a backward pass of its own has found.
    pub(crate) fn extend(&self, found: GradStore) -> Result<()> {
        self.locked().others.extend(found)
    }

    /// Takes all that has been found since the last call.
    pub(crate) fn take(&self) -> Result<GradStore> {
        let Found { matrices, mut others } = std::mem::take(&mut *self.locked());
        for (id, (values, shape)) in matrices {
            others.insert_id(id, Tensor::from_vec(values, shape, &Device::Cpu)?);
        }
        Ok(others)
    }

    fn locked(&self) -> MutexGuard<'_, Found> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
