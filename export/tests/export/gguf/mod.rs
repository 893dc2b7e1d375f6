//! GGUF files: what is written is read back, what cannot be is refused by name, and no file makes the reader panic.

mod command;
mod hostile;
mod keys;
mod round_trip;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use dflash_export::gguf::drafter;
use dflash_export::gguf::file::{Plan, Stored};
use dflash_export::gguf::tokenizer::Tokenizer;
use dflash_model::formats::{Format, Source};
use dflash_model::{ConvConfig, DrafterConfig, LayerRule, SelectorConfig, TargetConfig};
use serde_json::json;

use crate::folders::demo;

/// A DFlash 2 of two layers, one sliding, for a target of 5 layers; H = 32, so the lattice of k = 5 just fits.
fn dflash2() -> DrafterConfig {
    let rule = |window| LayerRule { window, causal: false };
    DrafterConfig {
        hidden_size: 32,
        intermediate_size: 64,
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 32,
        layers: vec![rule(Some(16)), rule(None)],
        vocab_size: 40,
        num_target_layers: 5,
        target_layer_ids: vec![0, 2],
        block_size: 4,
        mask_token_id: 39,
        rms_norm_eps: 1e-6,
        rope_theta: 1e7,
        max_positions: 128,
        output_multiplier: 1.0,
        final_logit_softcapping: None,
        input_embedding_scale: 1.0,
        conv: Some(ConvConfig {
            kernel_size: 2,
            group_size: 16,
        }),
        selector: Some(SelectorConfig { rank: 8, top_k: 5 }),
    }
}

fn dflash() -> DrafterConfig {
    DrafterConfig {
        conv: None,
        selector: None,
        ..dflash2()
    }
}

/// A target that the configuration fits: Qwen3.5, or Qwen3.
fn target_of(config: &DrafterConfig, qwen3_5: bool) -> TargetConfig {
    let mut text = json!({
        "model_type": if qwen3_5 { "qwen3_5_text" } else { "qwen3" },
        "hidden_act": "silu", "hidden_size": config.hidden_size, "intermediate_size": 64,
        "num_hidden_layers": config.num_target_layers, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "vocab_size": config.vocab_size, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": true,
    });
    if qwen3_5 {
        let more = json!({
            "partial_rotary_factor": 0.5, "full_attention_interval": 2,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 4,
        });
        text.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    }
    TargetConfig::parse(&text.to_string()).unwrap()
}

/// A tokenizer of `rows` tokens.
fn tokenizer(rows: usize) -> Tokenizer {
    Tokenizer {
        pre: "qwen35",
        tokens: (0..rows).map(|row| format!("t{row}")).collect(),
        kinds: vec![1; rows],
        merges: vec!["t 1".to_owned()],
        special: vec![("eos", 1)],
        add_bos: false,
        template: None,
    }
}

/// Any finite numbers of `dtype`, zeros of both signs and the smallest among them; a function of `seed`.
fn tensors(config: &DrafterConfig, dtype: DType, seed: u64) -> BTreeMap<String, Tensor> {
    let mut drawn = seed << 32;
    let mut next = || {
        drawn += 1;
        let bits = dflash_eval::random::below(seed, drawn, 1 << 32) as u32;
        // exponents -30 to 10 around the usual sizes, and what rounds to nothing
        let value = match bits % 16 {
            0 => 0.0,
            1 => f32::from_bits(1),
            _ => f32::from_bits(bits & 0x007f_ffff | (97 + bits % 41) << 23),
        };
        if bits >> 31 == 1 { -value } else { value }
    };
    let fill = |(name, shape): (String, Vec<usize>)| {
        let count: usize = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| next()).collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        (name, tensor.to_dtype(dtype).unwrap())
    };
    config.tensor_shapes().into_iter().map(fill).collect()
}

fn source(config: &DrafterConfig, dtype: DType, seed: u64) -> Source {
    Source {
        format: Format::Published,
        config: config.clone(),
        tensors: tensors(config, dtype, seed),
        carried: BTreeMap::new(),
        notes: Vec::new(),
    }
}

fn plan(source: &Source, target: &TargetConfig, stored: Stored) -> Result<(Plan, Vec<String>)> {
    let tokenizer = tokenizer(source.config.vocab_size);
    drafter::plan(source, target, &tokenizer, "a drafter", "a target", stored)
}

/// Writes a drafter as the command does, its checks included.
fn write(path: &Path, source: &Source, target: &TargetConfig, stored: Stored) -> Result<()> {
    let (plan, published) = plan(source, target, stored)?;
    let load = |index: usize| Ok(source.tensors[&published[index]].clone());
    plan.write(path, false, &load, &|path| drafter::compare(path, source, target))?;
    Ok(())
}

/// The message of what must be refused.
fn refused<T>(outcome: Result<T>) -> String {
    match outcome {
        Ok(_) => panic!("should be refused"),
        Err(error) => format!("{error:#}"),
    }
}
