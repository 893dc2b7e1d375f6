//! The train stage: variables, optimizer and source joined into the loop's [`Job`], fresh, warm or resumed.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use candle_core::DType;
use dflash_data::batch::Batch;
use dflash_model::{BoundDrafter, Codebooks, Drafter, Params, TargetHead, with_threads_awake};

use crate::checkpoint::{self, Progress};
use crate::cli::Resume;
use crate::config::{CodebookKind, TrainSection};
use crate::done::whole_drafter;
use crate::failure::{Blame, Failure};
use crate::fit::{Ending, Job, fit};
use crate::gradient::{Gradient, Gradients};
use crate::loss::{LossSettings, StepSums, total_weight};
use crate::materials::Materials;
use crate::optim::{AdamW, AdamWSettings};
use crate::progress::Display;
use crate::publish::Publisher;
use crate::room::{self, Sizes};
use crate::signals::StopFlag;
use crate::source::Source;
use crate::step;
use crate::{validate, warm_start};

/// Trains to the last step or a signal, and publishes `final` when done.
///
/// # Errors
/// When the checkpoint or the warm-start folder cannot be used, memory or disk is too small, or a step fails.
pub fn train(
    materials: &Materials,
    source: &Source,
    resume: &Resume,
    display: Display,
    stop: &StopFlag,
) -> Result<Ending, Failure> {
    let config = materials.config();
    let sizes = Sizes::of(&materials.resolved);
    check_room(materials, sizes, source.order.total_steps()).work()?;
    let contract = checkpoint::contract(config, materials.start.as_ref()).work()?;
    let resumed = resume_from(&config.run_dir, resume).input()?;
    let params = parameters(materials, resumed.is_none())?;
    let mut optimizer = AdamW::new(settings(&config.train), params.vars()).work()?;
    let progress = match resumed {
        None => Progress::start(source.identity.clone(), contract),
        Some(folder) => {
            let progress = checkpoint::read_progress(&folder).input()?;
            progress
                .check_same_run(&contract, &source.identity)
                .with_context(|| folder.display().to_string())
                .input()?;
            checkpoint::read_state(&folder, &progress, params.vars(), &mut optimizer).input()?;
            display.note(&format!("resumed from {}", folder.display()));
            for moved in checkpoint::supersede_after(&config.run_dir, progress.step).work()? {
                display.note(&format!("a later checkpoint is now {}", moved.display()));
            }
            progress
        }
    };

    let head = materials.target.head().clone();
    let compute = config.train.compute.compute();
    let mut drafter = Drafter::computing(materials.resolved.drafter.clone(), &params, compute).work()?;
    if config.train.recompute {
        drafter = drafter.recomputing();
    }
    let publisher = Publisher::new(materials).work()?;
    let held_out = &source.validation[..source.validation.len().min(config.validate.samples)];
    let block_size = materials.resolved.drafter.block_size;
    let job = Job {
        config,
        steps: source.order.total_steps(),
        masters: params.vars(),
        batch: &|epoch, position| source.step(epoch, position, config.train.anchors, block_size),
        gradients: &|passes: &Vec<Batch>, selector_alpha| {
            // Inside the pool once a step: from outside, every parallel operation would switch threads twice. And awake: a
            // step is hundreds of them.
            let settings = loss_settings(materials, selector_alpha);
            with_threads_awake(|| step_gradients(&drafter, &params, &head, passes, settings))
        },
        validate: &|step| {
            if held_out.is_empty() {
                return Ok(None);
            }
            let bound = BoundDrafter::new(drafter.clone(), &head)?;
            validate::validate(
                &bound,
                &source.taps,
                held_out,
                &materials.chat.stops,
                step,
                &materials.device,
            )
        },
        publish: &|folder, progress| publisher.write(folder, &params, Some(progress)),
        checkpoint_bytes: sizes.checkpoint(),
    };
    let ending = fit(&job, &mut optimizer, progress, display, stop).work()?;
    if let Ending::Done(progress, last) = &ending {
        let chosen = checkpoint::chosen(config, progress, last.clone());
        whole_drafter(&chosen).context("publishing final").input()?;
        room::check_disk("final", &config.run_dir, sizes.weights()).work()?;
        checkpoint::publish_final(&config.run_dir, &chosen).work()?;
        display.note(&format!("published {} as final", chosen.display()));
    }
    Ok(ending)
}

/// Fresh variables; where they are to be trained on and not to be replaced by a checkpoint's, overwritten by the tensors of
/// the drafter started from, if there is one.
pub fn parameters(materials: &Materials, from_start: bool) -> Result<Params, Failure> {
    let resolved = &materials.resolved;
    let codebooks = match resolved.codebooks {
        CodebookKind::Factored => Codebooks::Factored,
        CodebookKind::Free => Codebooks::Free,
    };
    let params = Params::init(&resolved.drafter, codebooks, resolved.config.seed, &materials.device).work()?;
    let section = &resolved.config.drafter;
    if let (Some(path), true) = (&section.init_from, from_start) {
        let start = warm_start::read(path, materials.target.as_ref(), &section.allow).input()?;
        warm_start::load(&params, &resolved.drafter, &start).input()?;
    }
    Ok(params)
}

/// Sums and normalised gradients of one optimizer step over its passes.
///
/// The base loss is divided by the slot weights of all passes together, so that a step over several packs equals
/// one over a single larger pack. A variable that no pass touched (the selector's, before its first hit) gets zeros.
pub fn step_gradients(
    drafter: &Drafter,
    params: &Params,
    head: &TargetHead,
    passes: &[Batch],
    settings: LossSettings,
) -> Result<(StepSums, Gradients)> {
    let denominator: f64 = passes
        .iter()
        .map(|pass| total_weight(&pass.blocks, settings.gamma))
        .sum();
    let mut sums = StepSums::default();
    let mut total = Gradients::new();
    for pass in passes {
        let taps = pass.taps_tensor(DType::F32, head.embed.device())?;
        let result = step::gradients(drafter, params, head, &pass.blocks, &taps, settings, denominator)?;
        let Some((pass_sums, gradients)) = result else {
            continue;
        };
        sums.add(&pass_sums);
        for (name, gradient) in gradients {
            let sum = match total.remove(&name) {
                Some(before) => gradient.plus(&before)?,
                None => gradient,
            };
            total.insert(name, sum);
        }
    }
    if total.is_empty() {
        bail!("no supervised slot in any of the step's samples");
    }
    for (name, var) in params.vars() {
        if !total.contains_key(name) {
            total.insert(name.clone(), Gradient::zero(name, var)?);
        }
    }
    Ok((sums, total))
}

/// Refuses a training whose masters, moments and gradients do not fit the memory, or its checkpoints the disk.
fn check_room(materials: &Materials, sizes: Sizes, steps: u64) -> Result<()> {
    let config = materials.config();
    if materials.device.is_cpu() {
        room::check_memory("train", sizes.training())?;
    }
    let saves = match config.checkpoint.every {
        0 => 1,
        every => steps.div_ceil(every),
    };
    // one more than is kept: an old one goes when the new one is whole
    let most = saves.min(config.checkpoint.keep_last as u64 + 1);
    let existing = checkpoint::steps(&config.run_dir)?.len() as u64;
    let need = most.saturating_sub(existing).max(1).saturating_mul(sizes.checkpoint());
    room::check_disk("checkpoints", &config.run_dir, need.saturating_add(sizes.weights()))
}

fn resume_from(run_dir: &Path, resume: &Resume) -> Result<Option<PathBuf>> {
    match resume {
        Resume::Auto => checkpoint::latest(run_dir),
        Resume::From(folder) => Ok(Some(folder.clone())),
        Resume::Never => match checkpoint::latest(run_dir)? {
            None => Ok(None),
            Some(folder) => bail!(
                "--resume never: {} exists; choose another run_dir or remove it",
                folder.display()
            ),
        },
    }
}

fn settings(train: &TrainSection) -> AdamWSettings {
    let [beta1, beta2] = train.betas;
    AdamWSettings {
        beta1,
        beta2,
        eps: train.eps,
        weight_decay: train.weight_decay,
        clip: train.clip,
    }
}

fn loss_settings(materials: &Materials, selector_alpha: f64) -> LossSettings {
    let train = &materials.config().train;
    LossSettings {
        gamma: materials.resolved.gamma,
        selector_alpha,
        inject_gold: train.selector_inject_gold,
        selector_detached: train.selector_detached,
    }
}
