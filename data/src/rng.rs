//! Seeded numbers as a pure function of a few integers: SplitMix64 behind a mixed key.
//!
//! `Stream::new(&[tag, seed, epoch, sample])` always yields the same sequence on every machine. Nothing random is
//! ever saved: whoever needs the numbers again names the same integers again.

use dflash_model::init::{STEP, mix};

/// A sequence of seeded numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stream {
    counter: u64,
}

impl Stream {
    /// Starts the sequence that belongs to these words. Order and number of words matter.
    pub fn new(words: &[u64]) -> Self {
        let mut counter = mix(words.len() as u64);
        for &word in words {
            counter = mix(counter.wrapping_add(STEP) ^ mix(word));
        }
        Self { counter }
    }

    /// The next 64 uniform bits.
    pub fn next_u64(&mut self) -> u64 {
        self.counter = self.counter.wrapping_add(STEP);
        mix(self.counter)
    }

    /// Uniform in [0, 1), 53 bits.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Uniform among 0..n, without bias.
    ///
    /// # Panics
    /// When `n` is 0: there is nothing to draw from.
    pub fn below(&mut self, n: usize) -> usize {
        assert!(n > 0, "a draw among 0 values");
        let n = n as u64;
        // high word of a 64 x 64 product; the few low words that would favour some values are drawn again
        let refused_below = n.wrapping_neg() % n;
        loop {
            let product = u128::from(self.next_u64()) * u128::from(n);
            if product as u64 >= refused_below {
                return (product >> 64) as usize;
            }
        }
    }

    /// Puts the items in a uniformly random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    /// Moves `count` items, drawn uniformly without replacement, to the front of the slice and returns them.
    ///
    /// # Panics
    /// When `count` is more than there are items.
    pub fn choose<'i, T>(&mut self, items: &'i mut [T], count: usize) -> &'i mut [T] {
        assert!(count <= items.len(), "{count} draws among {} items", items.len());
        for front in 0..count {
            items.swap(front, front + self.below(items.len() - front));
        }
        &mut items[..count]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_and_finaliser_are_the_published_splitmix64() {
        // reference outputs of SplitMix64 for the raw state 1234567
        let mut stream = Stream { counter: 1_234_567 };
        let drawn: Vec<u64> = (0..5).map(|_| stream.next_u64()).collect();
        assert_eq!(
            drawn,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423,
                4_593_380_528_125_082_431,
                16_408_922_859_458_223_821
            ]
        );
    }

    #[test]
    fn streams_differ_in_value_order_and_number_of_words() {
        let first = |words: &[u64]| Stream::new(words).next_u64();
        let all = [
            first(&[]),
            first(&[0]),
            first(&[0, 0]),
            first(&[1, 2]),
            first(&[2, 1]),
            first(&[1, 2, 0]),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b), "stream {i} repeats another");
        }
    }

    #[test]
    fn below_is_uniform_and_in_range() {
        let mut stream = Stream::new(&[7]);
        let mut counts = [0_usize; 6];
        for _ in 0..60_000 {
            counts[stream.below(6)] += 1;
        }
        // standard deviation of each count is 91
        assert!(counts.iter().all(|&c| c.abs_diff(10_000) < 500), "{counts:?}");
    }

    #[test]
    fn uniform_is_in_the_half_open_unit_interval_with_mean_one_half() {
        let mut stream = Stream::new(&[3, 1]);
        let drawn: Vec<f64> = (0..20_000).map(|_| stream.uniform()).collect();
        assert!(drawn.iter().all(|u| (0.0..1.0).contains(u)));
        let mean = drawn.iter().sum::<f64>() / 20_000.0;
        assert!((mean - 0.5).abs() < 0.01, "mean {mean}");
    }

    #[test]
    fn shuffle_keeps_the_items_and_moves_them() {
        let mut items: Vec<usize> = (0..100).collect();
        Stream::new(&[9]).shuffle(&mut items);
        assert_ne!(items, (0..100).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
    }
}
