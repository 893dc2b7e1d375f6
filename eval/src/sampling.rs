//! From a row of logits to the target's distribution: penalties, temperature, top-k, top-p, min-p, in this order.
//!
//! Plain and speculative decoding draw from the same distribution, made here, per position and with the drafted
//! prefix counted as text. Nothing of it but the temperature ever touches the draft side.
#![expect(
    clippy::float_cmp,
    reason = "a setting is off at exactly its neutral value, as written on the command line"
)]

use std::collections::HashMap;
use std::fmt;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// How the target's tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SamplingConfig {
    /// Softmax temperature; 0 takes the best token.
    pub temperature: f64,
    /// Keeps the k most likely tokens, and those tied with the k-th; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of most likely tokens whose mass reaches this; 1 keeps all.
    pub top_p: f64,
    /// Drops tokens less likely than this share of the most likely one's probability; 0 drops none.
    pub min_p: f64,
    /// Divides positive logits (multiplies negative ones) of every token in prompt or text; 1 leaves them.
    pub repetition_penalty: f64,
    /// Subtracted from the logit of every token in the text; 0 leaves them.
    pub presence_penalty: f64,
}

impl Default for SamplingConfig {
    fn default() -> Self {
        Self {
            temperature: 0.,
            top_k: 0,
            top_p: 1.,
            min_p: 0.,
            repetition_penalty: 1.,
            presence_penalty: 0.,
        }
    }
}

impl SamplingConfig {
    /// Whether the choice is the best token, so that a text is a function of its prompt.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.
    }

    /// Whether logits depend on the tokens before.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1. || self.presence_penalty != 0.
    }

    /// Refuses values outside their ranges; the message names the field.
    ///
    /// # Errors
    /// On the first such field.
    pub fn check(&self) -> Result<()> {
        let ranges = [
            ("temperature", self.temperature, 0., 100.),
            ("top_p", self.top_p, f64::MIN_POSITIVE, 1.),
            ("min_p", self.min_p, 0., 1.),
            ("repetition_penalty", self.repetition_penalty, 0.01, 100.),
            ("presence_penalty", self.presence_penalty, -100., 100.),
        ];
        for (name, value, low, high) in ranges {
            let low_text = if low == f64::MIN_POSITIVE {
                "more than 0".into()
            } else {
                format!("{low}")
            };
            ensure!(
                value.is_finite() && (low..=high).contains(&value),
                "{name} {value}: expected {low_text} to {high}"
            );
        }
        Ok(())
    }

    /// The target's distribution after one row of logits.
    ///
    /// # Errors
    /// On a row without entries or with NaN, and on one that leaves no finite logit.
    pub fn distribution(&self, logits: &[f32], seen: &Seen) -> Result<Distribution> {
        ensure!(!logits.is_empty(), "a row of logits without entries");
        ensure!(
            !logits.iter().any(|l| l.is_nan()),
            "a row of logits holds a NaN: the target's forward pass is broken"
        );
        let mut logits = logits.to_vec();
        self.penalise(&mut logits, seen);
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        ensure!(best.is_finite(), "a row of logits whose largest is {best}");
        if self.is_greedy() {
            let id = logits.iter().position(|&l| l >= best).unwrap_or(0);
            return Ok(Distribution {
                ids: vec![id as u32],
                p: vec![1.],
            });
        }
        let weight = |l: f32| (f64::from(l - best) / self.temperature).exp();
        let mut kept: Vec<(u32, f64)> = logits
            .iter()
            .enumerate()
            .map(|(id, &l)| (id as u32, weight(l)))
            .collect();
        if self.top_k > 0 && self.top_k < kept.len() {
            let mut weights: Vec<f64> = kept.iter().map(|entry| entry.1).collect();
            let (_, threshold, _) = weights.select_nth_unstable_by(self.top_k - 1, |a, b| b.total_cmp(a));
            let threshold = *threshold;
            kept.retain(|entry| entry.1 >= threshold);
        }
        if self.top_p < 1. {
            kept.sort_by(|a, b| b.1.total_cmp(&a.1));
            let goal = self.top_p * kept.iter().map(|entry| entry.1).sum::<f64>();
            let mut mass = 0.;
            let enough = kept.iter().position(|entry| {
                mass += entry.1;
                mass >= goal
            });
            kept.truncate(enough.map_or(kept.len(), |last| last + 1));
            kept.sort_by_key(|entry| entry.0);
        }
        // weights are relative to the most likely token's, which every filter before kept
        kept.retain(|entry| entry.1 > 0. && entry.1 >= self.min_p);
        let total: f64 = kept.iter().map(|entry| entry.1).sum();
        let (ids, p) = kept.into_iter().map(|(id, weight)| (id, weight / total)).unzip();
        Ok(Distribution { ids, p })
    }

    fn penalise(&self, logits: &mut [f32], seen: &Seen) {
        if !self.has_penalties() {
            return;
        }
        for (&id, &in_text) in &seen.0 {
            let Some(logit) = logits.get_mut(id as usize) else {
                continue;
            };
            let mut value = f64::from(*logit);
            if value > 0. {
                value /= self.repetition_penalty;
            } else {
                value *= self.repetition_penalty;
            }
            if in_text {
                value -= self.presence_penalty;
            }
            *logit = value as f32;
        }
    }
}

impl fmt::Display for SamplingConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_greedy() {
            write!(f, "greedy")?;
        } else {
            write!(f, "T {}", self.temperature)?;
            if self.top_k > 0 {
                write!(f, ", top-k {}", self.top_k)?;
            }
            if self.top_p < 1. {
                write!(f, ", top-p {}", self.top_p)?;
            }
            if self.min_p > 0. {
                write!(f, ", min-p {}", self.min_p)?;
            }
        }
        if self.repetition_penalty != 1. {
            write!(f, ", repetition penalty {}", self.repetition_penalty)?;
        }
        if self.presence_penalty != 0. {
            write!(f, ", presence penalty {}", self.presence_penalty)?;
        }
        Ok(())
    }
}

/// Tokens that penalties know of: id -> whether it occurs in the text (else only in the prompt).
#[derive(Debug, Clone, Default)]
pub struct Seen(HashMap<u32, bool>);

impl Seen {
    /// Notes tokens of the prompt.
    pub fn prompt(&mut self, tokens: &[u32]) {
        for &token in tokens {
            self.0.entry(token).or_insert(false);
        }
    }

    /// Notes a token of the text.
    pub fn text(&mut self, token: u32) {
        self.0.insert(token, true);
    }
}

/// Probabilities of the tokens that may be chosen, ids ascending, summing to 1.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    ids: Vec<u32>,
    p: Vec<f64>,
}

impl Distribution {
    /// Probability of one token.
    pub fn of(&self, token: u32) -> f64 {
        self.ids.binary_search(&token).map_or(0., |at| self.p[at])
    }

    /// The token at `u` in [0, 1) of the cumulative distribution.
    pub fn draw(&self, u: f64) -> u32 {
        pick(&self.ids, &self.p, u * self.p.iter().sum::<f64>())
    }

    /// What remains to be chosen after a draft from `q` was rejected: max(p - q, 0), drawn at `u` in [0, 1). `q` holds
    /// (token, probability) pairs; a token listed twice counts with the sum.
    pub fn draw_residual(&self, q: &[(u32, f64)], u: f64) -> u32 {
        let mut rest = self.p.clone();
        for &(token, q) in q {
            if let Ok(at) = self.ids.binary_search(&token) {
                rest[at] -= q;
            }
        }
        for p in &mut rest {
            *p = p.max(0.);
        }
        let total: f64 = rest.iter().sum();
        // p = q to the last bit: whatever is drawn now had probability zero to be needed
        if total <= 0. {
            self.draw(u)
        } else {
            pick(&self.ids, &rest, u * total)
        }
    }

    /// Tokens and probabilities.
    pub fn entries(&self) -> impl Iterator<Item = (u32, f64)> + '_ {
        self.ids.iter().copied().zip(self.p.iter().copied())
    }
}

fn pick(ids: &[u32], weights: &[f64], mut left: f64) -> u32 {
    let mut last = 0;
    for (&id, &weight) in ids.iter().zip(weights) {
        if weight > 0. {
            if left < weight {
                return id;
            }
            left -= weight;
            last = id;
        }
    }
    // rounding may leave a remainder behind the last entry that can be drawn
    last
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, -2.0, 3.0, 0.5];

    fn at(config: SamplingConfig) -> Vec<f64> {
        let distribution = config.distribution(&LOGITS, &Seen::default()).unwrap();
        (0..5).map(|id| distribution.of(id)).collect()
    }

    fn sampled() -> SamplingConfig {
        SamplingConfig {
            temperature: 1.,
            ..SamplingConfig::default()
        }
    }

    #[test]
    fn greedy_takes_the_first_of_equal_maxima() {
        assert_eq!(at(SamplingConfig::default()), [0., 1., 0., 0., 0.]);
    }

    #[test]
    fn each_filter_keeps_what_its_definition_says() {
        let kept = |config| at(config).iter().map(|&p| p > 0.).collect::<Vec<_>>();
        assert_eq!(kept(sampled()), [true; 5]);
        // the third best stands alone; the first two are tied and both stay for k = 1
        assert_eq!(
            kept(SamplingConfig { top_k: 1, ..sampled() }),
            [false, true, false, true, false]
        );
        assert_eq!(
            kept(SamplingConfig { top_k: 3, ..sampled() }),
            [true, true, false, true, false]
        );
        // e^3 is 0.43 of the mass: one is too little for 0.5, two reach 0.86
        assert_eq!(
            kept(SamplingConfig {
                top_p: 0.5,
                ..sampled()
            }),
            [false, true, false, true, false]
        );
        assert_eq!(
            kept(SamplingConfig {
                top_p: 0.4,
                ..sampled()
            }),
            [false, true, false, false, false]
        );
        // e^-2 = 0.135 of the best one's probability
        assert_eq!(
            kept(SamplingConfig {
                min_p: 0.14,
                ..sampled()
            }),
            [false, true, false, true, false]
        );
        assert_eq!(
            kept(SamplingConfig {
                min_p: 0.13,
                ..sampled()
            }),
            [true, true, false, true, false]
        );
    }

    #[test]
    fn penalties_know_prompt_and_text_apart() {
        let mut seen = Seen::default();
        seen.prompt(&[1, 2]);
        seen.text(3);
        let ratio = |config: SamplingConfig, a: u32, b: u32| {
            let d = config.distribution(&LOGITS, &seen).unwrap();
            (d.of(a) / d.of(b)).ln()
        };
        let repetition = SamplingConfig {
            repetition_penalty: 2.,
            ..sampled()
        };
        assert!((ratio(repetition, 1, 0) - 0.5).abs() < 1e-6, "3 / 2 - 1");
        assert!((ratio(repetition, 2, 0) + 5.).abs() < 1e-6, "-2 * 2 - 1");
        let presence = SamplingConfig {
            presence_penalty: 1.5,
            ..sampled()
        };
        assert!(
            (ratio(presence, 3, 1) + 1.5).abs() < 1e-6,
            "only what was written is penalised"
        );
    }

    #[test]
    fn values_out_of_range_and_broken_rows_are_refused_by_name() {
        for (config, word) in [
            (
                SamplingConfig {
                    temperature: -1.,
                    ..sampled()
                },
                "temperature -1",
            ),
            (
                SamplingConfig { top_p: 0., ..sampled() },
                "top_p 0: expected more than 0",
            ),
            (
                SamplingConfig {
                    min_p: f64::NAN,
                    ..sampled()
                },
                "min_p NaN",
            ),
            (
                SamplingConfig {
                    repetition_penalty: 0.,
                    ..sampled()
                },
                "repetition_penalty 0",
            ),
        ] {
            let error = config.check().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        for row in [&[][..], &[1., f32::NAN], &[f32::NEG_INFINITY; 2], &[f32::INFINITY, 0.]] {
            assert!(sampled().distribution(row, &Seen::default()).is_err(), "{row:?}");
        }
    }

    proptest! {
        #[test]
        fn a_distribution_sums_to_one_and_never_draws_what_it_excludes(
            logits in prop::collection::vec(-20.0f32..20.0, 1..40), temperature in 0.05f64..4.0, top_k in 0usize..50,
            top_p in 0.01f64..1.0, min_p in 0.0f64..1.0, u in 0.0f64..1.0, q in 0.0f64..1.0,
        ) {
            let config = SamplingConfig { temperature, top_k, top_p, min_p, ..SamplingConfig::default() };
            let d = config.distribution(&logits, &Seen::default()).unwrap();
            let sum: f64 = d.entries().map(|entry| entry.1).sum();
            prop_assert!((sum - 1.).abs() < 1e-9);
            prop_assert!(d.of(d.draw(u)) > 0.);
            let first = d.draw(0.);
            let rest = d.draw_residual(&[(first, q)], u);
            prop_assert!(d.of(rest) > 0.);
            prop_assert!(rest != first || d.of(first) > q || d.entries().count() == 1);
        }
    }
}
