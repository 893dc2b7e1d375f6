//! SIGINT and SIGTERM in every stage: the program ends soon, with 128 + the signal, and what is on disk can be gone on
//! from.

#![cfg(unix)]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::command::{command, conversations, repository, succeeded, train};

/// A second is the aim; the rest is for a machine that does other things too.
const SOON: Duration = Duration::from_secs(4);

/// A run that says what it does, on the demo's own data.
fn talking(folder: &Path, run: &str, more: &[&str]) -> Command {
    let quiet = command(folder, run, more);
    let mut command = Command::new(quiet.get_program());
    command
        .current_dir(repository())
        .args(quiet.get_args().filter(|argument| *argument != "--quiet"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

/// Waits until the run says `words`, sends the signal, and returns the exit code and the time until the end.
fn stop_at(mut command: Command, words: &str, signal: &str) -> (Option<i32>, Duration) {
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let (said, heard) = std::sync::mpsc::channel();
    // the pipe is read to its end, or the program would stop at a full one
    let reader = std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            let _nobody_listens = said.send(line);
        }
    });
    loop {
        let line = heard.recv_timeout(Duration::from_secs(120));
        if line
            .unwrap_or_else(|_| panic!("the run never said {words}"))
            .contains(words)
        {
            break;
        }
    }
    std::thread::sleep(Duration::from_millis(300));
    let (code, took) = stop(&mut child, signal);
    reader.join().unwrap();
    (code, took)
}

fn stop(child: &mut Child, signal: &str) -> (Option<i32>, Duration) {
    let started = Instant::now();
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status();
    assert!(sent.unwrap().success(), "the run had ended before the signal");
    let status = child.wait().unwrap();
    (status.code(), started.elapsed())
}

fn set(key: &str, path: &Path) -> String {
    format!("{key}={}", path.display())
}

#[test]
fn an_evaluation_ends_at_once_and_a_later_one_measures_from_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    conversations(folder);
    succeeded(&train(folder, "run", &["--set", "train.steps=2"]));
    let long = ["--set", "train.steps=2", "--set", "evaluate.max_new=900"];
    let (code, took) = stop_at(talking(folder, "run", &long), "train: ", "-TERM");
    assert_eq!(code, Some(143));
    assert!(took < SOON, "{took:?}");
    let report = folder.join("run/evaluation.json");
    assert!(!report.exists());
    let short = ["train.steps=2", "evaluate.max_new=4", "evaluate.limit=1"];
    let short: Vec<&str> = short.iter().flat_map(|setting| ["--set", setting]).collect();
    succeeded(&command(folder, "run", &short).output().unwrap());
    assert!(report.exists());
}

#[test]
fn a_capture_ends_at_once_and_leaves_a_folder_that_a_later_one_accepts() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let all = repository().join("data/demo/responses.jsonl");
    let (many, few) = (
        set("data.conversations", &all),
        set("data.conversations", &conversations(folder)),
    );
    let capture = |more: &str| talking(folder, "run", &["--stage", "capture", "--set", more]);
    let (code, took) = stop_at(capture(&many), "capture 0/", "-INT");
    assert_eq!(code, Some(130));
    assert!(took < SOON, "{took:?}");
    succeeded(
        &command(folder, "run", &["--stage", "capture", "--set", &few])
            .output()
            .unwrap(),
    );
}

#[test]
fn answering_prompts_ends_at_the_next_token_and_keeps_whole_answers() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let answers = folder.join("made/answers.jsonl");
    let made = set("data.conversations", &answers);
    let options = ["--stage", "prepare", "--set", &made, "--set", "generate.max_new=40"];
    let (code, took) = stop_at(talking(folder, "run", &options), "prepare 1", "-TERM");
    assert_eq!(code, Some(143));
    assert!(took < SOON, "{took:?}");
    assert!(!answers.exists());
    let part = std::fs::read_to_string(folder.join("made/answers.jsonl.part")).unwrap();
    assert!(
        part.ends_with("}\n") && part.lines().count() >= 8,
        "{}",
        part.lines().count()
    );
    for (index, line) in part.lines().enumerate() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(row["generated"]["prompt"], index);
    }
    let (code, _) = stop_at(talking(folder, "run", &options), "answering", "-INT");
    assert_eq!(code, Some(130));
    let later = std::fs::read_to_string(folder.join("made/answers.jsonl.part")).unwrap();
    assert!(later.starts_with(&part));
}

#[test]
fn loading_and_planning_end_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let all = set("data.conversations", &repository().join("data/demo/responses.jsonl"));
    let mut child = command(folder, "run", &["--dry-run", "--set", &all]).spawn().unwrap();
    // the handlers stand within milliseconds; the plan of 4000 conversations takes seconds
    std::thread::sleep(Duration::from_millis(500));
    let (code, took) = stop(&mut child, "-TERM");
    assert_eq!(code, Some(143));
    assert!(took < SOON, "{took:?}");
}
