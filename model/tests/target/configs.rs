//! Published configs parse, nested and flat; what is not supported is refused by name.

use candle_core::Result;
use dflash_model::TargetConfig;
use dflash_model::target::config::{GateActivation, Mixer};

/// The text part of a published Qwen3.5 config.
fn published(
    hidden: usize,
    layers: usize,
    ffn: usize,
    heads: [usize; 2],
    value_heads: usize,
    tied: bool,
) -> serde_json::Value {
    let kinds: Vec<&str> = (0..layers)
        .map(|i| {
            if (i + 1) % 4 == 0 {
                "full_attention"
            } else {
                "linear_attention"
            }
        })
        .collect();
    serde_json::json!({
        "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 256,
        "layer_types": kinds, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": value_heads,
        "attn_output_gate": true, "attention_bias": false, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144, "tie_word_embeddings": tied, "mamba_ssm_dtype": "float32",
        "output_gate_type": "swish", "mtp_num_hidden_layers": 1, "bos_token_id": null, "eos_token_id": 248_044,
        "rope_parameters": { "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
                             "mrope_section": [11, 11, 10], "mrope_interleaved": true },
        "partial_rotary_factor": 0.25
    })
}

#[test]
fn every_published_shape_parses_nested_and_flat() -> Result<()> {
    for (hidden, layers, ffn, heads, value_heads, tied) in [
        (1024, 24, 3584, [8, 2], 16, true),
        (2048, 24, 6144, [8, 2], 16, true),
        (2560, 32, 9216, [16, 4], 32, true),
        (4096, 32, 12288, [16, 4], 32, false),
        (5120, 64, 17408, [24, 4], 48, false),
    ] {
        let text = published(hidden, layers, ffn, heads, value_heads, tied);
        let nested = serde_json::json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
            "vision_config": { "depth": 12 }, "image_token_id": 248_056, "tie_word_embeddings": tied
        });
        let config = TargetConfig::parse(&nested.to_string())?;
        assert_eq!(config, TargetConfig::parse(&text.to_string())?, "flat equals nested");
        assert_eq!(config.info.model_type, "qwen3_5");
        assert_eq!(
            (
                config.info.hidden_size,
                config.info.num_layers,
                config.info.intermediate_size
            ),
            (hidden, layers, ffn)
        );
        assert_eq!(
            (config.num_heads, config.num_kv_heads, config.rotary_dim),
            (heads[0], heads[1], 64)
        );
        assert_eq!(
            config.layers.iter().filter(|mixer| **mixer == Mixer::Full).count(),
            layers / 4
        );
        assert!((config.info.rope_theta - 1e7).abs() < 1e-6);
        assert_eq!(config.info.tied, tied);
        let linear = config.linear.expect("linear layers");
        assert_eq!(
            (linear.value_heads, linear.conv_channels()),
            (value_heads, 4096 + value_heads * 128)
        );
        assert_eq!(linear.gate, GateActivation::Silu);
    }
    Ok(())
}

/// The 0.8B config with some keys replaced, or removed by the value "REMOVED".
fn with(changes: &serde_json::Value) -> Result<TargetConfig> {
    let mut config = published(1024, 24, 3584, [8, 2], 16, true);
    for (key, value) in changes.as_object().expect("object") {
        match value.as_str() {
            Some("REMOVED") => drop(config.as_object_mut().expect("object").remove(key)),
            _ => config[key] = value.clone(),
        }
    }
    TargetConfig::parse(&config.to_string())
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table")]
fn what_is_not_supported_is_refused_by_name() {
    let rope = |theta: serde_json::Value| serde_json::json!({ "rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.25 });
    for (changes, part) in [
        (
            serde_json::json!({ "model_type": "qwen3_5_moe_text" }),
            "mixture-of-experts",
        ),
        (serde_json::json!({ "model_type": "qwen3_moe" }), "mixture-of-experts"),
        (
            serde_json::json!({ "num_experts": 256 }),
            "num_experts: mixture-of-experts",
        ),
        (serde_json::json!({ "model_type": "qwen4_exp" }), "hyper-connections"),
        (
            serde_json::json!({ "model_type": "llama" }),
            "\"llama\": expected qwen3_5",
        ),
        (serde_json::json!({ "model_type": "REMOVED" }), "model_type is missing"),
        (
            serde_json::json!({ "quantization_config": { "quant_method": "fp8" } }),
            "quantization_config (fp8)",
        ),
        (
            serde_json::json!({ "output_gate_type": "tanh" }),
            "output_gate_type: expected silu, swish or sigmoid",
        ),
        (
            serde_json::json!({ "linear_num_value_heads": "REMOVED" }),
            "linear_num_value_heads is missing",
        ),
        (
            serde_json::json!({ "linear_num_value_heads": 24 }),
            "24 is not a multiple of linear_num_key_heads 16",
        ),
        (
            serde_json::json!({ "hidden_act": "gelu" }),
            "hidden_act: expected silu, came \"gelu\"",
        ),
        (
            serde_json::json!({ "num_hidden_layers": 1_000_000_000_000_000_u64, "layer_types": null }),
            "num_hidden_layers: expected a whole number from 1 to 16777216",
        ),
        (
            serde_json::json!({ "num_hidden_layers": 5000, "layer_types": null }),
            "num_hidden_layers: expected at most 4096, came 5000",
        ),
        (
            serde_json::json!({ "head_dim": u64::MAX }),
            "head_dim: expected a whole number from 1 to 16777216",
        ),
        (
            serde_json::json!({ "hidden_act": null }),
            "hidden_act: expected silu, came nothing",
        ),
        (serde_json::json!({ "attention_bias": true }), "attention_bias"),
        (serde_json::json!({ "attn_output_gate": false }), "attn_output_gate"),
        (
            serde_json::json!({ "hidden_size": -1 }),
            "hidden_size: expected a whole number from 1 to 16777216, came -1",
        ),
        (serde_json::json!({ "hidden_size": "big" }), "hidden_size"),
        (
            serde_json::json!({ "rope_parameters": "REMOVED" }),
            "rope_theta is missing",
        ),
        (
            serde_json::json!({ "rope_theta": 10_000 }),
            "rope_theta is 10000000 in rope_parameters and 10000 beside it",
        ),
        (
            serde_json::json!({ "partial_rotary_factor": 0.5 }),
            "partial_rotary_factor is 0.25 in rope_parameters and 0.5",
        ),
        (
            serde_json::json!({ "rope_parameters": { "rope_type": "yarn", "rope_theta": 1e7 } }),
            "expected default, came \"yarn\"",
        ),
        (
            serde_json::json!({ "rope_parameters": rope("x".into()) }),
            "rope_theta: expected a number",
        ),
        (
            serde_json::json!({ "layer_types": ["full_attention"] }),
            "layer_types has 1 entries, num_hidden_layers is 24",
        ),
        (
            serde_json::json!({ "num_hidden_layers": 1, "layer_types": ["sliding_attention"] }),
            "layer_types[0]",
        ),
        (
            serde_json::json!({ "num_key_value_heads": 3 }),
            "8 is not a multiple of num_key_value_heads 3",
        ),
        (
            serde_json::json!({ "layer_types": "REMOVED", "full_attention_interval": "REMOVED" }),
            "full_attention_interval is missing",
        ),
    ] {
        let text = with(&changes).expect_err("refused").to_string();
        assert!(text.contains(part), "{changes}: {part} not in {text}");
        assert!(!text.contains("Some(") && !text.contains("None"), "{text}");
    }
}

#[test]
fn absent_optional_keys_fall_back_and_unknown_ones_are_ignored() {
    let base = published(1024, 24, 3584, [8, 2], 16, true);
    // absent layer list: the interval; absent gate type: the activation; unknown keys: ignored; theta beside: equal
    let config = with(
        &serde_json::json!({ "layer_types": "REMOVED", "output_gate_type": "REMOVED", "novelty": [1], "rope_theta": 1e7 }),
    );
    assert_eq!(
        config.expect("parses"),
        TargetConfig::parse(&base.to_string()).expect("parses")
    );
    let sigmoid = with(&serde_json::json!({ "output_gate_type": "sigmoid" })).expect("parses");
    assert_eq!(sigmoid.linear.expect("linear").gate, GateActivation::Sigmoid);
    let moe = serde_json::json!({ "model_type": "qwen3_5_moe", "text_config": base });
    assert!(
        TargetConfig::parse(&moe.to_string())
            .expect_err("refused")
            .to_string()
            .contains("qwen3_5_moe")
    );
}
