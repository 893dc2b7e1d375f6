//! What engines make of ten folders, good and bad: the table of docs/engines.md, made anew and compared.

use std::fmt::Write as _;
use std::path::Path;

use dflash_export::engines::{Engine, Verdict};
use dflash_export::inspect::{Inspection, inspect};
use dflash_model::{DrafterConfig, LayerRule};
use serde_json::{Value, json};

use crate::folders::{config, demo, edit_config, edit_tensors, program, publish, text};

/// A name for the table, and what is done to a whole folder.
type Case = (&'static str, fn() -> DrafterConfig, fn(&Path));

const CASES: [Case; 10] = [
    ("DFlash 2 as we write it, window 2048", wide, |_| {}),
    ("DFlash as we write it, full attention", dflash1, |_| {}),
    ("DFlash 2, nested keys alone (June 2026)", wide, |dir| {
        edit_config(dir, |config| {
            remove(config, &["block_size", "rope_theta"]);
        });
    }),
    ("DFlash, sliding beside full layers", mixed, |_| {}),
    ("no RoPE base anywhere", wide, |dir| {
        edit_config(dir, |config| {
            remove(config, &["rope_theta", "rope_parameters"]);
        });
    }),
    ("a codebook named .weight", wide, |dir| {
        edit_tensors(dir, |tensors| {
            let book = tensors.remove("candidate_selector.predecessor_codebook").unwrap();
            tensors.insert("candidate_selector.predecessor_codebook.weight".to_owned(), book);
        });
    }),
    ("names with a model. prefix", wide, |dir| {
        edit_tensors(dir, |tensors| {
            *tensors = tensors
                .drain()
                .map(|(name, tensor)| (format!("model.{name}"), tensor))
                .collect();
        });
    }),
    ("no num_target_layers", wide, |dir| {
        edit_config(dir, |config| {
            remove(config, &["num_target_layers"]);
        });
    }),
    ("output_multiplier 0.5", scaled, |_| {}),
    ("DFlash 2 called DFlashDraftModel", wide, |dir| {
        edit_config(dir, |config| config["architectures"] = json!(["DFlashDraftModel"]));
    }),
];

fn remove(config: &mut Value, keys: &[&str]) {
    for key in keys {
        config.as_object_mut().unwrap().remove(*key);
    }
}

fn wide() -> DrafterConfig {
    let mut config = config();
    for layer in &mut config.layers {
        layer.window = Some(2048);
    }
    config
}

fn scaled() -> DrafterConfig {
    DrafterConfig {
        output_multiplier: 0.5,
        ..wide()
    }
}

fn dflash1() -> DrafterConfig {
    let full = LayerRule {
        window: None,
        causal: false,
    };
    DrafterConfig {
        layers: vec![full; 2],
        conv: None,
        selector: None,
        ..config()
    }
}

fn mixed() -> DrafterConfig {
    let sliding = LayerRule {
        window: Some(2048),
        causal: true,
    };
    let full = LayerRule {
        window: None,
        causal: false,
    };
    DrafterConfig {
        layers: vec![sliding, full],
        ..dflash1()
    }
}

fn found(case: &Case, root: &Path) -> Inspection {
    let dir = root.join("drafter");
    let _ = std::fs::remove_dir_all(&dir);
    publish(&dir, &case.1());
    case.2(&dir);
    inspect(&dir, Some(&demo("target"))).unwrap()
}

#[test]
fn the_documented_table_is_what_inspect_says_of_ten_folders() {
    let root = tempfile::tempdir().unwrap();
    let mut table =
        String::from("| folder | vLLM | SGLang | llama.cpp | MLX | HF | MAX |\n|---|---|---|---|---|---|---|\n");
    for case in &CASES {
        let found = found(case, root.path());
        let verdicts: Vec<&str> = found.engines.iter().map(|judgement| judgement.verdict.name()).collect();
        let _ = writeln!(table, "| {} | {} |", case.0, verdicts.join(" | "));
        for judgement in &found.engines {
            let bad = judgement.verdict > Verdict::Loads;
            assert_eq!(!judgement.reasons.is_empty(), bad, "{}: {judgement:?}", case.0);
        }
    }
    let documented = std::fs::read_to_string(demo("../../docs/engines.md")).unwrap_or_default();
    assert!(
        documented.contains(&table),
        "docs/engines.md lacks this table:\n{table}"
    );
}

/// No format is judged by its configuration alone.
#[test]
fn a_folder_without_readable_weights_is_refused_by_every_engine_and_has_one_problem() {
    let root = tempfile::tempdir().unwrap();
    let [published, theirs] = ["published", "theirs"].map(|name| root.path().join(name));
    publish(&published, &wide());
    let output = program(&[
        "speculators",
        published.to_str().unwrap(),
        "--target",
        demo("target").to_str().unwrap(),
        "--out",
        theirs.to_str().unwrap(),
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    for dir in [&published, &theirs] {
        std::fs::write(dir.join("model.safetensors"), "x").unwrap();
        let found = inspect(dir, Some(&demo("target"))).unwrap();
        assert_eq!(found.problems.len(), 1, "{:?}", found.problems);
        assert!(found.problems[0].contains("model.safetensors"), "{:?}", found.problems);
        for judgement in &found.engines {
            assert_eq!(judgement.verdict, Verdict::Refuses, "{judgement:?}");
        }
    }
}

#[test]
fn each_engine_is_told_its_own_count() {
    let root = tempfile::tempdir().unwrap();
    let config = DrafterConfig {
        block_size: 16,
        ..dflash1()
    };
    publish(&root.path().join("drafter"), &config);
    let found = inspect(&root.path().join("drafter"), Some(&demo("target"))).unwrap();
    let command = |engine: Engine| {
        let judgement = found
            .engines
            .iter()
            .find(|judgement| judgement.engine == engine)
            .unwrap();
        judgement.command.clone().unwrap()
    };
    for (engine, words) in [
        (Engine::Vllm, "\"num_speculative_tokens\":15"),
        (Engine::Sglang, "--speculative-num-draft-tokens 16"),
        (Engine::LlamaCpp, "--spec-draft-n-max 15"),
        (Engine::Max, "num_speculative_tokens 15"),
    ] {
        assert!(command(engine).contains(words), "{}", command(engine));
    }
}

#[test]
fn max_names_each_of_its_refusals() {
    let nested = |key: &'static str, value: Value| (key, value);
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    for (key, value) in [
        nested("target_layer_ids", json!([0, 1, 1, 2])),
        nested("target_layer_ids", json!([1, 3, 99])),
        nested("mask_token_id", json!(9999)),
        nested("block_size", json!(1)),
        nested("selector_rank", Value::Null),
        nested("output_multiplier", json!(0.5)),
    ] {
        let _ = std::fs::remove_dir_all(&dir);
        publish(&dir, &wide());
        edit_config(&dir, |config| {
            config["dflash_config"][key] = value.clone();
            if key == "block_size" {
                config["block_size"] = value.clone();
            }
        });
        let found = inspect(&dir, Some(&demo("target"))).unwrap();
        let max = found
            .engines
            .iter()
            .find(|judgement| judgement.engine == Engine::Max)
            .unwrap();
        assert_eq!(max.verdict, Verdict::Refuses, "{key} = {value}: {max:?}");
        let said = max.reasons.join("; ");
        let key = if key == "selector_rank" { "selector keys" } else { key };
        assert!(said.contains(key), "{key} = {value}: {said}");
    }
}

#[test]
fn verdicts_are_printed_and_in_json() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    publish(&dir, &wide());
    let output = program(&[
        "inspect",
        dir.to_str().unwrap(),
        "--target",
        demo("target").to_str().unwrap(),
    ]);
    let table = text(&output.stdout);
    assert!(
        table.contains("llama.cpp   loads with flags") && table.contains("vllm serve"),
        "{table}"
    );
    let output = program(&["inspect", dir.to_str().unwrap(), "--json"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["engines"][0]["engine"], json!("vLLM"));
    assert_eq!(json["engines"][0]["verdict"], json!("loads_with_flags"));
}

/// The first published folders name a Python file that lies beside them; engines with a reader of their own pass it by.
#[test]
fn remote_code_is_asked_for_by_its_own_class_alone() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    publish(&dir, &dflash1());
    edit_config(&dir, |config| {
        config["auto_map"] = json!({"AutoModel": "dflash.DFlashDraftModel"});
    });
    let verdicts = || {
        let found = inspect(&dir, Some(&demo("target"))).unwrap();
        assert!(found.passed(), "{:?}", found.problems);
        let verdicts = found.engines.iter().map(|judgement| judgement.verdict);
        verdicts.collect::<Vec<_>>()
    };
    let without = verdicts();
    std::fs::write(dir.join("dflash.py"), "").unwrap();
    let with = verdicts();
    assert_eq!((without[0], with[0]), (Verdict::Loads, Verdict::Loads));
    assert_eq!((without[4], with[4]), (Verdict::Refuses, Verdict::LoadsWithFlags));
}
