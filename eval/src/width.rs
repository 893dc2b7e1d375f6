//! How far to draft: a fixed number of tokens, or the number that pays most by what was measured so far.
//!
//! A round that drafts w tokens takes c(w) seconds and yields 1 + a(1) + .. + a(w) tokens, a(i) being the chance that
//! drafts 1 to i all stand. [`AutoWidth`] measures both while it decodes and takes the w with the most tokens a second;
//! w = 0 is plain decoding, chosen when no draft pays. The text does not depend on it: every width is lossless. (The idea
//! is the reference system's; its cost is a straight line in w, ours is what each width took.)

use crate::speculate::Round;

/// Times of one width that are remembered; their median counts, so that one interruption does not.
const MEMORY: usize = 9;
/// Times of a width that are taken before its cost is believed.
const TRIALS: usize = 2;
/// What a round's outcome keeps of its weight with each later round: about the last hundred rounds count.
const FADE: f64 = 0.99;
/// Another width must promise this much more than the present one: below it, noise would decide.
const MARGIN: f64 = 1.02;
/// Rounds at a chosen width after which the widest is tried once, to learn about the drafts behind it.
const LOOK_FURTHER: usize = 48;
/// Plain steps before drafting is tried again, doubled after each try in vain up to [`LONGEST_REST`].
const FIRST_REST: usize = 24;
/// See [`FIRST_REST`].
const LONGEST_REST: usize = 768;
/// Draft rounds of such a try.
const PROBE: usize = 4;

/// The width of the next round.
#[derive(Debug, Clone, PartialEq)]
pub enum Width {
    /// Always so many drafted tokens, >= 1.
    Fixed(usize),
    /// What pays most.
    Auto(AutoWidth),
}

impl Width {
    /// The largest width that it may ask for.
    pub fn most(&self) -> usize {
        match self {
            Self::Fixed(width) => *width,
            Self::Auto(auto) => auto.most(),
        }
    }

    /// Tokens to draft next; 0 asks for a plain step.
    pub fn next(&self) -> usize {
        match self {
            Self::Fixed(width) => *width,
            Self::Auto(auto) => auto.width,
        }
    }

    /// Learns from a finished round of `seconds`.
    pub fn learn(&mut self, round: &Round, seconds: f64) {
        if let Self::Auto(auto) = self {
            auto.learn(round, seconds);
        }
    }
}

/// Costs and chances measured while decoding, and the width that follows from them.
#[derive(Debug, Clone, PartialEq)]
pub struct AutoWidth {
    /// Last times of every width 0..=most, seconds.
    times: Vec<Vec<f64>>,
    /// Faded rounds that drafted i and had drafts 1..i-1 stand; and those of them whose draft i stood. i = 1..=most.
    reached: Vec<f64>,
    stood: Vec<f64>,
    width: usize,
    /// Rounds since the widest was tried, or plain steps since drafting was.
    since: usize,
    rest: usize,
    /// Draft rounds left of a try after plain steps.
    probing: usize,
}

impl AutoWidth {
    /// Chooses among 0..=`most` drafted tokens (`most` >= 1); begins with the widest.
    pub fn new(most: usize) -> Self {
        Self {
            times: vec![Vec::new(); most + 1],
            reached: vec![0.; most],
            stood: vec![0.; most],
            width: most,
            since: 0,
            rest: FIRST_REST,
            probing: 0,
        }
    }

    fn most(&self) -> usize {
        self.reached.len()
    }

    /// Median seconds of a round of `width`, between measured neighbours on a straight line; nothing before two widths
    /// were measured.
    pub fn cost(&self, width: usize) -> Option<f64> {
        let median = |w: usize| {
            let mut times = self.times[w].clone();
            times.sort_by(f64::total_cmp);
            (!times.is_empty()).then(|| times[times.len() / 2])
        };
        if let Some(seconds) = median(width) {
            return Some(seconds);
        }
        let below = (0..width).rev().find_map(|w| median(w).map(|seconds| (w, seconds)))?;
        let above = (width + 1..self.times.len()).find_map(|w| median(w).map(|seconds| (w, seconds)))?;
        let part = (width - below.0) as f64 / (above.0 - below.0) as f64;
        Some(below.1 + part * (above.1 - below.1))
    }

    /// Tokens a second that a width promises.
    pub fn promise(&self, width: usize) -> Option<f64> {
        let (mut chance, mut tokens, mut last) = (1., 1., 0.5);
        for i in 0..width {
            // a draft never reached is believed to be like the one before it
            last = (self.stood[i] + last) / (self.reached[i] + 1.);
            chance *= last;
            tokens += chance;
        }
        Some(tokens / self.cost(width)?)
    }

    fn learn(&mut self, round: &Round, seconds: f64) {
        // a block narrowed by the budget is still a block of that width
        let times = &mut self.times[round.drafted];
        if times.len() == MEMORY {
            times.remove(0);
        }
        times.push(seconds);
        if round.drafted > 0 {
            for value in self.reached.iter_mut().chain(&mut self.stood) {
                *value *= FADE;
            }
            for i in 0..round.drafted.min(round.accepted + 1) {
                self.reached[i] += 1.;
                self.stood[i] += f64::from(u8::from(i < round.accepted));
            }
        }
        self.since += 1;
        self.width = self.choose();
    }

    fn choose(&mut self) -> usize {
        if let Some(untried) = self.schedule().find(|&w| self.times[w].len() < TRIALS) {
            return untried;
        }
        let promises: Vec<f64> = (0..=self.most()).map(|w| self.promise(w).unwrap_or(0.)).collect();
        let promise = |w: usize| promises[w];
        let drafting = (1..=self.most()).fold(1, |best, w| if promise(w) > promise(best) { w } else { best });
        if self.probing > 0 {
            self.probing -= 1;
            if self.probing > 0 {
                return self.width.max(1);
            }
        }
        if self.width == 0 {
            if promise(drafting) > promise(0) * MARGIN {
                (self.since, self.rest) = (0, FIRST_REST);
                return drafting;
            }
            if self.since >= self.rest {
                (self.since, self.probing) = (0, PROBE);
                self.rest = (2 * self.rest).min(LONGEST_REST);
                return drafting;
            }
            return 0;
        }
        if promise(0) * MARGIN > promise(drafting) {
            self.since = 0;
            return 0;
        }
        if self.since >= LOOK_FURTHER {
            self.since = 0;
            return self.most();
        }
        if promise(drafting) > promise(self.width) * MARGIN {
            drafting
        } else {
            self.width
        }
    }

    /// Widths worth timing: all of a small block, powers of two of a large one; widest, plain, then between.
    fn schedule(&self) -> impl Iterator<Item = usize> + use<> {
        let most = self.most();
        [most, 0]
            .into_iter()
            .chain((1..most).filter(move |&w| most <= 8 || w.is_power_of_two()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes `rounds` rounds of a drafter whose every draft stands with `chance` (given the ones before) and whose rounds
    /// cost `base + per_draft * w`, plain steps 1; returns the widths used.
    fn simulate(auto: &mut AutoWidth, rounds: usize, chance: f64, base: f64, per_draft: f64, seed: u64) -> Vec<usize> {
        let mut draws = 0;
        let mut right = || {
            draws += 1;
            (crate::random::below(seed, draws, 1 << 20) as f64) < chance * f64::from(1 << 20)
        };
        (0..rounds)
            .map(|_| {
                let drafted = auto.width;
                let accepted = (0..drafted).take_while(|_| right()).count();
                let round = Round {
                    anchor: 0,
                    drafted,
                    accepted,
                    emitted: accepted + 1,
                    truncated: false,
                };
                let seconds = if drafted == 0 {
                    1.
                } else {
                    base + per_draft * drafted as f64
                };
                auto.learn(&round, seconds);
                drafted
            })
            .collect()
    }

    fn most_used(widths: &[usize]) -> usize {
        (0..=16)
            .max_by_key(|w| widths.iter().filter(|width| *width == w).count())
            .unwrap()
    }

    #[test]
    fn a_good_drafter_is_used_in_full_and_a_bad_one_is_left_out() {
        let widths = simulate(&mut AutoWidth::new(7), 400, 0.97, 1.2, 0.05, 1);
        assert_eq!(most_used(&widths[100..]), 7);
        let widths = simulate(&mut AutoWidth::new(7), 400, 0.02, 1.3, 0.05, 2);
        assert_eq!(most_used(&widths[60..]), 0);
        assert!(
            widths[60..].iter().filter(|&&w| w > 0).count() < 60,
            "tries must stay rare"
        );
    }

    #[test]
    fn the_width_is_the_one_that_pays_most() {
        // tokens a second of w drafts at 0.6: (1 + 0.6 + .. + 0.6^w) / (1.1 + 0.25 w), best at w = 2
        let best = (1..=7)
            .max_by(|&a, &b| {
                let rate = |w: i32| (0..=w).map(|i| 0.6f64.powi(i)).sum::<f64>() / (1.1 + 0.25 * f64::from(w));
                rate(a).total_cmp(&rate(b))
            })
            .unwrap();
        let widths = simulate(&mut AutoWidth::new(7), 2000, 0.6, 1.1, 0.25, 3);
        assert!(
            most_used(&widths[200..]).abs_diff(best as usize) <= 1,
            "{} for {best}",
            most_used(&widths[200..])
        );
    }

    #[test]
    fn drafting_comes_back_when_it_pays_again() {
        let mut auto = AutoWidth::new(7);
        let widths = simulate(&mut auto, 300, 0.0, 1.3, 0.05, 4);
        assert_eq!(*widths.last().unwrap(), 0);
        let widths = simulate(&mut auto, 2000, 0.95, 1.3, 0.05, 5);
        assert_eq!(most_used(&widths[1000..]), 7, "{widths:?}");
    }

    #[test]
    fn one_slow_round_changes_no_cost() {
        let mut auto = AutoWidth::new(3);
        simulate(&mut auto, 60, 0.9, 1.1, 0.1, 6);
        let before = auto.cost(3);
        auto.learn(
            &Round {
                anchor: 0,
                drafted: 3,
                accepted: 3,
                emitted: 4,
                truncated: false,
            },
            50.,
        );
        assert_eq!(auto.cost(3), before);
    }
}
