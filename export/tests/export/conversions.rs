//! A drafter through other formats and back: the same bytes, the same numbers, or a refusal that says why.

use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use dflash_model::folder::{Existing, read_config, read_tensors};
use dflash_model::formats::{self, Format};
use dflash_model::{DrafterConfig, TargetConfig};
use serde_json::{Value, json};

use crate::folders::{code, config, demo, edit_config, edit_tensors, program, publish, text};

/// One way to spoil a configuration, and what must be said about it.
type Case = (fn(&mut Value), &'static [&'static str]);

/// Runs the program and asserts that it exits with 0.
fn done(arguments: &[&str]) -> String {
    let output = program(arguments);
    assert_eq!(
        code(&output),
        0,
        "{arguments:?}: {}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Configuration and weights are the same bytes.
fn assert_same_drafter(a: &Path, b: &Path) {
    for file in ["config.json", "model.safetensors"] {
        let bytes = |dir: &Path| fs::read(dir.join(file)).unwrap();
        assert_eq!(bytes(a), bytes(b), "{}: {file}", b.display());
    }
}

fn dflash1() -> DrafterConfig {
    DrafterConfig {
        conv: None,
        selector: None,
        ..config()
    }
}

#[test]
fn a_folder_comes_back_from_speculators_bit_for_bit() {
    let target = demo("target");
    for (number, config) in [config(), dflash1()].into_iter().enumerate() {
        for carried in [false, true] {
            let root = tempfile::tempdir().unwrap();
            let [from, between, back] = ["from", "between", "back"].map(|name| root.path().join(name));
            publish(&from, &config);
            let mut arguments = vec![
                "speculators",
                path(&from),
                "--target",
                path(&target),
                "--out",
                path(&between),
            ];
            if carried {
                arguments.push("--carry-matrices");
            }
            let printed = done(&arguments);
            assert!(
                printed.contains("hidden differs by 0e0, logits by 0e0, 3 walks the same"),
                "{printed}"
            );
            let json: Value = serde_json::from_slice(&fs::read(between.join("config.json")).unwrap()).unwrap();
            assert_eq!(json["aux_hidden_state_layer_ids"], json!([2, 4, 6]), "drafter {number}");
            assert_eq!(json["sliding_window_non_causal"], json!(true));
            assert_eq!(
                json["speculators_config"]["proposal_methods"][0]["speculative_tokens"],
                json!(3)
            );

            let printed = done(&["hf", path(&between), "--target", path(&target), "--out", path(&back)]);
            assert!(printed.contains("logits by 0e0"), "{printed}");
            assert_eq!(printed.contains("embed_tokens.weight: left out"), carried, "{printed}");
            assert_same_drafter(&from, &back);
        }
    }
}

/// Decoding takes a drafter as it is stored: no conversion first, and the same tokens.
#[test]
fn every_format_is_decoded_with_alike() {
    let target = demo("target");
    let root = tempfile::tempdir().unwrap();
    let [from, theirs, file] = ["from", "theirs", "drafter.gguf"].map(|name| root.path().join(name));
    publish(&from, &config());
    for (command, out) in [("speculators", &theirs), ("gguf", &file)] {
        done(&[command, path(&from), "--target", path(&target), "--out", path(out)]);
    }
    let prompts = demo("heldout.jsonl");
    let common = ["--target", path(&target), "--prompts", path(&prompts), "--quiet"];
    let results: Vec<(Value, Vec<u8>)> = [&from, &theirs, &file]
        .map(|drafter| {
            let options = ["--limit", "2", "--max-new", "12", "--json"];
            let report = done(&[&["verify", path(drafter)], &common[..], &options].concat());
            let report: Value = serde_json::from_str(&report).unwrap();
            let walks = root.path().join("walks.json");
            done(
                &[
                    &["walk", path(drafter)],
                    &common[..],
                    &["--contexts", "2", "--json", path(&walks)],
                ]
                .concat(),
            );
            let keys = ["rounds", "accepted", "acceptance_length", "differing", "prompts"];
            let counts = keys.map(|key| report["acceptance"][key].clone());
            assert!(counts[0].as_u64().is_some_and(|rounds| rounds > 0), "{report}");
            (counts.to_vec().into(), fs::read(walks).unwrap())
        })
        .into();
    assert_eq!(results[0], results[1]);
    assert_eq!(results[0], results[2]);
}

#[test]
fn tap_numbers_shift_by_one_and_back() {
    let info = TargetConfig::read(&demo("target")).unwrap().info;
    let info = dflash_model::TargetInfo { num_layers: 32, ..info };
    let root = tempfile::tempdir().unwrap();
    let taps = vec![1, 8, 15, 22, 29];
    let config = DrafterConfig {
        num_target_layers: 32,
        target_layer_ids: taps.clone(),
        ..config()
    };
    let [from, to] = ["from", "to"].map(|name| root.path().join(name));
    publish(&from, &config);
    let source = formats::read(&from, None).unwrap();
    let verifier = formats::speculators::Verifier {
        name: "t".into(),
        architectures: vec![],
    };
    formats::speculators::write(&to, &source, &verifier, None, DType::BF16, Existing::Refuse).unwrap();
    let json: Value = serde_json::from_slice(&fs::read(to.join("config.json")).unwrap()).unwrap();
    assert_eq!(json["aux_hidden_state_layer_ids"], json!([2, 9, 16, 23, 30]));
    let back = formats::read(&to, Some(&info)).unwrap();
    assert_eq!((back.format, back.config.target_layer_ids), (Format::Speculators, taps));
}

#[test]
fn what_speculators_says_and_we_cannot_is_refused_by_name() {
    let target = demo("target");
    let root = tempfile::tempdir().unwrap();
    let [from, good] = ["from", "good"].map(|name| root.path().join(name));
    publish(&from, &config());
    done(&[
        "speculators",
        path(&from),
        "--target",
        path(&target),
        "--out",
        path(&good),
    ]);
    let cases: [Case; 8] = [
        (
            |c| c["aux_hidden_state_layer_ids"] = json!([0, 2, 4]),
            &["aux_hidden_state_layer_ids", "embedding"],
        ),
        (
            |c| c["aux_hidden_state_layer_ids"] = json!([2, 4, 8]),
            &["8 is the last layer", "8 layers"],
        ),
        // their converter drops the last layer's id and leaves fc as it was
        (
            |c| c["aux_hidden_state_layer_ids"] = json!([2, 4]),
            &["fc.weight", "[256, 512]", "[256, 768]"],
        ),
        (
            |c| c["aux_hidden_state_layer_ids"] = Value::Null,
            &["aux_hidden_state_layer_ids", "EAGLE"],
        ),
        (
            |c| c["speculators_model_type"] = json!("eagle3"),
            &["speculators_model_type", "eagle3"],
        ),
        (|c| c["draft_vocab_size"] = json!(100), &["draft_vocab_size", "4096"]),
        (|c| c["sample_from_anchor"] = json!(true), &["sample_from_anchor"]),
        (
            |c| c["transformer_layer_config"]["rope_parameters"]["partial_rotary_factor"] = json!(0.25),
            &["partial_rotary_factor", "0.25"],
        ),
    ];
    for (number, (spoil, words)) in cases.into_iter().enumerate() {
        let dir = root.path().join(number.to_string());
        fs::create_dir(&dir).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(good.join(file), dir.join(file)).unwrap();
        }
        edit_config(&dir, spoil);
        let out = root.path().join(format!("{number}-out"));
        let output = program(&["hf", path(&dir), "--target", path(&target), "--out", path(&out)]);
        assert_eq!(code(&output), 2, "case {number}");
        let error = text(&output.stderr);
        for word in words {
            assert!(error.contains(word), "case {number}: {word:?} is not in: {error}");
        }
        assert!(!out.exists(), "case {number}");
    }
    // an embedding that is not the target's
    edit_tensors(&good, |tensors| {
        let other = Tensor::zeros((4096, 256), DType::BF16, &Device::Cpu).unwrap();
        tensors.insert("embed_tokens.weight".to_owned(), other);
    });
    let out = root.path().join("other");
    let output = program(&["hf", path(&good), "--target", path(&target), "--out", path(&out)]);
    assert_eq!(code(&output), 2);
    assert!(
        text(&output.stderr).contains("embed_tokens.weight: row 0"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn a_causal_layer_that_does_not_slide_has_no_speculators_form() {
    let root = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| root.path().join(name));
    let mut config = config();
    for layer in &mut config.layers {
        (layer.window, layer.causal) = (None, true);
    }
    publish(&from, &config);
    let output = program(&[
        "speculators",
        path(&from),
        "--target",
        path(&demo("target")),
        "--out",
        path(&to),
    ]);
    assert_eq!(code(&output), 2);
    assert!(text(&output.stderr).contains("layer 0 is causal and does not slide"));
}

/// The flag speaks of the sliding layers; full ones see their whole block either way.
#[test]
fn sliding_window_non_causal_says_nothing_of_full_layers() {
    let root = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| root.path().join(name));
    let mut mixed = config();
    mixed.layers = vec![mixed.layers[0]; 5];
    mixed.layers[4].window = None;
    publish(&from, &mixed);
    done(&[
        "speculators",
        path(&from),
        "--target",
        path(&demo("target")),
        "--out",
        path(&to),
    ]);
    let info = TargetConfig::read(&demo("target")).unwrap().info;
    for (flag, expected) in [(false, [true, true, true, true, false]), (true, [false; 5])] {
        edit_config(&to, |config| config["sliding_window_non_causal"] = json!(flag));
        let read = formats::read(&to, Some(&info)).unwrap().config;
        let causal: Vec<bool> = read.layers.iter().map(|layer| layer.causal).collect();
        assert_eq!(causal, expected, "{flag}");
        let windows: Vec<bool> = read.layers.iter().map(|layer| layer.window.is_some()).collect();
        assert_eq!(windows, [true, true, true, true, false]);
    }
}

#[test]
fn every_stored_type_reads_back_and_says_its_name() {
    let root = tempfile::tempdir().unwrap();
    let from = root.path().join("from");
    publish(&from, &config());
    for (name, spelled, dtype) in [
        ("bf16", "bfloat16", DType::BF16),
        ("f16", "float16", DType::F16),
        ("f32", "float32", DType::F32),
    ] {
        let out = root.path().join(name);
        done(&[
            "hf",
            path(&from),
            "--out",
            path(&out),
            "--dtype",
            name,
            "--license",
            "mit",
            "--base-model",
            "org/t",
        ]);
        let read = read_config(&out).unwrap();
        let tensors = read_tensors(&out, &read, &Device::Cpu).unwrap();
        assert!(tensors.values().all(|tensor| tensor.dtype() == dtype));
        let json: Value = serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
        assert_eq!(
            (&json["dtype"], &json["torch_dtype"]),
            (&json!(spelled), &json!(spelled))
        );
        let card = fs::read_to_string(out.join("README.md")).unwrap();
        assert!(
            card.contains("license: \"mit\"") && card.contains("base_model: \"org/t\""),
            "{card}"
        );
        let made: Value = serde_json::from_slice(&fs::read(out.join("dflash_export.json")).unwrap()).unwrap();
        assert_eq!(made["source"]["format"], json!("published folder"));
        // taken: a second one needs --force
        assert!(refused(&["hf", path(&from), "--out", path(&out)]).contains("not empty"));
    }
}

#[test]
fn a_folder_comes_back_from_gguf_with_every_number() {
    let target = demo("target");
    let root = tempfile::tempdir().unwrap();
    for (name, config) in [("two", config()), ("one", dflash1())] {
        let [from, back] = ["from", "back"].map(|part| root.path().join(format!("{name}-{part}")));
        publish(&from, &config);
        for dtype in ["f32", "bf16", "f16", "q8_0"] {
            let file = root.path().join(format!("{name}-{dtype}.gguf"));
            done(&[
                "gguf",
                path(&from),
                "--target",
                path(&target),
                "--out",
                path(&file),
                "--dtype",
                dtype,
            ]);
            let info = TargetConfig::read(&target).unwrap().info;
            let read = formats::read(&file, Some(&info)).unwrap();
            assert_eq!((read.format, &read.config), (Format::Gguf, &config), "{dtype}");
            assert_eq!(read.notes.len(), usize::from(dtype == "q8_0"), "{:?}", read.notes);
            let printed = done(&["inspect", path(&file), "--target", path(&target)]);
            assert!(
                printed.contains("format      GGUF file") && printed.contains("a whole drafter"),
                "{printed}"
            );
        }
        // bf16 in, bf16 out: nothing is rounded on the way
        let file = root.path().join(format!("{name}-bf16.gguf"));
        done(&["hf", path(&file), "--target", path(&target), "--out", path(&back)]);
        assert_same_drafter(&from, &back);
    }
}

#[test]
fn a_gguf_file_that_is_cut_or_altered_is_an_error_by_name() {
    let target = demo("target");
    let info = TargetConfig::read(&target).unwrap().info;
    let root = tempfile::tempdir().unwrap();
    let [from, file, bad] = ["from", "good.gguf", "bad.gguf"].map(|name| root.path().join(name));
    publish(&from, &config());
    done(&["gguf", path(&from), "--target", path(&target), "--out", path(&file)]);
    assert!(formats::read(&file, None).unwrap_err().to_string().contains("target"));
    let bytes = fs::read(&file).unwrap();
    // every length of the header region, and a few of the data
    for length in (0..2000).step_by(37).chain([bytes.len() / 2, bytes.len() - 1]) {
        fs::write(&bad, &bytes[..length]).unwrap();
        let error = formats::read(&bad, Some(&info)).unwrap_err().to_string();
        assert!(error.contains("bad.gguf"), "{length}: {error}");
    }
    // counts that promise more than the file holds
    for at in [8, 16] {
        let mut altered = bytes.clone();
        altered[at..at + 8].fill(0x7f);
        fs::write(&bad, &altered).unwrap();
        assert!(formats::read(&bad, Some(&info)).is_err());
    }
}

/// What is said of a command that is refused as input.
fn refused(arguments: &[&str]) -> String {
    let output = program(arguments);
    assert_eq!(code(&output), 2, "{arguments:?}: {}", text(&output.stdout));
    text(&output.stderr)
}

#[test]
fn nothing_is_written_to_the_hub_or_over_what_is_read() {
    let root = tempfile::tempdir().unwrap();
    let target = demo("target");
    let from = root.path().join("from");
    publish(&from, &config());
    let weights = from.join("model.safetensors");
    let before = fs::read(&weights).unwrap();
    for command in ["hf", "speculators", "gguf"] {
        let common = [command, path(&from), "--target", path(&target), "--force", "--out"];
        let said = refused(&[&common[..], &["hf://org/name"]].concat());
        assert!(
            said.contains("--out hf://org/name") && said.contains("dflash-export push"),
            "{said}"
        );
    }
    let said = refused(&["hf", path(&from), "--out", path(&from)]);
    assert!(said.contains("--out") && said.contains("not empty"), "{said}");
    let to_file = ["gguf", path(&from), "--target", path(&target), "--force", "--out"];
    let said = refused(&[&to_file[..], &[path(&weights)]].concat());
    assert!(said.contains("it is no GGUF file"), "{said}");
    let folder = root.path().join("new/");
    let said = refused(&[&to_file[..], &[&format!("{}/", path(&folder).trim_end_matches('/'))]].concat());
    assert!(said.contains("expected the name of a file"), "{said}");
    assert_eq!(fs::read(&weights).unwrap(), before);

    let file = root.path().join("drafter.gguf");
    done(&[&to_file[..], &[path(&file)]].concat());
    let before = fs::read(&file).unwrap();
    let again = [
        "gguf",
        path(&file),
        "--target",
        path(&target),
        "--force",
        "--out",
        path(&file),
    ];
    assert!(refused(&again).contains("it is what is to be read"));
    assert_eq!(fs::read(&file).unwrap(), before);
    // an earlier result is replaced
    done(&[&to_file[..], &[path(&file)]].concat());
}

#[test]
fn rounding_is_said_where_nothing_is_drafted_to_show_it() {
    let root = tempfile::tempdir().unwrap();
    let [from, wide, narrow] = ["from", "wide", "narrow"].map(|name| root.path().join(name));
    publish(&from, &config());
    let said = done(&["hf", path(&from), "--dtype", "f32", "--out", path(&wide)]);
    assert!(said.contains("weights only, to the bit;"), "{said}");
    let said = done(&["hf", path(&wide), "--out", path(&narrow)]);
    assert!(said.contains("weights only, rounded to BF16"), "{said}");
}

#[test]
fn a_run_stands_for_the_drafter_that_it_published() {
    let root = tempfile::tempdir().unwrap();
    let run = root.path().join("run");
    fs::create_dir(&run).unwrap();
    fs::write(run.join("config.resolved.toml"), "").unwrap();
    let target = demo("target");
    let out = root.path().join("drafter.gguf");
    let to_file = ["gguf", path(&run), "--target", path(&target), "--out", path(&out)];
    assert!(refused(&to_file).contains("neither a published drafter nor a checkpoint"));
    publish(&run.join("final"), &config());
    done(&to_file);
    done(&["verify", path(&run), "--target", path(&target)]);
    done(&["inspect", path(&run)]);
    // and a file that does not say its target's depth is not judged without it
    let said = refused(&["inspect", path(&out)]);
    assert!(said.contains("GGUF file") && said.contains("--target FOLDER"), "{said}");
    done(&["inspect", path(&out), "--target", path(&target)]);
}
