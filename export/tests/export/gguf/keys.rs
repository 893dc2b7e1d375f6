//! Which keys and tensors a file has: llama.cpp reads these and no others.

use candle_core::DType;
use dflash_export::gguf::file::Stored;
use dflash_export::gguf::target::{self, Change};
use dflash_export::gguf::tokenizer::Tokenizer;
use dflash_model::formats::gguf::{GgufFile, Value};
use dflash_model::{DrafterConfig, TargetConfig};

use super::{demo, dflash, dflash2, plan, refused, source, target_of, tokenizer, write};

/// Each key of a DFlash 2 for a Qwen3.5 target, with the number of its type on disk.
const GOLDEN: [(&str, u32); 37] = [
    ("dflash.attention.causal", 7),
    ("dflash.attention.head_count", 4),
    ("dflash.attention.head_count_kv", 4),
    ("dflash.attention.key_length", 4),
    ("dflash.attention.layer_norm_rms_epsilon", 6),
    ("dflash.attention.sliding_window", 4),
    ("dflash.attention.sliding_window_pattern", 9),
    ("dflash.attention.value_length", 4),
    ("dflash.block_count", 4),
    ("dflash.block_size", 4),
    ("dflash.context_length", 4),
    ("dflash.conv_group_size", 4),
    ("dflash.conv_kernel_size", 4),
    ("dflash.embedding_length", 4),
    ("dflash.feed_forward_length", 4),
    ("dflash.rope.dimension_sections", 9),
    ("dflash.rope.freq_base", 6),
    ("dflash.sample_from_anchor", 7),
    ("dflash.selector_rank", 4),
    ("dflash.selector_top_k", 4),
    ("dflash.target_layers", 9),
    ("dflash.vocab_size", 4),
    ("general.architecture", 8),
    ("general.base_model.0.name", 8),
    ("general.base_model.count", 4),
    ("general.description", 8),
    ("general.file_type", 4),
    ("general.name", 8),
    ("general.tags", 9),
    ("general.type", 8),
    ("tokenizer.ggml.add_bos_token", 7),
    ("tokenizer.ggml.eos_token_id", 4),
    ("tokenizer.ggml.mask_token_id", 4),
    ("tokenizer.ggml.merges", 9),
    ("tokenizer.ggml.model", 8),
    ("tokenizer.ggml.pre", 8),
    ("tokenizer.ggml.token_type", 9),
];

fn written(config: &DrafterConfig, qwen3_5: bool) -> GgufFile {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("drafter.gguf");
    write(
        &path,
        &source(config, DType::BF16, 1),
        &target_of(config, qwen3_5),
        Stored::Bf16,
    )
    .unwrap();
    GgufFile::open(&path).unwrap()
}

#[test]
fn a_dflash_2_has_exactly_the_golden_keys() {
    let file = written(&dflash2(), true);
    let mut golden: Vec<(&str, u32)> = GOLDEN.to_vec();
    golden.push(("tokenizer.ggml.tokens", 9));
    let found: Vec<(&str, u32)> = file
        .metadata()
        .iter()
        .map(|(key, value)| (key.as_str(), value.kind()))
        .collect();
    assert_eq!(found, golden);
    let list = |values: &[i32]| Value::Array(values.iter().copied().map(Value::I32).collect());
    assert_eq!(
        file.get("dflash.target_layers"),
        Some(&list(&[1, 3])),
        "layers are counted by what enters them"
    );
    assert_eq!(file.get("dflash.rope.dimension_sections"), Some(&list(&[16, 0, 0, 0])));
    let slides = Value::Array(vec![Value::Bool(true), Value::Bool(false)]);
    assert_eq!(file.get("dflash.attention.sliding_window_pattern"), Some(&slides));
    assert_eq!(file.get("dflash.attention.causal"), Some(&Value::Bool(false)));
    assert_eq!(file.get("general.file_type"), Some(&Value::U32(32)));
}

/// DFlash leaves out what is DFlash 2's, a drafter without windows the windows, one for Qwen3 the sections.
#[test]
fn what_a_drafter_lacks_is_not_written() {
    let mut config = dflash();
    config.layers[0].window = None;
    let file = written(&config, false);
    let gone = ["conv_", "selector_", "sliding_window", "rope.dimension_sections"];
    let expected: Vec<&str> = GOLDEN
        .iter()
        .map(|(key, _)| *key)
        .filter(|key| !gone.iter().any(|part| key.contains(part)))
        .chain(["tokenizer.ggml.tokens"])
        .collect();
    let found: Vec<&str> = file.metadata().keys().map(String::as_str).collect();
    assert_eq!(found, expected);
    assert_eq!(file.tensors().len(), 3 + 11 * 2);
}

#[test]
fn every_tensor_has_llama_cpp_s_name_and_shape() {
    let file = written(&dflash2(), true);
    let found: Vec<(&str, Vec<usize>)> = file
        .tensors()
        .iter()
        .map(|(name, info)| (name.as_str(), info.shape.clone()))
        .collect();
    let mut expected = vec![
        ("enc.output_norm.weight", vec![32]),
        ("fc.weight", vec![32, 64]),
        ("output_norm.weight", vec![32]),
        ("selector_hidden.weight", vec![8, 32]),
        ("selector_predecessor.weight", vec![40, 8]),
        ("selector_successor.weight", vec![40, 8]),
    ];
    let layer = [
        ("attn_conv_base", vec![2, 2, 32]),
        ("attn_conv_proj.weight", vec![8, 32]),
        ("attn_k.weight", vec![32, 32]),
        ("attn_k_norm.weight", vec![32]),
        ("attn_norm.weight", vec![32]),
        ("attn_output.weight", vec![32, 64]),
        ("attn_q.weight", vec![64, 32]),
        ("attn_q_norm.weight", vec![32]),
        ("attn_v.weight", vec![32, 32]),
        ("ffn_conv_base", vec![2, 2, 32]),
        ("ffn_conv_proj.weight", vec![8, 32]),
        ("ffn_down.weight", vec![32, 64]),
        ("ffn_gate.weight", vec![64, 32]),
        ("ffn_norm.weight", vec![32]),
        ("ffn_up.weight", vec![64, 32]),
    ];
    let names: Vec<String> = (0..2)
        .flat_map(|i| layer.iter().map(move |(name, _)| format!("blk.{i}.{name}")))
        .collect();
    for (name, (_, shape)) in names.iter().zip(layer.iter().cycle()) {
        expected.push((name, shape.clone()));
    }
    expected.sort();
    assert_eq!(found, expected);
}

/// Each case changes one thing; the message names the field or tensor, what was expected and what came.
#[test]
fn what_llama_cpp_would_refuse_is_refused_by_name() {
    type Case = (fn(&mut DrafterConfig), Stored, &'static [&'static str]);
    let cases: [Case; 7] = [
        (
            |c| c.selector.as_mut().unwrap().top_k = 6,
            Stored::F32,
            &["selector_top_k", "hidden_size 32", "up to 5", "got 6 (42)"],
        ),
        (
            |c| c.layers[0].causal = true,
            Stored::F32,
            &["is_causal", "all layers or none", "[true, false]"],
        ),
        (
            |c| c.intermediate_size = 48,
            Stored::Q8_0,
            &["tensor blk.0.ffn_down.weight", "multiple of 32", "got 48"],
        ),
        (
            |c| c.hidden_size = 64,
            Stored::F32,
            &["another target", "hidden_size", "expects 64", "has 32"],
        ),
        (
            |c| c.num_target_layers = 6,
            Stored::F32,
            &["another target", "num_target_layers", "expects 6", "has 5"],
        ),
        (
            |c| c.vocab_size = 41,
            Stored::F32,
            &["another target", "vocab_size", "expects 41", "has 40"],
        ),
        (
            |c| c.layers = vec![c.layers[1]; 513],
            Stored::F32,
            &["num_hidden_layers", "at most 512", "got 513"],
        ),
    ];
    let target = target_of(&dflash2(), true);
    for (change, stored, parts) in cases {
        let mut config = dflash2();
        change(&mut config);
        let message = refused(plan(&source(&config, DType::F32, 2), &target, stored));
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
    plan(&source(&dflash2(), DType::F32, 2), &target, Stored::Q8_0).unwrap();
}

/// The demo target: names that llama.cpp's loader asks for, and how each tensor is changed on the way.
#[test]
fn a_target_s_tensors_and_their_changes_are_llama_cpp_s() {
    let config = TargetConfig::read(&demo("target")).unwrap();
    let tokens = tokenizer(4096);
    let (plan, origins, _) = target::plan(&config, Some(&[4, 2, 2]), &tokens, "demo", Stored::F32).unwrap();
    assert_eq!(plan.tensors.len(), 2 + 6 * 14 + 2 * 11);
    let find = |name: &str| {
        let at = plan.tensors.iter().position(|tensor| tensor.name == name).unwrap();
        (plan.tensors[at].shape.clone(), origins[at].clone())
    };
    let heads = |dim, from, width| Change::ValueHeads { dim, from, width };
    let expected = [
        ("token_embd.weight", "embed_tokens.weight", vec![4096, 256], vec![]),
        (
            "blk.0.attn_norm.weight",
            "layers.0.input_layernorm.weight",
            vec![256],
            vec![Change::AddOne],
        ),
        (
            "blk.0.attn_qkv.weight",
            "layers.0.linear_attn.in_proj_qkv.weight",
            vec![512, 256],
            vec![heads(0, 256, 32)],
        ),
        (
            "blk.0.attn_gate.weight",
            "layers.0.linear_attn.in_proj_z.weight",
            vec![256, 256],
            vec![heads(0, 0, 32)],
        ),
        (
            "blk.0.ssm_out.weight",
            "layers.0.linear_attn.out_proj.weight",
            vec![256, 256],
            vec![heads(1, 0, 32)],
        ),
        (
            "blk.0.ssm_a",
            "layers.0.linear_attn.A_log",
            vec![8],
            vec![Change::NegativeExp, heads(0, 0, 1)],
        ),
        (
            "blk.0.ssm_norm.weight",
            "layers.0.linear_attn.norm.weight",
            vec![32],
            vec![],
        ),
        (
            "blk.0.ssm_conv1d.weight",
            "layers.0.linear_attn.conv1d.weight",
            vec![512, 4],
            vec![Change::Squeeze, heads(0, 256, 32)],
        ),
        (
            "blk.3.attn_q.weight",
            "layers.3.self_attn.q_proj.weight",
            vec![512, 256],
            vec![],
        ),
        (
            "blk.3.attn_q_norm.weight",
            "layers.3.self_attn.q_norm.weight",
            vec![64],
            vec![Change::AddOne],
        ),
        (
            "blk.3.post_attention_norm.weight",
            "layers.3.post_attention_layernorm.weight",
            vec![256],
            vec![Change::AddOne],
        ),
    ];
    for (theirs, ours, shape, changes) in expected {
        let (found, origin) = find(theirs);
        assert_eq!(
            (found, origin.name.as_str(), origin.changes),
            (shape, ours, changes),
            "{theirs}"
        );
    }
}

#[test]
fn a_target_s_keys_and_tokenizer_are_those_of_its_folder() {
    let config = TargetConfig::read(&demo("target")).unwrap();
    let tokens = Tokenizer::read(&demo("target"), config.info.vocab_size).unwrap();
    assert_eq!(
        (tokens.pre, tokens.tokens.len(), tokens.merges.len()),
        ("qwen35", 4096, 3834)
    );
    assert_eq!(tokens.special, [("eos", 4092), ("padding", 4090)]);
    assert_eq!(
        (tokens.kinds[4089], tokens.kinds[4090], tokens.kinds[4093]),
        (1, 3, 3),
        "normal, control, control"
    );
    let (plan, _, note) = target::plan(&config, Some(&[4, 2, 2]), &tokens, "demo", Stored::F32).unwrap();
    let value = |key: &str| {
        plan.metadata
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.clone())
    };
    let sections = Value::Array([3, 3, 2, 0].map(Value::I32).to_vec());
    assert_eq!(value("qwen35.rope.dimension_sections"), Some(sections));
    assert!(note.unwrap().contains("[4, 2, 2]"));
    assert_eq!(value("qwen35.full_attention_interval"), Some(Value::U32(4)));
    assert_eq!(value("qwen35.ssm.time_step_rank"), Some(Value::U32(8)));
    assert_eq!(value("qwen35.attention.recurrent_layers"), None);
}

/// A pattern of layers that no interval describes is written layer by layer; what the graph has built in is refused.
#[test]
fn an_irregular_target_is_said_in_full_and_a_foreign_one_refused() {
    let mut config = target_of(&dflash2(), true);
    config.layers.swap(0, 1);
    let (plan, ..) = target::plan(&config, None, &tokenizer(40), "t", Stored::Bf16).unwrap();
    let flags = [false, true, true, false, true].map(Value::Bool).to_vec();
    let found = plan
        .metadata
        .iter()
        .find(|(key, _)| key == "qwen35.attention.recurrent_layers");
    assert_eq!(found.map(|(_, value)| value), Some(&Value::Array(flags)));
    assert!(
        !plan
            .metadata
            .iter()
            .any(|(key, _)| key == "qwen35.full_attention_interval")
    );

    config.linear.as_mut().unwrap().value_dim = 16;
    let message = refused(target::plan(&config, None, &tokenizer(40), "t", Stored::Bf16));
    assert!(
        message.contains("linear_value_head_dim") && message.contains("got 16"),
        "{message}"
    );
    let mut config = target_of(&dflash2(), true);
    config.info.intermediate_size = 48;
    let message = refused(target::plan(&config, None, &tokenizer(40), "t", Stored::Q8_0));
    assert!(
        message.contains("blk.4.ffn_down.weight") && message.contains("multiple of 32"),
        "{message}"
    );
}
