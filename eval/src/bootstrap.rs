//! Intervals by resampling prompts: whole prompts are drawn with replacement, because rounds of one text are alike.

use crate::acceptance::Counts;
use crate::random::below;

/// Resamples.
const RESAMPLES: usize = 2000;

/// 95 % interval of the micro acceptance length: percentiles over texts drawn with replacement.
///
/// Nothing when fewer than two texts have rounds: one text says nothing about how texts differ.
pub fn bootstrap_interval(texts: &[Counts], seed: u64) -> Option<[f64; 2]> {
    let sums: Vec<[(u64, u64); 1]> = texts
        .iter()
        .filter(|text| text.rounds > 0)
        .map(|text| [(text.accepted, text.rounds)])
        .collect();
    interval(&sums, seed, |[length]| *length)
}

/// 95 % interval of the second's micro acceptance length minus the first's over the same prompts, drawn together, so that
/// what is hard for both does not blur the difference.
///
/// Prompts on which either has no round are left out; nothing when fewer than two remain.
pub fn paired_interval(first: &[Counts], second: &[Counts], seed: u64) -> Option<[f64; 2]> {
    let sums: Vec<[(u64, u64); 2]> = first
        .iter()
        .zip(second)
        .filter(|(a, b)| a.rounds > 0 && b.rounds > 0)
        .map(|(a, b)| [(a.accepted, a.rounds), (b.accepted, b.rounds)])
        .collect();
    interval(&sums, seed, |[a, b]| b - a)
}

/// Percentiles of `statistic` of the `N` acceptance lengths over resampled prompts.
fn interval<const N: usize>(
    sums: &[[(u64, u64); N]],
    seed: u64,
    statistic: impl Fn(&[f64; N]) -> f64,
) -> Option<[f64; 2]> {
    if sums.len() < 2 {
        return None;
    }
    let resample = |index: usize| {
        let mut totals = [(0, 0); N];
        for i in 0..sums.len() {
            let drawn = &sums[below(seed, (index * sums.len() + i) as u64, sums.len())];
            for (total, part) in totals.iter_mut().zip(drawn) {
                *total = (total.0 + part.0, total.1 + part.1);
            }
        }
        statistic(&totals.map(|(accepted, rounds)| 1. + accepted as f64 / rounds as f64))
    };
    let mut values: Vec<f64> = (0..RESAMPLES).map(resample).collect();
    values.sort_by(f64::total_cmp);
    let tail = RESAMPLES * 25 / 1000;
    Some([values[tail], values[RESAMPLES - 1 - tail]])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(accepted: &[usize]) -> Counts {
        let mut counts = Counts::new(7);
        for &a in accepted {
            counts.add(7, a);
        }
        counts
    }

    #[test]
    fn the_interval_is_seeded_and_brackets_the_estimate() {
        let texts: Vec<Counts> = (0..40).map(|i| counts(&[i % 8, (i * 3) % 8])).collect();
        let [low, high] = bootstrap_interval(&texts, 1).unwrap();
        let estimate = crate::acceptance::pooled(&texts).acceptance_length().unwrap();
        assert!(low < estimate && estimate < high, "{low} {estimate} {high}");
        assert_eq!(bootstrap_interval(&texts, 1), Some([low, high]));
        assert_ne!(bootstrap_interval(&texts, 2), Some([low, high]));
        let same = vec![counts(&[2, 4]); 9];
        assert_eq!(bootstrap_interval(&same, 1), Some([4., 4.]));
        assert_eq!(bootstrap_interval(&[Counts::new(3), counts(&[1])], 0), None);
    }

    #[test]
    fn pairing_sees_a_small_difference_between_prompts_that_differ_much() {
        let first: Vec<Counts> = (0..30).map(|i| counts(&[i % 6, i % 6, i % 6])).collect();
        let second: Vec<Counts> = (0..30).map(|i| counts(&[i % 6 + 1, i % 6, i % 6])).collect();
        let [low, high] = paired_interval(&first, &second, 3).unwrap();
        assert!(
            low > 0.3 && high < 0.37,
            "{low} {high}: every prompt gained a third of a token"
        );
        let spread = bootstrap_interval(&first, 3).unwrap();
        assert!(
            spread[1] - spread[0] > 0.5,
            "unpaired the prompts' own spread would hide it"
        );
        assert_eq!(paired_interval(&first, &first, 3), Some([0., 0.]));
    }
}
