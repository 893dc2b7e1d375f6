//! Every published configuration is read to the numbers of its model, and what is written reads back the same.

use dflash_model::drafter_config::default_target_layer_ids;
use dflash_model::{ConvConfig, DrafterConfig, LayerRule, SelectorConfig, TargetInfo};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Sizes of one published drafter: H, I, L, heads, key/value heads, V, target layers, block, mask.
pub(crate) type Sizes = (usize, usize, usize, usize, usize, usize, usize, usize, u32);

const FULL: LayerRule = LayerRule {
    window: None,
    causal: false,
};

pub(crate) fn flat(sizes: Sizes, theta: f64, taps: &[usize]) -> Value {
    let (hidden, inner, layers, heads, kv_heads, vocab, target_layers, block, mask) = sizes;
    json!({
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": false,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": block,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
        "head_dim": 128, "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": inner,
        "layer_types": vec!["full_attention"; layers], "max_position_embeddings": 262_144, "max_window_layers": layers,
        "num_attention_heads": heads, "num_hidden_layers": layers, "num_key_value_heads": kv_heads,
        "num_target_layers": target_layers, "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": theta,
        "sliding_window": null, "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": vocab,
    })
}

/// The 27B DFlash 2 file, key by key.
pub(crate) fn qwen_27b_dflash2() -> Value {
    json!({
        "architectures": ["DFlash2DraftModel"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": null, "eos_token_id": 248_044, "pad_token_id": 248_044, "is_causal": false,
        "dflash_config": {
            "block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "mask_token_id": 248_070,
            "selector_rank": 256, "selector_top_k": 16, "target_layer_ids": [5, 19, 33, 47, 61],
        },
        "dtype": "bfloat16", "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
        "intermediate_size": 17_408, "layer_types": vec!["sliding_attention"; 5], "max_position_embeddings": 262_144,
        "max_window_layers": 5, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 5,
        "num_key_value_heads": 8, "num_target_layers": 64, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000_000, "rope_type": "default"}, "sliding_window": 2048,
        "tie_word_embeddings": false, "transformers_version": "5.15.0", "use_cache": true,
        "use_sliding_window": true, "vocab_size": 248_320,
    })
}

fn muse_30b_dflash2() -> Value {
    let changes = [
        ("/dflash_config/block_size", json!(16)),
        ("/dflash_config/mask_token_id", json!(201_818)),
        ("/dflash_config/target_layer_ids", json!([1, 13, 25, 37, 49])),
        ("/dflash_config/output_multiplier", json!(0.196_116_135_138_184_04)),
        ("/dflash_config/final_logit_softcapping", json!(20.0)),
        ("/hidden_size", json!(6656)),
        ("/intermediate_size", json!(19_968)),
        ("/max_position_embeddings", json!(131_072)),
        ("/num_target_layers", json!(52)),
        ("/rms_norm_eps", json!(1e-5)),
        ("/rope_parameters/rope_theta", json!(500_000.0)),
        ("/vocab_size", json!(202_048)),
    ];
    changes
        .into_iter()
        .fold(qwen_27b_dflash2(), |config, (path, value)| with(config, path, value))
}

/// `config` with the value at a JSON pointer set.
pub(crate) fn with(mut config: Value, pointer: &str, value: Value) -> Value {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = config.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    parent.insert(key.to_owned(), value);
    config
}

pub(crate) fn without(mut config: Value, pointer: &str) -> Value {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let removed = config
        .pointer_mut(parent)
        .unwrap()
        .as_object_mut()
        .unwrap()
        .shift_remove(key);
    assert!(removed.is_some(), "{pointer} was not there to be removed");
    config
}

pub(crate) fn read(config: &Value) -> DrafterConfig {
    DrafterConfig::from_json(config, "config.json").unwrap()
}

#[test]
fn dflash2_files_are_read_to_their_published_numbers() {
    let config = read(&qwen_27b_dflash2());
    let sliding = LayerRule {
        window: Some(2048),
        causal: false,
    };
    let expected = DrafterConfig {
        hidden_size: 5120,
        intermediate_size: 17_408,
        num_heads: 32,
        num_kv_heads: 8,
        head_dim: 128,
        layers: vec![sliding; 5],
        vocab_size: 248_320,
        num_target_layers: 64,
        target_layer_ids: vec![5, 19, 33, 47, 61],
        block_size: 8,
        mask_token_id: 248_070,
        rms_norm_eps: 1e-6,
        rope_theta: 1e7,
        max_positions: 262_144,
        output_multiplier: 1.0,
        final_logit_softcapping: None,
        input_embedding_scale: 1.0,
        conv: Some(ConvConfig {
            kernel_size: 2,
            group_size: 16,
        }),
        selector: Some(SelectorConfig { rank: 256, top_k: 16 }),
    };
    assert_eq!(config, expected);
    let muse = read(&muse_30b_dflash2());
    assert_eq!(muse.output_multiplier.to_bits(), (1.0 / 26f64.sqrt()).to_bits());
    assert_eq!((muse.final_logit_softcapping, muse.block_size), (Some(20.0), 16));
}

#[test]
fn tensor_lists_have_the_published_counts_and_bytes() {
    let bytes = |config: &DrafterConfig| 2 * config.parameter_count();
    let qwen = read(&qwen_27b_dflash2());
    assert_eq!((qwen.tensor_shapes().len(), bytes(&qwen)), (81, 3_848_808_960));
    let muse = read(&muse_30b_dflash2());
    assert_eq!((muse.tensor_shapes().len(), bytes(&muse)), (81, 5_544_319_488));
    let v1 = read(&flat(
        (2560, 9728, 5, 32, 8, 248_320, 32, 16, 248_070),
        1e7,
        &[1, 8, 15, 22, 29],
    ));
    assert_eq!((v1.tensor_shapes().len(), v1.parameter_count() / 100_000), (58, 5374));

    // the 4B shape with both DFlash 2 parts: 16,486,400 in the convolutions, 127.8 M in the selector
    let mut v2 = v1.clone();
    v2.conv = qwen.conv;
    v2.selector = qwen.selector;
    let part = |word: &str| -> usize {
        let shapes = v2.tensor_shapes();
        let tensors = shapes.iter().filter(|(name, _)| name.contains(word));
        tensors.map(|(_, shape)| shape.iter().product::<usize>()).sum()
    };
    assert_eq!(part("_conv."), 16_486_400);
    assert_eq!(part("candidate_selector."), 2 * 248_320 * 256 + 256 * 2560);
    assert_eq!(v2.parameter_count() / 100_000, 6817);
    let names: Vec<String> = v2.tensor_shapes().into_iter().map(|(name, _)| name).collect();
    assert!(names.is_sorted());
    assert!(names.contains(&"candidate_selector.predecessor_codebook".to_owned()));
    let shapes: std::collections::BTreeMap<_, _> = qwen.tensor_shapes().into_iter().collect();
    assert_eq!(shapes["fc.weight"], [5120, 25_600]);
    assert_eq!(shapes["layers.4.mlp_conv.kernel_projection.weight"], [1280, 5120]);
    assert_eq!(shapes["layers.0.attention_conv.base_kernel"], [2, 2, 5120]);
}

#[test]
fn dflash_files_are_read_and_absent_taps_are_asked_for_with_the_published_ones() {
    let files: [(Sizes, f64, &[usize]); 5] = [
        (
            (4096, 12_288, 5, 32, 8, 151_936, 36, 16, 151_669),
            1e6,
            &[1, 9, 17, 25, 33],
        ),
        (
            (2560, 9728, 5, 32, 8, 151_936, 36, 16, 151_669),
            1e6,
            &[1, 9, 17, 25, 33],
        ),
        (
            (2560, 9728, 5, 32, 8, 248_320, 32, 16, 248_070),
            1e7,
            &[1, 8, 15, 22, 29],
        ),
        (
            (4096, 12_288, 5, 32, 8, 248_320, 32, 16, 248_070),
            1e7,
            &[1, 8, 15, 22, 29],
        ),
        (
            (5120, 17_408, 5, 32, 8, 248_320, 64, 16, 248_070),
            1e7,
            &[1, 16, 31, 46, 61],
        ),
    ];
    for (sizes, theta, taps) in files {
        let value = flat(sizes, theta, taps);
        let config = read(&value);
        assert_eq!(config.layers, vec![FULL; 5]);
        assert_eq!((config.block_size, config.mask_token_id), (sizes.7, sizes.8));
        assert_eq!(config.rope_theta.to_bits(), theta.to_bits());
        assert_eq!(config.target_layer_ids, taps);
        let silent = without(value, "/dflash_config/target_layer_ids");
        let error = DrafterConfig::from_json(&silent, "config.json")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("target_layer_ids: missing") && error.contains(&format!("{taps:?}")),
            "{error}"
        );
    }
    let wide = flat(
        (2048, 6144, 8, 32, 4, 248_320, 40, 16, 248_070),
        1e7,
        &[1, 10, 19, 28, 37],
    );
    assert_eq!(read(&wide).layers.len(), 8);
}

#[test]
fn default_taps_round_halves_to_even() {
    assert_eq!(default_target_layer_ids(24, 5), [1, 6, 11, 16, 21]);
    assert_eq!(default_target_layer_ids(32, 5), [1, 8, 15, 22, 29]);
    assert_eq!(default_target_layer_ids(36, 5), [1, 9, 17, 25, 33]);
    assert_eq!(default_target_layer_ids(40, 5), [1, 10, 19, 28, 37]);
    assert_eq!(default_target_layer_ids(64, 5), [1, 16, 31, 46, 61]);
    assert_eq!(default_target_layer_ids(64, 1), [32]);
    // 1 + 7 / 2 = 4.5 goes to 4 and 1 + 9 / 2 = 5.5 to 6
    assert_eq!(default_target_layer_ids(11, 3), [1, 4, 8]);
    assert_eq!(default_target_layer_ids(13, 3), [1, 6, 10]);
}

#[test]
fn flat_and_nested_spellings_read_alike() {
    let old = flat(
        (2560, 9728, 5, 32, 8, 248_320, 32, 16, 248_070),
        1e7,
        &[1, 8, 15, 22, 29],
    );
    let new = without(without(old.clone(), "/rope_theta"), "/block_size");
    let new = with(
        new,
        "/rope_parameters",
        json!({"rope_theta": 10_000_000, "rope_type": "default"}),
    );
    let new = with(new, "/dflash_config/block_size", json!(16));
    assert_eq!(read(&old), read(&new));
    let both = with(
        old.clone(),
        "/rope_parameters",
        json!({"rope_theta": 10_000_000, "rope_type": "default"}),
    );
    let both = with(both, "/dflash_config/block_size", json!(16));
    assert_eq!(read(&both), read(&old));
}

#[test]
fn causality_follows_the_published_rules() {
    let base = qwen_27b_dflash2();
    let mixed = with(
        without(base.clone(), "/is_causal"),
        "/layer_types",
        json!([
            "sliding_attention",
            "sliding_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention"
        ]),
    );
    let causal = |value: &Value| -> Vec<bool> { read(value).layers.iter().map(|layer| layer.causal).collect() };
    let by_sliding = [true, true, true, true, false];
    assert_eq!(causal(&mixed), by_sliding);
    assert_eq!(causal(&with(mixed.clone(), "/is_causal", Value::Null)), by_sliding);
    assert_eq!(causal(&with(mixed.clone(), "/is_causal", json!(false))), [false; 5]);
    assert_eq!(causal(&with(mixed.clone(), "/is_causal", json!(true))), [true; 5]);
    assert_eq!(
        causal(&with(mixed.clone(), "/dflash_config/causal", json!(false))),
        [false; 5]
    );
    let both = with(
        with(mixed.clone(), "/dflash_config/causal", json!(true)),
        "/is_causal",
        json!(false),
    );
    assert_eq!(causal(&both), [false; 5], "the top-level key wins");
    assert_eq!(
        causal(&with(mixed.clone(), "/sliding_window_non_causal", json!(false))),
        by_sliding
    );
    assert_eq!(
        causal(&with(mixed.clone(), "/sliding_window_non_causal", json!(true))),
        [false; 5]
    );
    let windows: Vec<_> = read(&mixed).layers.iter().map(|layer| layer.window).collect();
    assert_eq!(windows, [Some(2048), Some(2048), Some(2048), Some(2048), None]);

    let untyped = without(without(base.clone(), "/layer_types"), "/use_sliding_window");
    assert_eq!(read(&untyped).layers, [FULL; 5], "no layer_types: all full");
    let forced = with(
        with(untyped, "/dflash_config/use_swa", json!(true)),
        "/dflash_config/swa_window_size",
        json!(2048),
    );
    assert_eq!(read(&forced).layers, read(&base).layers);
}

#[test]
fn another_target_is_refused_with_every_difference() {
    let config = read(&qwen_27b_dflash2());
    let mut info = TargetInfo {
        model_type: "qwen3_5".to_owned(),
        hidden_size: 5120,
        intermediate_size: 17_408,
        num_layers: 64,
        vocab_size: 248_320,
        max_positions: 262_144,
        rope_theta: 1e7,
        rms_norm_eps: 1e-6,
        tied: false,
    };
    config.check_target(&info).unwrap();
    (info.hidden_size, info.num_layers) = (2560, 32);
    let message = config.check_target(&info).unwrap_err().to_string();
    for part in ["hidden_size", "5120", "2560", "num_target_layers", "64", "32"] {
        assert!(message.contains(part), "{part} is not in: {message}");
    }
    assert!(!message.contains("vocab_size"), "{message}");
}

#[test]
fn a_rule_mix_that_the_format_cannot_say_is_not_written() {
    let mut config = read(&qwen_27b_dflash2());
    config.layers[1].window = Some(1024);
    assert!(config.to_json().unwrap_err().to_string().contains("one window"));
    config.layers[1] = LayerRule {
        window: Some(2048),
        causal: true,
    };
    assert!(config.to_json().unwrap_err().to_string().contains("is_causal"));
    config.layers = vec![FULL; 5];
    config.selector = None;
    assert!(config.to_json().unwrap_err().to_string().contains("selector_rank"));
}

#[test]
fn both_spellings_and_explicit_rules_are_written_in_a_stable_order() {
    let written = read(&qwen_27b_dflash2()).to_json().unwrap();
    for (pointer, value) in [
        ("/block_size", json!(8)),
        ("/dflash_config/block_size", json!(8)),
        ("/rope_theta", json!(1e7)),
        ("/rope_parameters", json!({"rope_theta": 1e7, "rope_type": "default"})),
        ("/rope_scaling", Value::Null),
        ("/dtype", json!("bfloat16")),
        ("/torch_dtype", json!("bfloat16")),
        ("/is_causal", json!(false)),
        ("/sliding_window", json!(2048)),
        ("/use_sliding_window", json!(true)),
        ("/dflash_config/sample_from_anchor", json!(false)),
        ("/architectures", json!(["DFlash2DraftModel"])),
    ] {
        assert_eq!(written.pointer(pointer), Some(&value), "{pointer}");
    }
    let keys: Vec<&String> = written.as_object().unwrap().keys().collect();
    assert_eq!(keys[..3], ["architectures", "model_type", "attention_bias"]);
    for absent in ["auto_map", "partial_rotary_factor"] {
        assert_eq!(written.get(absent), None);
    }
    assert_eq!(written.pointer("/dflash_config/output_multiplier"), None);

    let mut mixed = read(&qwen_27b_dflash2());
    mixed.layers.fill(LayerRule {
        window: Some(2048),
        causal: true,
    });
    mixed.layers[4] = FULL;
    assert_eq!(mixed.to_json().unwrap().get("is_causal"), None);
}

prop_compose! {
    fn any_config()(
        num_kv_heads in 1_usize..5, repeat in 1_usize..5, half_head in 1_usize..65, hidden_groups in 1_usize..9,
        group_size in 1_usize..17, inner in 1_usize..300, windows in prop::collection::vec(any::<bool>(), 1..7),
        beyond in 0_usize..5000, causality in 0_u8..3, vocab_size in 20_usize..300_000, depth in 2_usize..80,
        taps in prop::collection::btree_set(0_usize..78, 1..9), block_size in 2_usize..33, mask in 0_u32..20,
        factors in prop::array::uniform4(1e-9_f64..1e9), cap in prop::option::of(1e-3_f64..1e3),
        dflash2 in any::<bool>(), kernel_size in 1_usize..3, rank in 1_usize..300, top_k in 1_usize..20,
        positions in 0_usize..2_000_000, neutral in any::<bool>(),
    ) -> DrafterConfig {
        let taps: Vec<usize> = taps.into_iter().collect();
        let layers = windows
            .iter()
            .map(|&slides| LayerRule {
                window: slides.then_some(block_size + beyond),
                causal: match causality { 0 => false, 1 => true, _ => slides },
            })
            .collect();
        DrafterConfig {
            hidden_size: hidden_groups * group_size,
            intermediate_size: inner,
            num_heads: num_kv_heads * repeat,
            num_kv_heads,
            head_dim: 2 * half_head,
            layers,
            vocab_size,
            num_target_layers: depth.max(taps[taps.len() - 1] + 2),
            target_layer_ids: taps,
            block_size,
            mask_token_id: mask,
            rms_norm_eps: factors[0],
            rope_theta: factors[1],
            max_positions: block_size + positions,
            output_multiplier: if neutral { 1.0 } else { factors[2] },
            final_logit_softcapping: cap,
            input_embedding_scale: if neutral { 1.0 } else { factors[3] },
            conv: dflash2.then_some(ConvConfig { kernel_size, group_size }),
            selector: dflash2.then_some(SelectorConfig { rank, top_k }),
        }
    }
}

proptest! {
    #[test]
    fn what_is_written_reads_back_the_same(config in any_config()) {
        let value = config.to_json().unwrap();
        prop_assert_eq!(&DrafterConfig::from_json(&value, "value").unwrap(), &config);
        let text = serde_json::to_string_pretty(&value).unwrap();
        let parsed: Value = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(&DrafterConfig::from_json(&parsed, "text").unwrap(), &config);
        let per_layer = if config.is_dflash2() { 15 } else { 11 };
        let rest = if config.is_dflash2() { 6 } else { 3 };
        prop_assert_eq!(config.tensor_shapes().len(), rest + per_layer * config.layers.len());
    }
}
