//! The three commands on the demo target, with a fresh drafter and with folders that are wrong in one way each.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use candle_core::{DType, Device, Tensor};
use dflash_export::compare::Compared;
use dflash_export::inspect::inspect;
use dflash_export::verify::{compare_copy, failures};
use dflash_model::folder::{Existing, ModelCard, write};
use dflash_model::{
    BoundDrafter, Codebooks, ConvConfig, Drafter, DrafterConfig, Drafting, LayerRule, LogitRows, Params, Sampling,
    SelectorConfig, Target,
};
use serde_json::{Value, json};

pub(crate) fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo").join(name)
}

pub(crate) fn load_demo() -> Box<dyn Target> {
    dflash_model::target::load(&demo("target"), &Device::Cpu, DType::F32).unwrap()
}

/// A small DFlash 2 for the demo target.
pub(crate) fn config() -> DrafterConfig {
    let sliding = LayerRule {
        window: Some(32),
        causal: false,
    };
    DrafterConfig {
        hidden_size: 256,
        intermediate_size: 128,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 32,
        layers: vec![sliding; 2],
        vocab_size: 4096,
        num_target_layers: 8,
        target_layer_ids: vec![1, 3, 5],
        block_size: 4,
        mask_token_id: 4095,
        rms_norm_eps: 1e-6,
        rope_theta: 1e7,
        max_positions: 4096,
        output_multiplier: 1.0,
        final_logit_softcapping: None,
        input_embedding_scale: 1.0,
        conv: Some(ConvConfig {
            kernel_size: 2,
            group_size: 16,
        }),
        selector: Some(SelectorConfig { rank: 16, top_k: 8 }),
    }
}

/// Publishes fresh weights; every tensor is disturbed by its fan-in's share, so that no part is idle.
pub(crate) fn publish(dir: &Path, config: &DrafterConfig) {
    let params = Params::init(config, Codebooks::Free, 11, &Device::Cpu).unwrap();
    let target = load_demo();
    let mut drawn = 0;
    let mut disturbed = |tensor: &Tensor| {
        let fan_in = *tensor.dims().last().unwrap() as f32;
        let scale = if tensor.rank() == 1 { 0.1 } else { 2.0 / fan_in.sqrt() };
        let noise = (0..tensor.elem_count()).map(|_| {
            drawn += 1;
            scale * (dflash_eval::random::below(7, drawn, 2001) as f32 / 1000.0 - 1.0)
        });
        let noise = Tensor::from_iter(noise, &Device::Cpu)
            .unwrap()
            .reshape(tensor.shape())
            .unwrap();
        (tensor + noise).unwrap()
    };
    let tensors = params.published(target.head()).unwrap();
    let tensors = tensors
        .iter()
        .map(|(name, tensor)| (name.clone(), disturbed(tensor)))
        .collect();
    let card = ModelCard::named("fresh", "demo");
    write(dir, config, &tensors, &card, &json!({}), Existing::Refuse).unwrap();
}

pub(crate) fn program(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dflash-export"))
        .args(arguments)
        .output()
        .unwrap()
}

pub(crate) fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

pub(crate) fn edit_config(dir: &Path, change: impl FnOnce(&mut Value)) {
    let path = dir.join("config.json");
    let mut config = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(&path, config.to_string()).unwrap();
}

pub(crate) fn edit_tensors(dir: &Path, change: impl FnOnce(&mut std::collections::HashMap<String, Tensor>)) {
    let path = dir.join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    change(&mut tensors);
    candle_core::safetensors::save(&tensors, &path).unwrap();
}

#[test]
fn a_whole_folder_is_told_in_full_and_fits_its_target() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    publish(&dir, &config());
    let found = inspect(&dir, Some(&demo("target"))).unwrap();
    assert_eq!(found.problems, Vec::<String>::new());
    assert_eq!((found.method, found.tensors.len()), (Some("DFlash 2"), 6 + 15 * 2));
    assert_eq!(found.parameters, config().parameter_count());
    assert_eq!(found.bytes, 2 * found.parameters);

    let (folder, target) = (dir.to_str().unwrap(), demo("target"));
    let arguments = ["inspect", folder, "--target", target.to_str().unwrap()];
    let plain = program(&arguments);
    assert_eq!(code(&plain), 0, "{}", text(&plain.stderr));
    let table = text(&plain.stdout);
    for part in [
        "fc.weight",
        "[256, 768]",
        "vLLM 3, SGLang 4",
        "window 32, bidirectional",
        "dflash_config.mask_token_id",
        ": fits",
        "a whole drafter",
    ] {
        assert!(table.contains(part), "{part} is not in:\n{table}");
    }
    let printed = program(&[&arguments[..], &["--json"]].concat());
    let printed: Value = serde_json::from_slice(&printed.stdout).unwrap();
    assert_eq!(printed["parameters"], json!(found.parameters));
    assert_eq!(printed["config"]["dflash_config"]["target_layer_ids"], json!([1, 3, 5]));
    assert_eq!(printed["problems"], json!([]));
}

/// One way to spoil a folder, and what must be said about it.
type Case = (fn(&Path), &'static [&'static str]);

#[test]
fn a_folder_that_is_wrong_in_one_way_is_told_so() {
    let cases: [Case; 11] = [
        (
            |dir| {
                edit_tensors(dir, |tensors| {
                    let norm = tensors.remove("hidden_norm.weight").unwrap();
                    tensors.insert("hidden_normm.weight".to_owned(), norm);
                });
            },
            &["missing (1): hidden_norm.weight", "unexpected (1): hidden_normm.weight"],
        ),
        (
            |dir| {
                edit_tensors(dir, |tensors| {
                    let book = tensors.remove("candidate_selector.successor_codebook").unwrap();
                    tensors.insert("candidate_selector.successor_codebook.weight".to_owned(), book);
                });
            },
            &["successor_codebook.weight", "without .weight"],
        ),
        (
            |dir| {
                edit_config(dir, |config| {
                    config["dflash_config"]["target_layer_ids"] = json!([1, 2, 3, 4, 5]);
                });
            },
            &["fc.weight", "[256, 1280]", "[256, 768]", "5 taps"],
        ),
        (
            |dir| edit_config(dir, |config| config["rope_theta"] = json!(1e6)),
            &[
                "config.json",
                "rope_theta is 1000000.0",
                "rope_parameters.rope_theta is 10000000.0",
            ],
        ),
        (
            |dir| edit_config(dir, |config| config["dflash_config"]["mask_token_id"] = json!(4096)),
            &["mask_token_id", "4096"],
        ),
        (
            |dir| edit_config(dir, |config| config["num_target_layers"] = json!(12)),
            &["another target", "num_target_layers", "12", "8"],
        ),
        (
            |dir| {
                edit_config(dir, |config| {
                    config["dflash_config"]["target_layer_ids"] = json!([0, 1, 7]);
                });
            },
            &["target_layer_ids", "below 7", "got 7"],
        ),
        (
            |dir| edit_config(dir, |config| config["layer_types"] = json!(["sliding_attention"])),
            &["layer_types", "1 entries"],
        ),
        (
            |dir| {
                fs::copy(dir.join("model.safetensors"), dir.join("adamw.safetensors")).unwrap();
            },
            &["adamw.safetensors"],
        ),
        (
            |dir| {
                let bytes = fs::read(dir.join("model.safetensors")).unwrap();
                fs::write(dir.join("model.safetensors"), &bytes[..bytes.len() - 2]).unwrap();
            },
            &["model.safetensors", "not a whole safetensors file"],
        ),
        (
            |dir| fs::remove_file(dir.join("config.json")).unwrap(),
            &["config.json"],
        ),
    ];
    let root = tempfile::tempdir().unwrap();
    let good = root.path().join("good");
    publish(&good, &config());
    for (number, (spoil, words)) in cases.into_iter().enumerate() {
        let dir = root.path().join(number.to_string());
        fs::create_dir(&dir).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(good.join(file), dir.join(file)).unwrap();
        }
        spoil(&dir);
        let found = inspect(&dir, Some(&demo("target"))).unwrap();
        let problems = found.problems.join("; ");
        for word in words {
            assert!(problems.contains(word), "case {number}: {word:?} is not in: {problems}");
        }
        let (folder, target) = (dir.to_str().unwrap(), demo("target"));
        let output = program(&["inspect", folder, "--target", target.to_str().unwrap()]);
        assert_eq!(code(&output), 1, "case {number}");
        assert!(text(&output.stdout).contains("not usable"));
        let output = program(&["verify", folder, "--target", target.to_str().unwrap()]);
        assert_eq!(code(&output), 1, "case {number}");
        assert!(
            text(&output.stderr).contains(words[0]),
            "case {number}: {}",
            text(&output.stderr)
        );
    }
}

#[test]
fn usage_and_absent_folders_exit_with_2() {
    for arguments in [
        vec!["inspect"],
        vec!["inspect", "/no/such/folder"],
        vec!["inspect", ".", "--target", "/no/such/target"],
        vec!["verify", "/no/such/folder", "--target", "."],
        vec!["verify", ".", "--target", ".", "--min-acceptance", "2"],
        vec![
            "verify",
            ".",
            "--target",
            ".",
            "--prompts",
            "x",
            "--min-acceptance",
            "0.5",
        ],
        vec![
            "walk",
            "/no/such/folder",
            "--target",
            ".",
            "--prompts",
            "x",
            "--json",
            "out.json",
        ],
        vec!["frobnicate"],
    ] {
        let output = program(&arguments);
        assert_eq!(code(&output), 2, "{arguments:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_walk_repeats_from_the_tokens_that_it_names() {
    let root = tempfile::tempdir().unwrap();
    let (dir, out) = (root.path().join("drafter"), root.path().join("walks.json"));
    publish(&dir, &config());
    let (target_dir, prompts) = (demo("target"), demo("heldout.jsonl"));
    let arguments = [
        "walk",
        dir.to_str().unwrap(),
        "--target",
        target_dir.to_str().unwrap(),
        "--prompts",
        prompts.to_str().unwrap(),
        "--contexts",
        "3",
        "--json",
        out.to_str().unwrap(),
    ];
    let output = program(&arguments);
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    let walks: Value = serde_json::from_slice(&fs::read(&out).unwrap()).unwrap();
    let contexts = walks["contexts"].as_array().unwrap();
    assert_eq!(contexts.len(), 3);

    // the same from the tokens alone: taps of one whole pass, the anchor being the target's own next token
    let target = load_demo();
    let bound = BoundDrafter::new(Drafter::load(&dir, &Device::Cpu).unwrap(), target.head()).unwrap();
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    for context in contexts {
        let (tokens, anchor) = (ids(&context["tokens"]), context["anchor"].as_u64().unwrap() as u32);
        let mut session = target.session(bound.taps()).unwrap();
        let forward = session.forward(&tokens, LogitRows::Last).unwrap();
        let next = dflash_eval::argmax::argmax_rows(&forward.logits.unwrap()).unwrap();
        assert_eq!(next, [anchor]);
        let mut draft = bound.session().unwrap();
        draft.extend(&target.taps(&tokens, bound.taps()).unwrap()).unwrap();
        let walk = draft.propose(anchor, 3, &mut Sampling::Greedy).unwrap().tokens();
        assert_eq!(walk, ids(&context["walk"]));
    }
    assert_ne!(
        contexts[0]["walk"], contexts[1]["walk"],
        "a drafter that ignores its context would pass"
    );

    let many = program(
        &[
            &arguments[..6],
            &["--contexts", "1000", "--json", out.to_str().unwrap()],
        ]
        .concat(),
    );
    assert_eq!(code(&many), 2);
    assert!(
        text(&many.stderr).contains("has only 200 prompts"),
        "{}",
        text(&many.stderr)
    );
}

#[test]
fn a_verified_folder_equals_its_copy_and_is_held_to_its_floor() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    publish(&dir, &config());
    let (target_dir, prompts) = (demo("target"), demo("heldout.jsonl"));
    let base = [
        "verify",
        dir.to_str().unwrap(),
        "--target",
        target_dir.to_str().unwrap(),
        "--json",
    ];
    let alone = program(&base);
    assert_eq!(code(&alone), 0, "{}{}", text(&alone.stdout), text(&alone.stderr));
    let found: Value = serde_json::from_slice(&alone.stdout).unwrap();
    assert_eq!(
        found["copy"],
        json!({"exact": true, "blocks": 3, "hidden": 0.0, "logits": 0.0, "same_walks": 3})
    );
    assert_eq!(found["acceptance"], Value::Null);

    let short = [
        "--prompts",
        prompts.to_str().unwrap(),
        "--limit",
        "2",
        "--max-new",
        "12",
    ];
    let decoded = program(&[&base[..], &short, &["--min-acceptance", "1"]].concat());
    assert_eq!(code(&decoded), 0, "{}{}", text(&decoded.stdout), text(&decoded.stderr));
    let found: Value = serde_json::from_slice(&decoded.stdout).unwrap();
    assert_eq!(
        (&found["acceptance"]["prompts"], &found["acceptance"]["identical"]),
        (&json!(2), &json!(true))
    );

    let strict = program(&[&base[..], &short, &["--min-acceptance", "3.9"]].concat());
    assert_eq!(code(&strict), 1);
    let found: Value = serde_json::from_slice(&strict.stdout).unwrap();
    assert!(
        found["failures"][0].as_str().unwrap().contains("expected at least 3.9"),
        "{found}"
    );
}

#[test]
fn a_folder_stored_wider_than_bf16_may_differ_from_its_copy_and_says_so() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    publish(&dir, &config());
    edit_tensors(&dir, |tensors| {
        for tensor in tensors.values_mut() {
            *tensor = (tensor.to_dtype(DType::F32).unwrap() * 1.001).unwrap();
        }
    });
    let copy = compare_copy(&dir, load_demo().as_ref()).unwrap();
    assert!(!copy.exact && copy.hidden > 0.0 && copy.logits > 0.0, "{copy:?}");
    assert_eq!(failures(&copy, None, true, None), Vec::<String>::new());
}

#[test]
fn a_copy_that_drafts_differently_or_not_at_all_fails() {
    let same = Compared {
        exact: true,
        blocks: 3,
        hidden: 0.0,
        logits: 0.0,
        same_walks: 3,
    };
    let failed = |copy: Compared| !failures(&copy, None, true, None).is_empty();
    assert!(!failed(same.clone()));
    assert!(failed(Compared {
        hidden: 1e-7,
        ..same.clone()
    }));
    assert!(failed(Compared {
        logits: f32::NAN,
        ..same.clone()
    }));
    assert!(failed(Compared {
        same_walks: 2,
        ..same.clone()
    }));
    assert!(failed(Compared {
        blocks: 0,
        same_walks: 0,
        ..same
    }));
}

#[test]
fn what_engines_would_have_to_guess_is_a_warning_and_no_failure() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    publish(&dir, &config());
    edit_config(&dir, |config| {
        let config = config.as_object_mut().unwrap();
        config.shift_remove("model_type");
        config.insert("tie_word_embeddings".to_owned(), json!(true));
    });
    let output = program(&["inspect", dir.to_str().unwrap()]);
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for part in [
        "warning     model_type: missing",
        "warning     tie_word_embeddings: true",
    ] {
        assert!(table.contains(part), "{part} is not in:\n{table}");
    }
}

/// `| head` closes the pipe when it has seen enough.
#[test]
fn a_reader_that_goes_away_does_not_change_the_exit_code() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    publish(&dir, &config());
    for (broken, expected) in [(false, 0), (true, 1)] {
        if broken {
            fs::remove_file(dir.join("model.safetensors")).unwrap();
        }
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = Command::new(env!("CARGO_BIN_EXE_dflash-export"))
            .args(["inspect", dir.to_str().unwrap()])
            .stdout(writer)
            .stderr(std::process::Stdio::piped())
            .output()
            .unwrap();
        assert_eq!(code(&output), expected);
        assert_eq!(text(&output.stderr), "");
    }
}
