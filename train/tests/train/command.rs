//! The program itself on the demo target: kill and resume, signals, stored and online taps, warm start.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};

/// What a run is made of, small enough for a test.
const SETTINGS: [&str; 17] = [
    "train.steps=20",
    "train.pack_tokens=128",
    "train.anchors=6",
    "train.accumulate_samples=2",
    "train.lr=1e-3",
    "checkpoint.every=7",
    "checkpoint.keep_best=false",
    "checkpoint.keep_last=9",
    "validate.every=0",
    "validate.samples=2",
    "data.val_fraction=0.2",
    "drafter.layers=1",
    "drafter.ffn=64",
    "drafter.heads=2",
    "drafter.kv_heads=1",
    "drafter.head_dim=32",
    "drafter.selector_rank=8",
];

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Ten conversations that no model wrote; their text does not matter here.
pub(crate) fn conversations(folder: &Path) -> PathBuf {
    let path = folder.join("conversations.jsonl");
    let rows: String = (0..10)
        .map(|i| {
            let answer = format!("It returns the {i}th element of the slice, or `None` if `index` is out of bounds.");
            let messages = serde_json::json!([
                {"role": "user", "content": format!("What does `get_{i}` do?")},
                {"role": "assistant", "content": answer},
            ]);
            serde_json::json!({ "messages": messages }).to_string() + "\n"
        })
        .collect();
    std::fs::write(&path, rows).unwrap();
    path
}

pub(crate) fn command(folder: &Path, run: &str, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dflash-train"));
    command
        .current_dir(repository())
        .args(["--config", "configs/demo.toml", "--quiet"])
        .args(["--set", &format!("run_dir={}", folder.join(run).display())])
        .args([
            "--set",
            &format!("data.conversations={}", folder.join("conversations.jsonl").display()),
        ])
        .args(SETTINGS.iter().flat_map(|setting| ["--set", setting]))
        .args(more)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Captures and trains; evaluation is another room's.
pub(crate) fn train(folder: &Path, run: &str, more: &[&str]) -> Output {
    for stage in ["capture", "train"] {
        let output = command(folder, run, &[&["--stage", stage], more].concat())
            .output()
            .unwrap();
        if !output.status.success() || stage == "train" {
            return output;
        }
    }
    unreachable!("the train stage returns")
}

pub(crate) fn succeeded(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn wait_for(path: &Path, child: &mut Child) {
    let started = Instant::now();
    while !path.exists() {
        assert!(
            child.try_wait().unwrap().is_none(),
            "ended before {} was there",
            path.display()
        );
        assert!(
            started.elapsed() < Duration::from_secs(120),
            "{} never came",
            path.display()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn same_state(a: &Path, b: &Path) {
    for name in [
        "model.safetensors",
        "state/masters.safetensors",
        "state/adamw.safetensors",
    ] {
        let (a, b) = (
            std::fs::read(a.join(name)).unwrap(),
            std::fs::read(b.join(name)).unwrap(),
        );
        assert!(a == b, "{name} differs");
    }
}

/// Invariant 4 on the real model: SIGKILL, resume, SIGTERM, resume: the same bits as an undisturbed run.
#[cfg(unix)]
#[test]
fn a_killed_and_a_terminated_run_end_with_the_bits_of_an_undisturbed_one() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    conversations(folder);
    succeeded(&train(folder, "straight", &[]));
    succeeded(&command(folder, "broken", &["--stage", "capture"]).output().unwrap());

    let mut child = command(folder, "broken", &["--stage", "train"]).spawn().unwrap();
    wait_for(&folder.join("broken/step-000007"), &mut child);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!folder.join("broken/final").exists(), "the kill came too late");

    let mut child = command(folder, "broken", &["--stage", "train"]).spawn().unwrap();
    wait_for(&folder.join("broken/step-000014"), &mut child);
    let killed = Command::new("kill")
        .args(["-TERM", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(killed.success());
    assert_eq!(child.wait().unwrap().code(), Some(143));

    succeeded(&command(folder, "broken", &["--stage", "train"]).output().unwrap());
    same_state(&folder.join("straight/step-000020"), &folder.join("broken/step-000020"));
    let steps = |run: &str| {
        std::fs::read_to_string(folder.join(run).join("metrics.jsonl"))
            .unwrap()
            .lines()
            .count()
    };
    assert_eq!((steps("straight"), steps("broken")), (20, 20));

    // a further run has nothing to do; one with another learning rate is refused before anything is written
    succeeded(&command(folder, "broken", &["--stage", "train"]).output().unwrap());
    let before = std::fs::read(folder.join("broken/config.resolved.toml")).unwrap();
    let refused = command(folder, "broken", &["--stage", "train", "--set", "train.lr=0.5"])
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("train.lr was"));
    assert_eq!(
        before,
        std::fs::read(folder.join("broken/config.resolved.toml")).unwrap()
    );
}

#[test]
fn stored_and_online_taps_train_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    conversations(folder);
    let short = ["--set", "train.steps=4"];
    succeeded(&train(folder, "stored", &short));
    succeeded(&train(
        folder,
        "online",
        &[&short[..], &["--set", "taps.mode=online"]].concat(),
    ));
    assert!(!folder.join("online/taps").exists());
    same_state(&folder.join("stored/step-000004"), &folder.join("online/step-000004"));
}

/// The weights of the DFlash stay, the convolutions are the identity, and the selector adds nothing.
#[test]
fn a_dflash_becomes_a_dflash2_that_drafts_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    conversations(folder);
    let dry =
        |run: &str, more: &[&str]| succeeded(&command(folder, run, &[&["--dry-run"], more].concat()).output().unwrap());
    // the selector's keys are only for DFlash 2, so the first run file is one without them
    let text = std::fs::read_to_string(repository().join("configs/demo.toml")).unwrap();
    let plain: String = text
        .split_inclusive('\n')
        .filter(|line| !line.starts_with("selector_"))
        .collect();
    let config = folder.join("plain.toml");
    std::fs::write(&config, plain.replace("[drafter]", "[drafter]\nalgorithm = \"dflash\"")).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_dflash-train"))
        .current_dir(repository())
        .args(["--config", config.to_str().unwrap(), "--quiet", "--dry-run"])
        .args(["--set", &format!("run_dir={}", folder.join("first").display())])
        .args([
            "--set",
            &format!("data.conversations={}", folder.join("conversations.jsonl").display()),
        ])
        .args(
            SETTINGS
                .iter()
                .filter(|s| !s.contains("selector_"))
                .flat_map(|setting| ["--set", setting]),
        )
        .output()
        .unwrap();
    succeeded(&output);
    let init = format!("drafter.init_from={}", folder.join("first/initialised").display());
    dry(
        "second",
        &["--set", &init, "--set", "drafter.algorithm=dflash2", "--set", "seed=9"],
    );

    let load = |run: &str| {
        let path = folder.join(run).join("initialised/model.safetensors");
        candle_core::safetensors::load(path, &Device::Cpu).unwrap()
    };
    let (first, second) = (load("first"), load("second"));
    let values = |tensor: &Tensor| {
        tensor
            .to_dtype(DType::F32)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap()
    };
    assert_eq!((first.len(), second.len()), (3 + 11, 6 + 15));
    for (name, tensor) in &first {
        assert_eq!(values(tensor), values(&second[name]), "{name}");
    }
    let zero = |name: &str| values(&second[name]).iter().all(|&value| value == 0.0);
    assert!(zero("candidate_selector.successor_codebook"));
    for part in ["attention_conv", "mlp_conv"] {
        assert!(zero(&format!("layers.0.{part}.kernel_projection.weight")));
        let kernel = second[&format!("layers.0.{part}.base_kernel")]
            .to_dtype(DType::F32)
            .unwrap();
        let taps = kernel.to_vec3::<f32>().unwrap();
        assert!(taps.iter().all(|side| side[0] == [1.0; 256] && side[1] == [0.0; 256]));
    }
}

#[test]
fn a_timed_step_reports_the_peers_fields_and_refuses_what_it_cannot_time() {
    let bench = |arguments: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_dflash-train"))
            .args(["bench", "step", "--shape", "tiny", "--repeats", "1", "--json"])
            .args(arguments)
            .output()
            .unwrap()
    };
    for algorithm in ["dflash", "dflash2"] {
        let output = bench(&[
            "--context",
            "64",
            "--anchors",
            "2",
            "--algo",
            algorithm,
            "--window",
            "16",
        ]);
        succeeded(&output);
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["algo"], &report["context"]), (&algorithm.into(), &64.into()));
        let number = |name: &str| report[name].as_f64().unwrap();
        // 2 blocks of 7 supervised slots
        assert!((number("slots_per_s") * number("step_s") - 14.0).abs() < 1e-6);
        assert!(number("gradients_s") + number("update_s") <= number("step_s") * 1.001);
        assert!(number("loss") > 0.0 && report["off_peer"].is_null());
    }
    let nowhere = tempfile::tempdir().unwrap();
    for wrong in [
        vec!["--context", "64", "--anchors", "60"],
        vec!["--anchors", "0"],
        vec!["--context", "1000000000000"],
        vec!["--context", "10"],
        vec!["--window", "7"],
        vec!["--threads", "0"],
        vec!["--anchors", "2", "--peer", nowhere.path().to_str().unwrap()],
    ] {
        assert_eq!(bench(&wrong).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn a_target_from_the_hub_is_written_into_the_run_file_by_its_commit() {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    let folder = tempfile::tempdir().unwrap();
    conversations(folder.path());
    let model = folder.path().join("cache/models--org--target");
    for part in ["refs", "snapshots"] {
        std::fs::create_dir_all(model.join(part)).unwrap();
    }
    std::fs::write(model.join("refs/main"), COMMIT).unwrap();
    let snapshot = model.join("snapshots").join(COMMIT);
    std::fs::create_dir(&snapshot).unwrap();
    for entry in std::fs::read_dir(repository().join("data/demo/target")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, snapshot.join(path.file_name().unwrap())).unwrap();
    }
    let run = |settings: &[&str]| {
        command(folder.path(), "run", settings)
            .arg("--print-config")
            .env("HF_HUB_CACHE", folder.path().join("cache"))
            .env("HF_HUB_OFFLINE", "1")
            .output()
            .unwrap()
    };
    let output = run(&["--set", "target.path=hf://org/target"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(
        printed.contains(&format!("path = \"hf://org/target@{COMMIT}\"")),
        "{printed}"
    );

    let output = run(&[
        "--set",
        "target.path=hf://org/target",
        "--set",
        "drafter.init_from=hf://org/absent",
    ]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        said.contains("drafter.init_from: hf://org/absent") && said.contains("HF_HUB_OFFLINE"),
        "{said}"
    );
}
