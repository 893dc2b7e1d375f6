//! A target as llama.cpp's architectures `qwen35` and `qwen3`.
//!
//! What llama.cpp keeps otherwise than the checkpoint, from its `src/models/qwen35.cpp`:
//! norm scales around one instead of zero; the decay as -exp(A_log); the convolution without its middle dimension;
//! and value heads of the linear layers in the order of a tiled, not an interleaved, repetition: with nk key heads and
//! r value heads for each, head r' * nk + k there is head k * r + r' here.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor};
use dflash_model::formats::gguf::{ElementType, Value};
use dflash_model::target::Weights;
use dflash_model::target::config::{GateActivation, LinearConfig, Mixer};
use dflash_model::{TargetConfig, TensorFolder};

use super::file::{Plan, Planned, Stored};
use super::tokenizer::Tokenizer;
use super::{general, number};

/// A change of a tensor on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// 1 + w.
    AddOne,
    /// -exp(w).
    NegativeExp,
    /// [C, 1, K] to [C, K].
    Squeeze,
    /// The value heads along `dim` from `from` on, each `width` wide, into llama.cpp's order.
    ValueHeads {
        /// Dimension.
        dim: usize,
        /// First element of the first value head.
        from: usize,
        /// Elements of a head.
        width: usize,
    },
}

/// Where a tensor of the file comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// Its name in the checkpoint, without prefix.
    pub name: String,
    /// What is done to it, in order.
    pub changes: Vec<Change>,
}

/// The file for a target, and where each of its tensors comes from. `sections` are the parts of a position that the
/// checkpoint's RoPE interleaves (`mrope_section`); the note says what they became when llama.cpp reads them otherwise.
///
/// # Errors
/// Listing everything that llama.cpp would refuse or compute otherwise.
pub fn plan(
    config: &TargetConfig,
    sections: Option<&[usize]>,
    tokenizer: &Tokenizer,
    name: &str,
    stored: Stored,
) -> Result<(Plan, Vec<Origin>, Option<String>)> {
    let mut problems = refusals(config);
    let architecture = if config.qwen3_5 { "qwen35" } else { "qwen3" };
    let mut metadata = general(architecture, name, stored);
    let (keys, note) = target_keys(config, architecture, sections);
    metadata.extend(keys);
    metadata.extend(tokenizer.metadata());
    let mut list = List {
        stored,
        norm: if config.qwen3_5 {
            vec![Change::AddOne]
        } else {
            Vec::new()
        },
        tensors: Vec::new(),
        origins: Vec::new(),
    };
    list.fill(config);
    let plan = Plan {
        metadata,
        tensors: list.tensors,
    };
    problems.extend(plan.problems());
    ensure!(
        problems.is_empty(),
        "this target cannot be a GGUF file for llama.cpp: {}",
        problems.join("; ")
    );
    Ok((plan, list.origins, note))
}

/// A tensor of the checkpoint as the file stores it.
///
/// # Errors
/// When the checkpoint lacks it or candle fails.
pub fn load(weights: &Weights<'_>, origin: &Origin, linear: Option<&LinearConfig>) -> Result<Tensor> {
    let mut tensor = weights
        .get(&origin.name, &Device::Cpu)?
        .to_dtype(candle_core::DType::F32)?;
    for change in &origin.changes {
        tensor = match *change {
            Change::AddOne => (tensor + 1.0)?,
            Change::NegativeExp => tensor.exp()?.neg()?,
            Change::Squeeze => tensor.squeeze(1)?,
            Change::ValueHeads { dim, from, width } => {
                let linear = linear.context("value heads of a target without linear layers")?;
                let order = order(linear, from, width);
                let order = Tensor::from_vec(order.clone(), order.len(), &Device::Cpu)?;
                tensor.index_select(&order, dim)?
            }
        };
    }
    Ok(tensor.contiguous()?)
}

/// For every element along a dimension in llama.cpp's order, its place in the checkpoint's.
fn order(linear: &LinearConfig, from: usize, width: usize) -> Vec<u32> {
    let repeats = linear.value_heads / linear.key_heads;
    let heads = (0..repeats).flat_map(|r| (0..linear.key_heads).map(move |k| k * repeats + r));
    let moved = heads.flat_map(|head| (0..width).map(move |i| from + head * width + i));
    (0..from).chain(moved).map(|place| place as u32).collect()
}

/// The interleaved parts of a position, from the folder's configuration.
///
/// # Errors
/// When the file cannot be read.
pub fn mrope_sections(folder: &Path) -> Result<Option<Vec<usize>>> {
    let path = folder.join("config.json");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let json: serde_json::Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let config = json.get("text_config").unwrap_or(&json);
    for place in ["/rope_parameters/mrope_section", "/rope_scaling/mrope_section"] {
        let Some(list) = config.pointer(place) else { continue };
        let parts = list.as_array().map(|parts| {
            parts
                .iter()
                .map(|part| part.as_u64().map(|part| part as usize))
                .collect()
        });
        match parts {
            Some(Some(parts)) => return Ok(Some(parts)),
            _ => bail!(
                "{}: {place}: expected a list of whole numbers, got {list}",
                path.display()
            ),
        }
    }
    Ok(None)
}

/// What llama.cpp's graph takes for granted.
fn refusals(config: &TargetConfig) -> Vec<String> {
    let mut problems = Vec::new();
    if !config.qwen3_5 && config.rotary_dim != config.head_dim {
        problems.push(format!(
            "partial_rotary_factor: expected RoPE over the whole head of {}, got {}",
            config.head_dim, config.rotary_dim
        ));
    }
    let Some(linear) = &config.linear else {
        if config.qwen3_5 {
            problems.push("layer_types: expected at least one linear_attention layer, got none".to_owned());
        }
        return problems;
    };
    if linear.key_dim != linear.value_dim {
        problems.push(format!(
            "linear_value_head_dim: expected linear_key_head_dim {}, llama.cpp keeps one size for both, got {}",
            linear.key_dim, linear.value_dim
        ));
    }
    if linear.gate != GateActivation::Silu {
        problems.push("output_gate_type: expected silu, which llama.cpp has built in, got sigmoid".to_owned());
    }
    problems
}

fn target_keys(
    config: &TargetConfig,
    architecture: &str,
    sections: Option<&[usize]>,
) -> (Vec<(String, Value)>, Option<String>) {
    let info = &config.info;
    let mut list = Vec::new();
    let mut put = |key: &str, value: Value| list.push((format!("{architecture}.{key}"), value));
    let size = |size: usize| Value::U32(size as u32);
    put("context_length", size(info.max_positions));
    put("embedding_length", size(info.hidden_size));
    put("block_count", size(info.num_layers));
    put("feed_forward_length", size(info.intermediate_size));
    put("vocab_size", size(info.vocab_size));
    put("attention.head_count", size(config.num_heads));
    put("attention.head_count_kv", size(config.num_kv_heads));
    put("attention.key_length", size(config.head_dim));
    put("attention.value_length", size(config.head_dim));
    put("attention.layer_norm_rms_epsilon", number(info.rms_norm_eps));
    put("rope.freq_base", number(info.rope_theta));
    put("rope.dimension_count", size(config.rotary_dim));
    let mut note = None;
    if config.qwen3_5 {
        let (parts, changed) = covering(sections, config.rotary_dim / 2);
        put(
            "rope.dimension_sections",
            Value::Array(parts.map(|part| Value::I32(part as i32)).to_vec()),
        );
        note = changed;
    }
    if let Some(linear) = &config.linear {
        put("ssm.conv_kernel", size(linear.conv_width));
        put("ssm.state_size", size(linear.key_dim));
        put("ssm.group_count", size(linear.key_heads));
        put("ssm.time_step_rank", size(linear.value_heads));
        put("ssm.inner_size", size(linear.value_channels()));
        let regular = |interval: usize| {
            let full = |(i, mixer): (usize, &Mixer)| (*mixer == Mixer::Full) == (i + 1).is_multiple_of(interval);
            config.layers.iter().enumerate().all(full)
        };
        if let Some(interval) = (1..=config.layers.len()).find(|interval| regular(*interval)) {
            put("full_attention_interval", size(interval));
        } else {
            let linear = |mixer: &Mixer| Value::Bool(*mixer == Mixer::Linear);
            let linear = config.layers.iter().map(linear).collect();
            put("attention.recurrent_layers", Value::Array(linear));
        }
    }
    (list, note)
}

/// Sections for llama.cpp, whose interleaving turns pair i by part i mod 3 while i < 3 * its section, and by a fourth
/// part, which is zero in text, beyond. The checkpoint's own split must cover all pairs; one that does not is replaced by
/// the even one, which is the same for text: all three parts of a text position are equal.
fn covering(sections: Option<&[usize]>, pairs: usize) -> ([usize; 4], Option<String>) {
    let even = [pairs.div_ceil(3), (pairs + 1) / 3, pairs / 3, 0];
    let covers = |parts: &[usize]| parts.len() == 3 && (0..pairs).all(|i| i < 3 * parts[i % 3]);
    match sections {
        Some(parts) if covers(parts) && parts.iter().sum::<usize>() == pairs => {
            ([parts[0], parts[1], parts[2], 0], None)
        }
        Some(parts) => (
            even,
            Some(format!(
                "rope.dimension_sections: {even:?} instead of mrope_section {parts:?}, which in llama.cpp leaves some of \
                 the {pairs} pairs unturned; text is computed alike, images are not"
            )),
        ),
        None => (even, None),
    }
}

/// The tensors, as they are collected.
struct List {
    stored: Stored,
    /// What is done to a norm that scales around zero.
    norm: Vec<Change>,
    tensors: Vec<Planned>,
    origins: Vec<Origin>,
}

impl List {
    fn fill(&mut self, config: &TargetConfig) {
        let info = &config.info;
        let (hidden, inner, vocab) = (info.hidden_size, info.intermediate_size, info.vocab_size);
        self.matrix("token_embd.weight", "embed_tokens.weight", [vocab, hidden], Vec::new());
        self.norm("output_norm.weight", "norm.weight", hidden);
        if !info.tied {
            self.matrix("output.weight", "lm_head.weight", [vocab, hidden], Vec::new());
        }
        for (layer, mixer) in config.layers.iter().enumerate() {
            let theirs = |name: &str| format!("blk.{layer}.{name}");
            let ours = |name: &str| format!("layers.{layer}.{name}");
            self.norm(&theirs("attn_norm.weight"), &ours("input_layernorm.weight"), hidden);
            let post = if config.qwen3_5 {
                "post_attention_norm.weight"
            } else {
                "ffn_norm.weight"
            };
            self.norm(&theirs(post), &ours("post_attention_layernorm.weight"), hidden);
            for (name, shape) in [
                ("gate", [inner, hidden]),
                ("up", [inner, hidden]),
                ("down", [hidden, inner]),
            ] {
                let (theirs, ours) = (
                    theirs(&format!("ffn_{name}.weight")),
                    ours(&format!("mlp.{name}_proj.weight")),
                );
                self.matrix(&theirs, &ours, shape, Vec::new());
            }
            match (mixer, &config.linear) {
                (Mixer::Linear, Some(linear)) => self.linear(layer, linear, hidden),
                _ => self.attention(layer, config),
            }
        }
    }

    fn attention(&mut self, layer: usize, config: &TargetConfig) {
        let (hidden, head) = (config.info.hidden_size, config.head_dim);
        let (queries, keys) = (config.num_heads * head, config.num_kv_heads * head);
        // Qwen3.5 keeps each head's gate behind its query, here as there
        let query_rows = if config.qwen3_5 { 2 * queries } else { queries };
        let parts = [
            ("q", "q", [query_rows, hidden]),
            ("k", "k", [keys, hidden]),
            ("v", "v", [keys, hidden]),
            ("output", "o", [hidden, queries]),
        ];
        for (theirs, ours, shape) in parts {
            let theirs = format!("blk.{layer}.attn_{theirs}.weight");
            self.matrix(
                &theirs,
                &format!("layers.{layer}.self_attn.{ours}_proj.weight"),
                shape,
                Vec::new(),
            );
        }
        for name in ["q_norm", "k_norm"] {
            let theirs = format!("blk.{layer}.attn_{name}.weight");
            self.norm(&theirs, &format!("layers.{layer}.self_attn.{name}.weight"), head);
        }
    }

    fn linear(&mut self, layer: usize, linear: &LinearConfig, hidden: usize) {
        let theirs = |name: &str| format!("blk.{layer}.{name}");
        let ours = |name: &str| format!("layers.{layer}.linear_attn.{name}");
        let (heads, width) = (linear.value_heads, linear.value_dim);
        let (channels, values) = (linear.conv_channels(), linear.value_channels());
        let heads_along = |dim: usize, from: usize, width: usize| Change::ValueHeads { dim, from, width };
        let behind = channels - values;
        let matrices = [
            (
                "attn_qkv.weight",
                "in_proj_qkv.weight",
                [channels, hidden],
                heads_along(0, behind, width),
            ),
            (
                "attn_gate.weight",
                "in_proj_z.weight",
                [values, hidden],
                heads_along(0, 0, width),
            ),
            (
                "ssm_beta.weight",
                "in_proj_b.weight",
                [heads, hidden],
                heads_along(0, 0, 1),
            ),
            (
                "ssm_alpha.weight",
                "in_proj_a.weight",
                [heads, hidden],
                heads_along(0, 0, 1),
            ),
            (
                "ssm_out.weight",
                "out_proj.weight",
                [hidden, values],
                heads_along(1, 0, width),
            ),
        ];
        for (name, source, shape, change) in matrices {
            self.matrix(&theirs(name), &ours(source), shape, vec![change]);
        }
        let vectors = [
            (
                "ssm_conv1d.weight",
                "conv1d.weight",
                vec![channels, linear.conv_width],
                vec![Change::Squeeze, heads_along(0, behind, width)],
            ),
            ("ssm_dt.bias", "dt_bias", vec![heads], vec![heads_along(0, 0, 1)]),
            (
                "ssm_a",
                "A_log",
                vec![heads],
                vec![Change::NegativeExp, heads_along(0, 0, 1)],
            ),
            // the one norm of Qwen3.5 that scales around one already
            ("ssm_norm.weight", "norm.weight", vec![width], Vec::new()),
        ];
        for (name, source, shape, changes) in vectors {
            self.push(theirs(name), ours(source), ElementType::F32, shape, changes);
        }
    }

    fn matrix(&mut self, theirs: &str, ours: &str, shape: [usize; 2], changes: Vec<Change>) {
        self.push(
            theirs.to_owned(),
            ours.to_owned(),
            self.stored.element(),
            shape.to_vec(),
            changes,
        );
    }

    fn norm(&mut self, theirs: &str, ours: &str, width: usize) {
        self.push(
            theirs.to_owned(),
            ours.to_owned(),
            ElementType::F32,
            vec![width],
            self.norm.clone(),
        );
    }

    fn push(&mut self, theirs: String, ours: String, element: ElementType, shape: Vec<usize>, changes: Vec<Change>) {
        self.tensors.push(Planned {
            name: theirs,
            element,
            shape,
        });
        self.origins.push(Origin { name: ours, changes });
    }
}

/// The folder's weights, checked against its configuration.
///
/// # Errors
/// When the tensor lists differ; every difference is in the message.
pub fn weights<'f>(folder: &'f TensorFolder, config: &TargetConfig) -> Result<Weights<'f>> {
    Ok(Weights::check(folder, config)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Head j of the new order must use the key head that it used before: j mod nk there, old / repeats here.
    #[test]
    fn reordered_value_heads_keep_their_key_heads_and_their_insides() {
        for (key_heads, repeats, width, from) in [(1, 1, 1, 0), (4, 2, 3, 5), (3, 4, 1, 0), (2, 1, 2, 7)] {
            let linear = LinearConfig {
                key_heads,
                value_heads: key_heads * repeats,
                key_dim: 8,
                value_dim: 8,
                conv_width: 4,
                gate: GateActivation::Silu,
            };
            let order = order(&linear, from, width);
            let (kept, moved) = order.split_at(from);
            assert!(kept.iter().enumerate().all(|(i, &place)| place as usize == i));
            for (j, head) in moved.chunks(width).enumerate() {
                let old = (head[0] as usize - from) / width;
                assert_eq!(
                    j % key_heads,
                    old / repeats,
                    "head {old} of {linear:?} came to place {j}"
                );
                assert!(
                    head.iter()
                        .enumerate()
                        .all(|(i, &place)| place as usize == from + old * width + i)
                );
            }
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(
                sorted.iter().enumerate().all(|(i, &place)| place as usize == i),
                "{order:?}"
            );
        }
    }

    /// Whatever the checkpoint says, llama.cpp's interleaving turns every pair by a part that text fills.
    #[test]
    fn sections_cover_every_pair() {
        for pairs in 1..200 {
            let (even, note) = covering(None, pairs);
            assert_eq!((even.iter().sum::<usize>(), note), (pairs, None), "{pairs} pairs");
            assert!((0..pairs).all(|i| i < 3 * even[i % 3]), "{pairs} pairs: {even:?}");
        }
        assert_eq!(
            covering(Some(&[11, 11, 10]), 32),
            ([11, 11, 10, 0], None),
            "the published one stays"
        );
        for bad in [&[4, 2, 2][..], &[8, 0, 0], &[3, 3], &[]] {
            let (parts, note) = covering(Some(bad), 8);
            assert_eq!(parts, [3, 3, 2, 0]);
            assert!(note.is_some_and(|note| note.contains(&format!("{bad:?}"))));
        }
    }
}
