//! The k largest of values that come in pieces.

use crate::simd::{max, vectorised};

/// Values looked at together before any is compared alone.
const STRIDE: usize = 64;

/// The k largest values seen so far with their ids, best first, ties to the lower id. NaN is never chosen.
#[derive(Debug)]
pub(crate) struct Best {
    k: usize,
    entries: Vec<(f32, u32)>,
}

impl Best {
    /// None seen yet.
    pub(crate) fn new(k: usize) -> Self {
        let entries = Vec::with_capacity(k + 1);
        Self { k, entries }
    }

    /// Looks at values with the ids `first`, `first + 1`, ..; ids must grow from call to call.
    pub(crate) fn offer(&mut self, values: &[f32], first: u32) {
        let k = self.k;
        for (start, stride) in values.chunks(STRIDE).enumerate() {
            if self.entries.len() == k
                && vectorised(
                    #[inline(always)]
                    || max(stride),
                ) <= self.entries[k - 1].0
            {
                continue;
            }
            for (i, value) in stride.iter().enumerate() {
                if value.is_nan() || (self.entries.len() == k && *value <= self.entries[k - 1].0) {
                    continue;
                }
                let at = self.entries.partition_point(|(other, _)| other >= value);
                self.entries.insert(at, (*value, first + (start * STRIDE + i) as u32));
                self.entries.truncate(k);
            }
        }
    }

    /// Writes the ids, best first; where fewer than k numbers were seen, id 0 fills the rest.
    pub(crate) fn write(&self, top: &mut [u32]) {
        for (slot, top) in top.iter_mut().enumerate() {
            *top = self.entries.get(slot).map_or(0, |(_, id)| *id);
        }
    }
}

/// Writes the ids of the largest values into `top`, best first, ties to the lower id. NaN is never chosen; where
/// fewer than `top.len()` numbers exist, id 0 fills the rest.
pub fn top_k(values: &[f32], top: &mut [u32]) {
    let mut best = Best::new(top.len());
    best.offer(values, 0);
    best.write(top);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_best_k_equal_a_stable_sort_in_any_pieces(
            values in prop::collection::vec(-4i32..4, 1..300),
            k in 1usize..20,
            piece in 1usize..300,
        ) {
            let values: Vec<f32> = values.into_iter().map(|v| v as f32).collect();
            let k = k.min(values.len());
            let (mut whole, mut pieced) = (vec![0; k], vec![0; k]);
            top_k(&values, &mut whole);
            let mut best = Best::new(k);
            for (i, values) in values.chunks(piece).enumerate() {
                best.offer(values, (i * piece) as u32);
            }
            best.write(&mut pieced);
            let mut order: Vec<u32> = (0..values.len() as u32).collect();
            order.sort_by(|a, b| values[*b as usize].total_cmp(&values[*a as usize]));
            prop_assert_eq!(&whole[..], &order[..k]);
            prop_assert_eq!(whole, pieced);
        }
    }
}
