//! Working memory of the CPU target that is handed back instead of freed.
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
pub(crate) struct Buffer(Vec<f32>);

impl Buffer {
    /// Zeros.
    pub(crate) fn zeros(len: usize) -> Self {
        let mut floats = Self::room(len);
        floats.clear();
        floats.resize(len, 0.0);
        Self(floats)
    }

    /// Floats of earlier use, for who writes every one of them.
    pub(crate) fn stale(len: usize) -> Self {
        let mut floats = Self::room(len);
        floats.resize(len, 0.0);
        Self(floats)
    }

    /// A vector with room for `len` floats, from the store if one fits; what it holds is of no meaning.
    fn room(len: usize) -> Vec<f32> {
        let kept = FREE.with_borrow_mut(|free| {
            let fits = free.iter().enumerate().filter(|(_, kept)| kept.capacity() >= len);
            let tightest = fits.min_by_key(|(_, kept)| kept.capacity()).map(|(i, _)| i);
            tightest.map(|i| free.swap_remove(i))
        });
        kept.unwrap_or_else(|| Vec::with_capacity(len))
    }

    /// Two slices, one after the other.
    pub(crate) fn joined(first: &[f32], rest: usize, fill: impl FnOnce(&mut Vec<f32>)) -> Self {
        let mut floats = Self::room(first.len() + rest);
        floats.clear();
        floats.extend_from_slice(first);
        fill(&mut floats);
        Self(floats)
    }

    /// The floats themselves, for a tensor that outlives the pass.
    pub(crate) fn into_vec(mut self) -> Vec<f32> {
        std::mem::take(&mut self.0)
    }
}

impl From<Vec<f32>> for Buffer {
    fn from(floats: Vec<f32>) -> Self {
        Self(floats)
    }
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.0
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let floats = std::mem::take(&mut self.0);
        if floats.capacity() == 0 {
            return;
        }
        // a thread that is ending has no store any more; then the memory is simply freed
        let _ = FREE.try_with(|free| {
            let mut free = free.borrow_mut();
            let held: usize = free.iter().map(Vec::capacity).sum();
            if free.len() < KEPT && held + floats.capacity() <= KEPT_FLOATS {
                free.push(floats);
            }
        });
    }
}
