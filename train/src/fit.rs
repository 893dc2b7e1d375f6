//! The training loop: batches in order, one optimizer step each, states saved on the way.
//!
//! The loop knows neither drafter nor data: [`Job`] hands it a batch for (epoch, position) and the gradients of a
//! batch, both pure functions, which is why a resumed run repeats an uninterrupted one bit for bit. The next batch
//! is assembled in a second thread while the step runs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use candle_core::Var;

use crate::checkpoint::{self, Best, Progress};
use crate::config::RunConfig;
use crate::durable;
use crate::gradient::Gradients;
use crate::loss::StepSums;
use crate::metrics::{StepRecord, StepSetting, Validation};
use crate::optim::AdamW;
use crate::progress::{self, Display, Stage};
use crate::room;
use crate::schedule;
use crate::signals::StopFlag;
use crate::tracking::Tracking;

/// Batches assembled ahead of the step.
const AHEAD: usize = 2;

/// Sums and normalised gradients of a batch under a selector weight.
pub type StepFunction<'j, B> = dyn Fn(&B, f64) -> Result<(StepSums, Gradients)> + 'j;

/// What is trained, and how its parts are had.
pub struct Job<'j, B> {
    /// The resolved run file.
    pub config: &'j RunConfig,
    /// Steps of the whole run.
    pub steps: u64,
    /// The trained parameters.
    pub masters: &'j BTreeMap<String, Var>,
    /// The batch of the step at (epoch, position); none behind the epoch's last.
    pub batch: &'j (dyn Fn(u64, u64) -> Result<Option<B>> + Sync),
    /// Sums and normalised gradients of a batch under a selector weight.
    pub gradients: &'j StepFunction<'j, B>,
    /// Replays the held-out responses with the present parameters, after so many steps; none without any.
    pub validate: &'j dyn Fn(u64) -> Result<Option<Validation>>,
    /// Writes the published drafter folder of the present parameters.
    pub publish: &'j dyn Fn(&Path, &Progress) -> Result<()>,
    /// Bytes that a checkpoint takes on disk.
    pub checkpoint_bytes: u64,
}

/// How the loop ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Ending {
    /// All steps are made; the folder holds the last state.
    Done(Progress, PathBuf),
    /// A signal came; the state is saved in the folder. Holds the exit code.
    Stopped(i32, PathBuf),
}

/// Trains from `progress` to the end or to a signal.
pub fn fit<B: Send>(
    job: &Job<'_, B>,
    optimizer: &mut AdamW,
    progress: Progress,
    display: Display,
    stop: &StopFlag,
) -> Result<Ending> {
    let _saves_first = stop.defer();
    let run_dir = &job.config.run_dir;
    durable::sweep(run_dir)?;
    let mut tracking = Tracking::open(job.config, progress.step)?;
    if let Some(missing) = tracking.missing(progress.step) {
        progress::warn(&missing);
    }
    tracking.say(&format!("training from step {} to {}", progress.step, job.steps))?;
    let stage = Stage::start(display, "train", progress.step, job.steps);
    let batch = job.batch;
    let (epoch, position, left) = (
        progress.epoch,
        progress.position,
        job.steps.saturating_sub(progress.step),
    );
    let mut run = Run {
        job,
        optimizer,
        progress,
        tracking,
        stage,
        saved: None,
    };
    let ending = std::thread::scope(|scope| {
        let (sender, batches) = mpsc::sync_channel(AHEAD);
        scope.spawn(move || assemble(batch, epoch, position, left, &sender));
        train(&mut run, &batches, stop)
    })?;
    run.say_ending(&ending)?;
    Ok(ending)
}

/// A run on its way.
struct Run<'r, 'j, B> {
    job: &'r Job<'j, B>,
    optimizer: &'r mut AdamW,
    progress: Progress,
    tracking: Tracking,
    stage: Stage,
    /// The checkpoint of the present step, if it has one.
    saved: Option<PathBuf>,
}

/// A batch with its place.
struct Placed<B> {
    epoch: u64,
    position: u64,
    batch: B,
}

fn train<B>(run: &mut Run<'_, '_, B>, batches: &mpsc::Receiver<Result<Placed<B>>>, stop: &StopFlag) -> Result<Ending> {
    let (job, train) = (run.job, &run.job.config.train);
    while run.progress.step < job.steps {
        if let Some(code) = stop.exit_code() {
            return Ok(Ending::Stopped(code, run.save()?));
        }
        let placed = match batches.recv().context("the thread that assembles batches ended")? {
            Ok(placed) => placed,
            // a batch of online taps was given up because of a signal: the next look at the flag saves and leaves
            Err(_) if stop.exit_code().is_some() => continue,
            Err(error) => return Err(error),
        };
        let started = Instant::now();

        // ---- one training step ---------------------------------------------------------------------------------
        let step = run.progress.step;
        let lr = schedule::learning_rate(train, step, job.steps);
        let alpha = schedule::selector_alpha(train, step);
        let (sums, gradients) = (job.gradients)(&placed.batch, alpha).with_context(|| format!("step {}", step + 1))?;
        let update = run
            .optimizer
            .step(job.masters, &gradients, lr)
            .with_context(|| format!("step {}", step + 1))?;
        // ---------------------------------------------------------------------------------------------------------

        run.progress.step += 1;
        run.progress.epoch = placed.epoch;
        run.progress.position = placed.position + 1;
        run.saved = None;
        run.record(&sums, update, lr, alpha, started.elapsed())?;
        run.validate_and_save()?;
    }
    Ok(Ending::Done(run.progress.clone(), run.save()?))
}

impl<B> Run<'_, '_, B> {
    fn record(
        &mut self,
        sums: &StepSums,
        update: crate::optim::Update,
        lr: f64,
        selector_alpha: f64,
        elapsed: Duration,
    ) -> Result<()> {
        let setting = StepSetting {
            step: self.progress.step,
            epoch: self.progress.epoch,
            lr,
            selector_alpha,
            elapsed,
        };
        let record = StepRecord::new(setting, sums, update);
        self.tracking.step(&record)?;
        self.stage.set(record.step, || summary(&record));
        Ok(())
    }

    /// What is due after a step: a validation, then a checkpoint if one is due or the state is the best so far.
    fn validate_and_save(&mut self) -> Result<()> {
        let (config, step) = (self.job.config, self.progress.step);
        let last = step == self.job.steps;
        let mut best = false;
        if last || due(step, config.validate.every) {
            best = self.validate()?;
        }
        self.tracking.commit()?;
        if last || due(step, config.checkpoint.every) || (best && config.checkpoint.keep_best) {
            self.save()?;
        }
        Ok(())
    }

    /// Validates the present state; whether it is the best so far.
    fn validate(&mut self) -> Result<bool> {
        let step = self.progress.step;
        let Some(validation) = (self.job.validate)(step).with_context(|| format!("validation after step {step}"))?
        else {
            return Ok(false);
        };
        self.tracking.validation(&validation)?;
        let acceptance_length = validation.acceptance_length;
        ensure!(
            acceptance_length.is_finite(),
            "validation after step {step}: acceptance length is not finite"
        );
        let best = self
            .progress
            .best
            .is_none_or(|best| acceptance_length > best.acceptance_length);
        if best {
            self.progress.best = Some(Best {
                step,
                acceptance_length,
            });
        }
        let text = format!(
            "step {step}: replay acceptance length {acceptance_length:.3} over {} responses{}",
            validation.samples,
            if best { ", the best so far" } else { "" }
        );
        self.stage.note(&text);
        self.tracking.remark(text);
        Ok(best)
    }

    fn say_ending(&mut self, ending: &Ending) -> Result<()> {
        let (code, what) = match ending {
            Ending::Done(..) => (0, "done"),
            Ending::Stopped(code, _) => (*code, "stopped"),
        };
        let step = self.progress.step;
        self.tracking
            .say(&format!("{what} after step {step} of {}", self.job.steps))?;
        self.tracking.finish(code)
    }

    fn save(&mut self) -> Result<PathBuf> {
        if let Some(folder) = &self.saved {
            return Ok(folder.clone());
        }
        let (run_dir, checkpoints) = (&self.job.config.run_dir, &self.job.config.checkpoint);
        let what = format!("checkpoint of step {}", self.progress.step);
        room::check_disk(&what, run_dir, self.job.checkpoint_bytes)?;
        let folder = checkpoint::write(
            run_dir,
            &self.progress,
            self.job.masters,
            self.optimizer,
            self.job.publish,
        )?;
        let best = self.progress.best.filter(|_| checkpoints.keep_best);
        if let Some(best) = best {
            let text = serde_json::to_string_pretty(&best)? + "\n";
            durable::replace_file(&run_dir.join("best.json"), text.as_bytes())?;
        }
        checkpoint::prune(run_dir, checkpoints.keep_last, best.map(|best| best.step))?;
        self.saved = Some(folder.clone());
        Ok(folder)
    }
}

/// Sends the batches of `steps` steps in order, from (epoch, position) on.
fn assemble<B: Send>(
    batch: &(dyn Fn(u64, u64) -> Result<Option<B>> + Sync),
    mut epoch: u64,
    mut position: u64,
    steps: u64,
    sender: &mpsc::SyncSender<Result<Placed<B>>>,
) {
    for _ in 0..steps {
        let mut made = batch(epoch, position);
        if matches!(made, Ok(None)) {
            (epoch, position) = (epoch + 1, 0);
            made = batch(epoch, position);
        }
        let placed = made
            .and_then(|made| made.with_context(|| format!("epoch {epoch} has no step")))
            .map(|batch| Placed { epoch, position, batch })
            .with_context(|| format!("batch {position} of epoch {epoch}"));
        let failed = placed.is_err();
        // the other end is gone after a signal or a failed step
        if sender.send(placed).is_err() || failed {
            return;
        }
        position += 1;
    }
}

fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

fn summary(record: &StepRecord) -> String {
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let first = record.slot_accuracy.first().copied().flatten().map(percent);
    let first = first.map(|share| format!(" slot 1 {share}")).unwrap_or_default();
    let recall = record.recall.map(percent);
    let recall = recall.map(|share| format!(" recall {share}")).unwrap_or_default();
    format!(
        "loss {:.3}{first}{recall} |g| {:.2} {:.0} slots/s",
        record.base_loss, record.grad_norm, record.slots_per_s
    )
}
