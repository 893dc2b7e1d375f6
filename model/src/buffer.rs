//! Working memory of the CPU target and of training's products that is handed back instead of freed.
//!
//! A pass allocates a dozen megabyte-sized slices a layer. Returned to the system each time, they cost a sixth of the
//! prefill in page faults; so each thread keeps those that it drops, within a limit, for the next layer.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

/// Kept buffers of one thread, and the most floats that they may hold together (256 MiB).
const KEPT: usize = 24;
const KEPT_FLOATS: usize = 64 << 20;

thread_local! {
    static FREE: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// A slice of floats whose memory goes back to the dropping thread's store.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// At least `len` floats; those after it are nobody's.
    floats: Vec<f32>,
    len: usize,
}

impl Buffer {
    /// Zeros.
    pub(crate) fn zeros(len: usize) -> Self {
        let mut zeros = Self::stale(len);
        zeros.fill(0.0);
        zeros
    }

    /// Floats of earlier use, for who writes every one of them.
    pub(crate) fn stale(len: usize) -> Self {
        let kept = FREE.with_borrow_mut(|free| {
            let fits = free.iter().enumerate().filter(|(_, kept)| kept.len() >= len);
            let tightest = fits.min_by_key(|(_, kept)| kept.len()).map(|(i, _)| i);
            tightest.map(|i| free.swap_remove(i))
        });
        Self {
            floats: kept.unwrap_or_else(|| vec![0.0; len]),
            len,
        }
    }

    /// The floats themselves, for a tensor that outlives the pass.
    pub(crate) fn into_vec(mut self) -> Vec<f32> {
        let mut floats = std::mem::take(&mut self.floats);
        floats.truncate(self.len);
        floats
    }
}

impl From<Vec<f32>> for Buffer {
    fn from(floats: Vec<f32>) -> Self {
        Self {
            len: floats.len(),
            floats,
        }
    }
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.floats[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.floats[..self.len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let floats = std::mem::take(&mut self.floats);
        if floats.is_empty() {
            return;
        }
        // a thread that is ending has no store any more; then the memory is simply freed
        let _ = FREE.try_with(|free| {
            let mut free = free.borrow_mut();
            let held: usize = free.iter().map(Vec::len).sum();
            if free.len() < KEPT && held + floats.len() <= KEPT_FLOATS {
                free.push(floats);
            }
        });
    }
}
