//! Configurations that contradict themselves, lack a field or ask for another method are refused by name.

use dflash_model::DrafterConfig;
use serde_json::{Value, json};

use crate::config::{flat, qwen_27b_dflash2, read, with, without};

/// The message with which `config` is refused; it must name the file and each of `words`.
fn refused(config: &Value, words: &[&str]) {
    let message = match DrafterConfig::from_json(config, "some/config.json") {
        Ok(config) => panic!("read although it should not be ({words:?}): {config:?}"),
        Err(error) => error.to_string(),
    };
    assert!(!message.contains("Some(") && !message.contains("None"), "{message}");
    for word in ["some/config.json"].iter().chain(words) {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
}

#[test]
fn a_contradiction_names_both_values() {
    let base = qwen_27b_dflash2();
    refused(
        &with(base.clone(), "/block_size", json!(16)),
        &["dflash_config.block_size is 8", "block_size is 16"],
    );
    refused(
        &with(base.clone(), "/rope_theta", json!(1e5)),
        &["rope_theta is 100000.0", "rope_parameters.rope_theta is 10000000"],
    );
    refused(
        &with(base.clone(), "/mask_token_id", json!(7)),
        &["dflash_config.mask_token_id is 248070", "mask_token_id is 7"],
    );
    refused(
        &with(base.clone(), "/dflash_config/num_target_layers", json!(8)),
        &["num_target_layers is 8", "is 64"],
    );
    refused(
        &with(base.clone(), "/target_layer_ids", json!([1, 2])),
        &["[5,19,33,47,61]", "[1,2]"],
    );
    refused(
        &with(base.clone(), "/dflash_config/swa_window_size", json!(128)),
        &["swa_window_size is 128", "sliding_window is 2048"],
    );
    refused(
        &with(base.clone(), "/use_sliding_window", json!(false)),
        &["use_sliding_window is false", "layer_types"],
    );
    refused(
        &with(base.clone(), "/dflash_config/use_swa", json!(false)),
        &["use_swa is false", "layer_types"],
    );
    refused(
        &with(base.clone(), "/sliding_window_non_causal", json!(false)),
        &["sliding_window_non_causal", "is_causal"],
    );
    refused(
        &with(base.clone(), "/architectures", json!(["DFlashDraftModel"])),
        &["conv_kernel_size", "DFlashDraftModel"],
    );
    refused(
        &with(
            base.clone(),
            "/eagle_aux_hidden_state_layer_ids",
            json!([5, 19, 33, 47, 61]),
        ),
        &["[6, 20, 34, 48, 62]"],
    );
    let plus_one = with(
        base.clone(),
        "/eagle_aux_hidden_state_layer_ids",
        json!([6, 20, 34, 48, 62]),
    );
    assert_eq!(read(&plus_one), read(&base));
}

#[test]
fn a_missing_field_is_named() {
    for pointer in [
        "/architectures",
        "/hidden_size",
        "/intermediate_size",
        "/num_attention_heads",
        "/num_key_value_heads",
        "/head_dim",
        "/num_hidden_layers",
        "/num_target_layers",
        "/vocab_size",
        "/rms_norm_eps",
        "/hidden_act",
        "/max_position_embeddings",
        "/sliding_window",
        "/rope_parameters",
        "/dflash_config/block_size",
        "/dflash_config/mask_token_id",
        "/dflash_config/target_layer_ids",
        "/dflash_config/selector_rank",
        "/dflash_config/selector_top_k",
        "/dflash_config/conv_kernel_size",
        "/dflash_config/conv_group_size",
    ] {
        let key = pointer.rsplit('/').next().unwrap();
        let named = if key == "rope_parameters" { "rope_theta" } else { key };
        refused(&without(qwen_27b_dflash2(), pointer), &[named, "missing"]);
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table")]
fn an_unsound_value_is_named_with_what_was_expected() {
    let cases: [(&str, Value, &[&str]); 38] = [
        (
            "/dflash_config/mask_token_id",
            json!(248_320),
            &["mask_token_id", "248320"],
        ),
        ("/dflash_config/mask_token_id", json!(-1), &["mask_token_id", "-1"]),
        ("/dflash_config/mask_token_id", json!(1.5), &["mask_token_id", "1.5"]),
        (
            "/dflash_config/mask_token_id",
            json!("<|MASK|>"),
            &["mask_token_id", "<|MASK|>"],
        ),
        ("/dflash_config/mask_token_id", json!(true), &["mask_token_id", "true"]),
        (
            "/dflash_config/block_size",
            json!(1),
            &["block_size", "at least 2", "got 1"],
        ),
        (
            "/dflash_config/block_size",
            json!(2049),
            &["block_size", "sliding_window 2048", "got 2049"],
        ),
        (
            "/sliding_window",
            json!(7),
            &["block_size", "sliding_window 7", "got 8"],
        ),
        ("/sliding_window", json!(0), &["sliding_window", "at least 1", "got 0"]),
        (
            "/max_position_embeddings",
            json!(7),
            &["block_size", "max_position_embeddings 7", "got 8"],
        ),
        (
            "/dflash_config/target_layer_ids",
            json!([0, 1, 1, 2]),
            &["target_layer_ids", "got 1 before 1"],
        ),
        (
            "/dflash_config/target_layer_ids",
            json!([5, 3]),
            &["target_layer_ids", "got 5 before 3"],
        ),
        (
            "/dflash_config/target_layer_ids",
            json!([1, 99]),
            &["target_layer_ids", "below 63", "got 99"],
        ),
        (
            "/dflash_config/target_layer_ids",
            json!([1, 63]),
            &["target_layer_ids", "got 63"],
        ),
        (
            "/dflash_config/target_layer_ids",
            json!([]),
            &["target_layer_ids", "none"],
        ),
        (
            "/dflash_config/target_layer_ids",
            json!([1, "2"]),
            &["target_layer_ids[1]", "\"2\""],
        ),
        (
            "/dflash_config/target_layer_ids",
            json!(5),
            &["target_layer_ids", "list"],
        ),
        (
            "/dflash_config/conv_group_size",
            json!(48),
            &["conv_group_size", "5120", "48"],
        ),
        ("/dflash_config/conv_kernel_size", json!(9), &["conv_kernel_size", "9"]),
        ("/dflash_config/selector_top_k", json!(0), &["selector_top_k", "got 0"]),
        (
            "/dflash_config/selector_top_k",
            json!(248_321),
            &["selector_top_k", "248321"],
        ),
        (
            "/dflash_config/sample_from_anchor",
            json!(true),
            &["sample_from_anchor", "true"],
        ),
        (
            "/dflash_config/attention_sink_bias",
            json!(true),
            &["attention_sink_bias"],
        ),
        (
            "/dflash_config/projector_type",
            json!("domino"),
            &["projector_type", "Domino"],
        ),
        ("/dflash_config/shape", json!(3), &["unknown key shape", "block_size"]),
        (
            "/dflash_config/output_multiplier",
            json!(-0.5),
            &["output_multiplier", "-0.5"],
        ),
        (
            "/layer_types",
            json!(["full_attention"]),
            &["layer_types", "num_hidden_layers is 5", "1 entries"],
        ),
        (
            "/layer_types/4",
            json!("linear_attention"),
            &["layer_types[4]", "linear_attention"],
        ),
        ("/rope_scaling", json!({"rope_type": "yarn"}), &["rope_scaling", "yarn"]),
        ("/rope_parameters/rope_type", json!("yarn"), &["rope_type", "yarn"]),
        (
            "/rope_parameters/mrope_section",
            json!([11, 11, 10]),
            &["rope_parameters.mrope_section"],
        ),
        (
            "/rope_parameters/partial_rotary_factor",
            json!(0.25),
            &["partial_rotary_factor", "0.25"],
        ),
        ("/partial_rotary_factor", json!(0.5), &["partial_rotary_factor", "0.5"]),
        ("/hidden_act", json!("gelu"), &["hidden_act", "silu", "gelu"]),
        ("/attention_bias", json!(true), &["attention_bias"]),
        (
            "/draft_vocab_size",
            json!(32_000),
            &["draft_vocab_size", "32000", "248320"],
        ),
        ("/num_key_value_heads", json!(5), &["num_key_value_heads", "32", "5"]),
        ("/model_type", json!("qwen3_5_text"), &["model_type", "qwen3_5_text"]),
    ];
    for (pointer, value, words) in cases {
        let mut config = qwen_27b_dflash2();
        if let Some(place) = config.pointer_mut(pointer) {
            *place = value;
        } else {
            config = with(config, pointer, value);
        }
        refused(&config, words);
    }
    let huge = with(
        without(qwen_27b_dflash2(), "/layer_types"),
        "/num_hidden_layers",
        json!(u64::MAX),
    );
    refused(&huge, &["num_hidden_layers"]);
    refused(&json!({"speculators_model_type": "dflash"}), &["speculators"]);
    refused(&json!([1]), &["JSON object"]);
}

#[test]
fn a_tiny_config_with_a_mask_outside_its_vocabulary_is_refused() {
    let value = flat((64, 128, 2, 4, 2, 128, 4, 4, 999), 1e6, &[0, 1]);
    refused(&value, &["mask_token_id", "128", "999"]);
}

/// Engines read a window of 0 as they like, also where no layer slides.
#[test]
fn a_window_of_nothing_is_refused_even_when_no_layer_slides() {
    let value = flat((64, 128, 2, 4, 2, 128, 6, 4, 5), 1e6, &[0, 1]);
    refused(&with(value, "/sliding_window", json!(0)), &["sliding_window", "got 0"]);
}

#[test]
fn what_is_left_to_the_guess_of_an_engine_is_remarked_upon() {
    let written = read(&qwen_27b_dflash2()).to_json().unwrap();
    assert_eq!(DrafterConfig::remarks(&written), Vec::<String>::new());
    for (value, key) in [
        (without(written.clone(), "/model_type"), "model_type"),
        (without(written.clone(), "/is_causal"), "is_causal"),
        (without(written.clone(), "/block_size"), "block_size"),
        (
            without(written.clone(), "/dflash_config/block_size"),
            "dflash_config.block_size",
        ),
        (
            with(written.clone(), "/tie_word_embeddings", json!(true)),
            "tie_word_embeddings",
        ),
        (
            with(written.clone(), "/dflash_config/mask_token_id", json!(0)),
            "mask_token_id",
        ),
    ] {
        let remarks = DrafterConfig::remarks(&value);
        assert_eq!(remarks.len(), 1, "{key}: {remarks:?}");
        assert!(remarks[0].starts_with(key), "{key}: {remarks:?}");
    }
    let plain = flat((64, 128, 2, 4, 2, 128, 6, 4, 5), 1e6, &[0, 1]);
    let remarks = DrafterConfig::remarks(&without(plain, "/layer_types"));
    assert!(
        remarks.iter().any(|remark| remark.starts_with("layer_types: missing")),
        "{remarks:?}"
    );
    assert_eq!(DrafterConfig::remarks(&json!({"model_type": 3})), Vec::<String>::new());
}
