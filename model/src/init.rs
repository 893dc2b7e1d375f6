//! Seeded random numbers: every draw is a function of its seed and index, so runs repeat and resume exactly.
//!
//! candle cannot seed its CPU generator. This is SplitMix64, a hash of a counter, which needs no state at all.

/// Step of the SplitMix64 counter: 2^64 divided by the golden ratio, odd.
pub const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// The `index`-th 64-bit word of stream `seed`.
pub fn word(seed: u64, index: u64) -> u64 {
    mix(seed.wrapping_add(index.wrapping_add(1).wrapping_mul(STEP)))
}

/// The SplitMix64 finaliser: a bijection of 64 bits whose output bits each depend on every input bit.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A stream that belongs to `name`: the same seed gives unrelated numbers to different names.
pub fn named(seed: u64, name: &str) -> u64 {
    name.bytes()
        .fold(word(seed, 0), |hash, byte| word(hash ^ u64::from(byte), 1))
}

/// A number in [0, 1) with 53 random bits.
pub fn uniform(seed: u64, index: u64) -> f64 {
    (word(seed, index) >> 11) as f64 / (1u64 << 53) as f64
}

/// `count` normal numbers of mean 0 and the given standard deviation (Box-Muller).
pub fn normal(seed: u64, count: usize, deviation: f64) -> Vec<f32> {
    (0..count as u64)
        .map(|i| {
            let radius = (-2.0 * (1.0 - uniform(seed, 2 * i)).ln()).sqrt();
            (deviation * radius * (std::f64::consts::TAU * uniform(seed, 2 * i + 1)).cos()) as f32
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_repeat_and_have_the_right_moments() {
        let values = normal(named(7, "fc.weight"), 100_000, 0.02);
        assert_eq!(values, normal(named(7, "fc.weight"), 100_000, 0.02));
        assert_ne!(values[..8], normal(named(8, "fc.weight"), 8, 0.02)[..]);
        assert_ne!(values[..8], normal(named(7, "fc.weights"), 8, 0.02)[..]);
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / 1e5;
        let variance = values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / 1e5;
        assert!(mean.abs() < 3e-4 && (variance.sqrt() / 0.02 - 1.0).abs() < 0.01);
    }
}
