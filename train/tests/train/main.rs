//! What crosses files: the optimizer against PyTorch, resuming, keeping, signals, faults, trackers, and the run files in
//! `configs/`.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod command;
mod faults;
mod golden;
mod leak;
mod optim;
mod resume;
mod run_files;
mod shape;
mod stopping;
mod tracking;
mod warm_resume;
mod warm_start;

use candle_core::{Device, Tensor};
use dflash_model::ops::Compute;
use dflash_model::{Blocks, Codebooks, Drafter, DrafterConfig, Params, TargetHead};
use dflash_train::loss::{LossSettings, StepSums, total_weight};
use dflash_train::optim::{AdamW, AdamWSettings};
use dflash_train::step::gradients;

/// Trains a fresh drafter on batches of blocks and taps, one step each, and returns every step's sums.
/// `rates`: AdamW's beta2 and weight decay.
fn learn(
    config: DrafterConfig,
    compute: Compute,
    recompute: bool,
    head: &TargetHead,
    rates: (f64, f64),
    batches: impl Iterator<Item = (Blocks, Tensor)>,
) -> Vec<StepSums> {
    let params = Params::init(&config, Codebooks::Factored, 3, &Device::Cpu).unwrap();
    let mut drafter = Drafter::computing(config, &params, compute).unwrap();
    if recompute {
        drafter = drafter.recomputing();
    }
    let settings = AdamWSettings {
        beta1: 0.9,
        beta2: rates.0,
        eps: 1e-8,
        weight_decay: rates.1,
        clip: 1.0,
    };
    let mut optimizer = AdamW::new(settings, params.vars()).unwrap();
    let loss = LossSettings {
        gamma: 4.0,
        selector_alpha: 1.0,
        inject_gold: false,
        selector_detached: false,
    };
    batches
        .map(|(blocks, taps)| {
            let denominator = total_weight(&blocks, loss.gamma);
            let (sums, grads) = gradients(&drafter, &params, head, &blocks, &taps, loss, denominator)
                .unwrap()
                .unwrap();
            optimizer.step(params.vars(), &grads, 5e-3).unwrap();
            sums
        })
        .collect()
}
