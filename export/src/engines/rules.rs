//! What each engine's reader checks, assumes and overlooks.
//!
//! Sources: the loaders of vLLM, SGLang, llama.cpp, z-lab's MLX and PyTorch code and MAX's tests as of autumn 2026, and
//! the bug reports in which they misread a file. `null` counts as absent.

use dflash_model::DrafterConfig;
use dflash_model::formats::Format;
use serde_json::Value;

use super::lookup::{Names, Raw, some};
use super::{Engine, Findings, Seen};
use crate::gguf::drafter::refusals;

/// The keys that DFlash 2 adds, conv's pair and selector's.
const DFLASH2_KEYS: [&str; 4] = ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"];

/// SGLang's first release with DFlash 2 is later than this one.
const SGLANG_WITHOUT_DFLASH2: &str = "0.5.18";

/// MAX's window, which it does not read.
const MAX_WINDOW: usize = 2048;

pub(super) fn findings(seen: &Seen, engine: Engine) -> Findings {
    let mut found = Findings::default();
    match (seen.format, engine) {
        (_, Engine::LlamaCpp) => llama_cpp(seen, &mut found),
        (Format::Gguf, _) => found.refuse(
            true,
            "reads no GGUF drafter; convert it: dflash-export hf FILE --target T",
        ),
        (Format::Speculators, Engine::Vllm) => vllm_speculators(seen, &mut found),
        (Format::Speculators, _) => found.refuse(
            true,
            "has no reader for the speculators configuration; convert it: dflash-export hf FOLDER --target T",
        ),
        (Format::Published, Engine::Vllm) => vllm(seen, &mut found),
        (Format::Published, Engine::Sglang) => sglang(seen, &mut found),
        (Format::Published, Engine::Mlx) => mlx(seen, &mut found),
        (Format::Published, Engine::Transformers) => transformers(seen, &mut found),
        (Format::Published, Engine::Max) => max(seen, &mut found),
    }
    // fits no engine: each takes its sizes from the target
    if let (Some(config), Some(target)) = (&seen.config, &seen.target)
        && let Err(error) = config.check_target(target)
    {
        let depth_only = config.hidden_size == target.hidden_size && config.vocab_size == target.vocab_size;
        let verdict_refuses = !depth_only || engine == Engine::Max;
        found.refuse(verdict_refuses, error.to_string());
        found.misread(!verdict_refuses, format!("{error}; does not look"));
    }
    found
}

fn vllm(seen: &Seen, found: &mut Findings) {
    let raw = Raw(&seen.raw);
    let slides = raw.slides();
    let mixed = slides.contains(&true) && slides.contains(&false);
    architecture(&raw, found);
    found.refuse(
        raw.top("model_type").is_none_or(|name| name != "qwen3"),
        "model_type: expected \"qwen3\", the class that its registry builds a drafter's configuration from",
    );
    found.refuse(
        raw.is_dflash2() && DFLASH2_KEYS.iter().any(|key| raw.nested(key).is_none()),
        "dflash_config lacks a key of DFlash 2 (KeyError)",
    );
    found.refuse(
        raw.either("sample_from_anchor") == Some(&Value::Bool(true)),
        "sample_from_anchor: true is another block layout",
    );
    found.refuse(
        slides.contains(&true) && raw.top("sliding_window").is_none() && raw.nested("swa_window_size").is_none(),
        "sliding layers without a sliding_window",
    );
    found.refuse(disguised(seen), "its DFlash has no module for layers.0.attention_conv");
    let names = Names::of(seen);
    let prefixed = names.unexpected.iter().any(|name| name.starts_with("model."));
    found.refuse(
        prefixed,
        "model. is put before every name, so names that have it already are not found",
    );
    names.strict(found);
    found.refuse(
        raw.taps().is_none() && raw.top("eagle_aux_hidden_state_layer_ids").is_none(),
        "without target_layer_ids three layers of EAGLE's rule are tapped, and fc does not fit",
    );
    rope(&raw, found, ", taken as 1e6 without a word");
    stray(seen, found);
    context(seen, found);
    found.flag(raw.is_dflash2(), "DFlash 2 needs the V2 model runner");
    found.flag(
        mixed && !raw.is_dflash2(),
        "sliding beside full layers need the V2 model runner",
    );
}

/// A configuration of speculators, which carries target and counts.
fn vllm_speculators(seen: &Seen, found: &mut Findings) {
    let flag = |key: &str| seen.raw.get(key).and_then(Value::as_bool);
    let dflash2 = seen.raw["speculators_model_type"] == "dflash2";
    Names::of(seen).strict(found);
    found.refuse(
        flag("sample_from_anchor") == Some(true),
        "sample_from_anchor: true is another block layout",
    );
    if let Some(config) = &seen.config {
        let full = config.layers.iter().any(|layer| layer.window.is_none());
        let causal = config.layers.iter().any(|layer| layer.causal);
        found.misread(
            full && causal,
            "sliding_window_non_causal: false made the full layers causal, too, before PR 56692",
        );
    }
    context(seen, found);
    found.flag(
        dflash2,
        "DFlash 2 in this format needs a release with its updater, and the V2 model runner",
    );
}

fn sglang(seen: &Seen, found: &mut Findings) {
    let raw = Raw(&seen.raw);
    architecture(&raw, found);
    let layers = raw.size("num_hidden_layers").unwrap_or(0);
    let (depth, said) = match raw.size("num_target_layers") {
        Some(depth) => (depth, "num_target_layers"),
        None => (layers, "num_hidden_layers, for want of num_target_layers"),
    };
    match raw.taps() {
        None => found.refuse(true, "dflash_config.target_layer_ids: expected a list of layer ids"),
        Some(taps) => found.refuse(
            taps.is_empty() || taps.iter().any(|tap| *tap >= depth),
            format!("target_layer_ids {taps:?}: expected ids below {depth} ({said})"),
        ),
    }
    found.refuse(
        raw.nested("mask_token_id").and_then(Value::as_u64).is_none(),
        "dflash_config.mask_token_id: expected an integer",
    );
    for pair in [&DFLASH2_KEYS[..2], &DFLASH2_KEYS[2..]] {
        found.refuse(
            raw.either(pair[0]).is_some() != raw.either(pair[1]).is_some(),
            format!("{} and {}: both or neither", pair[0], pair[1]),
        );
    }
    layer_types(&raw, found);
    found.refuse(
        raw.slides().contains(&true) && raw.top("sliding_window").is_none(),
        "sliding layers without a sliding_window",
    );
    found.refuse(
        raw.top("hidden_act").is_some_and(|name| name != "silu"),
        "hidden_act: expected \"silu\"",
    );
    let names = Names::of(seen);
    let shape = names.misshapen.iter().find(|problem| problem.starts_with("fc.weight"));
    found.refuse(shape.is_some(), shape.cloned().unwrap_or_default());
    // a prefix is taken off here
    let unknown: Vec<String> = names
        .unexpected
        .iter()
        .filter(|name| !name.starts_with("model."))
        .cloned()
        .collect();
    found.misread(!unknown.is_empty(), format!("skips {} without a word", some(&unknown)));
    let missing: Vec<String> = names
        .missing
        .iter()
        .filter(|name| !seen.tensors.contains_key(&format!("model.{name}")))
        .cloned()
        .collect();
    found.misread(!missing.is_empty(), format!("does not miss {}", some(&missing)));
    found.misread(
        shape.is_none() && !names.misshapen.is_empty(),
        names.misshapen.join("; "),
    );
    let block = raw.either("block_size").is_none();
    found.misread(block, "block_size: missing, taken as 16 without a word");
    rope(&raw, found, ", taken from a default without a word");
    let unsaid = raw.slides().contains(&true) && raw.top("is_causal").is_none() && raw.nested("causal").is_none();
    found.misread(
        unsaid
            && seen
                .config
                .as_ref()
                .is_some_and(|config| !config.layers.iter().any(|layer| layer.causal)),
        "is_causal: missing, sliding layers are taken as causal",
    );
    stray(seen, found);
    found.flag(
        raw.is_dflash2(),
        format!("DFlash 2 needs a build with PR 35371: no release up to {SGLANG_WITHOUT_DFLASH2} has it"),
    );
}

fn llama_cpp(seen: &Seen, found: &mut Findings) {
    let Some(config) = &seen.config else { return };
    for problem in refusals(config) {
        found.refuse(true, problem);
    }
    let names = Names::of(seen);
    names.strict(found);
    found.flag(
        seen.format != Format::Gguf,
        "after dflash-export gguf, which puts the target's tokenizer in",
    );
    found.flag(
        config.is_dflash2(),
        "on several GPUs with -sm layer, -sm tensor fails with DFlash 2",
    );
}

fn mlx(seen: &Seen, found: &mut Findings) {
    let raw = Raw(&seen.raw);
    for key in ["num_target_layers", "max_position_embeddings", "head_dim"] {
        found.refuse(
            raw.top(key).is_none(),
            format!("{key}: read at the top without a default"),
        );
    }
    for key in ["target_layer_ids", "mask_token_id"] {
        found.refuse(
            raw.nested(key).is_none(),
            format!("dflash_config.{key}: read without a default"),
        );
    }
    layer_types(&raw, found);
    Names::of(seen).strict(found);
    found.refuse(disguised(seen), "its DFlash has no module for layers.0.attention_conv");
    found.misread(
        raw.disagreeing_theta(),
        "rope_theta: two values, the one at the top is read",
    );
    found.refuse(
        seen.stray.iter().any(|file| file.contains("weight file")),
        "loads every .safetensors of the folder, strictly",
    );
    rope(&raw, found, ", taken as 10,000 without a word");
    let (block, theta) = (raw.top("block_size").is_none(), raw.top("rope_theta").is_none());
    found.misread(
        block && raw.nested("block_size").is_some(),
        "block_size: mlx-vlm up to 0.6.4 reads it at the top alone and takes 16",
    );
    found.flag(
        theta && raw.theta().is_some(),
        "rope_theta: loaders of before June 2026 read it at the top alone",
    );
}

fn transformers(seen: &Seen, found: &mut Findings) {
    let raw = Raw(&seen.raw);
    architecture(&raw, found);
    found.refuse(
        raw.top("auto_map").is_some() && !seen.remote_code,
        "auto_map names a dflash.py that is not in the folder",
    );
    found.refuse(
        raw.top("num_target_layers").is_none(),
        "num_target_layers: read at the top without a default",
    );
    found.refuse(raw.either("block_size").is_none(), "block_size: read without a default");
    let names = Names::of(seen);
    found.misread(
        !names.missing.is_empty(),
        format!("fills {} at random, with a warning", some(&names.missing)),
    );
    found.misread(
        !names.unexpected.is_empty(),
        format!("skips {} with a warning", some(&names.unexpected)),
    );
    found.refuse(!names.misshapen.is_empty(), names.misshapen.join("; "));
    rope(&raw, found, ", taken as 10,000 without a word");
    found.misread(
        raw.disagreeing_theta(),
        "rope_theta: two values, the one in rope_parameters is read",
    );
    found.flag(
        true,
        "through the class of PyPI dflash; its benchmark takes Qwen3 and Llama targets alone",
    );
}

fn max(seen: &Seen, found: &mut Findings) {
    let raw = Raw(&seen.raw);
    architecture(&raw, found);
    found.refuse(
        raw.is_dflash2() && DFLASH2_KEYS.iter().any(|key| raw.either(key).is_none()),
        "all four conv and selector keys are required",
    );
    for key in ["input_embedding_scale", "output_multiplier"] {
        let neutral = raw.either(key).is_none_or(|value| value.as_f64() == Some(1.0));
        found.refuse(!neutral, format!("{key}: expected 1"));
    }
    let taps = raw.taps().unwrap_or_default();
    let mut distinct = taps.clone();
    distinct.sort_unstable();
    distinct.dedup();
    found.refuse(
        taps.is_empty() || distinct.len() != taps.len(),
        format!("target_layer_ids {taps:?}: expected distinct ids"),
    );
    let depth = seen
        .target
        .as_ref()
        .map(|target| target.num_layers as u64)
        .or(raw.size("num_target_layers"));
    found.refuse(
        depth.is_some_and(|depth| taps.iter().any(|tap| *tap >= depth)),
        format!(
            "target_layer_ids {taps:?}: expected ids below the target's {} layers",
            depth.unwrap_or(0)
        ),
    );
    let (mask, vocab) = (raw.size("mask_token_id"), raw.size("vocab_size"));
    found.refuse(
        mask.is_none_or(|mask| vocab.is_some_and(|vocab| mask >= vocab)),
        "mask_token_id: expected an id below vocab_size",
    );
    found.refuse(
        raw.nested("block_size")
            .and_then(Value::as_u64)
            .is_none_or(|block| block < 2),
        "dflash_config.block_size: expected at least 2",
    );
    layer_types(&raw, found);
    Names::of(seen).strict(found);
    let window = seen.config.as_ref().and_then(DrafterConfig::sliding_window);
    found.misread(
        window.is_some_and(|window| window != MAX_WINDOW),
        format!("sliding_window: taken as {MAX_WINDOW}, whatever the file says"),
    );
    rope(&raw, found, "");
    found.flag(true, "on a single device");
}

fn architecture(raw: &Raw<'_>, found: &mut Findings) {
    let name = raw.architecture();
    found.refuse(
        !matches!(name, Some("DFlashDraftModel" | "DFlash2DraftModel")),
        format!(
            "architectures: expected [\"DFlashDraftModel\"] or [\"DFlash2DraftModel\"], got {}",
            name.unwrap_or("nothing")
        ),
    );
    let keys = DFLASH2_KEYS.iter().any(|key| raw.either(key).is_some());
    found.misread(
        keys && name == Some("DFlashDraftModel"),
        "architectures says DFlash: convolution and selector of DFlash 2 are left out",
    );
}

/// The RoPE base and nothing else; `assumed` says what the engine takes for a base that is missing.
fn rope(raw: &Raw<'_>, found: &mut Findings, assumed: &str) {
    found.misread(raw.theta().is_none(), format!("rope_theta: missing{assumed}"));
    if let Some(keys) = raw.foreign_rope() {
        found.misread(true, keys);
    }
}

/// One type a layer, where types are given.
fn layer_types(raw: &Raw<'_>, found: &mut Findings) {
    let types = raw.top("layer_types").and_then(Value::as_array);
    let types = types.map(|types| types.len() as u64);
    found.refuse(
        types.is_some() && types != raw.size("num_hidden_layers"),
        "layer_types: expected one entry a layer",
    );
}

/// DFlash 2's tensors under DFlash's architecture.
fn disguised(seen: &Seen) -> bool {
    let convolves = seen.tensors.keys().any(|name| name.contains(".attention_conv."));
    convolves && Raw(&seen.raw).architecture() == Some("DFlashDraftModel")
}

fn stray(seen: &Seen, found: &mut Findings) {
    for file in &seen.stray {
        found.misread(true, file.clone());
    }
}

/// A drafter that is served past its positions.
fn context(seen: &Seen, found: &mut Findings) {
    if let (Some(config), Some(target)) = (&seen.config, &seen.target) {
        found.flag(
            config.max_positions < target.max_positions,
            format!(
                "--max-model-len {}: longer contexts read past the drafter's max_position_embeddings",
                config.max_positions
            ),
        );
    }
}
