//! Which token follows: the rule that judges drafts, one row of logits after the other.
//!
//! Greedy: the draft stands if it is the target's own choice, else the choice takes its place. Sampled: with p the
//! target's distribution and q the draft's, the draft x stands with probability min(1, p(x) / q(x)); else a token is
//! drawn from max(p - q, 0). A draft without a q is deterministic, q = 1 at x. Either way what is written follows p
//! whatever was drafted. Drafting, acceptance and recovery draw from streams of their own: noise shared between them
//! would bend the distribution.

use anyhow::{Context, Result, ensure};
use dflash_model::init::{uniform, word};
use dflash_model::{ProposalSlot, Sampling};

use crate::argmax::first_maximum;
use crate::sampling::{SamplingConfig, Seen};

/// What the target says to one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The token that is written.
    pub token: u32,
    /// Whether it is the draft.
    pub accepted: bool,
}

/// The rule, its random streams, and the tokens that penalties look back on. One per text.
#[derive(Debug, Clone)]
pub struct Chooser {
    config: SamplingConfig,
    seen: Seen,
    drafting: Stream,
    acceptance: Stream,
    recovery: Stream,
}

impl Chooser {
    /// The best token, always.
    pub fn greedy() -> Self {
        Self::new(SamplingConfig::default(), 0)
    }

    /// A rule whose draws are a function of `seed` (give every text its own).
    pub fn new(config: SamplingConfig, seed: u64) -> Self {
        let stream = |index| Stream {
            seed: word(seed, index),
            next: 0,
        };
        Self {
            config,
            seen: Seen::default(),
            drafting: stream(0),
            acceptance: stream(1),
            recovery: stream(2),
        }
    }

    /// Notes the tokens before the text.
    pub fn begin(&mut self, prompt: &[u32]) {
        if self.config.has_penalties() {
            self.seen.prompt(prompt);
        }
    }

    /// Calls `propose` with the draft side's sampling: temperature only, and the drafting stream.
    pub fn drafting<T>(&mut self, propose: impl FnOnce(&mut Sampling<'_>) -> T) -> T {
        if self.config.is_greedy() {
            return propose(&mut Sampling::Greedy);
        }
        let stream = &mut self.drafting;
        propose(&mut Sampling::Random {
            temperature: self.config.temperature,
            uniform: &mut || stream.uniform(),
        })
    }

    /// Judges a draft (nothing: the row after the last one) by the target's logits, `[V]`, at its place.
    ///
    /// # Errors
    /// On logits without a choice, and on a q that cannot have drawn its token.
    pub fn judge(&mut self, slot: Option<&ProposalSlot>, logits: &[f32]) -> Result<Choice> {
        let choice = if self.config.is_greedy() && !self.config.has_penalties() {
            let token = first_maximum(logits)
                .context("a row of logits is empty or holds a NaN: the target's forward pass is broken")?
                as u32;
            Choice {
                token,
                accepted: slot.is_some_and(|slot| slot.token == token),
            }
        } else {
            self.draw(slot, logits)?
        };
        if self.config.has_penalties() {
            self.seen.text(choice.token);
        }
        Ok(choice)
    }

    fn draw(&mut self, slot: Option<&ProposalSlot>, logits: &[f32]) -> Result<Choice> {
        let p = self.config.distribution(logits, &self.seen)?;
        let Some(slot) = slot else {
            return Ok(Choice {
                token: p.draw(self.recovery.uniform()),
                accepted: false,
            });
        };
        let q = realised(slot)?;
        let of_draft: f64 = q
            .iter()
            .filter(|entry| entry.0 == slot.token)
            .map(|entry| entry.1)
            .sum();
        ensure!(
            of_draft > 0.,
            "the drafter drew token {} to which it gave no probability",
            slot.token
        );
        if self.acceptance.uniform() * of_draft < p.of(slot.token) {
            return Ok(Choice {
                token: slot.token,
                accepted: true,
            });
        }
        Ok(Choice {
            token: p.draw_residual(&q, self.recovery.uniform()),
            accepted: false,
        })
    }
}

/// (token, probability) of the draft's distribution; one certain token when it is deterministic.
fn realised(slot: &ProposalSlot) -> Result<Vec<(u32, f64)>> {
    if slot.q.is_empty() {
        return Ok(vec![(slot.token, 1.)]);
    }
    let sum: f64 = slot.q.iter().map(|&q| f64::from(q)).sum();
    ensure!(
        slot.q.len() == slot.candidates.len() && slot.q.iter().all(|q| *q >= 0.) && (sum - 1.).abs() < 1e-3,
        "a draft distribution of {} numbers over {} candidates, sum {sum}: expected probabilities that sum to 1",
        slot.q.len(),
        slot.candidates.len()
    );
    // f32 rounding of the softmax: what was drawn from sums to exactly 1
    Ok(slot
        .candidates
        .iter()
        .zip(&slot.q)
        .map(|(&id, &q)| (id, f64::from(q) / sum))
        .collect())
}

/// Numbers in [0, 1), each a function of (seed, how many came before).
#[derive(Debug, Clone)]
struct Stream {
    seed: u64,
    next: u64,
}

impl Stream {
    fn uniform(&mut self) -> f64 {
        self.next += 1;
        uniform(self.seed, self.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejected_certain_draft_leaves_the_targets_own_distribution() {
        // p = [.5, .3, .2], draft 0 for certain: what comes out must be p
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let slot = ProposalSlot {
            token: 0,
            candidates: Vec::new(),
            q: Vec::new(),
        };
        let sampled = SamplingConfig {
            temperature: 1.,
            ..SamplingConfig::default()
        };
        let (mut counts, mut accepted, draws) = ([0usize; 3], 0, 200_000);
        let mut chooser = Chooser::new(sampled, 1);
        for _ in 0..draws {
            let choice = chooser.judge(Some(&slot), &logits).unwrap();
            counts[choice.token as usize] += 1;
            accepted += usize::from(choice.accepted);
        }
        let share = |count: usize| count as f64 / f64::from(draws);
        for (count, p) in counts.iter().zip([0.5, 0.3, 0.2]) {
            assert!((share(*count) - p).abs() < 0.005, "{counts:?}");
        }
        assert!((share(accepted) - 0.5).abs() < 0.005);
    }

    #[test]
    fn a_distribution_that_cannot_have_drawn_its_token_is_refused() {
        let sampled = SamplingConfig {
            temperature: 1.,
            ..SamplingConfig::default()
        };
        let slot = |token, candidates: &[u32], q: &[f32]| ProposalSlot {
            token,
            candidates: candidates.to_vec(),
            q: q.to_vec(),
        };
        for slot in [
            slot(2, &[0, 1], &[0.5, 0.5]),
            slot(0, &[0, 1], &[0.0, 1.0]),
            slot(0, &[0, 1], &[0.9, 0.9]),
            slot(0, &[0, 1], &[1.0]),
            slot(0, &[0, 1], &[2.0, -1.0]),
            slot(0, &[0, 1], &[f32::NAN, 1.0]),
        ] {
            assert!(
                Chooser::new(sampled, 0).judge(Some(&slot), &[0., 0., 0.]).is_err(),
                "{slot:?}"
            );
        }
    }

    #[test]
    fn greedy_with_a_penalty_does_not_repeat_itself() {
        let config = SamplingConfig {
            presence_penalty: 10.,
            ..SamplingConfig::default()
        };
        let mut chooser = Chooser::new(config, 0);
        let tokens: Vec<u32> = (0..3)
            .map(|_| chooser.judge(None, &[3., 2., 1.]).unwrap().token)
            .collect();
        assert_eq!(tokens, [0, 1, 2]);
    }

    #[test]
    fn the_three_streams_do_not_repeat_each_other() {
        let mut chooser = Chooser::new(
            SamplingConfig {
                temperature: 1.,
                ..SamplingConfig::default()
            },
            7,
        );
        let mut drafts = Vec::new();
        chooser.drafting(|sampling| {
            if let Sampling::Random { uniform, .. } = sampling {
                drafts.extend((0..50).map(|_| uniform()));
            }
        });
        let rest: Vec<f64> = (0..50)
            .flat_map(|_| [chooser.acceptance.uniform(), chooser.recovery.uniform()])
            .collect();
        assert_eq!(drafts.len(), 50);
        assert!(drafts.iter().all(|draft| !rest.contains(draft)));
    }
}
