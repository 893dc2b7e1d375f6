//! Reads `config.json`: DFlash with flat keys, the nested spelling since June 2026, and DFlash 2.
//!
//! A key of `dflash_config` may also stand at the top; two places must then hold the same value. Nothing that
//! changes the numbers is guessed: a key that has no agreed default is required, a feature that this drafter does
//! not have is refused by name. Unknown keys at the top are ignored (model files carry many), unknown keys inside
//! `dflash_config` are not: they change the method. `null` counts as absent.

use std::path::Path;

use candle_core::{Result, bail};
use serde_json::{Map, Value};

use super::keys::{Field, Keys, Read, agreed, brief};
use super::{
    ConvConfig, DrafterConfig, LARGEST_SIZE, LayerRule, MOST_LAYERS, SelectorConfig, default_target_layer_ids,
};

/// Keys of `dflash_config` that are read.
const KNOWN: [&str; 17] = [
    "attention_sink_bias",
    "block_size",
    "causal",
    "conv_group_size",
    "conv_kernel_size",
    "final_logit_softcapping",
    "input_embedding_scale",
    "mask_token",
    "mask_token_id",
    "num_target_layers",
    "output_multiplier",
    "sample_from_anchor",
    "selector_rank",
    "selector_top_k",
    "swa_window_size",
    "target_layer_ids",
    "use_swa",
];

/// Keys of other drafters, at the top or nested, and what they stand for.
const OTHER_METHODS: [(&str, &str); 9] = [
    ("projector_type", "a drafter with another head (Domino)"),
    ("shift_label", "a Domino head"),
    ("pure_draft_prefix_len", "a Domino head"),
    ("gru_hidden_dim", "a Domino head"),
    ("emb_dim", "a Domino head"),
    ("markov_rank", "a DSpark head"),
    (
        "speculators_model_type",
        "a checkpoint in the speculators format, which has to be converted first",
    ),
    (
        "transformer_layer_config",
        "a checkpoint in the speculators format, which has to be converted first",
    ),
    (
        "quantization_config",
        "a quantised drafter; drafters are read as BF16, F16 or F32",
    ),
];

impl DrafterConfig {
    /// Reads a drafter's `config.json`.
    ///
    /// # Errors
    /// When the file cannot be read, is not JSON, or does not describe a drafter that this crate runs. The message
    /// names the file, the field, what was expected and what came.
    pub fn from_json_file(path: &Path) -> Result<Self> {
        let origin = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|e| candle_core::Error::msg(format!("{origin}: {e}")))?;
        let value: Value = serde_json::from_slice(&bytes)
            .map_err(|e| candle_core::Error::msg(format!("{origin}: not a JSON file: {e}")))?;
        Self::from_json(&value, &origin)
    }

    /// Reads a configuration that is already parsed; `origin` names its source in errors.
    ///
    /// # Errors
    /// As [`DrafterConfig::from_json_file`].
    pub fn from_json(value: &Value, origin: &str) -> Result<Self> {
        let config = read(value).map_err(|e| candle_core::Error::msg(format!("{origin}: {e}")))?;
        if let Err(problem) = config.check() {
            bail!("{origin}: {problem}")
        }
        Ok(config)
    }
}

fn read(value: &Value) -> Read<DrafterConfig> {
    let keys = Keys::of(value)?;
    refuse_other_methods(&keys)?;
    let dflash2 = architecture(&keys)?;
    refuse_unsupported_layers(&keys)?;

    let num_layers = keys.required("num_hidden_layers")?.size(MOST_LAYERS)?;
    let num_target_layers = keys.required("num_target_layers")?.size(MOST_LAYERS)?;
    let vocab_size = keys.required("vocab_size")?.size(LARGEST_SIZE)?;
    if let Some(drafted) = keys.either("draft_vocab_size")?
        && drafted.size(LARGEST_SIZE)? != vocab_size
    {
        return Err(format!(
            "draft_vocab_size: reduced vocabularies are not supported, expected vocab_size {vocab_size}, got {}",
            drafted.value
        ));
    }
    let hidden_size = keys.required("hidden_size")?.size(LARGEST_SIZE)?;
    if let Some(target) = keys.either("target_hidden_size")?
        && target.size(LARGEST_SIZE)? != hidden_size
    {
        return Err(format!(
            "target_hidden_size: expected hidden_size {hidden_size}, got {}",
            target.value
        ));
    }
    let (conv, selector) = dflash2_parts(&keys, dflash2)?;
    Ok(DrafterConfig {
        hidden_size,
        intermediate_size: keys.required("intermediate_size")?.size(LARGEST_SIZE)?,
        num_heads: keys.required("num_attention_heads")?.size(LARGEST_SIZE)?,
        num_kv_heads: keys.required("num_key_value_heads")?.size(LARGEST_SIZE)?,
        head_dim: keys.required("head_dim")?.size(LARGEST_SIZE)?,
        layers: layer_rules(&keys, num_layers)?,
        vocab_size,
        num_target_layers,
        target_layer_ids: taps(&keys, num_target_layers, num_layers)?,
        block_size: keys.required("block_size")?.size(LARGEST_SIZE)?,
        mask_token_id: keys.required("mask_token_id")?.token()?,
        rms_norm_eps: keys.required("rms_norm_eps")?.number()?,
        rope_theta: rope_theta(&keys)?,
        max_positions: keys.required("max_position_embeddings")?.size(LARGEST_SIZE)?,
        output_multiplier: keys.number_or("output_multiplier", 1.0)?,
        // 0 switches the cap off in the reference
        final_logit_softcapping: Some(keys.number_or("final_logit_softcapping", 0.0)?).filter(|&cap| cap != 0.0),
        input_embedding_scale: keys.number_or("input_embedding_scale", 1.0)?,
        conv,
        selector,
    })
}

fn refuse_other_methods(keys: &Keys<'_>) -> Read<()> {
    for (key, meaning) in OTHER_METHODS {
        if let Some(field) = keys.nested(key).or_else(|| keys.top(key)) {
            return Err(format!("{}: not supported, it marks {meaning}", field.name));
        }
    }
    let unknown: Vec<&str> = keys
        .nested
        .into_iter()
        .flat_map(Map::keys)
        .map(String::as_str)
        .filter(|key| !KNOWN.contains(key) && !OTHER_METHODS.iter().any(|(other, _)| other == key))
        .collect();
    if unknown.is_empty() {
        return Ok(());
    }
    Err(format!(
        "dflash_config: unknown {} {}; known are {}",
        if unknown.len() == 1 { "key" } else { "keys" },
        unknown.join(", "),
        KNOWN.join(", ")
    ))
}

/// Whether the file is DFlash 2.
fn architecture(keys: &Keys<'_>) -> Read<bool> {
    if let Some(model_type) = keys.top("model_type")
        && model_type.value != "qwen3"
    {
        return Err(model_type.expected("\"qwen3\", whose layers both drafters use"));
    }
    let field = keys
        .top("architectures")
        .ok_or("architectures: missing, it tells DFlash and DFlash 2 apart")?;
    let names = field.list()?;
    match names.first().and_then(Value::as_str).filter(|_| names.len() == 1) {
        Some("DFlashDraftModel") => Ok(false),
        Some("DFlash2DraftModel") => Ok(true),
        _ => Err(field.expected("[\"DFlashDraftModel\"] or [\"DFlash2DraftModel\"]")),
    }
}

/// What a Qwen3 layer could be configured to but a drafter's layer is not.
fn refuse_unsupported_layers(keys: &Keys<'_>) -> Read<()> {
    let activation = keys
        .top("hidden_act")
        .ok_or("hidden_act: missing, it must be \"silu\"")?;
    if activation.value != "silu" {
        return Err(activation.expected("\"silu\""));
    }
    let flags = [
        ("attention_bias", false, "the projections have no bias"),
        ("attention_sink_bias", false, "attention sinks are not supported"),
        ("is_neox_style", true, "RoPE rotates halves, not neighbours"),
        ("sample_from_anchor", false, "slot 0 is the anchor and predicts nothing"),
    ];
    for (key, supported, reason) in flags {
        if keys.flag_or(key, supported)? != supported {
            return Err(format!("{key}: expected {supported}, got {}: {reason}", !supported));
        }
    }
    Ok(())
}

/// The RoPE base, flat or in `rope_parameters`, with everything but plain RoPE over the whole head refused.
fn rope_theta(keys: &Keys<'_>) -> Read<f64> {
    if let Some(scaling) = keys.top("rope_scaling") {
        return Err(scaling.expected("null, a drafter's RoPE is never scaled"));
    }
    let mut theta = keys.top("rope_theta");
    let mut partial = keys.top("partial_rotary_factor");
    if let Some(parameters) = keys.top("rope_parameters") {
        let Value::Object(map) = parameters.value else {
            return Err(parameters.expected("an object"));
        };
        for (key, value) in map.iter().filter(|(_, value)| !value.is_null()) {
            let field = Field {
                name: format!("rope_parameters.{key}"),
                value,
            };
            match key.as_str() {
                "rope_theta" => theta = agreed(theta, Some(field))?,
                "partial_rotary_factor" => partial = agreed(partial, Some(field))?,
                "rope_type" | "type" if field.value == "default" => {}
                "rope_type" | "type" => return Err(field.expected("\"default\"")),
                _ => {
                    return Err(format!(
                        "{}: not supported, a drafter has plain RoPE (rope_theta, rope_type); the target's settings \
                         do not belong here",
                        field.name
                    ));
                }
            }
        }
    }
    if let Some(partial) = partial
        && partial.number()?.to_bits() != 1.0_f64.to_bits()
    {
        return Err(partial.expected("1 or nothing, a drafter rotates the whole head"));
    }
    theta
        .ok_or("rope_theta: missing, expected it at the top or in rope_parameters; engines guess differently")?
        .number()
}

/// Tapped layers, which must be listed: engines guess differently, or read other layers without a word. A list in the
/// input numbering of other formats must agree.
fn taps(keys: &Keys<'_>, num_target_layers: usize, num_layers: usize) -> Read<Vec<usize>> {
    let ids = match keys.either("target_layer_ids")? {
        None => {
            let usual = default_target_layer_ids(num_target_layers, num_layers);
            return Err(format!(
                "target_layer_ids: missing, every engine needs it in dflash_config; for {num_layers} layers and \
                 {num_target_layers} of the target the usual ones are {usual:?}, if the drafter was trained with them"
            ));
        }
        Some(field) => ids(&field)?,
    };
    for key in ["eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"] {
        let Some(field) = keys.top(key) else { continue };
        let from_one: Vec<usize> = ids.iter().map(|id| id + 1).collect();
        if self::ids(&field)? != from_one {
            return Err(field.expected(&format!("target_layer_ids plus one, {from_one:?}")));
        }
    }
    Ok(ids)
}

fn ids(field: &Field<'_>) -> Read<Vec<usize>> {
    let list = field.list()?;
    let id = |(i, value)| {
        Field {
            name: format!("{}[{i}]", field.name),
            value,
        }
        .size(MOST_LAYERS)
    };
    list.iter().enumerate().map(id).collect()
}

/// One rule a layer: which layers slide, how far, and which are causal inside the block.
fn layer_rules(keys: &Keys<'_>, num_layers: usize) -> Read<Vec<LayerRule>> {
    let sliding = sliding_layers(keys, num_layers)?;
    // engines disagree on which of the two they read; 0 is no window in none of them
    let window = match agreed(keys.nested("swa_window_size"), keys.top("sliding_window"))? {
        None => None,
        Some(field) => match field.size(LARGEST_SIZE)? {
            0 => return Err(field.expected("at least 1, or null when no layer slides")),
            window => Some(window),
        },
    };
    if window.is_none() && sliding.contains(&true) {
        return Err("sliding_window: missing, at least one layer slides".to_owned());
    }
    let causal = match (keys.top("is_causal"), keys.nested("causal")) {
        (Some(field), _) | (None, Some(field)) => Some(field.flag()?),
        (None, None) => None,
    };
    let non_causal_windows = keys
        .top("sliding_window_non_causal")
        .map(|field| field.flag())
        .transpose()?;
    if let (Some(causal), Some(non_causal)) = (causal, non_causal_windows)
        && causal == non_causal
    {
        return Err(format!(
            "sliding_window_non_causal is {non_causal} but is_causal is {causal}"
        ));
    }
    let rule = |slides: bool| LayerRule {
        window: window.filter(|_| slides),
        causal: causal.unwrap_or(slides && non_causal_windows != Some(true)),
    };
    Ok(sliding.into_iter().map(rule).collect())
}

/// Which layers slide.
fn sliding_layers(keys: &Keys<'_>, num_layers: usize) -> Read<Vec<bool>> {
    let use_swa = keys.nested("use_swa").map(|field| field.flag()).transpose()?;
    let use_window = keys.top("use_sliding_window").map(|field| field.flag()).transpose()?;
    let Some(field) = keys.top("layer_types") else {
        if use_window == Some(true) && use_swa != Some(true) {
            return Err("layer_types: missing although use_sliding_window is true; name every layer's type".to_owned());
        }
        return Ok(vec![use_swa == Some(true); num_layers]);
    };
    let types = field.list()?;
    if types.len() != num_layers {
        return Err(format!(
            "layer_types: expected one entry a layer, num_hidden_layers is {num_layers}, got {} entries",
            types.len()
        ));
    }
    let mut sliding = Vec::with_capacity(num_layers);
    for (i, value) in types.iter().enumerate() {
        sliding.push(match value.as_str() {
            Some("full_attention") => false,
            Some("sliding_attention") => true,
            _ => {
                return Err(format!(
                    "layer_types[{i}]: expected \"full_attention\" or \"sliding_attention\", got {}",
                    brief(value)
                ));
            }
        });
    }
    let slides = sliding.contains(&true);
    let contradiction = match (use_swa, use_window) {
        (Some(wanted), _) if wanted != slides => Some(("dflash_config.use_swa", wanted)),
        (_, Some(false)) if slides => Some(("use_sliding_window", false)),
        _ => None,
    };
    if let Some((key, wanted)) = contradiction {
        return Err(format!("{key} is {wanted} but layer_types is {}", brief(field.value)));
    }
    Ok(sliding)
}

/// Convolution and selector: two pairs of keys, all four in DFlash 2 and none in DFlash.
fn dflash2_parts(keys: &Keys<'_>, dflash2: bool) -> Read<(Option<ConvConfig>, Option<SelectorConfig>)> {
    let names = ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"];
    let mut found = Vec::new();
    for name in names {
        found.extend(keys.either(name)?);
    }
    if !dflash2 {
        return match found.first() {
            None => Ok((None, None)),
            Some(field) => Err(format!(
                "{}: a DFlash 2 key, but architectures says DFlashDraftModel; expected [\"DFlash2DraftModel\"]",
                field.name
            )),
        };
    }
    let size = |name: &str| match keys.either(name)? {
        Some(field) => field.size(LARGEST_SIZE),
        None => Err(format!("{name}: missing, DFlash2DraftModel needs {}", names.join(", "))),
    };
    let conv = ConvConfig {
        kernel_size: size(names[0])?,
        group_size: size(names[1])?,
    };
    let selector = SelectorConfig {
        rank: size(names[2])?,
        top_k: size(names[3])?,
    };
    Ok((Some(conv), Some(selector)))
}
