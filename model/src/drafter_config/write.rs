//! Writes `config.json` so that every engine reads the same drafter out of it.
//!
//! Engines look for the same fact in different places, so the file says it in each: `block_size` at the top and
//! nested, the RoPE base flat and in `rope_parameters`, the storage type as `dtype` and `torch_dtype`. What an
//! engine would otherwise guess (`layer_types`, `sliding_window`, `rope_scaling`, `sample_from_anchor`) is explicit.

use candle_core::{DType, Result};
use serde_json::{Map, Value, json};

use super::DrafterConfig;

impl DrafterConfig {
    /// The published form, keys in a fixed order. Reading it back gives this configuration again.
    ///
    /// # Errors
    /// When the configuration is not sound, or mixes layer rules in a way that the format cannot say.
    pub fn to_json(&self) -> Result<Value> {
        self.to_json_stored_as(DType::BF16)
    }

    /// As [`DrafterConfig::to_json`], for tensors stored as `stored`: BF16, F16 or F32.
    ///
    /// # Errors
    /// As [`DrafterConfig::to_json`]; on another type, too.
    pub fn to_json_stored_as(&self, stored: DType) -> Result<Value> {
        self.validate()?;
        let dtype = match stored {
            DType::BF16 => "bfloat16",
            DType::F16 => "float16",
            DType::F32 => "float32",
            other => candle_core::bail!(
                "expected BF16, F16 or F32 to store a drafter in, got {}",
                other.as_str()
            ),
        };
        let architecture = if self.is_dflash2() {
            "DFlash2DraftModel"
        } else {
            "DFlashDraftModel"
        };
        let layer_types: Vec<&str> = self
            .layers
            .iter()
            .map(|layer| {
                if layer.window.is_some() {
                    "sliding_attention"
                } else {
                    "full_attention"
                }
            })
            .collect();
        let mut config = object(json!({
            "architectures": [architecture],
            "model_type": "qwen3",
            "attention_bias": false,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "dflash_config": self.nested(),
            "dtype": dtype,
            "torch_dtype": dtype,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
        }));
        // Absent means "a layer is causal exactly when it slides", the only mixed rule that there is.
        if let Some(causal) = self.uniform_causality() {
            config.insert("is_causal".to_owned(), causal.into());
        }
        config.extend(object(json!({
            "layer_types": layer_types,
            "max_position_embeddings": self.max_positions,
            "max_window_layers": self.layers.len(),
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.layers.len(),
            "num_key_value_heads": self.num_kv_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": { "rope_theta": self.rope_theta, "rope_type": "default" },
            "rope_scaling": null,
            "rope_theta": self.rope_theta,
            "sliding_window": self.sliding_window(),
            "use_sliding_window": self.sliding_window().is_some(),
            "tie_word_embeddings": false,
            "use_cache": true,
            "vocab_size": self.vocab_size,
        })));
        Ok(Value::Object(config))
    }

    /// The `dflash_config` object: what a Qwen3 configuration has no place for.
    fn nested(&self) -> Value {
        let mut nested = object(json!({
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": self.target_layer_ids,
            "sample_from_anchor": false,
        }));
        if let Some(conv) = self.conv {
            nested.insert("conv_kernel_size".to_owned(), conv.kernel_size.into());
            nested.insert("conv_group_size".to_owned(), conv.group_size.into());
        }
        if let Some(selector) = self.selector {
            nested.insert("selector_rank".to_owned(), selector.rank.into());
            nested.insert("selector_top_k".to_owned(), selector.top_k.into());
        }
        // A neutral factor stays out, as in the published files.
        if self.output_multiplier.to_bits() != 1.0_f64.to_bits() {
            nested.insert("output_multiplier".to_owned(), self.output_multiplier.into());
        }
        if self.input_embedding_scale.to_bits() != 1.0_f64.to_bits() {
            nested.insert("input_embedding_scale".to_owned(), self.input_embedding_scale.into());
        }
        if let Some(cap) = self.final_logit_softcapping {
            nested.insert("final_logit_softcapping".to_owned(), cap.into());
        }
        Value::Object(nested)
    }

    /// The causality that all layers share, if they do.
    fn uniform_causality(&self) -> Option<bool> {
        let first = self.layers.first()?.causal;
        self.layers.iter().all(|layer| layer.causal == first).then_some(first)
    }
}

/// The map inside a `json!({..})`.
fn object(value: Value) -> Map<String, Value> {
    let Value::Object(map) = value else {
        unreachable!("braces make an object")
    };
    map
}
