//! Learning rate and selector weight as pure functions of the step.
//!
//! With S steps and W = round(ratio * S) warm-up steps, step s = 0..S-1 uses
//! `lr * (s + 1) / W` while s < W, and then, for the cosine,
//! `lr * (m + (1 - m) * (1 + cos(pi * (s - W) / (S - W))) / 2)` with m the final share. No step has rate 0
//! unless it lies behind the end.

use crate::config::{Schedule, TrainSection};

/// Learning rate of step `step` (0-based) of `steps`.
pub fn learning_rate(train: &TrainSection, step: u64, steps: u64) -> f64 {
    let warmup = warmup_steps(train, steps);
    if step < warmup {
        return train.lr * (step + 1) as f64 / warmup as f64;
    }
    match train.schedule {
        Schedule::Constant => train.lr,
        Schedule::Cosine => {
            let progress = ((step - warmup) as f64 / (steps - warmup).max(1) as f64).min(1.0);
            let shape = f64::midpoint(1.0, (std::f64::consts::PI * progress).cos());
            train.lr * (train.min_lr_ratio + (1.0 - train.min_lr_ratio) * shape)
        }
    }
}

/// Weight of the selector's loss at step `step` (0-based).
pub fn selector_alpha(train: &TrainSection, step: u64) -> f64 {
    if step >= train.selector_ramp_steps {
        return train.selector_alpha;
    }
    train.selector_alpha * (step + 1) as f64 / (train.selector_ramp_steps + 1) as f64
}

fn warmup_steps(train: &TrainSection, steps: u64) -> u64 {
    ((train.warmup_ratio * steps as f64).round() as u64).min(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section() -> TrainSection {
        TrainSection {
            lr: 1.0,
            warmup_ratio: 0.1,
            ..TrainSection::default()
        }
    }

    fn assert_near(value: f64, expected: f64) {
        assert!((value - expected).abs() < 1e-12, "{value} instead of {expected}");
    }

    #[test]
    fn the_rate_rises_to_its_peak_then_falls_by_a_cosine() {
        let train = section();
        assert_near(learning_rate(&train, 0, 100), 0.1);
        assert_near(learning_rate(&train, 9, 100), 1.0);
        assert_near(learning_rate(&train, 10, 100), 1.0);
        assert_near(learning_rate(&train, 55, 100), 0.5);
        assert!(learning_rate(&train, 99, 100) > 0.0);
        assert_near(learning_rate(&train, 100, 100), 0.0);
    }

    #[test]
    fn the_cosine_ends_at_the_stated_share() {
        let train = TrainSection {
            min_lr_ratio: 0.1,
            ..section()
        };
        assert_near(learning_rate(&train, 100, 100), 0.1);
        let constant = TrainSection {
            schedule: Schedule::Constant,
            ..section()
        };
        assert_near(learning_rate(&constant, 99, 100), 1.0);
    }

    #[test]
    fn degenerate_lengths_stay_finite() {
        for steps in 1..4 {
            for warmup_ratio in [0.0, 0.5, 1.0] {
                let train = TrainSection {
                    warmup_ratio,
                    ..section()
                };
                for step in 0..steps {
                    let rate = learning_rate(&train, step, steps);
                    assert!(rate.is_finite() && rate > 0.0 && rate <= 1.0, "{rate}");
                }
            }
        }
    }

    #[test]
    fn the_selector_weight_ramps_linearly() {
        let train = TrainSection {
            selector_alpha: 0.5,
            selector_ramp_steps: 4,
            ..section()
        };
        let values: Vec<f64> = (0..6).map(|step| selector_alpha(&train, step)).collect();
        for (value, expected) in values.iter().zip([0.1, 0.2, 0.3, 0.4, 0.5, 0.5]) {
            assert_near(*value, expected);
        }
        assert_near(selector_alpha(&section(), 0), 1.0);
    }
}
