//! Seeded numbers as pure functions of indices, over the model room's SplitMix64.

use dflash_model::init::word;

/// A bijection of 64 bits whose output bits each depend on every input bit.
pub fn mix(counter: u64) -> u64 {
    word(counter, 0)
}

/// Number `index` of the stream `seed`, uniform over `0..bound` (`bound` > 0).
pub fn below(seed: u64, index: u64, bound: usize) -> usize {
    // multiply-shift: unlike the remainder it has no bias that a bound below 2^32 could show
    ((u128::from(word(seed, index)) * bound as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_a_function_of_seed_and_index_and_covers_its_range() {
        assert_eq!(word(1, 7), word(1, 7));
        assert_ne!(word(1, 7), word(2, 7));
        let mut seen = [0usize; 10];
        for index in 0..10_000 {
            seen[below(3, index, 10)] += 1;
        }
        assert!(seen.iter().all(|&n| (850..1150).contains(&n)), "{seen:?}");
    }
}
