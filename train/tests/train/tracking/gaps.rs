//! What a tracker lacks when a run goes on, because its files were cut or it was not listed, comes from the JSON lines;
//! and what lies in its place is left alone or refused by name.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use dflash_train::checkpoint;
use dflash_train::fit::Ending;

use super::readers::{event_files, wandb_log};
use super::{assert_complete, jsonl, trial};
use crate::resume::{Trial, done};

/// Trains from the newest checkpoint up to `step`, or without one from the start, with the trackers listed.
fn train(run_dir: &Path, trackers: &str, step: u64) {
    let mut trial = trial(run_dir);
    trial.config.tracking = Trial::new(run_dir, &[&format!("tracking={trackers}")]).config.tracking;
    trial.stop_after = (step < 20).then_some(step);
    let progress = match checkpoint::latest(run_dir).unwrap() {
        Some(folder) => trial.resume(&folder),
        None => trial.start(),
    };
    match trial.run(progress).unwrap() {
        Ending::Stopped(143, _) => {}
        ending => assert_eq!(done(ending).0.step, step),
    }
}

const BOTH: &str = "['tensorboard', 'wandb']";

fn event_paths(run_dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(run_dir.join("tensorboard")).unwrap();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

fn cut(path: &Path, length: usize) {
    let bytes = fs::read(path).unwrap();
    fs::write(path, &bytes[..length.min(bytes.len())]).unwrap();
}

/// Tracking is no part of what a resumed run must repeat: a tracker may come late, or leave and come again.
#[test]
fn a_tracker_that_is_listed_later_or_again_has_every_step() {
    for lists in [
        ["[]", "[]", BOTH],
        [BOTH, "[]", BOTH],
        ["['wandb']", "['tensorboard']", BOTH],
    ] {
        let folder = tempfile::tempdir().unwrap();
        for (list, step) in lists.into_iter().zip([9, 13, 20]) {
            train(folder.path(), list, step);
        }
        assert_complete(folder.path());
        let validated = &jsonl(folder.path())["validation/acceptance_length"];
        assert_eq!(*validated, BTreeMap::from([(8, 2.5), (12, 2.0)]));
    }
}

/// Wherever a log is cut, at a record's end, within one or within its head, nothing is missing afterwards.
#[test]
fn a_log_that_was_cut_is_filled_up_to_the_step_that_the_run_goes_on_from() {
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path();
    train(run_dir, BOTH, 15);
    let log = wandb_log(run_dir);
    let [bytes, events] = [&log.path, &event_paths(run_dir)[0]].map(|path| fs::read(path).unwrap());
    for tenth in 0..=10 {
        let kept = bytes.len() * tenth / 10 + tenth % 2;
        for path in event_paths(run_dir).iter().skip(1) {
            fs::remove_file(path).unwrap();
        }
        fs::write(&event_paths(run_dir)[0], &events).unwrap();
        fs::write(&log.path, &bytes[..kept.min(bytes.len())]).unwrap();
        cut(&event_paths(run_dir)[0], events.len() * tenth / 10);
        checkpoint::supersede_after(run_dir, 15).unwrap();
        train(run_dir, BOTH, 20);
        // a file that was cut ends within a record, where readers stop: the records before are looked at here
        whole_records(&event_paths(run_dir)[0]);
        assert_complete(run_dir);
        assert_eq!(wandb_log(run_dir).id, log.id);
    }
}

/// Cuts an event file behind its last whole record.
fn whole_records(path: &Path) {
    let bytes = fs::read(path).unwrap();
    let mut end = 0;
    while let Some(length) = bytes.get(end..end + 8) {
        let next = end + 16 + u64::from_le_bytes(length.try_into().unwrap()) as usize;
        if next > bytes.len() {
            break;
        }
        end = next;
    }
    cut(path, end);
}

/// A damaged record hides what follows it in its file.
#[test]
fn steps_behind_a_damaged_record_of_an_event_file_are_written_again() {
    let folder = tempfile::tempdir().unwrap();
    train(folder.path(), BOTH, 15);
    let path = event_paths(folder.path()).remove(0);
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, &bytes).unwrap();
    train(folder.path(), BOTH, 20);
    // as a reader sees it, which stops at the damage
    cut(&path, middle);
    whole_records(&path);
    assert_complete(folder.path());
}

/// Names that are none of ours decide nothing; those of a run stay in the order in which they were written.
#[test]
fn foreign_names_among_the_event_files_do_not_disturb_the_order() {
    let folder = tempfile::tempdir().unwrap();
    let tensorboard = folder.path().join("tensorboard");
    fs::create_dir(&tensorboard).unwrap();
    let foreign = [
        "18446744073709551615.x",
        "9999999999.dflash",
        "99999999999.x",
        "1.x",
        "+111111111.x",
        "x",
    ];
    for name in foreign {
        fs::write(tensorboard.join(format!("events.out.tfevents.{name}")), "").unwrap();
    }
    let mut written = Vec::new();
    for step in [7, 15, 20] {
        train(folder.path(), BOTH, step);
        let new = event_paths(folder.path())
            .into_iter()
            .filter(|path| fs::metadata(path).unwrap().len() > 0 && !written.contains(path));
        let new: Vec<PathBuf> = new.collect();
        assert_eq!(new.len(), 1, "{new:?}");
        let name = new[0].file_name().unwrap().to_str().unwrap().to_owned();
        assert_eq!(name.len(), "events.out.tfevents.0123456789.dflash".len(), "{name}");
        written.extend(new);
    }
    assert!(written.is_sorted(), "{written:?}");
    assert_complete(folder.path());
}

#[test]
fn a_file_where_a_folder_is_to_be_is_an_error_that_says_so() {
    for name in ["tensorboard", "wandb"] {
        let folder = tempfile::tempdir().unwrap();
        let mut trial = trial(folder.path());
        let path = folder.path().join(name);
        fs::write(&path, "a file where a folder is to be").unwrap();
        let error = format!("{:#}", trial.run(trial.start()).unwrap_err());
        let expected = format!("{}: expected a folder, got a file", path.display());
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn the_files_of_an_offline_run_are_made_again() {
    let folder = tempfile::tempdir().unwrap();
    train(folder.path(), BOTH, 15);
    let files = wandb_log(folder.path()).path.with_file_name("files");
    fs::remove_dir_all(&files).unwrap();
    train(folder.path(), BOTH, 20);
    let log = wandb_log(folder.path());
    assert_eq!(fs::read_to_string(files.join("output.log")).unwrap(), log.output);
    assert!(files.join("wandb-summary.json").exists());
}

/// Attempts that made no checkpoint leave no lines behind.
#[test]
fn a_run_that_starts_over_says_so_once() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        let mut trial = trial(folder.path());
        trial.validations = vec![(4, f64::NAN)];
        trial.run(trial.start()).unwrap_err();
    }
    train(folder.path(), BOTH, 20);
    let output = wandb_log(folder.path()).output;
    assert_eq!(output.matches("training from step 0 to 20").count(), 1, "{output}");
    assert_complete(folder.path());
}

/// What cannot be refilled does not take from a tracker what it has.
#[test]
fn a_tracker_keeps_the_steps_that_the_json_lines_lost() {
    let folder = tempfile::tempdir().unwrap();
    train(folder.path(), BOTH, 15);
    let metrics = folder.path().join("metrics.jsonl");
    let text = fs::read_to_string(&metrics).unwrap();
    fs::write(&metrics, text.split_inclusive('\n').take(3).collect::<String>()).unwrap();
    train(folder.path(), BOTH, 20);
    let losses = event_files(&folder.path().join("tensorboard"))
        .0
        .remove("train/loss")
        .unwrap();
    assert_eq!(losses.len(), 20);
    assert_eq!(wandb_log(folder.path()).history["train/loss"].len(), 20);
    assert_eq!(jsonl(folder.path())["train/loss"].len(), 8);
}
