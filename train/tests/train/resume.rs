//! The loop on a quadratic: resuming, torn checkpoints, keeping, signals. Toy parameters, the real loop.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::{Device, Tensor, Var};
use dflash_train::checkpoint::{self, Progress};
use dflash_train::config::RunConfig;
use dflash_train::config_file;
use dflash_train::fit::{Ending, Job, fit};
use dflash_train::gradient::{Gradient, Gradients};
use dflash_train::loss::StepSums;
use dflash_train::metrics::Validation;
use dflash_train::optim::{AdamW, AdamWSettings};
use dflash_train::progress::Display;
use dflash_train::signals::StopFlag;

pub(crate) const STEPS: u64 = 20;
const STEPS_AN_EPOCH: u64 = 6;

fn config(run_dir: &Path, overrides: &[&str]) -> RunConfig {
    let text = "run_dir = 'x'\n[target]\npath = 't'\n[data]\nprompts = 'p'\n[train]\nsteps = 20\nweight_decay = 0.1\nlr = 0.05\n\
                [checkpoint]\nevery = 5\nkeep_last = 2\n[validate]\nevery = 0\n";
    let mut all = vec![format!("run_dir={}", run_dir.display())];
    all.extend(overrides.iter().map(ToString::to_string));
    config_file::parse(text, &all).unwrap()
}

fn parameters() -> BTreeMap<String, Var> {
    let var = |values: &[f32], shape: &[usize]| {
        Var::from_tensor(&Tensor::from_slice(values, shape, &Device::Cpu).unwrap()).unwrap()
    };
    BTreeMap::from([
        ("a.weight".to_owned(), var(&[0.5, -0.25, 1.5, 0.1, 0.2, -0.7], &[2, 3])),
        ("norm.weight".to_owned(), var(&[1.0, 1.0, 1.0], &[3])),
    ])
}

fn optimizer(vars: &BTreeMap<String, Var>) -> AdamW {
    let settings = AdamWSettings {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        clip: 1.0,
    };
    AdamW::new(settings, vars).unwrap()
}

/// Pulls every value towards a point that depends on the batch only.
fn gradients(vars: &BTreeMap<String, Var>, batch: (u64, u64)) -> Result<(StepSums, Gradients)> {
    let point = (batch.0 * 31 + batch.1 * 7) % 11;
    let mut grads = BTreeMap::new();
    let mut loss = 0.0;
    for (name, var) in vars {
        let difference = (var.as_tensor() - point as f64 / 11.0)?;
        loss += f64::from(difference.sqr()?.sum_all()?.to_scalar::<f32>()?);
        grads.insert(name.clone(), Gradient::Whole((difference * 2.0)?));
    }
    let sums = StepSums {
        base_loss: loss,
        weight: 1.0,
        slot_total: vec![0, 1],
        slot_correct: vec![0, 0],
        context_rows: 1,
        ..StepSums::default()
    };
    Ok((sums, grads))
}

pub(crate) struct Trial {
    vars: BTreeMap<String, Var>,
    optimizer: AdamW,
    pub(crate) config: RunConfig,
    batches: RefCell<Vec<(u64, u64)>>,
    /// Step after which the flag is raised.
    pub(crate) stop_after: Option<u64>,
    pub(crate) validations: Vec<(u64, f64)>,
}

impl Trial {
    pub(crate) fn new(run_dir: &Path, overrides: &[&str]) -> Self {
        let vars = parameters();
        std::fs::create_dir_all(run_dir).unwrap();
        Self {
            optimizer: optimizer(&vars),
            vars,
            config: config(run_dir, overrides),
            batches: RefCell::default(),
            stop_after: None,
            validations: Vec::new(),
        }
    }

    pub(crate) fn start(&self) -> Progress {
        Progress::start("data".into(), checkpoint::contract(&self.config, None).unwrap())
    }

    pub(crate) fn run(&mut self, progress: Progress) -> Result<Ending> {
        let stop = StopFlag::default();
        let made = Cell::new(progress.step);
        let job = Job {
            config: &self.config,
            steps: STEPS,
            masters: &self.vars,
            batch: &|epoch, position| Ok((position < STEPS_AN_EPOCH).then_some((epoch, position))),
            gradients: &|batch, _alpha| {
                self.batches.borrow_mut().push(*batch);
                made.set(made.get() + 1);
                if self.stop_after == Some(made.get()) {
                    stop.raise(15);
                }
                gradients(&self.vars, *batch)
            },
            validate: &|step| {
                let found = self.validations.iter().find(|(at, _)| *at == step);
                Ok(found.map(|&(step, acceptance_length)| Validation {
                    step,
                    acceptance_length,
                    rounds: 1,
                    samples: 1,
                    accept_at_pos: vec![],
                    seconds: 0.0,
                }))
            },
            checkpoint_bytes: 0,
            publish: &|folder, _| Ok(std::fs::write(folder.join("config.json"), "{}")?),
        };
        fit(&job, &mut self.optimizer, progress, Display::Quiet, &stop)
    }

    pub(crate) fn resume(&mut self, folder: &Path) -> Progress {
        let progress = checkpoint::read_progress(folder).unwrap();
        checkpoint::read_state(folder, &progress, &self.vars, &mut self.optimizer).unwrap();
        progress
    }
}

fn file(folder: &Path, name: &str) -> Vec<u8> {
    std::fs::read(folder.join(name)).unwrap()
}

/// `metrics.jsonl` without what time and memory change.
fn metrics(run_dir: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(run_dir.join("metrics.jsonl")).unwrap();
    text.lines()
        .map(|line| {
            let mut record: serde_json::Value = serde_json::from_str(line).unwrap();
            for key in ["seconds", "tokens_per_s", "slots_per_s", "peak_memory"] {
                record.as_object_mut().unwrap().remove(key);
            }
            record
        })
        .collect()
}

pub(crate) fn done(ending: Ending) -> (Progress, PathBuf) {
    match ending {
        Ending::Done(progress, folder) => (progress, folder),
        Ending::Stopped(code, _) => panic!("stopped with {code}"),
    }
}

#[test]
fn twenty_steps_equal_seven_and_thirteen_bit_for_bit() {
    let root = tempfile::tempdir().unwrap();
    let (straight_dir, broken_dir) = (root.path().join("straight"), root.path().join("broken"));
    let mut straight = Trial::new(&straight_dir, &[]);
    let (progress, straight_end) = done(straight.run(straight.start()).unwrap());
    assert_eq!((progress.step, progress.epoch, progress.position), (20, 3, 2));

    let mut first = Trial::new(&broken_dir, &[]);
    first.stop_after = Some(7);
    let ending = first.run(first.start()).unwrap();
    let Ending::Stopped(143, folder) = ending else {
        panic!("expected a stop by SIGTERM, got {ending:?}")
    };
    assert_eq!(folder, broken_dir.join("step-000007"));
    assert_eq!(checkpoint::latest(&broken_dir).unwrap(), Some(folder.clone()));

    let mut second = Trial::new(&broken_dir, &[]);
    let progress = second.resume(&folder);
    let (_, broken_end) = done(second.run(progress).unwrap());
    for name in [
        "state/masters.safetensors",
        "state/adamw.safetensors",
        "state/progress.json",
    ] {
        assert_eq!(file(&straight_end, name), file(&broken_end, name), "{name} differs");
    }
    assert_eq!(metrics(&straight_dir), metrics(&broken_dir));
    assert_eq!(straight.batches.borrow()[7..], *second.batches.borrow());
}

/// Killed between two checkpoints: the steps behind the last one are made again, in memory and in the metrics.
#[test]
fn a_kill_loses_only_the_steps_since_the_last_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let (straight_dir, killed_dir) = (root.path().join("straight"), root.path().join("killed"));
    let mut straight = Trial::new(&straight_dir, &[]);
    done(straight.run(straight.start()).unwrap());
    let mut killed = Trial::new(&killed_dir, &[]);
    done(killed.run(killed.start()).unwrap());
    for step in [15, 20] {
        assert!(checkpoint::step_folder(&killed_dir, step).is_dir());
    }
    let moved = checkpoint::supersede_after(&killed_dir, 15).unwrap();
    assert_eq!(moved, [killed_dir.join("superseded-step-000020")]);
    let mut again = Trial::new(&killed_dir, &[]);
    let progress = again.resume(&checkpoint::latest(&killed_dir).unwrap().unwrap());
    assert_eq!(progress.step, 15);
    done(again.run(progress).unwrap());
    assert_eq!(metrics(&straight_dir), metrics(&killed_dir));
}

#[test]
fn a_half_written_checkpoint_is_ignored_and_swept() {
    let root = tempfile::tempdir().unwrap();
    let mut trial = Trial::new(root.path(), &[]);
    let torn = root.path().join(".step-000099.partial/state");
    std::fs::create_dir_all(&torn).unwrap();
    std::fs::write(torn.join("progress.json"), "{").unwrap();
    assert_eq!(checkpoint::latest(root.path()).unwrap(), None);
    done(trial.run(trial.start()).unwrap());
    assert!(!root.path().join(".step-000099.partial").exists());
    assert_eq!(checkpoint::steps(root.path()).unwrap(), [15, 20]);
}

/// A failed write leaves the older checkpoint of the same step as it was.
#[test]
fn a_failed_write_leaves_no_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let trial = Trial::new(root.path(), &[]);
    let mut progress = trial.start();
    progress.step = 3;
    let fail = |_: &Path, _: &Progress| anyhow::bail!("disk full");
    let error = checkpoint::write(root.path(), &progress, &trial.vars, &trial.optimizer, &fail).unwrap_err();
    assert!(format!("{error:#}").contains("disk full"));
    assert_eq!(checkpoint::steps(root.path()).unwrap(), Vec::<u64>::new());
}

#[test]
fn the_newest_and_the_best_are_kept_and_the_best_is_published() {
    let root = tempfile::tempdir().unwrap();
    let mut trial = Trial::new(root.path(), &["validate.every=4"]);
    trial.validations = vec![(4, 1.5), (8, 2.5), (12, 2.0), (16, 2.4), (20, 2.1)];
    let (progress, _) = done(trial.run(trial.start()).unwrap());
    let best = progress.best.unwrap();
    assert_eq!(best.step, 8);
    assert_eq!(checkpoint::steps(root.path()).unwrap(), [8, 15, 20]);
    let text = std::fs::read_to_string(root.path().join("best.json")).unwrap();
    assert!(text.contains("\"step\": 8"), "{text}");
    let folder = checkpoint::publish_final(root.path(), &checkpoint::step_folder(root.path(), 8)).unwrap();
    let names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["config.json"], "final holds published files only");
}

#[test]
fn a_changed_contract_is_refused_by_name() {
    let root = tempfile::tempdir().unwrap();
    let trial = Trial::new(root.path(), &[]);
    let progress = trial.start();
    for (change, key) in [
        ("seed=1", "seed"),
        ("train.lr=0.5", "train.lr"),
        ("train.steps=21", "train.steps"),
        ("drafter.layers=3", "drafter.layers"),
        ("taps.layers=[1]", "taps.layers"),
        ("data.max_length=9", "data.max_length"),
        ("target.dtype=bf16", "target.dtype"),
    ] {
        let changed = checkpoint::contract(&config(root.path(), &[change]), None).unwrap();
        let error = progress.check_same_run(&changed, "data").unwrap_err().to_string();
        assert!(error.contains(&format!("refused: {key} was")), "{change}: {error}");
    }
    let harmless = config(
        root.path(),
        &[
            "threads=3",
            "checkpoint.every=1",
            "validate.samples=2",
            "evaluate.max_new=9",
            "train.recompute=true",
        ],
    );
    progress
        .check_same_run(&checkpoint::contract(&harmless, None).unwrap(), "data")
        .unwrap();
    let error = progress
        .check_same_run(&progress.contract, "other")
        .unwrap_err()
        .to_string();
    assert!(error.contains("data or taps changed"), "{error}");
}

#[test]
fn a_checkpoint_of_other_parameters_is_refused_by_tensor() {
    let root = tempfile::tempdir().unwrap();
    let trial = Trial::new(root.path(), &[]);
    let progress = trial.start();
    let publish = |_: &Path, _: &Progress| Ok(());
    let folder = checkpoint::write(root.path(), &progress, &trial.vars, &trial.optimizer, &publish).unwrap();
    let mut fewer = parameters();
    fewer.remove("norm.weight");
    let mut adam = optimizer(&fewer);
    let error = checkpoint::read_state(&folder, &progress, &fewer, &mut adam).unwrap_err();
    assert!(
        format!("{error:#}").contains("unexpected tensor norm.weight"),
        "{error:#}"
    );
    let mut more = parameters();
    let extra = Var::from_tensor(&Tensor::zeros(1, candle_core::DType::F32, &Device::Cpu).unwrap()).unwrap();
    more.insert("z".into(), extra);
    let mut adam = optimizer(&more);
    let error = checkpoint::read_state(&folder, &progress, &more, &mut adam).unwrap_err();
    assert!(format!("{error:#}").contains("tensor z is missing"), "{error:#}");
}
