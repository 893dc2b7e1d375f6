//! Numbers that follow from a report's fields, for its renderings. A report may come from a file, so nothing here trusts
//! that its lists are as long as they should be.

use super::{PromptResult, Report};
use crate::text::Finish;

/// Rounds of one text, summed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Rounds {
    /// Counted rounds.
    pub(super) counted: u64,
    /// Tokens drafted in them.
    pub(super) drafted: u64,
    /// Drafts accepted in them.
    pub(super) accepted: u64,
}

impl PromptResult {
    /// Sums over the counted rounds.
    pub(super) fn rounds(&self, include_truncated: bool) -> Rounds {
        let mut sum = Rounds::default();
        for (round, &accepted) in self.accepted.iter().enumerate() {
            if include_truncated || !self.truncated.contains(&round) {
                sum.counted += 1;
                sum.drafted += self.drafted.get(round).map_or(0, |&drafted| drafted as u64);
                sum.accepted += accepted as u64;
            }
        }
        sum
    }

    /// Tokens after the prefill's a second of speculative decoding.
    pub(super) fn spec_tokens_per_s(&self) -> Option<f64> {
        rate(self.new_tokens, self.spec_seconds)
    }

    /// The same of plain decoding; nothing where the texts differ, because the plain one's length is not kept.
    pub(super) fn plain_tokens_per_s(&self) -> Option<f64> {
        rate(self.new_tokens, self.plain_seconds).filter(|_| self.identical)
    }

    /// Ratio of the two rates.
    pub(super) fn speedup(&self) -> Option<f64> {
        Some(self.spec_tokens_per_s()? / self.plain_tokens_per_s()?)
    }
}

impl Report {
    /// Rounds of all texts, truncated ones included.
    pub(super) fn all_rounds(&self) -> u64 {
        self.per_prompt.iter().map(|result| result.accepted.len() as u64).sum()
    }

    /// Tokens after each text's first, which the prefill gave.
    pub(super) fn decoded_tokens(&self) -> u64 {
        let after_first = |result: &PromptResult| result.new_tokens.saturating_sub(1) as u64;
        self.per_prompt.iter().map(after_first).sum()
    }

    /// Texts that equal plain decoding's.
    pub(super) fn identical_texts(&self) -> usize {
        self.prompts.saturating_sub(self.differing.len())
    }

    /// Drafted tokens of a full block, or of the most frequent one when the width was chosen round by round.
    pub(super) fn width_used(&self) -> Option<usize> {
        match self.setting.block_size_used.checked_sub(1) {
            Some(width) if self.setting.width_policy != "auto" => Some(width),
            _ => self.widths.iter().max_by_key(|used| used.rounds).map(|used| used.width),
        }
    }

    /// Speed-up that each measured width would give at this acceptance: (1 + sum of `accept_at_pos` up to w) / cost(w) *
    /// cost(0), in the order of `costs`. Nothing without a plain step's cost; no value for a width beyond `accept_at_pos`.
    pub(super) fn projected_speedups(&self) -> Vec<(usize, Option<f64>)> {
        let Some(plain) = self.costs.iter().find(|cost| cost.width == 0) else {
            return Vec::new();
        };
        let tokens = |width: usize| -> Option<f64> {
            let joint = self.accept_at_pos.get(..width)?;
            joint.iter().try_fold(1., |sum, &share| Some(sum + share?))
        };
        let projected = |width, seconds: f64| finite(tokens(width)? / seconds * plain.total());
        self.costs
            .iter()
            .map(|cost| (cost.width, projected(cost.width, cost.total())))
            .collect()
    }
}

impl Finish {
    /// As in the JSON.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Budget => "budget",
            Self::Context => "context",
        }
    }
}

/// `value` if it can be drawn and read.
pub(super) fn finite(value: f64) -> Option<f64> {
    (value.is_finite() && value.abs() < 1e12).then_some(value)
}

/// Part of a whole; nothing of nothing.
pub(super) fn share(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.).then(|| finite(part / whole)).flatten()
}

fn rate(new_tokens: usize, seconds: f64) -> Option<f64> {
    let tokens = new_tokens.saturating_sub(1) as f64;
    share(tokens, seconds).filter(|_| tokens > 0.)
}
