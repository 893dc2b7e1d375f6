//! Starting from another drafter: the same start from every format, exact where it says so, refused where weights
//! would fit and mean something else.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{Value, write as write_gguf};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use dflash_model::folder::{Existing, ModelCard, read_config, write};
use dflash_model::formats::gguf::names::tensor_name;
use dflash_model::formats::speculators::{self, Verifier};
use dflash_model::formats::{self, Format, Source};
use dflash_model::{
    BoundDrafter, Codebooks, ConvConfig, Drafter, DrafterConfig, Drafting, LayerRule, Params, Sampling, SelectorConfig,
    TargetHead, init, target,
};
use dflash_train::warm_start::load;
use serde_json::json;

use crate::command::{command, conversations, repository, succeeded, train};

/// A drafter for the demo target, of the sizes that [`command`] asks for.
fn config() -> DrafterConfig {
    DrafterConfig {
        hidden_size: 256,
        intermediate_size: 64,
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 32,
        layers: vec![LayerRule {
            window: Some(2048),
            causal: false,
        }],
        vocab_size: 4096,
        num_target_layers: 8,
        target_layer_ids: vec![1, 3, 5],
        block_size: 8,
        mask_token_id: 4095,
        rms_norm_eps: 1e-6,
        rope_theta: 1e7,
        max_positions: 2048,
        output_multiplier: 1.0,
        final_logit_softcapping: None,
        input_embedding_scale: 1.0,
        conv: Some(ConvConfig {
            kernel_size: 2,
            group_size: 16,
        }),
        selector: Some(SelectorConfig { rank: 8, top_k: 8 }),
    }
}

/// A drafter none of whose tensors is what a fresh one starts with; every value fits BF16.
fn random(config: DrafterConfig, seed: u64) -> Source {
    let tensors = config
        .tensor_shapes()
        .into_iter()
        .enumerate()
        .map(|(i, (name, shape))| {
            let values = init::normal(seed + i as u64, shape.iter().product(), 0.05);
            let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
            let narrow = tensor.to_dtype(DType::BF16).unwrap();
            (name, narrow.to_dtype(DType::F32).unwrap())
        })
        .collect();
    Source {
        format: Format::Published,
        config,
        tensors,
        carried: BTreeMap::new(),
        notes: Vec::new(),
    }
}

fn publish(dir: &Path, source: &Source) {
    let card = ModelCard::named("start", "demo");
    write(
        dir,
        &source.config,
        &source.tensors,
        &card,
        &json!({}),
        Existing::Refuse,
    )
    .unwrap();
}

fn values(tensor: &Tensor) -> Vec<u32> {
    let flat = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    flat.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

fn same_tensors(a: &BTreeMap<String, Tensor>, b: &BTreeMap<String, Tensor>) {
    assert!(a.keys().eq(b.keys()), "{:?} {:?}", a.keys(), b.keys());
    for (name, tensor) in a {
        assert!(values(tensor) == values(&b[name]), "{name}");
    }
}

fn demo_head() -> TargetHead {
    let path = repository().join("data/demo/target");
    let target = target::load(&path, &Device::Cpu, DType::F32).unwrap();
    target.head().clone()
}

/// Writes a drafter as llama.cpp's converter does, by candle's own writer.
fn as_gguf(path: &Path, source: &Source) {
    let config = &source.config;
    let (conv, selector) = (config.conv.unwrap(), config.selector.unwrap());
    let number = |value: usize| Value::U32(value as u32);
    let taps = config.target_layer_ids.iter().map(|&tap| number(tap + 1)).collect();
    let own = [
        ("context_length", number(config.max_positions)),
        ("embedding_length", number(config.hidden_size)),
        ("block_count", number(config.layers.len())),
        ("feed_forward_length", number(config.intermediate_size)),
        ("attention.head_count", number(config.num_heads)),
        ("attention.head_count_kv", number(config.num_kv_heads)),
        ("attention.key_length", number(config.head_dim)),
        (
            "attention.layer_norm_rms_epsilon",
            Value::F32(config.rms_norm_eps as f32),
        ),
        ("attention.causal", Value::Bool(false)),
        ("attention.sliding_window", number(config.layers[0].window.unwrap())),
        (
            "attention.sliding_window_pattern",
            Value::Array(vec![Value::Bool(true)]),
        ),
        ("rope.freq_base", Value::F32(config.rope_theta as f32)),
        ("block_size", number(config.block_size)),
        ("target_layers", Value::Array(taps)),
        ("conv_kernel_size", number(conv.kernel_size)),
        ("conv_group_size", number(conv.group_size)),
        ("selector_rank", number(selector.rank)),
        ("selector_top_k", number(selector.top_k)),
        ("vocab_size", number(config.vocab_size)),
    ];
    let mut metadata: Vec<(String, Value)> = own.map(|(key, value)| (format!("dflash.{key}"), value)).into();
    metadata.push(("general.architecture".into(), Value::String("dflash".into())));
    metadata.push(("tokenizer.ggml.mask_token_id".into(), Value::U32(config.mask_token_id)));
    let whole = |tensor: &Tensor| QTensor::quantize(tensor, GgmlDType::F32).unwrap();
    let tensors: Vec<(String, QTensor)> = source
        .tensors
        .iter()
        .map(|(name, tensor)| (tensor_name(name).unwrap(), whole(tensor)))
        .collect();
    write_gguf(
        &mut fs::File::create(path).unwrap(),
        &metadata
            .iter()
            .map(|(key, value)| (key.as_str(), value))
            .collect::<Vec<_>>(),
        &tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor))
            .collect::<Vec<_>>(),
    )
    .unwrap();
}

fn init_from(path: &Path) -> String {
    format!("drafter.init_from={}", path.display())
}

/// `initialised` of a dry run that starts from `path`.
fn initialised(folder: &Path, run: &str, path: &Path, more: &[&str]) -> PathBuf {
    let init = init_from(path);
    let arguments = [&["--dry-run", "--set", &init], more].concat();
    succeeded(&command(folder, run, &arguments).output().unwrap());
    folder.join(run).join("initialised")
}

/// What is said when a run that starts from `path` is refused.
fn refusal(folder: &Path, path: &Path, more: &[&str]) -> String {
    let init = init_from(path);
    let arguments = [&["--dry-run", "--set", &init], more].concat();
    let output = command(folder, "refused", &arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(!folder.join("refused/initialised").exists());
    said
}

#[test]
fn every_format_starts_a_run_with_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path();
    conversations(folder);
    let source = random(config(), 3);
    let [published, theirs, file] = ["published", "theirs", "drafter.gguf"].map(|name| folder.join(name));
    publish(&published, &source);
    let verifier = Verifier {
        name: "demo".into(),
        architectures: Vec::new(),
    };
    let head = demo_head();
    speculators::write(&theirs, &source, &verifier, Some(&head), DType::BF16, Existing::Refuse).unwrap();
    as_gguf(&file, &source);
    for (run, path) in [("a", &published), ("b", &theirs), ("c", &file)] {
        let start = initialised(folder, run, path, &[]);
        let read = formats::read(&start, None).unwrap();
        same_tensors(&source.tensors, &read.tensors);
        assert_eq!(read.config, source.config, "{run}");
        let provenance: serde_json::Value =
            serde_json::from_slice(&fs::read(start.join("dflash_export.json")).unwrap()).unwrap();
        assert_eq!(provenance["started_from"]["path"], json!(path));
        assert_eq!(provenance["started_from"]["hash"].as_str().unwrap().len(), 64);
    }

    // with another embedding inside, the drafter was made for another target
    let mut foreign = head.clone();
    foreign.embed = (foreign.embed * 2.0).unwrap();
    let other = folder.join("other");
    speculators::write(
        &other,
        &source,
        &verifier,
        Some(&foreign),
        DType::BF16,
        Existing::Refuse,
    )
    .unwrap();
    let said = refusal(folder, &other, &[]);
    assert!(
        said.contains("drafter.init_from") && said.contains("embed_tokens.weight") && said.contains("--allow target"),
        "{said}"
    );
    initialised(folder, "allowed", &other, &["--allow", "target"]);
}

/// The issue's own check of a warm start: a learning rate of 0 for an epoch, and the acceptance is what it was.
#[test]
fn a_learning_rate_of_zero_leaves_weights_and_acceptance_as_they_were() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path();
    conversations(folder);
    let measured = |run: &str, more: &[&str]| {
        succeeded(&train(folder, run, more));
        let limits = ["--set", "evaluate.limit=4", "--set", "evaluate.max_new=32"];
        let arguments = [&["--stage", "evaluate"], more, &limits[..]].concat();
        succeeded(&command(folder, run, &arguments).output().unwrap());
        let report: serde_json::Value =
            serde_json::from_slice(&fs::read(folder.join(run).join("evaluation.json")).unwrap()).unwrap();
        assert!(report["rounds"].as_u64().unwrap() > 20);
        ["rounds", "acceptance_length", "acceptance_length_macro"].map(|key| report[key].clone())
    };
    let first = measured("first", &[]);
    let init = init_from(&folder.join("first/final"));
    let second = measured("second", &["--set", &init, "--set", "train.lr=0", "--set", "seed=9"]);
    assert_eq!(first, second);
    let read = |run: &str| formats::read(&folder.join(run).join("final"), None).unwrap().tensors;
    same_tensors(&read("first"), &read("second"));
    // and the same steps with a rate do move them
    succeeded(&train(folder, "third", &["--set", &init]));
    assert!(values(&read("third")["fc.weight"]) != values(&read("first")["fc.weight"]));
}

#[test]
fn a_tensor_that_this_drafter_does_not_have_is_refused_by_name() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path();
    conversations(folder);
    let start = folder.join("start");
    publish(&start, &random(config(), 5));
    let file = start.join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    let sinks = Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
    tensors.insert("layers.0.self_attn.sinks".into(), sinks);
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let said = refusal(folder, &start, &[]);
    assert!(
        said.contains("drafter.init_from") && said.contains("layers.0.self_attn.sinks"),
        "{said}"
    );
}

#[test]
fn mask_and_taps_change_only_by_name() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path();
    conversations(folder);
    let start = folder.join("start");
    let source = random(
        DrafterConfig {
            mask_token_id: 4000,
            ..config()
        },
        7,
    );
    publish(&start, &source);
    // the run file names 4095
    let said = refusal(folder, &start, &[]);
    for words in ["drafter.mask_token_id", "4000", "4095", "--allow mask"] {
        assert!(said.contains(words), "{said}");
    }
    let path = initialised(folder, "masked", &start, &["--allow", "mask"]);
    assert_eq!(read_config(&path).unwrap().mask_token_id, 4095);
    let taps = ["--set", "drafter.mask_token_id=4000", "--set", "taps.layers=[1, 2, 5]"];
    let said = refusal(folder, &start, &taps);
    assert!(said.contains("taps.layers") && said.contains("--allow taps"), "{said}");
    let path = initialised(
        folder,
        "tapped",
        &start,
        &[&taps[..], &["--set", "drafter.allow=[\"taps\"]"]].concat(),
    );
    // layer 2 takes over from layer 3, in its place
    same_tensors(&source.tensors, &formats::read(&path, None).unwrap().tensors);
    let said = refusal(folder, &start, &["--allow", "masks"]);
    assert!(said.contains("masks") && said.contains("taps"), "{said}");
}

/// Fresh variables of `config`, started from `source`, as a source again.
fn started(config: DrafterConfig, source: &Source) -> Source {
    let params = Params::init(&config, Codebooks::Free, 11, &Device::Cpu).unwrap();
    load(&params, &config, source).unwrap();
    let tensors = params
        .vars()
        .iter()
        .map(|(name, var)| (name.clone(), var.as_tensor().clone()));
    Source {
        config,
        tensors: tensors.collect(),
        ..source.clone()
    }
}

/// Hidden states [B - 1, H] and the drafted tokens after a context of `taps` [rows, taps * H].
fn drafted(source: &Source, head: &TargetHead, taps: &Tensor) -> (Vec<f32>, Vec<u32>) {
    let bound = BoundDrafter::new(Drafter::from_source(source, &Device::Cpu).unwrap(), head).unwrap();
    let width = bound.block_size() - 1;
    let mut context = bound.drafter().decoding_context();
    bound.drafter().extend(&mut context, taps).unwrap();
    let (hidden, _) = bound.slots(&context, 17, width).unwrap();
    let mut session = bound.session().unwrap();
    session.extend(taps).unwrap();
    let tokens = session.propose(17, width, &mut Sampling::Greedy).unwrap().tokens();
    (hidden.flatten_all().unwrap().to_vec1().unwrap(), tokens)
}

fn context(taps: usize) -> Tensor {
    let values = init::normal(23, 20 * taps * 256, 1.0);
    Tensor::from_vec(values, (20, taps * 256), &Device::Cpu).unwrap()
}

#[test]
fn a_dflash2_made_from_a_dflash_has_its_hidden_states_and_drafts_its_tokens() {
    let plain = DrafterConfig {
        conv: None,
        selector: None,
        ..config()
    };
    let (source, head, taps) = (random(plain, 31), demo_head(), context(3));
    let upgraded = started(config(), &source);
    assert_eq!(drafted(&source, &head, &taps), drafted(&upgraded, &head, &taps));
}

#[test]
fn taps_that_are_added_leave_the_drafter_what_it_was() {
    let (source, head) = (random(config(), 41), demo_head());
    let wider = started(
        DrafterConfig {
            target_layer_ids: vec![1, 2, 3, 5, 6],
            ..config()
        },
        &source,
    );
    let taps = context(5);
    let old = [0, 2, 3].map(|tap| taps.narrow(1, tap * 256, 256).unwrap());
    let (before, walk) = drafted(&source, &head, &Tensor::cat(&old, 1).unwrap());
    let (after, same_walk) = drafted(&wider, &head, &taps);
    assert_eq!(walk, same_walk);
    // a longer sum rounds otherwise
    let worst = before
        .iter()
        .zip(&after)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    assert!(worst < 1e-4, "{worst}");
}

/// Depth of the new target, its taps, and whose columns each takes over.
type Case = (usize, &'static [usize], &'static [Option<usize>]);

/// Columns of `fc` that belong to a tap.
fn tap_columns(source: &Source, tap: usize) -> Vec<u32> {
    values(&source.tensors["fc.weight"].narrow(1, tap * 256, 256).unwrap())
}

#[test]
fn a_layer_keeps_its_weights_and_new_layers_take_over_those_of_the_ones_that_fell_away() {
    let source = random(config(), 43);
    let zero = vec![0; 256 * 256];
    let of = |tap: Option<usize>| tap.map_or_else(|| zero.clone(), |tap| tap_columns(&source, tap));
    let cases: [Case; 5] = [
        (8, &[1, 3, 5], &[Some(0), Some(1), Some(2)]),
        (8, &[3, 4, 5, 6], &[Some(1), Some(0), Some(2), None]),
        (8, &[3], &[Some(1)]),
        // in a target of another depth only the order counts
        (12, &[1, 5, 9], &[Some(0), Some(1), Some(2)]),
        (12, &[3, 5, 7, 9], &[Some(0), Some(1), Some(2), None]),
    ];
    for (depth, layers, expected) in cases {
        let moved = started(
            DrafterConfig {
                num_target_layers: depth,
                target_layer_ids: layers.to_vec(),
                ..config()
            },
            &source,
        );
        for (tap, from) in expected.iter().enumerate() {
            assert!(tap_columns(&moved, tap) == of(*from), "{depth} {layers:?}: tap {tap}");
        }
    }
}

#[test]
fn codebook_rows_of_tokens_that_both_know_stay_and_new_ones_are_fresh() {
    let source = random(config(), 47);
    for vocabulary in [4100, 4096, 4000] {
        let changed = DrafterConfig {
            vocab_size: vocabulary,
            mask_token_id: 3999,
            ..config()
        };
        let fresh = Params::init(&changed, Codebooks::Free, 11, &Device::Cpu).unwrap();
        let moved = started(changed, &source);
        let common = vocabulary.min(4096);
        for name in ["predecessor_codebook", "successor_codebook"].map(|name| format!("candidate_selector.{name}")) {
            let rows = |tensor: &Tensor, start: usize, count: usize| values(&tensor.narrow(0, start, count).unwrap());
            let (ours, theirs) = (&moved.tensors[&name], &source.tensors[&name]);
            assert!(rows(ours, 0, common) == rows(theirs, 0, common), "{name}");
            let new = vocabulary - common;
            let start = fresh.vars()[&name].as_tensor();
            assert!(rows(ours, common, new) == rows(start, common, new), "{name}");
        }
    }
}
