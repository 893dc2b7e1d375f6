//! Acceptance, counted: sums over rounds, and the numbers read from them.
//!
//! Round r drafts K_r tokens, of which the first a_r are accepted; it emits a_r + 1. Over R counted rounds:
//! - `mean_accepted_drafts` = sum a_r / R, `acceptance_length` = 1 + that (micro: every round weighs the same);
//! - `acceptance_length_macro` = mean over prompts of the prompt's acceptance length;
//! - `draft_acceptance_rate` = sum a_r / sum K_r (depends on K: not comparable across block sizes);
//! - `accept_at_pos[i]` = share of rounds with a_r >= i, `accept_cond[i]` = the same among those with a_r >= i - 1;
//!   i = 1..K. Sum of `accept_at_pos` = `mean_accepted_drafts`. A round that drafted fewer than i tokens counts as
//!   one that did not accept position i, so that this identity always holds;
//! - `tokens_per_verify_e2e` = tokens emitted in all rounds, after every cut, / number of all rounds.
//!
//! Truncated rounds are tallied apart and enter only `tokens_per_verify_e2e`, unless asked for.

use serde::{Deserialize, Serialize};

use crate::speculate::Round;

/// Counts over some rounds. All are sums, so counts of parts add up to the counts of the whole.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Rounds, R.
    pub rounds: u64,
    /// Drafted tokens, sum of K_r.
    pub drafted: u64,
    /// Accepted drafts, sum of a_r.
    pub accepted: u64,
    /// `histogram[a]` = rounds that accepted exactly a drafts.
    pub histogram: Vec<u64>,
}

impl Counts {
    /// Counts of no round, with a histogram for up to `width` drafts.
    pub fn new(width: usize) -> Self {
        Self {
            histogram: vec![0; width + 1],
            ..Self::default()
        }
    }

    /// Adds one round of `drafted` tokens whose first `accepted` were accepted.
    pub fn add(&mut self, drafted: usize, accepted: usize) {
        self.rounds += 1;
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
        if self.histogram.len() <= drafted {
            self.histogram.resize(drafted + 1, 0);
        }
        self.histogram[accepted] += 1;
    }

    /// Adds the counts of other rounds.
    pub fn merge(&mut self, other: &Self) {
        self.rounds += other.rounds;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        if self.histogram.len() < other.histogram.len() {
            self.histogram.resize(other.histogram.len(), 0);
        }
        for (sum, count) in self.histogram.iter_mut().zip(&other.histogram) {
            *sum += count;
        }
    }

    /// Sum of a_r / R; nothing without rounds.
    pub fn mean_accepted_drafts(&self) -> Option<f64> {
        ratio(self.accepted, self.rounds)
    }

    /// 1 + mean accepted drafts: tokens a round, the correction or bonus token included.
    pub fn acceptance_length(&self) -> Option<f64> {
        self.mean_accepted_drafts().map(|mean| 1. + mean)
    }

    /// Sum of a_r / sum of K_r.
    pub fn draft_acceptance_rate(&self) -> Option<f64> {
        ratio(self.accepted, self.drafted)
    }

    /// Joint acceptance of positions 1..K: share of all rounds with a_r >= i.
    pub fn accept_at_pos(&self) -> Vec<Option<f64>> {
        let reached = self.reached();
        reached[1..].iter().map(|&count| ratio(count, self.rounds)).collect()
    }

    /// Conditional acceptance of positions 1..K: share with a_r >= i of the rounds with a_r >= i - 1.
    pub fn accept_cond(&self) -> Vec<Option<f64>> {
        self.reached().windows(2).map(|pair| ratio(pair[1], pair[0])).collect()
    }

    /// Rounds with a_r >= i, for i = 0..=K.
    fn reached(&self) -> Vec<u64> {
        let mut reached = vec![0; self.histogram.len().max(1)];
        let mut sum = 0;
        for (at, count) in reached.iter_mut().zip(&self.histogram).rev() {
            sum += count;
            *at = sum;
        }
        reached
    }
}

/// The rounds of one or more texts, whole and truncated ones apart.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Rounds that drafted their full width and emitted all they accepted.
    pub full: Counts,
    /// Rounds narrowed by the budget or cut by a stop token.
    pub truncated: Counts,
    /// Tokens that all rounds added to the text, after every cut.
    pub emitted: u64,
    /// Texts tallied; each has one more token, which the prefill gave.
    pub texts: u64,
}

impl Tally {
    /// No texts yet; histograms for up to `width` drafts.
    pub fn new(width: usize) -> Self {
        Self {
            full: Counts::new(width),
            truncated: Counts::new(width),
            emitted: 0,
            texts: 0,
        }
    }

    /// The rounds of one text.
    pub fn of_text(rounds: &[Round], width: usize) -> Self {
        let mut tally = Self::new(width);
        tally.texts = 1;
        for round in rounds {
            let counts = if round.truncated {
                &mut tally.truncated
            } else {
                &mut tally.full
            };
            counts.add(round.drafted, round.accepted);
            tally.emitted += round.emitted as u64;
        }
        tally
    }

    /// Adds other texts.
    pub fn merge(&mut self, other: &Self) {
        self.full.merge(&other.full);
        self.truncated.merge(&other.truncated);
        self.emitted += other.emitted;
        self.texts += other.texts;
    }

    /// The rounds that acceptance is computed over.
    pub fn counted(&self, include_truncated: bool) -> Counts {
        let mut counts = self.full.clone();
        if include_truncated {
            counts.merge(&self.truncated);
        }
        counts
    }

    /// All target passes after the prefill.
    pub fn verifies(&self) -> u64 {
        self.full.rounds + self.truncated.rounds
    }

    /// Tokens emitted after the prefill's / target passes.
    pub fn tokens_per_verify_e2e(&self) -> Option<f64> {
        ratio(self.emitted, self.verifies())
    }

    /// All tokens, the prefill's included, / target passes: what SGLang's `spec_accept_length` divides.
    pub fn completion_tokens_per_verify(&self) -> Option<f64> {
        ratio(self.emitted + self.texts, self.verifies())
    }
}

/// Sum of the counts of several texts.
pub fn pooled(texts: &[Counts]) -> Counts {
    let mut sum = Counts::default();
    for text in texts {
        sum.merge(text);
    }
    sum
}

/// Mean over the texts that have rounds of each one's acceptance length.
pub fn macro_acceptance_length(texts: &[Counts]) -> Option<f64> {
    let lengths: Vec<f64> = texts.iter().filter_map(Counts::acceptance_length).collect();
    (!lengths.is_empty()).then(|| lengths.iter().sum::<f64>() / lengths.len() as f64)
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::speculate::leading_run;
    use proptest::prelude::*;

    fn counts(width: usize, accepted: &[usize]) -> Counts {
        let mut counts = Counts::new(width);
        for &a in accepted {
            counts.add(width, a);
        }
        counts
    }

    fn all(value: f64, n: usize) -> Vec<Option<f64>> {
        vec![Some(value); n]
    }

    #[test]
    fn two_prompts_of_unequal_length_pool_to_micro_and_average_to_macro() {
        let texts = [counts(7, &[7, 7, 7, 0]), counts(7, &[0, 0])];
        let pool = pooled(&texts);
        assert_eq!(pool.acceptance_length(), Some(4.5));
        assert_eq!(macro_acceptance_length(&texts), Some(3.625));
        assert_eq!(pool.draft_acceptance_rate(), Some(0.5));
        assert_eq!(pool.accept_at_pos(), all(0.5, 7));
        let mut conditional = all(1., 7);
        conditional[0] = Some(0.5);
        assert_eq!(pool.accept_cond(), conditional);
        assert_eq!(pool.histogram, [3, 0, 0, 0, 0, 0, 0, 3]);
    }

    #[test]
    fn the_prefill_token_is_no_round() {
        let round = |anchor| Round {
            anchor,
            drafted: 7,
            accepted: 3,
            emitted: 4,
            truncated: false,
        };
        let tally = Tally::of_text(&[round(5), round(9), round(13)], 7);
        assert_eq!(tally.full.acceptance_length(), Some(4.0));
        assert_eq!(tally.tokens_per_verify_e2e(), Some(4.0));
        assert_eq!(tally.completion_tokens_per_verify(), Some(13. / 3.));
    }

    #[test]
    fn the_mean_run_is_counted_not_multiplied_from_marginals() {
        let correct = [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 1, 1]];
        let mut counted = Counts::new(4);
        for block in &correct {
            counted.add(4, leading_run(block, &[1; 4]));
        }
        assert_eq!(counted.mean_accepted_drafts(), Some(2.0));
        let marginal = |i: usize| correct.iter().map(|block| f64::from(block[i])).sum::<f64>() / 4.;
        let (sum, _) = (0..4).fold((0., 1.), |(sum, product), i| {
            let product = product * marginal(i);
            (sum + product, product)
        });
        assert!((sum - 1.367_187_5).abs() < 1e-12, "{sum}");
    }

    #[test]
    fn truncated_rounds_enter_only_when_asked() {
        let round = |accepted, emitted, truncated| Round {
            anchor: 0,
            drafted: 3,
            accepted,
            emitted,
            truncated,
        };
        let tally = Tally::of_text(&[round(3, 4, false), round(1, 1, true)], 3);
        assert_eq!(tally.counted(false).acceptance_length(), Some(4.));
        assert_eq!(tally.counted(true).acceptance_length(), Some(3.));
        assert_eq!(tally.tokens_per_verify_e2e(), Some(2.5));
    }

    #[test]
    fn nothing_counted_is_no_number() {
        let none = Counts::new(3);
        assert_eq!(none.acceptance_length(), None);
        assert_eq!(none.accept_at_pos(), vec![None; 3]);
        assert_eq!(macro_acceptance_length(std::slice::from_ref(&none)), None);
    }

    proptest! {
        #[test]
        fn joint_acceptance_sums_to_the_mean_run(rounds in prop::collection::vec((0usize..=9, 0.0f64..=1.0), 1..200)) {
            let mut counts = Counts::new(7);
            for &(drafted, share) in &rounds {
                counts.add(drafted, (share * drafted as f64) as usize);
            }
            let sum: f64 = counts.accept_at_pos().into_iter().map(Option::unwrap).sum();
            prop_assert!((sum - counts.mean_accepted_drafts().unwrap()).abs() < 1e-9);
            prop_assert_eq!(counts.histogram.iter().sum::<u64>(), counts.rounds);
            let mut product = 1.;
            for (joint, conditional) in counts.accept_at_pos().into_iter().zip(counts.accept_cond()) {
                product *= conditional.unwrap_or(0.);
                prop_assert!((product - joint.unwrap()).abs() < 1e-9);
            }
        }
    }
}
