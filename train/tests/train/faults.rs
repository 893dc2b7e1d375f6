//! Faults around a run: bad input and its exit code, damaged results and states, and what does not fit the machine.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Output;

use candle_core::{DType, Device, Tensor};
use serde_json::Value;

use crate::command::{command, conversations, same_state, succeeded, train};

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn refused(output: &Output, code: i32, words: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{words:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{word}: {text}");
    }
}

fn options<'s>(settings: &[&'s str]) -> Vec<&'s str> {
    settings.iter().flat_map(|setting| ["--set", setting]).collect()
}

#[test]
fn bad_usage_and_input_exit_with_2_and_name_the_fault() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let text_file = conversations(folder);
    let taps = format!("taps.dir={}", text_file.join("taps").display());
    for (more, fault) in [
        (vec!["--set", "train.speed=1"], "train.speed"),
        (vec!["--set", "target.path=nowhere"], "nowhere"),
        (vec!["--set", "target.device=tpu"], "tpu"),
        (vec!["--set", "taps.layers=[7]"], "taps.layers"),
        (vec!["--set", "drafter.layers=4096", "--dry-run"], "drafter.layers"),
        (
            vec!["--set", "data.conversations=missing.jsonl", "--stage", "capture"],
            "missing.jsonl",
        ),
        (vec!["--resume", "nowhere", "--stage", "train"], "nowhere"),
        (vec!["--stage", "bake"], "bake"),
        // found before the first stage, not after the training
        (
            vec!["--set", "evaluate.prompts=missing.jsonl"],
            "evaluate.prompts: missing.jsonl",
        ),
        (
            vec!["--set", "data.prompts=missing.jsonl"],
            "data.prompts: missing.jsonl",
        ),
        (
            vec!["--set", "data.validation=missing.jsonl"],
            "data.validation: missing.jsonl",
        ),
        (vec!["--set", "drafter.init_from=missing"], "drafter.init_from"),
        (vec!["--set", &taps], "taps.dir"),
    ] {
        let output = command(folder, "bad", &more).output().unwrap();
        refused(&output, 2, &[fault]);
        assert!(!folder.join("bad/taps").exists(), "{more:?}");
    }
}

#[test]
fn a_drafter_that_does_not_fit_the_machine_is_refused_before_it_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    conversations(folder);
    let huge = [
        "drafter.layers=64",
        "drafter.ffn=262144",
        "drafter.heads=1024",
        "drafter.kv_heads=1024",
    ];
    let huge = [&options(&huge)[..], &["--set", "drafter.head_dim=1024"]].concat();
    let output = command(folder, "run", &[&huge[..], &["--dry-run"]].concat())
        .output()
        .unwrap();
    refused(&output, 1, &["the drafter to initialise: needs", "are free"]);
    assert!(!folder.join("run").exists());
    refused(&train(folder, "run", &huge), 1, &["train: needs", "are free"]);
}

#[test]
fn a_damaged_or_foreign_result_does_not_count_as_done() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    conversations(folder);
    let short = options(&["train.steps=4", "evaluate.max_new=6", "evaluate.limit=1"]);
    let run = || succeeded(&command(folder, "run", &short).output().unwrap());
    run();
    let run_dir = folder.join("run");
    let (published, report) = (run_dir.join("final/model.safetensors"), run_dir.join("evaluation.json"));
    let last = run_dir.join("step-000004/model.safetensors");
    let (weights, measured) = (fs::read(&published).unwrap(), fs::read(&report).unwrap());
    assert!(weights == fs::read(&last).unwrap());

    // nothing is done twice
    let stamp = || fs::metadata(&report).unwrap().modified().unwrap();
    let before = stamp();
    run();
    assert_eq!(stamp(), before);

    let mut other = weights.clone();
    *other.last_mut().unwrap() ^= 1;
    for broken in [None, Some(&weights[..weights.len() / 2]), Some(&other[..])] {
        match broken {
            None => fs::remove_file(&published).unwrap(),
            Some(bytes) => fs::write(&published, bytes).unwrap(),
        }
        run();
        assert!(fs::read(&published).unwrap() == weights);
        assert!(report.exists());
    }

    let mut foreign: Value = serde_json::from_slice(&measured).unwrap();
    foreign["setting"]["drafter_hash"] = "0".into();
    let mut shorter: Value = serde_json::from_slice(&measured).unwrap();
    shorter["setting"]["max_new"] = 5.into();
    for broken in [
        b"{\"kind\": \"accep".to_vec(),
        b"{}".to_vec(),
        foreign.to_string().into(),
        shorter.to_string().into(),
    ] {
        fs::write(&report, &broken).unwrap();
        run();
        let again: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
        assert_eq!(again["setting"]["max_new"], 6);
        assert_ne!(again["setting"]["drafter_hash"], "0");
    }
}

/// Every state that a run goes on from is looked at when it is read, and is input, not work.
#[test]
fn damaged_states_exit_with_2_and_name_file_and_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    conversations(folder);
    let short = options(&["train.steps=9"]);
    succeeded(&train(folder, "run", &options(&["train.steps=9"])));
    let run_dir = folder.join("run");
    refused(
        &command(folder, "run", &[&short[..], &["--resume", "never"]].concat())
            .output()
            .unwrap(),
        2,
        &["--resume never", "step-000009"],
    );

    // back to the checkpoint before the end
    let checkpoint = run_dir.join("step-000007");
    let intact = folder.join("intact");
    copy(&run_dir.join("step-000009"), &intact);
    fs::remove_dir_all(run_dir.join("step-000009")).unwrap();
    let resume = |words: &[&str]| {
        let output = command(folder, "run", &[&short[..], &["--stage", "train"]].concat()).output();
        refused(&output.unwrap(), 2, words);
    };
    for (file, tensor) in [("masters", "fc.weight"), ("adamw", "fc.weight.exp_avg_sq")] {
        let path = checkpoint.join(format!("state/{file}.safetensors"));
        let name = format!("{file}.safetensors");
        let bytes = fs::read(&path).unwrap();
        for value in [f32::NAN, f32::INFINITY] {
            poison(&path, tensor, value);
            resume(&["step-000007", &name, tensor, "expected finite"]);
        }
        fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        resume(&["step-000007", &name]);
        fs::write(&path, &bytes).unwrap();
    }
    let damaged = |path: &Path, words: &[&str]| {
        let bytes = fs::read(path).unwrap();
        fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
        resume(words);
        fs::write(path, &bytes).unwrap();
    };
    damaged(
        &checkpoint.join("state/progress.json"),
        &["step-000007", "progress.json"],
    );
    damaged(
        &run_dir.join("taps/taps-00000.safetensors"),
        &["taps-00000.safetensors"],
    );
    let manifest = run_dir.join("taps/manifest.json");
    damaged(&manifest, &["manifest.json"]);
    let text = fs::read_to_string(&manifest).unwrap();
    let foreign: Value = serde_json::from_str(&text).unwrap();
    let target = foreign["identity"]["target"].as_str().unwrap();
    fs::write(&manifest, text.replace(target, "another")).unwrap();
    resume(&["taps", "another"]);
    let capture = command(folder, "run", &[&short[..], &["--stage", "capture"]].concat()).output();
    refused(&capture.unwrap(), 2, &["taps", "another"]);
    fs::write(&manifest, text).unwrap();

    // with everything mended the run ends where it ended before
    succeeded(
        &command(folder, "run", &[&short[..], &["--stage", "train"]].concat())
            .output()
            .unwrap(),
    );
    same_state(&intact, &run_dir.join("step-000009"));
}

fn poison(path: &Path, name: &str, value: f32) {
    let mut tensors: HashMap<String, Tensor> = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let tensor = &tensors[name];
    let count = tensor.elem_count();
    let mut values = tensor
        .to_dtype(DType::F32)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1::<f32>()
        .unwrap();
    values[count / 2] = value;
    let poisoned = Tensor::from_vec(values, tensor.dims(), &Device::Cpu).unwrap();
    tensors.insert(name.to_owned(), poisoned);
    candle_core::safetensors::save(&tensors, path).unwrap();
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let place = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &place);
        } else {
            fs::copy(entry.path(), place).unwrap();
        }
    }
}

/// A mistyped path must not cost a generation run: the file is only made when the run file speaks of making it.
#[test]
fn missing_conversations_are_not_made_without_a_generate_section() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let text = fs::read_to_string(crate::command::repository().join("configs/demo.toml")).unwrap();
    let silent = folder.join("silent.toml");
    fs::write(&silent, text.replace("[generate]\nmax_new = 96\n", "")).unwrap();
    let mistyped = format!("data.conversations={}", folder.join("reponses.jsonl").display());
    let mut command = command(folder, "run", &["--set", &mistyped]);
    command.args(["--stage", "prepare"]);
    let arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    let place = arguments
        .iter()
        .position(|argument| argument == "configs/demo.toml")
        .unwrap();
    let mut program = std::process::Command::new(command.get_program());
    program.current_dir(crate::command::repository());
    program
        .args(&arguments[..place])
        .arg(&silent)
        .args(&arguments[place + 1..]);
    refused(
        &program.output().unwrap(),
        2,
        &["reponses.jsonl does not exist", "[generate]"],
    );
}
