//! The program itself, on the demo target with a drafter of random weights.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use candle_core::{DType, Device};
use dflash_model::folder::{Existing, ModelCard, write};
use dflash_model::params::Codebooks;
use dflash_model::{DrafterConfig, Params};
use serde_json::{Value, json};

fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo").join(name)
}

/// Writes an untrained DFlash 2 drafter, as if made for the demo target but for the number of its layers.
fn untrained_drafter(folder: &Path, num_target_layers: usize) {
    let config = json!({
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": false,
        "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096, "num_target_layers": num_target_layers,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e7, "is_causal": false,
        "use_sliding_window": true, "layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 32,
        "block_size": 8,
        "dflash_config": {
            "target_layer_ids": [1, 3, 5], "mask_token_id": 4095, "block_size": 8, "conv_kernel_size": 2,
            "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 8
        }
    });
    let config = DrafterConfig::from_json(&config, "test").unwrap();
    let target = dflash_model::target::load(&demo("target"), &Device::Cpu, DType::F32).unwrap();
    let params = Params::init(&config, Codebooks::Free, 1, &Device::Cpu).unwrap();
    let tensors = params.published(target.head()).unwrap();
    let card = ModelCard::named("untrained", "demo");
    write(folder, &config, &tensors, &card, &json!({}), Existing::Refuse).unwrap();
}

/// Runs the program with `arguments` and the demo's target; `drafter` and `prompts` as given.
fn program(command: &str, drafter: &Path, prompts: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dflash-eval"))
        .arg(command)
        .arg("--target")
        .arg(demo("target"))
        .arg("--drafter")
        .arg(drafter)
        .arg("--prompts")
        .arg(prompts)
        .args(arguments)
        .env_remove("RUST_BACKTRACE")
        .output()
        .unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn read(json: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap()
}

#[test]
fn acceptance_writes_the_promised_numbers_and_a_table_of_80_columns() {
    let room = tempfile::tempdir().unwrap();
    let (drafter, json) = (room.path().join("drafter"), room.path().join("out.json"));
    untrained_drafter(&drafter, 8);
    let arguments = ["--max-new", "24", "--limit", "3", "--json", json.to_str().unwrap()];
    let output = program("acceptance", &drafter, &demo("heldout.jsonl"), &arguments);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let table = stdout(&output);
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    let escape = '\u{1b}';
    assert!(
        !table.contains(escape) && !stderr(&output).contains(escape),
        "no escapes into a pipe"
    );

    let report = read(&json);
    assert_eq!((&report["prompts"], &report["identical"]), (&json!(3), &json!(true)));
    for name in [
        "acceptance_length",
        "acceptance_length_macro",
        "plain_tokens_per_s",
        "spec_tokens_per_s",
    ] {
        assert!(report[name].as_f64().unwrap() > 0., "{name}");
    }
    for name in ["rounds", "drafted", "accepted", "truncated_rounds"] {
        assert!(report[name].is_u64(), "{name}");
    }
    for (name, entries) in [
        ("histogram", 8),
        ("accept_at_pos", 7),
        ("accept_cond", 7),
        ("per_prompt", 3),
    ] {
        assert_eq!(report[name].as_array().unwrap().len(), entries, "{name}");
    }
    let setting = &report["setting"];
    assert_eq!(
        (&setting["mask_token_id"], &setting["taps"]),
        (&json!(4095), &json!([1, 3, 5]))
    );
    assert!(
        setting["prompt_tail"]
            .as_str()
            .unwrap()
            .ends_with("<think>\n\n</think>\n\n")
    );
}

#[test]
fn lossless_holds_on_the_demo_target_and_an_idle_drafter_fails_it() {
    let room = tempfile::tempdir().unwrap();
    let (drafter, json) = (room.path().join("drafter"), room.path().join("out.json"));
    untrained_drafter(&drafter, 8);
    let hostile = [
        "--max-new",
        "30",
        "--limit",
        "2",
        "--quiet",
        "--drafters",
        "random,right,wrong",
    ];
    let arguments = [&hostile[..], &["--json", json.to_str().unwrap()]].concat();
    let output = program("lossless", &drafter, &demo("heldout.jsonl"), &arguments);
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
    let report = read(&json);
    assert_eq!((&report["passed"], &report["identical"]), (&json!(true), &json!(true)));
    assert_eq!(report["drafters"].as_array().unwrap().len(), 3);

    let idle = ["--max-new", "1", "--limit", "1", "--quiet", "--drafters", "trained"];
    let output = program("lossless", &drafter, &demo("heldout.jsonl"), &idle);
    assert_eq!(code(&output), 1);
    assert!(stdout(&output).contains("no verification round"), "{}", stdout(&output));
}

#[test]
fn bad_usage_and_bad_input_exit_2_and_name_the_culprit() {
    let room = tempfile::tempdir().unwrap();
    let drafter = room.path().join("drafter");
    untrained_drafter(&drafter, 8);
    let heldout = demo("heldout.jsonl");
    let refused = |drafter: &Path, prompts: &Path, arguments: &[&str], culprit: &str| {
        let output = program("acceptance", drafter, prompts, arguments);
        let message = stderr(&output);
        assert_eq!(code(&output), 2, "{message}");
        assert!(message.contains(culprit), "{culprit:?} in {message}");
    };
    refused(&drafter, &heldout, &["--max-new", "0"], "--max-new");
    refused(&drafter, &heldout, &["--block", "9"], "expected 2..=8");
    refused(&drafter, &heldout, &["--device", "abacus"], "abacus");
    refused(
        &drafter,
        &heldout,
        &["--json", room.path().to_str().unwrap()],
        "is a folder",
    );
    refused(&drafter, &heldout, &["--frobnicate"], "--frobnicate");
    refused(&room.path().join("none"), &heldout, &[], "no such file or folder");
    refused(&drafter, &room.path().join("none.jsonl"), &[], "none.jsonl");

    let broken = room.path().join("broken.jsonl");
    let good = r#"{"messages": [{"role": "user", "content": "Hello"}]}"#;
    std::fs::write(&broken, format!("{good}\n{good}\n{{\"messages\": 7}}\n")).unwrap();
    refused(&drafter, &broken, &[], "broken.jsonl:3");
    let long = room.path().join("long.jsonl");
    let words = "many words ".repeat(5000);
    std::fs::write(
        &long,
        format!(r#"{{"messages": [{{"role": "user", "content": "{words}"}}]}}"#),
    )
    .unwrap();
    refused(&drafter, &long, &[], "positions");

    let foreign = room.path().join("foreign");
    untrained_drafter(&foreign, 9);
    refused(&foreign, &heldout, &[], "the drafter expects 9, the target has 8");
    std::fs::remove_file(drafter.join("model.safetensors")).unwrap();
    refused(&drafter, &heldout, &[], drafter.to_str().unwrap());
}

/// A slip of the hand must not cost a prompt file, a drafter or the report that another mode reads.
#[test]
fn an_output_never_replaces_an_input_or_another_output() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let text = |path: &Path| path.display().to_string();
    untrained_drafter(&at("drafter"), 8);
    std::fs::copy(demo("heldout.jsonl"), at("prompts.jsonl")).unwrap();
    let report = text(&at("report.json"));
    let small = ["--limit", "1", "--max-new", "4", "--threads", "1", "--quiet"];
    let run =
        |command: &str, more: &[&str]| program(command, &at("drafter"), &at("prompts.jsonl"), &[&small, more].concat());
    for again in 0..2 {
        let output = run("acceptance", &["--json", &report]);
        assert_eq!(code(&output), 0, "{again}: {}", stderr(&output));
    }
    let inputs = [
        at("prompts.jsonl"),
        at("drafter/config.json"),
        at("drafter/model.safetensors"),
        at("report.json"),
    ];
    let before: Vec<Vec<u8>> = inputs.iter().map(|path| std::fs::read(path).unwrap()).collect();
    let both = text(&at("both"));
    let refused = [
        run("acceptance", &["--json", &text(&inputs[0])]),
        run("lossless", &["--json", &text(&inputs[1])]),
        run("acceptance", &["--html", &text(&inputs[2])]),
        run("replay", &["--recorded", &report, "--json", &report]),
        run("acceptance", &["--csv", &both, "--html", &both]),
        Command::new(env!("CARGO_BIN_EXE_dflash-eval"))
            .args(["inspect-run", &report, "--html", &report])
            .output()
            .unwrap(),
    ];
    for (i, output) in refused.iter().enumerate() {
        assert_eq!(code(output), 2, "case {i}: {}", stderr(output));
    }
    for (path, before) in inputs.iter().zip(&before) {
        assert!(std::fs::read(path).unwrap() == *before, "{} changed", path.display());
    }
    assert!(!at("both").exists());
}

/// A recording that the same drafting does not give again is a difference; one of other drafting is not compared.
#[test]
fn a_replay_fails_where_its_rounds_are_not_those_recorded() {
    let room = tempfile::tempdir().unwrap();
    let (drafter, json) = (room.path().join("drafter"), room.path().join("run.json"));
    untrained_drafter(&drafter, 8);
    let small = ["--limit", "2", "--max-new", "12", "--threads", "1", "--quiet"];
    let run =
        |command: &str, more: &[&str]| program(command, &drafter, &demo("heldout.jsonl"), &[&small, more].concat());
    assert_eq!(code(&run("acceptance", &["--json", json.to_str().unwrap()])), 0);
    let whole = read(&json);
    let replayed = |change: &dyn Fn(&mut Value), more: &[&str]| {
        let (mut report, path) = (whole.clone(), room.path().join("changed.json"));
        change(&mut report);
        std::fs::write(&path, report.to_string()).unwrap();
        run("replay", &[&["--recorded", path.to_str().unwrap()], more].concat())
    };
    assert_eq!(code(&replayed(&|_| (), &[])), 0);
    let other_counts = replayed(&|report| report["per_prompt"][0]["accepted"][0] = 5.into(), &[]);
    assert_eq!(code(&other_counts), 1, "{}", stdout(&other_counts));
    let narrower = replayed(&|_| (), &["--block", "3"]);
    assert_eq!(code(&narrower), 0, "{}", stderr(&narrower));
    assert!(
        stderr(&narrower).contains("block 8, now 3") && !stdout(&narrower).contains("against generation"),
        "{}{}",
        stderr(&narrower),
        stdout(&narrower)
    );
    let foreign_token = replayed(&|report| report["per_prompt"][1]["tokens"][0] = 99_999.into(), &[]);
    assert_eq!(code(&foreign_token), 2);
    assert!(stderr(&foreign_token).contains("token 99999") && stderr(&foreign_token).contains("--recorded"));
    assert_eq!(
        code(&replayed(
            &|report| report["per_prompt"] = Vec::<Value>::new().into(),
            &[]
        )),
        2
    );
}

#[test]
fn an_answered_conversation_serves_as_its_prompt() {
    let room = tempfile::tempdir().unwrap();
    let drafter = room.path().join("drafter");
    untrained_drafter(&drafter, 8);
    let question = r#"{"role": "user", "content": "Explain Function powf32."}"#;
    let tail = |name: &str, messages: &str| {
        let (prompts, json) = (room.path().join(name), room.path().join(format!("{name}.json")));
        std::fs::write(&prompts, format!(r#"{{"messages": [{messages}]}}"#)).unwrap();
        let arguments = ["--max-new", "4", "--quiet", "--json", json.to_str().unwrap()];
        let output = program("acceptance", &drafter, &prompts, &arguments);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        read(&json)["setting"]["prompt_tail"].clone()
    };
    let answered = format!(r#"{question}, {{"role": "assistant", "content": "No."}}"#);
    assert_eq!(tail("asked", question), tail("answered", &answered));
}

#[test]
fn every_mode_runs_on_the_demo_and_its_report_can_be_shown_again() {
    let room = tempfile::tempdir().unwrap();
    let (first, second) = (room.path().join("first"), room.path().join("second"));
    untrained_drafter(&first, 8);
    untrained_drafter(&second, 8);
    let heldout = demo("heldout.jsonl");
    let file = |name: &str| room.path().join(name);
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let two = ["--max-new", "20", "--limit", "2", "--quiet"];
    let shown = |command: &str, report: &Path, arguments: &[&str]| {
        let arguments = [arguments, &["--json", report.to_str().unwrap()]].concat();
        let output = program(command, &first, &heldout, &arguments);
        assert_eq!(code(&output), 0, "{command}: {}{}", stdout(&output), stderr(&output));
        let table = stdout(&output);
        assert!(
            table.lines().all(|line| line.chars().count() <= 80),
            "{command}:\n{table}"
        );
        let again = Command::new(env!("CARGO_BIN_EXE_dflash-eval"))
            .arg("inspect-run")
            .arg(report)
            .output()
            .unwrap();
        assert_eq!(stdout(&again), table, "{command} shown again");
        table
    };
    shown("acceptance", &file("run.json"), &two);
    let replayed = shown(
        "replay",
        &file("replay.json"),
        &[&two[..], &["--recorded", &text(&file("run.json"))]].concat(),
    );
    assert!(replayed.contains("2 of 2 texts"), "{replayed}");
    shown(
        "lossless",
        &file("lossless.json"),
        &[&two[..], &["--drafters", "wrong,right"]].concat(),
    );
    shown(
        "compare",
        &file("compare.json"),
        &[&two[..], &["--drafter", &text(&second)]].concat(),
    );
    shown(
        "sweep",
        &file("sweep.json"),
        &[&two[..], &["--blocks", "3,8", "--scripted", "0.8"]].concat(),
    );
    shown(
        "acceptance",
        &file("auto.json"),
        &[&two[..], &["--block", "auto", "--thinking", "both"]].concat(),
    );
    let sampled = [
        "--temperature",
        "0.8",
        "--top-p",
        "0.9",
        "--top-k",
        "40",
        "--exact-verify",
    ];
    let table = shown("acceptance", &file("sampled.json"), &[&two[..], &sampled].concat());
    assert!(table.contains("sampled"), "{table}");

    let timed = Command::new(env!("CARGO_BIN_EXE_dflash-eval"))
        .args([
            "speed",
            "--quiet",
            "--contexts",
            "16",
            "--target",
            &text(&demo("target")),
            "--drafter",
            &text(&first),
        ])
        .output()
        .unwrap();
    assert_eq!(code(&timed), 0, "{}", stderr(&timed));
    assert_eq!(
        stdout(&timed)
            .lines()
            .filter(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit()))
            .count(),
        7
    );
    std::fs::write(file("other.json"), "{\"kind\": \"poem\"}").unwrap();
    let refused = Command::new(env!("CARGO_BIN_EXE_dflash-eval"))
        .arg("inspect-run")
        .arg(file("other.json"))
        .output()
        .unwrap();
    assert_eq!(code(&refused), 2);
    assert!(stderr(&refused).contains("kind poem"));
}

#[test]
fn a_chat_through_a_pipe_answers_as_plain_decoding_would_without_colours() {
    use std::io::Write;
    let room = tempfile::tempdir().unwrap();
    let drafter = room.path().join("drafter");
    untrained_drafter(&drafter, 8);
    let talk = |words: &str, arguments: &[&str]| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_dflash-eval"))
            .args(["chat", "--max-new", "24"])
            .args(arguments)
            .arg("--target")
            .arg(demo("target"))
            .arg("--drafter")
            .arg(&drafter)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(words.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        assert!(!stdout(&output).contains('\u{1b}'));
        output
    };
    let words = "Explain Function powf32.\nWhat does it return?\n/reset\nExplain Function powf32.\n/quit\nnever read\n";
    let block = talk(words, &[]);
    let answers = stdout(&block);
    assert_eq!(stderr(&block).matches("acceptance length").count(), 3);
    // the third answer is the first again, and row by row gives the same text
    let first = answers.split('\n').next().unwrap().to_owned();
    assert!(
        !first.is_empty() && answers.matches(first.as_str()).count() >= 2,
        "{answers}"
    );
    assert_eq!(stdout(&talk(words, &["--exact-verify", "--quiet"])), answers);
}

#[test]
fn target_and_drafter_from_the_hub_s_cache_are_on_record_by_their_commits() {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    let room = tempfile::tempdir().unwrap();
    let drafter = room.path().join("drafter");
    untrained_drafter(&drafter, 8);
    // the cache as the hub's tools leave it; offline nobody is asked for more
    for (name, folder) in [("target", demo("target")), ("drafter", drafter.clone())] {
        let model = room.path().join(format!("cache/models--org--{name}"));
        for part in ["refs", "blobs", "snapshots"] {
            std::fs::create_dir_all(model.join(part)).unwrap();
        }
        std::fs::write(model.join("refs/main"), COMMIT).unwrap();
        let snapshot = model.join("snapshots").join(COMMIT);
        std::fs::create_dir(&snapshot).unwrap();
        for entry in std::fs::read_dir(folder.canonicalize().unwrap()).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, snapshot.join(path.file_name().unwrap())).unwrap();
        }
    }
    let json = room.path().join("out.json");
    let run = |drafter: &str| {
        Command::new(env!("CARGO_BIN_EXE_dflash-eval"))
            .args([
                "acceptance",
                "--target",
                "hf://org/target@main",
                "--drafter",
                drafter,
                "--prompts",
            ])
            .arg(demo("heldout.jsonl"))
            .args(["--max-new", "8", "--limit", "1", "--quiet", "--json"])
            .arg(&json)
            .env("HF_HUB_CACHE", room.path().join("cache"))
            .env("HF_HUB_OFFLINE", "1")
            .output()
            .unwrap()
    };
    let output = run("hf://org/drafter");
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let setting = &read(&json)["setting"];
    assert_eq!(setting["target"], format!("hf://org/target@{COMMIT}"));
    assert_eq!(setting["drafter"], format!("hf://org/drafter@{COMMIT}"));

    let absent = run("hf://org/absent");
    assert_eq!(code(&absent), 2);
    let said = stderr(&absent);
    assert!(
        said.contains("--drafter: hf://org/absent") && said.contains("HF_HUB_OFFLINE"),
        "{said}"
    );
}
