//! A drafter as llama.cpp's architecture `dflash`: what it would refuse, the keys, the tensors.
//!
//! Matrices are stored as asked. Norms and the convolution's fixed kernels are F32, since llama.cpp adds and multiplies
//! them as such; the convolution's projections and the selector are never quantised, since they are small and a drafter
//! lives by them.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Tensor};
use dflash_model::formats::gguf::names::{ARCHITECTURE, MASK_TOKEN, keys, tensor_name};
use dflash_model::formats::gguf::{ElementType, Value};
use dflash_model::formats::{self, Source};
use dflash_model::{DrafterConfig, TargetConfig};

use super::file::{Plan, Planned, Stored};
use super::tokenizer::Tokenizer;
use super::{general, number};

/// Most layers that llama.cpp has room for.
const MOST_LAYERS: usize = 512;

/// The file for a drafter of `target`, and the published name of each of its tensors.
///
/// # Errors
/// Listing everything that llama.cpp would refuse or compute otherwise.
pub fn plan(
    source: &Source,
    target: &TargetConfig,
    tokenizer: &Tokenizer,
    name: &str,
    base: &str,
    stored: Stored,
) -> Result<(Plan, Vec<String>)> {
    let config = &source.config;
    let mut problems = refusals(config);
    if let Err(error) = config.check_target(&target.info) {
        problems.push(error.to_string());
    }
    let mut tensors = Vec::new();
    let mut published = Vec::new();
    for (ours, shape) in config.tensor_shapes() {
        let tensor = source
            .tensors
            .get(&ours)
            .with_context(|| format!("tensor {ours} is missing"))?;
        tensors.push(Planned {
            name: tensor_name(&ours).with_context(|| format!("tensor {ours} has no name in llama.cpp"))?,
            element: element(&ours, shape.len(), stored, tensor.dtype()),
            shape,
        });
        published.push(ours);
    }
    let mut metadata = general(ARCHITECTURE, name, stored);
    metadata.extend(about(config, base));
    metadata.extend(drafter_keys(config, target));
    metadata.extend(tokenizer.metadata());
    metadata.push((MASK_TOKEN.to_owned(), Value::U32(config.mask_token_id)));
    let plan = Plan { metadata, tensors };
    problems.extend(plan.problems());
    ensure!(
        problems.is_empty(),
        "this drafter cannot be a GGUF file for llama.cpp: {}",
        problems.join("; ")
    );
    Ok((plan, published))
}

/// Reads a written file as a drafter again and holds it to what it was made from.
///
/// # Errors
/// Naming the first field or tensor that differs by more than the stored type explains.
pub fn compare(path: &Path, source: &Source, target: &TargetConfig) -> Result<()> {
    let read = formats::read(path, Some(&target.info))?;
    let expected = in_single(&source.config);
    ensure!(
        read.config == expected,
        "the configuration is not what was written: expected {expected:?}, got {:?}",
        read.config
    );
    for (name, given) in &source.tensors {
        let Some(found) = read.tensors.get(name) else {
            bail!("tensor {name} is missing")
        };
        let (given, found) = (values(given)?, (found.dtype(), values(found)?));
        let rounded = |value: f32| match found.0 {
            DType::BF16 => half::bf16::from_f32(value).to_f32(),
            DType::F16 => half::f16::from_f32(value).to_f32(),
            _ => value,
        };
        let exact = given.len() == found.1.len()
            && given
                .iter()
                .zip(&found.1)
                .all(|(a, b)| rounded(*a).to_bits() == b.to_bits());
        ensure!(
            exact || found.0 == DType::F32 && within_q8_0(&given, &found.1),
            "tensor {name} is not what was written"
        );
    }
    Ok(())
}

/// Whether `stored` is `given` in blocks of 32 with a half-float scale: off by half a step and what rounding the scale adds.
fn within_q8_0(given: &[f32], stored: &[f32]) -> bool {
    given.len() == stored.len()
        && given
            .chunks(ElementType::Q8_0.block())
            .zip(stored.chunks(ElementType::Q8_0.block()))
            .all(|(given, stored)| {
                let largest = given.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
                let step = largest / 127.0;
                // scales below 2^-14 lose bits of their own
                let allowed = 0.6 * step + 127.0 * f32::from(half::f16::MIN_POSITIVE_SUBNORMAL);
                given.iter().zip(stored).all(|(a, b)| (a - b).abs() <= allowed)
            })
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
}

/// The configuration with its numbers in single precision, which is all that llama.cpp keeps.
fn in_single(config: &DrafterConfig) -> DrafterConfig {
    let single = |number: f64| self::number(number).as_f64().unwrap_or(number);
    DrafterConfig {
        rms_norm_eps: single(config.rms_norm_eps),
        rope_theta: single(config.rope_theta),
        output_multiplier: single(config.output_multiplier),
        input_embedding_scale: single(config.input_embedding_scale),
        final_logit_softcapping: config.final_logit_softcapping.map(single),
        ..config.clone()
    }
}

/// What llama.cpp's loader refuses, or cannot be told.
pub fn refusals(config: &DrafterConfig) -> Vec<String> {
    let mut problems = Vec::new();
    if config.layers.len() > MOST_LAYERS {
        problems.push(format!(
            "num_hidden_layers: expected at most {MOST_LAYERS}, got {}",
            config.layers.len()
        ));
    }
    let causal: Vec<bool> = config.layers.iter().map(|layer| layer.causal).collect();
    if causal.iter().any(|layer| *layer != causal[0]) {
        problems.push(format!(
            "is_causal: expected all layers or none, llama.cpp keeps one flag for the drafter, got {causal:?} layer by layer"
        ));
    }
    if let Some(selector) = config.selector {
        let lattice = selector.top_k * (selector.top_k + 1);
        if config.hidden_size < lattice {
            let fitting = (1..selector.top_k).rfind(|k| k * (k + 1) <= config.hidden_size);
            problems.push(format!(
                "selector_top_k: expected top_k * (top_k + 1) of at most hidden_size {}, which holds up to {}, got {} \
                 ({lattice})",
                config.hidden_size,
                fitting.unwrap_or(0),
                selector.top_k
            ));
        }
    }
    problems
}

/// The type that one tensor is stored as.
fn element(published: &str, rank: usize, stored: Stored, source: DType) -> ElementType {
    if rank == 1 || published.ends_with(".base_kernel") {
        return ElementType::F32;
    }
    let kept = published.starts_with("candidate_selector.") || published.ends_with(".kernel_projection.weight");
    if kept && stored.element().float().is_none() {
        return match source {
            DType::BF16 => ElementType::BF16,
            DType::F16 => ElementType::F16,
            _ => ElementType::F32,
        };
    }
    stored.element()
}

/// What a reader of the file's head should know.
fn about(config: &DrafterConfig, base: &str) -> Vec<(String, Value)> {
    let method = if config.is_dflash2() { "DFlash 2" } else { "DFlash" };
    let drafts = config.block_size - 1;
    let tags = ["speculative-decoding", "draft-model"].map(|tag| Value::String(tag.to_owned()));
    vec![
        (
            "general.description".to_owned(),
            Value::String(format!(
                "{method} drafter for speculative decoding with {base} and no other model; --spec-type draft-dflash \
                 --spec-draft-n-max {drafts}"
            )),
        ),
        ("general.base_model.count".to_owned(), Value::U32(1)),
        ("general.base_model.0.name".to_owned(), Value::String(base.to_owned())),
        ("general.tags".to_owned(), Value::Array(tags.to_vec())),
    ]
}

fn drafter_keys(config: &DrafterConfig, target: &TargetConfig) -> Vec<(String, Value)> {
    let mut list = Vec::new();
    let mut put = |key: &str, value: Value| list.push((format!("{ARCHITECTURE}.{key}"), value));
    let size = |size: usize| Value::U32(size as u32);
    put(keys::CONTEXT_LENGTH, size(config.max_positions));
    put(keys::EMBEDDING_LENGTH, size(config.hidden_size));
    put(keys::BLOCK_COUNT, size(config.layers.len()));
    put(keys::FEED_FORWARD_LENGTH, size(config.intermediate_size));
    put(keys::HEAD_COUNT, size(config.num_heads));
    put(keys::HEAD_COUNT_KV, size(config.num_kv_heads));
    put(keys::KEY_LENGTH, size(config.head_dim));
    put(keys::VALUE_LENGTH, size(config.head_dim));
    put(keys::RMS_EPSILON, number(config.rms_norm_eps));
    put(
        keys::CAUSAL,
        Value::Bool(config.layers.iter().all(|layer| layer.causal)),
    );
    if let Some(window) = config.sliding_window() {
        let slides = config
            .layers
            .iter()
            .map(|layer| Value::Bool(layer.window.is_some()))
            .collect();
        put(keys::SLIDING_WINDOW, size(window));
        put(keys::SLIDING_WINDOW_PATTERN, Value::Array(slides));
    }
    put(keys::ROPE_BASE, number(config.rope_theta));
    if target.qwen3_5 {
        // positions of such a target have three parts; the drafter follows the first over its whole head
        let sections = [config.head_dim / 2, 0, 0, 0].map(|section| Value::I32(section as i32));
        put(keys::ROPE_SECTIONS, Value::Array(sections.to_vec()));
    }
    put(keys::VOCAB_SIZE, size(config.vocab_size));
    put(keys::BLOCK_SIZE, size(config.block_size));
    let entering = config
        .target_layer_ids
        .iter()
        .map(|&id| Value::I32(id as i32 + 1))
        .collect();
    put(keys::TARGET_LAYERS, Value::Array(entering));
    put(keys::SAMPLE_FROM_ANCHOR, Value::Bool(false));
    if let (Some(conv), Some(selector)) = (config.conv, config.selector) {
        put(keys::CONV_KERNEL_SIZE, size(conv.kernel_size));
        put(keys::CONV_GROUP_SIZE, size(conv.group_size));
        put(keys::SELECTOR_RANK, size(selector.rank));
        put(keys::SELECTOR_TOP_K, size(selector.top_k));
    }
    let neutral = 1.0_f64.to_bits();
    if config.output_multiplier.to_bits() != neutral {
        put(keys::LOGIT_SCALE, number(config.output_multiplier));
    }
    if let Some(cap) = config.final_logit_softcapping {
        put(keys::SOFTCAP, number(cap));
    }
    if config.input_embedding_scale.to_bits() != neutral {
        put(keys::EMBEDDING_SCALE, number(config.input_embedding_scale));
    }
    list
}
