//! TensorBoard event files and W&B logs hold what the files of JSON lines hold, whatever happens to the process.

mod gaps;
mod readers;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Output;

use dflash_train::checkpoint;
use dflash_train::fit::Ending;
use readers::{Curves, event_files, wandb_log};

use crate::command::{command, conversations, succeeded};
use crate::resume::{Trial, done};

const BOTH: &str = "tracking=['tensorboard', 'wandb']";

/// A run of the toy with both trackers and two validations.
fn trial(run_dir: &Path) -> Trial {
    let mut trial = Trial::new(run_dir, &[BOTH, "validate.every=4", "wandb.tags=['a', 'b c']"]);
    trial.validations = vec![(8, 2.5), (12, 2.0)];
    trial
}

/// Every number of a file of JSON lines, by name and step.
fn lines(run_dir: &Path, file: &str, prefix: &str) -> Curves {
    let mut curves = Curves::new();
    let text = std::fs::read_to_string(run_dir.join(file)).unwrap();
    for line in text.lines() {
        let record: BTreeMap<String, serde_json::Value> = serde_json::from_str(line).unwrap();
        let step = record["step"].as_u64().unwrap();
        let mut add = |name: String, value: &serde_json::Value| {
            if let Some(number) = value.as_f64() {
                curves.entry(name).or_default().insert(step, number);
            }
        };
        for (key, value) in record.iter().filter(|(key, _)| *key != "step") {
            match value.as_array() {
                Some(list) => (1..)
                    .zip(list)
                    .for_each(|(i, value)| add(format!("{prefix}/{key}/{i:02}"), value)),
                None => add(format!("{prefix}/{key}"), value),
            }
        }
    }
    curves
}

fn jsonl(run_dir: &Path) -> Curves {
    let mut curves = lines(run_dir, "metrics.jsonl", "train");
    curves.extend(lines(run_dir, "validation.jsonl", "validation"));
    curves
}

/// Without what differs from one execution to the next.
fn lasting(mut curves: Curves) -> Curves {
    let own = ["_runtime", "_timestamp"];
    let changing = ["/seconds", "_per_s", "/peak_memory"];
    curves.retain(|name, _| !own.contains(&name.as_str()) && !changing.iter().any(|end| name.ends_with(end)));
    curves
}

fn as_f32(mut curves: Curves) -> Curves {
    for value in curves.values_mut().flat_map(BTreeMap::values_mut) {
        *value = f64::from(*value as f32);
    }
    curves
}

/// What a reader of each tracker sees is the JSON lines, all of them and nothing else.
fn assert_complete(run_dir: &Path) {
    let expected = jsonl(run_dir);
    assert_eq!(event_files(&run_dir.join("tensorboard")).0, as_f32(expected.clone()));
    let mut history = wandb_log(run_dir).history;
    let steps: Vec<u64> = expected["train/loss"].keys().copied().collect();
    let own = ["_step", "_runtime", "_timestamp"].map(|name| history.remove(name).unwrap());
    for curve in &own {
        assert_eq!(curve.keys().copied().collect::<Vec<_>>(), steps);
        assert!(curve.values().is_sorted());
    }
    let own_steps: Vec<String> = own[0].values().map(ToString::to_string).collect();
    assert_eq!(own_steps, steps.iter().map(ToString::to_string).collect::<Vec<_>>());
    assert_eq!(history, expected);
}

#[test]
fn every_number_of_every_step_is_in_both_trackers() {
    let folder = tempfile::tempdir().unwrap();
    let mut trial = trial(folder.path());
    done(trial.run(trial.start()).unwrap());
    let expected = jsonl(folder.path());
    assert_eq!(expected["train/loss"].len(), 20);
    assert_eq!(expected["train/slot_accuracy/01"].len(), 20);
    assert_eq!(
        expected["validation/acceptance_length"],
        BTreeMap::from([(8, 2.5), (12, 2.0)])
    );
    assert_complete(folder.path());

    let (_, texts) = event_files(&folder.path().join("tensorboard"));
    assert!(texts["config"].contains("\nsteps = 20\n"), "{}", texts["config"]);
    let log = wandb_log(folder.path());
    let named = (log.project.as_str(), log.name.as_str());
    assert_eq!(named, ("dflash", folder.path().file_name().unwrap().to_str().unwrap()));
    assert_eq!(log.tags, ["a", "b c"]);
    assert_eq!(log.config["train"]["steps"], 20);
    assert_eq!(log.exit, Some(0));
    assert_eq!(log.summary.get("_step"), Some(&20.0));
    assert_eq!(log.summary.get("validation/acceptance_length"), Some(&2.0));
    assert_eq!(log.summary.get("train/loss"), expected["train/loss"].get(&20));
    assert!(log.summary.contains_key("_wandb.runtime"));
    assert!(
        log.output.contains("step 8: replay acceptance length 2.500"),
        "{}",
        log.output
    );
    let file = |name: &str| std::fs::read_to_string(log.path.with_file_name("files").join(name)).unwrap();
    assert_eq!(file("output.log"), log.output);
    let summary: BTreeMap<String, f64> = serde_json::from_str(&file("wandb-summary.json")).unwrap();
    assert_eq!(summary.get("train/loss"), log.summary.get("train/loss"));
    assert!(file("config.yaml").contains("train:\n    value: {"));
}

/// By default, and where only `jsonl` is named, nothing but the JSON lines is written.
#[test]
fn the_json_lines_are_written_whatever_the_list_says() {
    for setting in ["seed=0", "tracking=[]", "tracking=['jsonl']"] {
        let folder = tempfile::tempdir().unwrap();
        let mut trial = Trial::new(folder.path(), &[setting]);
        done(trial.run(trial.start()).unwrap());
        assert_eq!(jsonl(folder.path())["train/loss"].len(), 20);
        assert!(!folder.path().join("tensorboard").exists() && !folder.path().join("wandb").exists());
    }
}

/// Stopped after step 7, then gone back from step 20 to step 15, as after a kill: one curve, as if undisturbed.
#[test]
fn the_curves_of_a_stopped_and_killed_run_equal_those_of_an_undisturbed_one() {
    let root = tempfile::tempdir().unwrap();
    let (straight_dir, broken_dir) = (root.path().join("straight"), root.path().join("broken"));
    let mut straight = trial(&straight_dir);
    done(straight.run(straight.start()).unwrap());

    let mut first = trial(&broken_dir);
    first.stop_after = Some(7);
    let Ending::Stopped(143, folder) = first.run(first.start()).unwrap() else {
        panic!("expected a stop")
    };
    let id = wandb_log(&broken_dir).id;
    assert_eq!(wandb_log(&broken_dir).exit, Some(143));
    let mut second = trial(&broken_dir);
    let progress = second.resume(&folder);
    done(second.run(progress).unwrap());
    assert_complete(&broken_dir);

    checkpoint::supersede_after(&broken_dir, 15).unwrap();
    let uploaded = wandb_log(&broken_dir).path.with_extension("wandb.synced");
    std::fs::write(&uploaded, "").unwrap();
    let mut third = trial(&broken_dir);
    let progress = third.resume(&checkpoint::latest(&broken_dir).unwrap().unwrap());
    assert_eq!(progress.step, 15);
    done(third.run(progress).unwrap());
    assert_complete(&broken_dir);
    assert!(!uploaded.exists(), "the mark of an upload that no longer holds");

    let [straight, broken] = [&straight_dir, &broken_dir].map(|run_dir| {
        let tensorboard = event_files(&run_dir.join("tensorboard")).0;
        let log = wandb_log(run_dir);
        (lasting(tensorboard), lasting(log.history.clone()), log)
    });
    assert_eq!(straight.0, broken.0);
    assert_eq!(straight.1, broken.1);
    assert_eq!(broken.2.id, id);
    assert_eq!(broken.2.exit, Some(0));
    let said: Vec<&str> = broken
        .2
        .output
        .lines()
        .filter(|line| line.contains("step 8:"))
        .collect();
    assert_eq!(said.len(), 1, "{}", broken.2.output);
}

/// A run whose step fails ends without an exit record, as a killed one does; its steps are there.
#[test]
fn a_run_that_ends_without_an_end_is_readable_up_to_its_last_step() {
    let folder = tempfile::tempdir().unwrap();
    let mut trial = trial(folder.path());
    trial.validations = vec![(8, f64::NAN)];
    trial.run(trial.start()).unwrap_err();
    let log = wandb_log(folder.path());
    assert_eq!(log.exit, None);
    assert_eq!(log.history["train/loss"].len(), 7, "step 8 failed on the way");
    assert_eq!(lines(folder.path(), "metrics.jsonl", "train")["train/loss"].len(), 8);

    // whatever is cut off the end, the records before it are readable, and the run goes on from them
    let whole = std::fs::read(&log.path).unwrap();
    for cut in [1, 700, 2000] {
        std::fs::write(&log.path, &whole[..whole.len() - cut]).unwrap();
        let steps = wandb_log(folder.path()).history["train/loss"].len();
        assert!((5..=7).contains(&steps), "{cut} bytes cut: {steps} steps");
        let mut again = self::trial(folder.path());
        again.validations = vec![(12, 2.0)];
        done(again.run(again.start()).unwrap());
        assert_complete(folder.path());
        assert_eq!(wandb_log(folder.path()).id, log.id);
    }
}

/// The program itself: killed, resumed, evaluated; with a key in its environment that must be nowhere.
#[cfg(unix)]
#[test]
fn the_program_tracks_training_and_evaluation_in_one_run_and_writes_no_key() {
    const KEY: &str = "0123456789abcdef0123456789abcdef01234567";
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    conversations(folder);
    let both = [
        "--set",
        BOTH,
        "--set",
        "evaluate.limit=2",
        "--set",
        "evaluate.max_new=32",
    ];
    succeeded(&command(folder, "run", &["--stage", "capture"]).output().unwrap());
    let run = folder.join("run");
    let mut child = command(folder, "run", &[&["--stage", "train"], &both[..]].concat())
        .env("WANDB_API_KEY", KEY)
        .spawn()
        .unwrap();
    while !run.join("step-000007").exists() {
        assert!(child.try_wait().unwrap().is_none(), "ended before step 7");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let killed = wandb_log(&run);
    assert!(killed.history["train/loss"].len() >= 7);
    let with_key = |output: std::io::Result<Output>| succeeded(&output.unwrap());
    with_key(command(folder, "run", &both).env("WANDB_API_KEY", KEY).output());

    assert_complete_up_to_evaluation(&run);
    let log = wandb_log(&run);
    assert_eq!((log.id, log.exit), (killed.id, Some(0)));
    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(run.join("evaluation.json")).unwrap()).unwrap();
    for name in ["acceptance_length", "spec_tokens_per_s", "prompts"] {
        let tracked = log.summary.get(&format!("evaluation/{name}"));
        assert_eq!(tracked, report[name].as_f64().as_ref(), "{name}");
    }
    for path in files(folder) {
        let bytes = std::fs::read(&path).unwrap();
        let found = bytes.windows(KEY.len()).any(|window| window == KEY.as_bytes());
        assert!(!found, "{} holds the key", path.display());
    }

    // lines that someone cut off are not in the file again: it is said, also where progress is quiet
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let cut: String = metrics.split_inclusive('\n').take(3).collect();
    std::fs::write(run.join("metrics.jsonl"), cut).unwrap();
    checkpoint::supersede_after(&run, 14).unwrap();
    let output = command(folder, "run", &["--stage", "train"]).output().unwrap();
    succeeded(&output);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("metrics.jsonl: steps 4 to 14 are missing"), "{said}");
}

/// The evaluation adds a point of its own to the event files.
fn assert_complete_up_to_evaluation(run: &Path) {
    let (mut curves, _) = event_files(&run.join("tensorboard"));
    let evaluated = curves.remove("evaluation/acceptance_length").unwrap();
    assert_eq!(evaluated.keys().copied().collect::<Vec<_>>(), [20]);
    curves.retain(|name, _| !name.starts_with("evaluation/"));
    assert_eq!(curves, as_f32(jsonl(run)));
    assert_eq!(lasting(wandb_log(run).history)["train/loss"], jsonl(run)["train/loss"]);
}

fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] })
        .collect()
}
