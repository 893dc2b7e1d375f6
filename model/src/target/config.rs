//! The target's `config.json`: Qwen3.5 (nested `text_config` or flat) and Qwen3, dense, resolved into one struct.
//!
//! Whatever this room does not compute is refused by name here, before a weight is read: mixture of experts,
//! quantised checkpoints, other architectures, unknown activations. Nothing that shapes the model has a default.

use std::path::Path;

use candle_core::{Result, bail};
use serde_json::{Map, Value};

use super::TargetInfo;

/// A target's shape, resolved.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetConfig {
    /// Sizes that other rooms see. `info.model_type` is `qwen3_5` or `qwen3`.
    pub info: TargetInfo,
    /// Mixer of each decoder layer.
    pub layers: Vec<Mixer>,
    /// Query heads of the full-attention layers.
    pub num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Channels of an attention head, D.
    pub head_dim: usize,
    /// Leading channels of a head that RoPE rotates; even.
    pub rotary_dim: usize,
    /// Qwen3.5: norms scale by 1 + w, and each attention head's output is gated by a sigmoid.
    pub qwen3_5: bool,
    /// Shape of the gated-delta-net layers; absent when there is none.
    pub linear: Option<LinearConfig>,
}

/// What mixes tokens in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixer {
    /// Softmax attention over all earlier positions.
    Full,
    /// Gated delta rule with a fixed-size state.
    Linear,
}

/// Shape of a gated-delta-net layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearConfig {
    /// Key heads, nk.
    pub key_heads: usize,
    /// Value heads, nv; a multiple of nk.
    pub value_heads: usize,
    /// Channels of a key head, dk.
    pub key_dim: usize,
    /// Channels of a value head, dv.
    pub value_dim: usize,
    /// Taps of the depthwise convolution, the current token included.
    pub conv_width: usize,
    /// Activation of the output gate.
    pub gate: GateActivation,
}

/// The largest size that any field may hold: products of two, and sums of those, stay inside 64 bits.
const LARGEST_SIZE: u64 = 1 << 24;

/// The most layers that a target may have.
const MOST_LAYERS: usize = 1 << 12;

impl LinearConfig {
    /// Channels that the convolution runs over: queries, keys, values.
    pub fn conv_channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_channels()
    }

    /// Value channels of all heads.
    pub fn value_channels(&self) -> usize {
        self.value_heads * self.value_dim
    }
}

/// Activation of the gated-delta-net output gate (`output_gate_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateActivation {
    /// z * sigmoid(z); spelled `silu` or `swish`.
    Silu,
    /// sigmoid(z).
    Sigmoid,
}

impl TargetConfig {
    /// Reads `dir/config.json`.
    ///
    /// # Errors
    /// When the file is absent or not JSON, a field is missing or malformed, or the model is not supported.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) => bail!("{}: {error}", path.display()),
        };
        match Self::parse(&text) {
            Ok(config) => Ok(config),
            Err(error) => bail!("{}: {error}", path.display()),
        }
    }

    /// Resolves the text of a `config.json`.
    ///
    /// # Errors
    /// As [`TargetConfig::read`].
    pub fn parse(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text).map_err(candle_core::Error::wrap)?;
        let Value::Object(top) = &value else {
            bail!("expected a JSON object")
        };
        let nested = match top.get("text_config") {
            None | Some(Value::Null) => None,
            Some(Value::Object(text_config)) => Some(text_config),
            Some(other) => bail!("text_config: expected an object, came {other}"),
        };
        let fields = Fields(nested.unwrap_or(top));
        let qwen3_5 = family(top, nested)?;
        refuse_unsupported(top, &fields)?;

        let num_layers = fields.size("num_hidden_layers")?;
        if num_layers > MOST_LAYERS {
            bail!("num_hidden_layers: expected at most {MOST_LAYERS}, came {num_layers}")
        }
        let hidden_size = fields.size("hidden_size")?;
        let (num_heads, num_kv_heads) = (fields.size("num_attention_heads")?, fields.size("num_key_value_heads")?);
        if !num_heads.is_multiple_of(num_kv_heads) {
            bail!("num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
        }
        let layers = layers(&fields, qwen3_5, num_layers)?;
        let head_dim = fields.size("head_dim")?;
        let (rope_theta, rotary_dim) = rope(&fields, qwen3_5, head_dim)?;
        let linear = layers.contains(&Mixer::Linear).then(|| linear(&fields)).transpose()?;
        // The composite class ties by its own key, text-only classes by theirs; absent means untied to all of them,
        // and then a checkpoint without lm_head.weight is refused by the tensor list.
        let outer = Fields(top).flag("tie_word_embeddings")?;
        let tied = outer.or(fields.flag("tie_word_embeddings")?).unwrap_or(false);
        Ok(Self {
            info: TargetInfo {
                model_type: if qwen3_5 { "qwen3_5" } else { "qwen3" }.to_string(),
                hidden_size,
                intermediate_size: fields.size("intermediate_size")?,
                num_layers,
                vocab_size: fields.size("vocab_size")?,
                max_positions: fields.size("max_position_embeddings")?,
                rope_theta,
                rms_norm_eps: fields.positive("rms_norm_eps")?,
                tied,
            },
            layers,
            num_heads,
            num_kv_heads,
            head_dim,
            rotary_dim,
            qwen3_5,
            linear,
        })
    }
}

/// Whether the model is Qwen3.5 (true) or Qwen3 (false); anything else is refused.
fn family(top: &Map<String, Value>, nested: Option<&Map<String, Value>>) -> Result<bool> {
    let outer = Fields(top).text("model_type")?;
    let inner = match nested {
        Some(fields) => Fields(fields).text("model_type")?.or(outer),
        None => outer,
    };
    for (place, name) in [("model_type", outer), ("text_config.model_type", inner)] {
        match name {
            Some("qwen3_5" | "qwen3_5_text" | "qwen3") => {}
            Some(name) if name.contains("moe") => {
                bail!("{place} \"{name}\": mixture-of-experts targets are not supported, only dense qwen3_5 and qwen3")
            }
            Some("qwen4_exp") => bail!(
                "{place} \"qwen4_exp\": a different architecture (hyper-connections, per-layer n-gram embeddings), \
                 not supported"
            ),
            Some(name) => bail!("{place} \"{name}\": expected qwen3_5, qwen3_5_text or qwen3"),
            None => bail!("model_type is missing: expected qwen3_5, qwen3_5_text or qwen3"),
        }
    }
    let family = |name: Option<&str>| name != Some("qwen3");
    if family(outer) != family(inner) {
        bail!(
            "model_type {} with text_config.model_type {}: expected one family",
            said(outer),
            said(inner)
        )
    }
    Ok(family(inner))
}

/// A text of the file for a message.
fn said(text: Option<&str>) -> String {
    text.map_or_else(|| "nothing".to_owned(), |text| format!("\"{text}\""))
}

fn refuse_unsupported(top: &Map<String, Value>, fields: &Fields<'_>) -> Result<()> {
    for place in [top, fields.0] {
        for key in ["quantization_config", "quantization"] {
            if let Some(value) = place.get(key).filter(|value| !value.is_null()) {
                let method = value.get("quant_method").and_then(Value::as_str).unwrap_or("unnamed");
                bail!("{key} ({method}): quantised checkpoints are not supported, use the BF16 or F32 weights")
            }
        }
    }
    for key in ["num_experts", "num_local_experts"] {
        if fields.0.get(key).and_then(Value::as_u64).is_some_and(|count| count > 0) {
            bail!("{key}: mixture-of-experts targets are not supported, only dense qwen3_5 and qwen3")
        }
    }
    match fields.text("hidden_act")? {
        Some("silu") => {}
        other => bail!("hidden_act: expected silu, came {}", said(other)),
    }
    if fields.flag("attention_bias")? == Some(true) {
        bail!("attention_bias true: expected false")
    }
    if fields.flag("attn_output_gate")? == Some(false) {
        bail!("attn_output_gate false: expected true")
    }
    if fields.flag("use_sliding_window")? == Some(true) {
        bail!("use_sliding_window true: expected false")
    }
    Ok(())
}

fn layers(fields: &Fields<'_>, qwen3_5: bool, num_layers: usize) -> Result<Vec<Mixer>> {
    let listed = match fields.0.get("layer_types") {
        None | Some(Value::Null) => None,
        Some(Value::Array(kinds)) => Some(kinds),
        Some(other) => bail!("layer_types: expected a list, came {other}"),
    };
    if let Some(kinds) = listed {
        if kinds.len() != num_layers {
            bail!(
                "layer_types has {} entries, num_hidden_layers is {num_layers}",
                kinds.len()
            )
        }
        let mixer = |(i, kind): (usize, &Value)| match kind.as_str() {
            Some("full_attention") => Ok(Mixer::Full),
            Some("linear_attention") if qwen3_5 => Ok(Mixer::Linear),
            _ => bail!("layer_types[{i}]: expected full_attention or (Qwen3.5) linear_attention, came {kind}"),
        };
        return kinds.iter().enumerate().map(mixer).collect();
    }
    if !qwen3_5 {
        return Ok(vec![Mixer::Full; num_layers]);
    }
    let interval = fields.size("full_attention_interval")?;
    let mixer = |i: usize| {
        if (i + 1).is_multiple_of(interval) {
            Mixer::Full
        } else {
            Mixer::Linear
        }
    };
    Ok((0..num_layers).map(mixer).collect())
}

/// RoPE base and the number of rotated channels. Each may stand in `rope_parameters` or beside it.
fn rope(fields: &Fields<'_>, qwen3_5: bool, head_dim: usize) -> Result<(f64, usize)> {
    let empty = Map::new();
    let inner = match (fields.0.get("rope_parameters"), fields.0.get("rope_scaling")) {
        (Some(Value::Object(inner)), _) | (_, Some(Value::Object(inner))) => Fields(inner),
        _ => Fields(&empty),
    };
    for key in ["rope_type", "type"] {
        match inner.text(key)? {
            None | Some("default") => {}
            Some(other) => bail!("rope_parameters.{key}: expected default, came \"{other}\""),
        }
    }
    let either = |key: &str| match (inner.number(key)?, fields.number(key)?) {
        (Some(a), Some(b)) if (a - b).abs() > 1e-12 * a.abs() => {
            bail!("{key} is {a} in rope_parameters and {b} beside it: expected one value")
        }
        (a, b) => Ok(a.or(b)),
    };
    let theta = match either("rope_theta")? {
        Some(theta) if theta > 0.0 => theta,
        Some(theta) => bail!("rope_theta: expected a positive number, came {theta}"),
        None => bail!("rope_theta is missing, in rope_parameters and beside it"),
    };
    let factor = match either("partial_rotary_factor")? {
        Some(factor) if factor > 0.0 && factor <= 1.0 && (qwen3_5 || factor >= 1.0) => factor,
        Some(factor) => bail!("partial_rotary_factor: expected in (0, 1], and 1 for qwen3, came {factor}"),
        None if qwen3_5 => bail!("partial_rotary_factor is missing, in rope_parameters and beside it"),
        None => 1.0,
    };
    let rotary_dim = (head_dim as f64 * factor) as usize;
    if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
        bail!(
            "head_dim {head_dim} times partial_rotary_factor {factor} is {rotary_dim}: expected a positive even number"
        )
    }
    Ok((theta, rotary_dim))
}

fn linear(fields: &Fields<'_>) -> Result<LinearConfig> {
    let gate = match fields.text("output_gate_type")? {
        // absent: the gate is the model's activation, and that has been checked to be silu
        None | Some("silu" | "swish") => GateActivation::Silu,
        Some("sigmoid") => GateActivation::Sigmoid,
        Some(other) => bail!("output_gate_type: expected silu, swish or sigmoid, came \"{other}\""),
    };
    let config = LinearConfig {
        key_heads: fields.size("linear_num_key_heads")?,
        value_heads: fields.size("linear_num_value_heads")?,
        key_dim: fields.size("linear_key_head_dim")?,
        value_dim: fields.size("linear_value_head_dim")?,
        conv_width: fields.size("linear_conv_kernel_dim")?,
        gate,
    };
    if !config.value_heads.is_multiple_of(config.key_heads) {
        let (value, key) = (config.value_heads, config.key_heads);
        bail!("linear_num_value_heads {value} is not a multiple of linear_num_key_heads {key}")
    }
    Ok(config)
}

/// Typed access to a JSON object; `null` reads as absent.
struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn size(&self, key: &str) -> Result<usize> {
        match self.get(key) {
            None => bail!("{key} is missing"),
            Some(value) => match value.as_u64() {
                Some(size) if (1..=LARGEST_SIZE).contains(&size) => Ok(size as usize),
                _ => bail!("{key}: expected a whole number from 1 to {LARGEST_SIZE}, came {value}"),
            },
        }
    }

    fn positive(&self, key: &str) -> Result<f64> {
        match self.number(key)? {
            Some(number) if number > 0.0 => Ok(number),
            Some(number) => bail!("{key}: expected a positive number, came {number}"),
            None => bail!("{key} is missing"),
        }
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) => Ok(Some(number)),
                None => bail!("{key}: expected a number, came {value}"),
            },
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => bail!("{key}: expected true or false, came {other}"),
        }
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => bail!("{key}: expected a string, came {other}"),
        }
    }
}
