//! Seeded numbers as pure functions: SplitMix64's finaliser over a counter.
//!
//! `mix(x)` scrambles 64 bits; a stream is `mix(seed + i * GOLDEN)`. Nothing is stored, so any draw can be
//! repeated from its indices alone.

/// 2^64 divided by the golden ratio, odd: the step that makes consecutive counters far apart.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A bijection of 64 bits whose output bits each depend on every input bit.
pub fn mix(counter: u64) -> u64 {
    let mut z = counter.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Number `index` of the stream `seed`, as 64 bits.
pub fn bits(seed: u64, index: u64) -> u64 {
    mix(seed.wrapping_add(index.wrapping_mul(GOLDEN)))
}

/// Number `index` of the stream `seed`, uniform over `0..bound` (`bound` > 0).
pub fn below(seed: u64, index: u64, bound: usize) -> usize {
    // multiply-shift: unlike the remainder it has no bias that a bound below 2^32 could show
    ((u128::from(bits(seed, index)) * bound as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_a_function_of_seed_and_index_and_covers_its_range() {
        assert_eq!(bits(1, 7), bits(1, 7));
        assert_ne!(bits(1, 7), bits(2, 7));
        let mut seen = [0usize; 10];
        for index in 0..10_000 {
            seen[below(3, index, 10)] += 1;
        }
        assert!(seen.iter().all(|&n| (850..1150).contains(&n)), "{seen:?}");
    }
}
