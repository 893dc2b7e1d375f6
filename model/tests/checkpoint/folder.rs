//! The folder comes back as it was written, or is refused for what is wrong with it; it is never there by half.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use dflash_model::folder::{
    ACCEPTANCE_DEFINITION, AcceptanceRow, DraftCounts, Existing, FILES, ModelCard, read_config, read_tensors,
    verify_written, write, write_files,
};
use dflash_model::{ConvConfig, DrafterConfig, LayerRule, SelectorConfig};
use half::bf16;
use serde_json::{Value, json};

type Tensors = BTreeMap<String, Tensor>;

fn tiny(dflash2: bool) -> DrafterConfig {
    let sliding = LayerRule {
        window: Some(64),
        causal: false,
    };
    DrafterConfig {
        hidden_size: 16,
        intermediate_size: 24,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 8,
        layers: vec![sliding; 2],
        vocab_size: 40,
        num_target_layers: 6,
        target_layer_ids: vec![0, 2, 3],
        block_size: 4,
        mask_token_id: 39,
        rms_norm_eps: 1e-6,
        rope_theta: 1e7,
        max_positions: 4096,
        output_multiplier: 1.0,
        final_logit_softcapping: None,
        input_embedding_scale: 1.0,
        conv: dflash2.then_some(ConvConfig {
            kernel_size: 2,
            group_size: 4,
        }),
        selector: dflash2.then_some(SelectorConfig { rank: 8, top_k: 4 }),
    }
}

/// Values that do not fit BF16 exactly, different in every tensor.
fn values(config: &DrafterConfig, dtype: DType) -> Tensors {
    let mut start = 0.0_f32;
    let tensor = |shape: &Vec<usize>| {
        let count: usize = shape.iter().product();
        start += 1.0;
        let values: Vec<f32> = (0..count).map(|i| (start * 1.7 + i as f32 * 0.613).sin()).collect();
        let tensor = Tensor::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap();
        tensor.to_dtype(dtype).unwrap()
    };
    let mut tensor = tensor;
    let shapes = config.tensor_shapes();
    shapes
        .iter()
        .map(|(name, shape)| (name.clone(), tensor(shape)))
        .collect()
}

fn card() -> ModelCard {
    ModelCard {
        name: "org/Tiny-DFlash".to_owned(),
        base_model: "org/Tiny".to_owned(),
        base_revision: Some("abc123".to_owned()),
        base_model_relation: None,
        license: Some("apache-2.0".to_owned()),
        thinking: Some("off".to_owned()),
        data: None,
        training_length: Some(256),
        acceptance: vec![AcceptanceRow {
            prompts: "held out | 12".to_owned(),
            setting: "greedy, thinking off, 96 tokens".to_owned(),
            rounds: 321,
            acceptance_length: 2.4567,
            acceptance_length_macro: 2.5,
        }],
    }
}

fn write_tiny(dir: &Path, config: &DrafterConfig, tensors: &Tensors) -> candle_core::Result<()> {
    write(dir, config, tensors, &card(), &json!({"steps": 3}), Existing::Refuse)
}

fn message<T>(result: candle_core::Result<T>) -> String {
    result.err().expect("should be refused").to_string()
}

fn assert_names(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
}

/// A good folder whose weight file is then replaced by `change`d tensors.
fn spoiled(change: impl FnOnce(&mut Tensors)) -> (tempfile::TempDir, String) {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    let config = tiny(true);
    let mut tensors = values(&config, DType::BF16);
    write_tiny(&dir, &config, &tensors).unwrap();
    read_tensors(&dir, &config, &Device::Cpu).unwrap();
    change(&mut tensors);
    let map = tensors.into_iter().collect();
    candle_core::safetensors::save(&map, dir.join("model.safetensors")).unwrap();
    let message = message(read_tensors(&dir, &config, &Device::Cpu));
    (root, message)
}

fn rename(tensors: &mut Tensors, from: &str, to: &str) {
    let tensor = tensors.remove(from).unwrap();
    tensors.insert(to.to_owned(), tensor);
}

#[test]
fn a_written_folder_reads_back_as_the_bf16_rounding_of_what_was_given() {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        for dflash2 in [false, true] {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().join("deep/er/drafter");
            let config = tiny(dflash2);
            let tensors = values(&config, dtype);
            write_tiny(&dir, &config, &tensors).unwrap();
            assert_eq!(read_config(&dir).unwrap(), config);
            let read = read_tensors(&dir, &config, &Device::Cpu).unwrap();
            let count = if dflash2 { 6 + 15 * 2 } else { 3 + 11 * 2 };
            assert_eq!(read.len(), count);
            for (name, tensor) in &read {
                assert_eq!(tensor.dtype(), DType::BF16);
                let given: Vec<f32> = flat(&tensors[name]);
                let rounded: Vec<f32> = given.iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
                assert_eq!(flat(tensor), rounded, "{name}");
            }
            verify_written(&dir, &tensors).unwrap();
            let left: Vec<_> = fs::read_dir(dir.parent().unwrap()).unwrap().collect();
            assert_eq!(left.len(), 1, "nothing but the drafter is left");
        }
    }
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    let tensor = tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap();
    tensor.to_vec1().unwrap()
}

#[test]
fn the_weight_file_says_pt_and_nothing_but_the_list() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    let config = tiny(true);
    write_tiny(&dir, &config, &values(&config, DType::F32)).unwrap();
    let bytes = fs::read(dir.join("model.safetensors")).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header % 8, 0);
    assert_eq!(bytes.len() as u64, 8 + header as u64 + 2 * config.parameter_count());
    let said = metadata.metadata().clone().unwrap();
    assert_eq!(
        said.into_iter().collect::<Vec<_>>(),
        [("format".to_owned(), "pt".to_owned())]
    );
    let mut files: Vec<String> = fs::read_dir(&dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let mut expected = FILES;
    expected.sort_unstable();
    assert_eq!(files, expected);
    let provenance: Value = serde_json::from_slice(&fs::read(dir.join("dflash_export.json")).unwrap()).unwrap();
    assert_eq!(provenance, json!({"steps": 3}));
}

#[test]
fn a_value_that_bf16_cannot_hold_is_refused_by_tensor_and_index() {
    let name = "layers.1.mlp.up_proj.weight";
    for (value, words) in [
        (f32::NAN, "not finite"),
        (f32::NEG_INFINITY, "not finite"),
        (3.4e38, "too large for BF16"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let config = tiny(true);
        let mut tensors = values(&config, DType::F32);
        let mut spoiled = flat(&tensors[name]);
        spoiled[5 * 16 + 7] = value;
        tensors.insert(
            name.to_owned(),
            Tensor::from_vec(spoiled, (24, 16), &Device::Cpu).unwrap(),
        );
        let text = message(write_tiny(&root.path().join("drafter"), &config, &tensors));
        assert_names(&text, &[name, "[5, 7]", words]);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0, "nothing is left behind");
    }
}

#[test]
fn tensors_that_are_not_the_list_are_not_written() {
    let root = tempfile::tempdir().unwrap();
    let config = tiny(true);
    let mut tensors = values(&config, DType::F32);
    rename(&mut tensors, "norm.weight", "final_norm.weight");
    tensors.insert(
        "fc.weight".to_owned(),
        Tensor::zeros((16, 80), DType::F32, &Device::Cpu).unwrap(),
    );
    tensors.insert(
        "hidden_norm.weight".to_owned(),
        Tensor::zeros(16, DType::U32, &Device::Cpu).unwrap(),
    );
    let text = message(write_tiny(&root.path().join("drafter"), &config, &tensors));
    assert_names(
        &text,
        &[
            "missing (1): norm.weight",
            "unexpected (1): final_norm.weight",
            "[16, 48], got [16, 80]",
            "3 taps",
            "U32".to_lowercase().as_str(),
        ],
    );
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    let mut unsound = tiny(true);
    unsound.block_size = 1;
    let text = message(write_tiny(
        &root.path().join("drafter"),
        &unsound,
        &values(&tiny(true), DType::F32),
    ));
    assert_names(&text, &["block_size"]);
}

#[test]
fn a_destination_is_replaced_only_when_it_is_a_drafter_and_the_caller_says_so() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    let config = tiny(false);
    let (first, second) = (values(&config, DType::F32), values(&config, DType::BF16));
    let replace = |dir: &Path| write(dir, &config, &second, &card(), &json!({}), Existing::ReplaceDrafter);

    fs::create_dir(&dir).unwrap();
    assert_names(&message(write_tiny(&dir, &config, &Tensors::new())), &["missing (25)"]);
    assert!(dir.is_dir(), "an empty destination survives a failure");
    write_tiny(&dir, &config, &first).unwrap();
    assert_names(&message(write_tiny(&dir, &config, &first)), &["drafter", "not empty"]);
    replace(&dir).unwrap();
    verify_written(&dir, &second).unwrap();

    fs::write(dir.join("notes.txt"), "mine").unwrap();
    assert_names(&message(replace(&dir)), &["notes.txt"]);
    assert_eq!(fs::read_to_string(dir.join("notes.txt")).unwrap(), "mine");
    fs::remove_file(dir.join("notes.txt")).unwrap();
    fs::write(dir.join("config.json"), r#"{"architectures": ["Qwen3ForCausalLM"]}"#).unwrap();
    assert_names(&message(replace(&dir)), &["config.json", "not that of a drafter"]);

    let file = root.path().join("file");
    fs::write(&file, "x").unwrap();
    assert_names(&message(replace(&file)), &["file", "expected a folder"]);
    assert_eq!(
        fs::read_dir(root.path()).unwrap().count(),
        2,
        "no unfinished folder is left"
    );
}

#[cfg(unix)]
#[test]
fn a_linked_folder_is_read_and_replaced_through_its_link() {
    let root = tempfile::tempdir().unwrap();
    let (dir, link) = (root.path().join("step-1"), root.path().join("latest"));
    let config = tiny(true);
    let tensors = values(&config, DType::F32);
    write_tiny(&dir, &config, &tensors).unwrap();
    std::os::unix::fs::symlink(&dir, &link).unwrap();
    verify_written(&link, &tensors).unwrap();
    let other = values(&config, DType::F16);
    write(&link, &config, &other, &card(), &json!({}), Existing::ReplaceDrafter).unwrap();
    verify_written(&dir, &other).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
}

#[test]
fn files_written_into_a_callers_folder_stand_beside_its_own() {
    let root = tempfile::tempdir().unwrap();
    let config = tiny(true);
    let tensors = values(&config, DType::F32);
    fs::create_dir(root.path().join("state")).unwrap();
    fs::write(root.path().join("state/masters.safetensors"), "not a drafter's").unwrap();
    write_files(root.path(), &config, &tensors, &card(), &json!({})).unwrap();
    verify_written(root.path(), &tensors).unwrap();
    assert_names(
        &message(write_files(root.path(), &config, &tensors, &card(), &json!({}))),
        &["model.safetensors"],
    );
}

#[test]
fn a_renamed_tensor_is_one_missing_and_one_unexpected() {
    let (_root, text) = spoiled(|tensors| rename(tensors, "hidden_norm.weight", "hidden_normm.weight"));
    assert_names(
        &text,
        &[
            "missing (1): hidden_norm.weight",
            "unexpected (1): hidden_normm.weight",
            "drafter",
        ],
    );
}

#[test]
fn names_of_other_formats_are_explained() {
    let book = "candidate_selector.predecessor_codebook";
    let (_root, text) = spoiled(|tensors| rename(tensors, book, &format!("{book}.weight")));
    assert_names(&text, &[&format!("{book}.weight"), "without .weight"]);

    let packed = "layers.0.mlp.up_proj.weight";
    let (_root, text) = spoiled(|tensors| {
        tensors.remove(packed).unwrap();
        let words = Tensor::zeros((24, 2), DType::I32, &Device::Cpu).unwrap();
        tensors.insert(format!("{packed}_packed"), words);
    });
    assert_names(
        &text,
        &["missing (1): layers.0.mlp.up_proj.weight", "weight_packed", "quantised"],
    );

    let (_root, text) = spoiled(|tensors| {
        let words = Tensor::zeros((24, 16), DType::I32, &Device::Cpu).unwrap();
        tensors.insert(packed.to_owned(), words);
    });
    assert_names(&text, &[packed, "i32", "quantised"]);

    let (_root, text) = spoiled(|tensors| {
        let names: Vec<String> = tensors.keys().cloned().collect();
        for name in names {
            rename(tensors, &name, &format!("model.{name}"));
        }
        let table = Tensor::zeros((40, 16), DType::F32, &Device::Cpu).unwrap();
        tensors.insert("lm_head.weight".to_owned(), table);
        tensors.insert("d2t".to_owned(), Tensor::zeros(40, DType::I64, &Device::Cpu).unwrap());
    });
    assert_names(
        &text,
        &[
            "missing (36)",
            "unexpected (38)",
            "no model. prefix",
            "neither",
            "reduced vocabulary",
        ],
    );
}

#[test]
fn a_projection_of_another_tap_count_is_refused() {
    let (_root, text) = spoiled(|tensors| {
        let fc = Tensor::zeros((16, 80), DType::BF16, &Device::Cpu).unwrap();
        tensors.insert("fc.weight".to_owned(), fc);
    });
    assert_names(&text, &["fc.weight", "[16, 48]", "[16, 80]", "3 taps"]);
}

#[test]
fn a_stray_file_that_engines_would_load_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    let config = tiny(false);
    let tensors = values(&config, DType::F32);
    write_tiny(&dir, &config, &tensors).unwrap();
    fs::copy(dir.join("model.safetensors"), dir.join("optimizer.safetensors")).unwrap();
    fs::write(dir.join("mask_embedding.pt"), "x").unwrap();
    let text = message(read_tensors(&dir, &config, &Device::Cpu));
    assert_names(&text, &["optimizer.safetensors", "mask_embedding.pt"]);
}

#[test]
fn a_changed_value_is_found_by_the_reload_check() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    let config = tiny(true);
    let mut tensors = values(&config, DType::F32);
    write_tiny(&dir, &config, &tensors).unwrap();
    let name = "layers.0.attention_conv.base_kernel";
    let mut changed = flat(&tensors[name]);
    changed[17] += 0.5;
    tensors.insert(
        name.to_owned(),
        Tensor::from_vec(changed, (2, 2, 16), &Device::Cpu).unwrap(),
    );
    assert_names(&message(verify_written(&dir, &tensors)), &[name, "element 17"]);
}

#[test]
fn engines_are_told_their_own_counts() {
    assert_eq!(
        DraftCounts::of(16),
        DraftCounts {
            vllm: 15,
            sglang: 16,
            llama_cpp: 15,
            max: 15
        }
    );
}

#[test]
fn the_card_says_how_to_serve_and_what_the_numbers_mean() {
    let text = card().markdown(&tiny(true));
    assert!(
        text.starts_with("---\nlicense: \"apache-2.0\"\nbase_model: \"org/Tiny\"\n"),
        "{text}"
    );
    assert_names(
        &text,
        &[
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "- dflash2\n",
            r#"'{"method":"dflash","model":"org/Tiny-DFlash","num_speculative_tokens":3}'"#,
            "--speculative-num-draft-tokens 4",
            "--spec-draft-n-max 3",
            "| Block size | 4 (1 anchor + 3 drafts) |",
            "| Tapped target layers (outputs, from 0) | [0, 2, 3] |",
            "| Mask token id | 39 |",
            "| Training data | not stated |",
            "| held out \\| 12 | greedy, thinking off, 96 tokens | 321 | 2.457 | 2.500 |",
            ACCEPTANCE_DEFINITION,
            "revision `abc123`",
        ],
    );
    assert!(!text.contains("- qwen\n"), "{text}");
    let mut odd = card();
    odd.base_model = "Qwen/Qwen3.5-4B".to_owned();
    assert!(odd.markdown(&tiny(true)).contains("- sglang\n- qwen\n---\n"));
    assert!(!odd.markdown(&tiny(true)).contains("base_model_relation"));
    odd.base_model_relation = Some("adapter".to_owned());
    let text = odd.markdown(&tiny(true));
    assert!(
        text.contains("base_model: \"Qwen/Qwen3.5-4B\"\nbase_model_relation: \"adapter\"\n"),
        "{text}"
    );
    odd.base_model_relation = None;
    odd.license = None;
    odd.acceptance.clear();
    odd.base_model = "it's: here\nnow".to_owned();
    let text = odd.markdown(&tiny(false));
    assert!(
        text.starts_with("---\nbase_model: \"it's: here\\nnow\"\nlibrary_name"),
        "{text}"
    );
    assert_names(&text, &["Not measured", "- dflash\n", r"'it'\''s: here"]);
}

/// Every stored type, anywhere in a tensor; the largest finite value passes.
#[test]
fn a_stored_value_that_is_not_finite_is_refused_by_file_tensor_and_element() {
    let folder = tempfile::tempdir().unwrap();
    let config = tiny(true);
    write_tiny(&folder.path().join("drafter"), &config, &values(&config, DType::F32)).unwrap();
    let dir = folder.path().join("drafter");
    for (dtype, largest) in [
        (DType::BF16, f64::from(bf16::MAX)),
        (DType::F16, 65_504.0),
        (DType::F32, f64::from(f32::MAX)),
        (DType::F64, f64::MAX),
    ] {
        for (value, refused) in [
            (largest, false),
            (-largest, false),
            (f64::NAN, true),
            (f64::INFINITY, true),
            (f64::NEG_INFINITY, true),
        ] {
            let mut tensors = values(&config, dtype);
            let shape = tensors["norm.weight"].dims().to_vec();
            let mut spoiled = vec![1.0_f64; shape[0]];
            spoiled[5] = value;
            let exact = Tensor::from_vec(spoiled, shape, &Device::Cpu).unwrap();
            tensors.insert("norm.weight".to_owned(), exact.to_dtype(dtype).unwrap());
            let tensors: std::collections::HashMap<_, _> = tensors.into_iter().collect();
            candle_core::safetensors::save(&tensors, dir.join("model.safetensors")).unwrap();
            let outcome = read_tensors(&dir, &config, &Device::Cpu);
            if refused {
                assert_names(&message(outcome), &["model.safetensors", "norm.weight", "element 5"]);
            } else {
                outcome.unwrap();
            }
        }
    }
}
