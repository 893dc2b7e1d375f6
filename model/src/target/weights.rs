//! The target's tensor list: every expected name with its shape, found under whichever prefix the checkpoint uses.
//!
//! The list is strict. Vision and multi-token-prediction tensors are skipped; any other tensor that is missing,
//! unexpected, of the wrong shape or of a type without meaning here is reported, all of them in one error.

use std::collections::BTreeMap;
use std::fmt::Write;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::config::{Mixer, TargetConfig};
use crate::tensor_file::TensorFolder;

/// A checkpoint whose tensor list has been checked against its config.
#[derive(Debug)]
pub struct Weights<'f> {
    folder: &'f TensorFolder,
    /// Canonical name (`layers.0.mlp.up_proj.weight`) to the name in the files.
    names: BTreeMap<String, String>,
    tied: bool,
}

impl<'f> Weights<'f> {
    /// Matches the folder's tensors with those that `config` calls for.
    ///
    /// # Errors
    /// When no known prefix fits or the lists differ; every difference is in the message.
    pub fn check(folder: &'f TensorFolder, config: &TargetConfig) -> Result<Self> {
        let Some(prefix) = PREFIXES
            .into_iter()
            .find(|p| folder.info(&format!("{p}{EMBED}")).is_some())
        else {
            bail!(
                "{}: no {EMBED} under any of the prefixes {PREFIXES:?}",
                folder.dir().display()
            )
        };
        let mut faults = Vec::new();
        let mut names = BTreeMap::new();
        for (name, shape) in expected(config) {
            let stored = if name == HEAD {
                HEADS
                    .into_iter()
                    .find(|head| folder.info(head).is_some())
                    .unwrap_or(HEAD)
                    .to_string()
            } else {
                format!("{prefix}{name}")
            };
            match folder.info(&stored) {
                None => faults.push(format!("{stored} is missing, expected {shape:?}")),
                Some(info) if info.shape != shape => {
                    let mlx =
                        name.ends_with("conv1d.weight") && info.shape.last() == Some(&1) && shape.last() != Some(&1);
                    let note = if mlx {
                        " (an MLX-converted checkpoint; use the original one)"
                    } else {
                        ""
                    };
                    faults.push(format!("{stored} has shape {:?}, expected {shape:?}{note}", info.shape));
                }
                Some(info) if !matches!(info.dtype, DType::F32 | DType::BF16 | DType::F16) => {
                    faults.push(format!(
                        "{stored} is stored as {}, expected F32, BF16 or F16",
                        info.dtype.as_str().to_uppercase()
                    ));
                }
                Some(_) => {}
            }
            names.insert(name, stored);
        }
        let known: Vec<&str> = names.values().map(String::as_str).collect();
        for (name, _) in folder.iter() {
            let skipped = SKIPPED.iter().any(|prefix| name.starts_with(prefix));
            if skipped || known.contains(&name) {
                continue;
            }
            // a tied checkpoint may carry its head once more; it must then be the same matrix
            if config.info.tied && HEADS.contains(&name) {
                if folder.bytes(name)? != folder.bytes(&format!("{prefix}{EMBED}"))? {
                    faults.push(format!(
                        "{name} differs from the embedding that tie_word_embeddings ties it to"
                    ));
                }
                continue;
            }
            faults.push(format!("{name} is unexpected"));
        }
        if !faults.is_empty() {
            bail!("{}: {}", folder.dir().display(), listed(&faults))
        }
        Ok(Self {
            folder,
            names,
            tied: config.info.tied,
        })
    }

    /// A tensor by canonical name, in its stored type.
    ///
    /// # Errors
    /// When the name is not in the list or the file cannot be read.
    pub fn get(&self, name: &str, device: &Device) -> Result<Tensor> {
        match self.names.get(name) {
            Some(stored) => self.folder.get(stored, device),
            None => bail!("{}: {name} is not a tensor of this target", self.folder.dir().display()),
        }
    }

    /// Embedding and head, [V, H] each, one tensor when tied, in their stored type.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn head(&self, device: &Device) -> Result<super::TargetHead> {
        let embed = self.get(EMBED, device)?;
        let head = if self.tied {
            embed.clone()
        } else {
            self.get(HEAD, device)?
        };
        Ok(super::TargetHead { embed, head })
    }
}

/// Canonical names of layer `layer`'s tensors start with this.
pub(crate) fn layer_prefix(layer: usize) -> String {
    format!("layers.{layer}.")
}

const PREFIXES: [&str; 4] = [
    "model.language_model.",
    "model.",
    "language_model.model.",
    "language_model.",
];
const SKIPPED: [&str; 4] = ["model.visual.", "visual.", "vision_tower.", "mtp."];
const EMBED: &str = "embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
const HEADS: [&str; 2] = [HEAD, "language_model.lm_head.weight"];

fn expected(config: &TargetConfig) -> Vec<(String, Vec<usize>)> {
    let info = &config.info;
    let (hidden, ffn) = (info.hidden_size, info.intermediate_size);
    let mut list = vec![
        (EMBED.to_string(), vec![info.vocab_size, hidden]),
        ("norm.weight".to_string(), vec![hidden]),
    ];
    if !info.tied {
        list.push((HEAD.to_string(), vec![info.vocab_size, hidden]));
    }
    for (i, mixer) in config.layers.iter().enumerate() {
        let mut add = |name: &str, shape: &[usize]| list.push((format!("{}{name}", layer_prefix(i)), shape.to_vec()));
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
        add("mlp.gate_proj.weight", &[ffn, hidden]);
        add("mlp.up_proj.weight", &[ffn, hidden]);
        add("mlp.down_proj.weight", &[hidden, ffn]);
        match (mixer, &config.linear) {
            (Mixer::Linear, Some(linear)) => {
                let (heads, values) = (linear.value_heads, linear.value_channels());
                add("linear_attn.in_proj_qkv.weight", &[linear.conv_channels(), hidden]);
                add("linear_attn.in_proj_z.weight", &[values, hidden]);
                add("linear_attn.in_proj_b.weight", &[heads, hidden]);
                add("linear_attn.in_proj_a.weight", &[heads, hidden]);
                add(
                    "linear_attn.conv1d.weight",
                    &[linear.conv_channels(), 1, linear.conv_width],
                );
                add("linear_attn.A_log", &[heads]);
                add("linear_attn.dt_bias", &[heads]);
                add("linear_attn.norm.weight", &[linear.value_dim]);
                add("linear_attn.out_proj.weight", &[hidden, values]);
            }
            (Mixer::Full, _) | (Mixer::Linear, None) => {
                let d = config.head_dim;
                let query_rows = config.num_heads * d * if config.qwen3_5 { 2 } else { 1 };
                add("self_attn.q_proj.weight", &[query_rows, hidden]);
                add("self_attn.k_proj.weight", &[config.num_kv_heads * d, hidden]);
                add("self_attn.v_proj.weight", &[config.num_kv_heads * d, hidden]);
                add("self_attn.o_proj.weight", &[hidden, config.num_heads * d]);
                add("self_attn.q_norm.weight", &[d]);
                add("self_attn.k_norm.weight", &[d]);
            }
        }
    }
    list
}

fn listed(faults: &[String]) -> String {
    let mut text = format!("{} tensors do not fit the config:", faults.len());
    for fault in faults {
        // writing to a String cannot fail
        let _ = write!(text, "\n  {fault}");
    }
    text
}
