//! Anchors: where the training blocks of a sample begin.
//!
//! A position p can be an anchor when tokens p and p + 1 are both supervised: at serving time a block starts at a
//! token that the target wrote, and needs at least one label. Anchors are drawn uniformly without replacement,
//! anew in every epoch, as a pure function of (seed, epoch, sample).

use crate::rng::Stream;

/// Keeps the anchor stream apart from all other streams of the same seed.
const ANCHOR_STREAM: u64 = 0x616E_6368_6F72;

/// Positions that can be anchors, ascending.
pub fn anchor_candidates(loss_mask: &[bool]) -> impl Iterator<Item = usize> + '_ {
    loss_mask
        .windows(2)
        .enumerate()
        .filter(|(_, pair)| pair[0] && pair[1])
        .map(|(position, _)| position)
}

/// Draws at most `max_anchors` anchors of one sample, ascending. All candidates when there are fewer.
pub fn anchors(loss_mask: &[bool], max_anchors: usize, seed: u64, epoch: u64, sample: u64) -> Vec<usize> {
    let mut candidates: Vec<usize> = anchor_candidates(loss_mask).collect();
    if candidates.len() <= max_anchors {
        return candidates;
    }
    let mut stream = Stream::new(&[ANCHOR_STREAM, seed, epoch, sample]);
    let mut drawn = stream.choose(&mut candidates, max_anchors).to_vec();
    drawn.sort_unstable();
    drawn
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn anchors_of_a_seed_epoch_and_sample_never_change() {
        let mut mask = vec![false; 10];
        mask.resize(60, true);
        assert_eq!(anchors(&mask, 6, 17, 0, 3), GOLDEN_EPOCH_0);
        assert_eq!(anchors(&mask, 6, 17, 1, 3), GOLDEN_EPOCH_1);
    }
    const GOLDEN_EPOCH_0: [usize; 6] = [0; 6];
    const GOLDEN_EPOCH_1: [usize; 6] = [0; 6];

    #[test]
    fn every_candidate_is_drawn_equally_often() {
        let mask = vec![true; 21];
        let mut counts = [0_usize; 20];
        for sample in 0..8_000 {
            for anchor in anchors(&mask, 5, 1, 0, sample) {
                counts[anchor] += 1;
            }
        }
        // 2000 expected, standard deviation 39
        assert!(counts.iter().all(|&c| c.abs_diff(2_000) < 200), "{counts:?}");
    }

    #[test]
    fn a_lone_supervised_token_is_no_anchor() {
        assert!(anchors(&[false, true, false, true], 8, 0, 0, 0).is_empty());
        assert!(anchors(&[], 8, 0, 0, 0).is_empty());
        assert!(anchors(&[true], 8, 0, 0, 0).is_empty());
        assert!(anchors(&[true, true], 0, 0, 0, 0).is_empty());
    }

    proptest! {
        #[test]
        fn anchors_are_ascending_distinct_supervised_pairs(
            mask in proptest::collection::vec(any::<bool>(), 0..200), max in 0_usize..40, seed: u64, epoch in 0_u64..9, sample: u64,
        ) {
            let drawn = anchors(&mask, max, seed, epoch, sample);
            let possible = (0..mask.len()).filter(|&p| mask[p] && mask.get(p + 1) == Some(&true)).count();
            prop_assert_eq!(drawn.len(), possible.min(max));
            prop_assert!(drawn.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(drawn.iter().all(|&p| mask[p] && mask[p + 1]));
            prop_assert_eq!(drawn, anchors(&mask, max, seed, epoch, sample));
        }
    }
}
