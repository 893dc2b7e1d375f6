//! How far to draft: a fixed number of tokens, or the number that pays most by what was measured so far.
//!
//! A round that drafts w tokens takes c(w) seconds and yields 1 + a(1) + .. + a(w) tokens, a(i) being the chance that
//! drafts 1 to i all stand. [`AutoWidth`] measures both while it decodes and takes the w with the most tokens a second;
//! w = 0 is plain decoding, chosen when no draft pays. Easy and hard stretches of a text alternate within a few rounds, so
//! the last rounds say more than the average: they shift what the slots' own history says. The text does not depend on it:
//! every width is lossless. (The idea is the reference system's; its cost is a straight line in w, ours is what each width
//! took.)

use crate::speculate::Round;

/// Times of one width that are remembered; their median counts, so that one interruption does not.
const MEMORY: usize = 9;
/// Times of a width that are taken before its cost is believed.
const TRIALS: usize = 2;
/// Rounds before any is timed: the first ones find caches cold, and a width tried then would look dear for good.
const WARM_UP: usize = 16;
/// Rounds after which a width that was not used is timed again, if drafting pays at all.
const STALE: usize = 300;
/// What a round's outcome keeps of its weight in a slot's history with each later round: the last hundred rounds count.
const FADE: f64 = 0.99;
/// The same for all slots together: about the last three rounds count. On the demo's 8,700 rounds, costs as measured on two
/// Zen 5 cores, 0.6 was worth 24 % over 0.99, and anything from 0.5 to 0.8 at least 20 %.
const RECENT_FADE: f64 = 0.6;
/// How many drafts a slot's history weighs against the recent ones.
const HISTORY: f64 = 2.;
/// Plain steps before drafting is tried again for a round.
const FIRST_REST: usize = 4;
/// Tries in vain after which the next doubles the rest, up to [`LONGEST_REST`].
const PATIENCE: u32 = 3;
/// See [`PATIENCE`].
const LONGEST_REST: usize = 768;
/// Drafts of such a try, at least: one more than the fewest, so that a stretch of right drafts shows at once.
const TRY: usize = 2;

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
    /// Rounds so far, and which of them last timed each width.
    rounds: usize,
    timed: Vec<usize>,
    /// Faded rounds that drafted i and had drafts 1..i-1 stand; and those of them whose draft i stood. i = 1..=most.
    reached: Vec<f64>,
    stood: Vec<f64>,
    /// The same of all slots, of the last rounds: judged, and stood.
    recent: (f64, f64),
    width: usize,
    /// Plain steps since drafting was tried.
    since: usize,
    /// Tries in vain since drafting last paid.
    vain: u32,
}

impl AutoWidth {
    /// Chooses among 0..=`most` drafted tokens (`most` >= 1); begins with the widest.
    pub fn new(most: usize) -> Self {
        Self {
            times: vec![Vec::new(); most + 1],
            rounds: 0,
            timed: vec![0; most + 1],
            reached: vec![0.; most],
            stood: vec![0.; most],
            recent: (0., 0.),
            width: most,
            since: 0,
            vain: 0,
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
            chance *= (self.recent.1 + HISTORY * last) / (self.recent.0 + HISTORY);
            tokens += chance;
        }
        Some(tokens / self.cost(width)?)
    }

    fn learn(&mut self, round: &Round, seconds: f64) {
        self.rounds += 1;
        if self.rounds > WARM_UP {
            // a block narrowed by the budget is still a block of that width
            let times = &mut self.times[round.drafted];
            if times.len() == MEMORY {
                times.remove(0);
            }
            times.push(seconds);
            self.timed[round.drafted] = self.rounds;
        }
        if round.drafted > 0 {
            self.recent = (self.recent.0 * RECENT_FADE, self.recent.1 * RECENT_FADE);
            for value in self.reached.iter_mut().chain(&mut self.stood) {
                *value *= FADE;
            }
            for i in 0..round.drafted.min(round.accepted + 1) {
                let stood = f64::from(u8::from(i < round.accepted));
                self.reached[i] += 1.;
                self.stood[i] += stood;
                self.recent = (self.recent.0 + 1., self.recent.1 + stood);
            }
        }
        self.width = self.choose(round.drafted);
    }

    /// The next width after a round of `drafted`.
    fn choose(&mut self, drafted: usize) -> usize {
        if let Some(untried) = self.schedule().find(|&w| self.times[w].len() < TRIALS) {
            return untried;
        }
        let promises: Vec<f64> = (0..=self.most()).map(|w| self.promise(w).unwrap_or(0.)).collect();
        let best = |from: usize| {
            (from..promises.len()).fold(from, |best, w| if promises[w] > promises[best] { w } else { best })
        };
        let width = best(0);
        if width > 0 {
            (self.since, self.vain) = (0, 0);
            let stale = self.schedule().find(|&w| self.rounds - self.timed[w] > STALE);
            return stale.unwrap_or(width);
        }
        if drafted > 0 {
            (self.since, self.vain) = (0, self.vain + 1);
        }
        self.since += 1;
        let doublings = self.vain.saturating_sub(PATIENCE).min(16);
        if self.since > (FIRST_REST << doublings).min(LONGEST_REST) {
            return best(TRY.min(self.most()));
        }
        0
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

    /// Tokens a second of `rounds` rounds through stretches of 12 rounds, drafts right with chance 0.97 and 0.05 in turn.
    fn through_stretches(mut next: impl FnMut() -> usize, mut learn: impl FnMut(&Round, f64), rounds: usize) -> f64 {
        let (mut draws, mut tokens, mut seconds) = (0, 0, 0.);
        for n in 0..rounds {
            let chance = if n / 12 % 2 == 0 { 0.97 } else { 0.05 };
            let drafted = next();
            let mut right = || {
                draws += 1;
                crate::random::below(11, draws, 1000) < (chance * 1000.) as usize
            };
            let accepted = (0..drafted).take_while(|_| right()).count();
            let cost = if drafted == 0 { 1. } else { 1.5 + 0.25 * drafted as f64 };
            let (anchor, emitted, truncated) = (0, accepted + 1, false);
            learn(
                &Round {
                    anchor,
                    drafted,
                    accepted,
                    emitted,
                    truncated,
                },
                cost,
            );
            tokens += emitted;
            seconds += cost;
        }
        tokens as f64 / seconds
    }

    #[test]
    fn easy_and_hard_stretches_are_followed() {
        let auto = std::cell::RefCell::new(AutoWidth::new(7));
        let rate = through_stretches(
            || auto.borrow().width,
            |round, s| auto.borrow_mut().learn(round, s),
            4800,
        );
        let fixed = (0..=7)
            .map(|w| through_stretches(|| w, |_, _| (), 4800))
            .fold(0., f64::max);
        assert!(rate > 1.1 * fixed, "{rate} against {fixed} of the best fixed width");
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
        assert!(
            widths[200..].iter().filter(|width| **width > 0).count() < 8,
            "{widths:?}"
        );
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
