//! The checkpoint folder of the speculators project: read into the published form, and written from it.
//!
//! | here and published | speculators |
//! |---|---|
//! | tap i, the output of target layer i | `aux_hidden_state_layer_ids`, i + 1 |
//! | Qwen3 keys at the top | inside `transformer_layer_config` |
//! | `is_causal`, or left out | `sliding_window_non_causal`; full layers are never causal |
//! | `num_target_layers` | not said; the verifier knows |
//! | borrowed embedding and head | borrowed (0.9 writes neither) or carried along |
//!
//! Tensor names are the published ones. Facts: the configuration classes of speculators 0.9.0 and files that it saved.

use std::path::Path;

use candle_core::{DType, Device, Result, bail};
use serde_json::{Map, Value, json};

use super::{Facts, Source, Tensors};
use crate::drafter_config::DrafterConfig;
use crate::folder::{
    Existing, check_finite, extra_files, place, pretty, sync_folder, verify_stored, write_tensors, write_text,
};
use crate::target::{TargetHead, TargetInfo};
use crate::tensor_file::TensorFolder;

/// The release whose schema is written.
const VERSION: &str = "0.9.0";

/// Matrices of the target that a folder may carry along.
pub(super) const EMBEDDING: &str = "embed_tokens.weight";
pub(super) const HEAD: &str = "lm_head.weight";

/// Keys of the outer object that have a place in `dflash_config`.
const NESTED: [&str; 8] = [
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "sample_from_anchor",
];

/// The target as a speculators folder names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verifier {
    /// Repository or path.
    pub name: String,
    /// `architectures` of its configuration.
    pub architectures: Vec<String>,
}

/// Whether a `config.json` is one of speculators.
pub(super) fn is_speculators(config: &Value) -> bool {
    config.get("speculators_model_type").is_some()
}

/// Repository or path of the target that the folder names.
pub(super) fn verifier(config: &Value) -> Option<String> {
    let name = config.pointer("/speculators_config/verifier/name_or_path")?.as_str()?;
    Some(name.to_owned())
}

/// Configuration and tensor list of the folder.
pub(super) fn facts(dir: &Path, config: &Value, target: Option<&TargetInfo>) -> Result<Facts> {
    facts_of(&TensorFolder::open(dir)?, config, target)
}

fn facts_of(folder: &TensorFolder, config: &Value, target: Option<&TargetInfo>) -> Result<Facts> {
    let mut tensors = super::shapes(folder);
    let carried = [EMBEDDING, HEAD]
        .into_iter()
        .filter_map(|name| tensors.remove_entry(name))
        .collect();
    Ok(Facts {
        config: published(folder.dir(), config, target)?,
        tensors,
        quantised: std::collections::BTreeMap::new(),
        carried,
        stray: extra_files(folder)?,
    })
}

/// Reads the drafter.
pub(super) fn read(dir: &Path, config: &Value, target: Option<&TargetInfo>) -> Result<Source> {
    let folder = TensorFolder::open(dir)?;
    let facts = facts_of(&folder, config, target)?;
    facts.check(dir)?;
    let load = |names: Vec<&String>| -> Result<Tensors> {
        let one = |name: &String| {
            check_finite(&folder, name)?;
            Ok((name.clone(), folder.get(name, &Device::Cpu)?))
        };
        names.into_iter().map(one).collect()
    };
    let mut notes = Vec::new();
    let ignored = config.get("auto_map").is_some_and(|value| !value.is_null());
    if ignored {
        notes.push("auto_map: left out, it names Python files of speculators".to_owned());
    }
    Ok(Source {
        format: super::Format::Speculators,
        tensors: load(facts.tensors.keys().collect())?,
        carried: load(facts.carried.keys().collect())?,
        config: facts.config,
        notes,
    })
}

/// The configuration in the published form, read by the one strict reader.
fn published(dir: &Path, config: &Value, target: Option<&TargetInfo>) -> Result<DrafterConfig> {
    let origin = dir.join("config.json").display().to_string();
    let Some(target) = target else {
        bail!("{origin}: a speculators configuration does not say how many layers its target has; name the target")
    };
    match flattened(config, target.num_layers) {
        Ok(flat) => DrafterConfig::from_json(&flat, &origin),
        Err(problem) => bail!("{origin}: {problem}"),
    }
}

/// The published `config.json` of the same drafter.
fn flattened(config: &Value, num_target_layers: usize) -> std::result::Result<Value, String> {
    let text = |key: &str| config.get(key).and_then(Value::as_str);
    let kind = text("speculators_model_type");
    let architecture = match kind {
        Some("dflash") => "DFlashDraftModel",
        Some("dflash2") => "DFlash2DraftModel",
        _ => {
            return Err(format!(
                "speculators_model_type: expected \"dflash\" or \"dflash2\", got {}",
                config["speculators_model_type"]
            ));
        }
    };
    let Some(Value::Object(inner)) = config.get("transformer_layer_config") else {
        return Err(
            "transformer_layer_config: expected an object with the Qwen3 configuration of the layers".to_owned(),
        );
    };
    let mut flat = inner.clone();
    flat.insert("architectures".to_owned(), json!([architecture]));
    flat.insert("num_target_layers".to_owned(), num_target_layers.into());
    for key in ["draft_vocab_size", "target_hidden_size"] {
        copy(config, key, &mut flat);
    }
    let slides = inner
        .get("layer_types")
        .and_then(Value::as_array)
        .is_some_and(|types| types.iter().any(|name| name == "sliding_attention"));
    let non_causal = match config.get("sliding_window_non_causal") {
        None | Some(Value::Null) => kind == Some("dflash2"), // the defaults of the two classes
        Some(Value::Bool(flag)) => *flag,
        Some(other) => {
            return Err(format!(
                "sliding_window_non_causal: expected true or false, got {other}"
            ));
        }
    };
    if non_causal || !slides {
        flat.insert("is_causal".to_owned(), false.into());
    }
    let mut nested = Map::new();
    for key in ["block_size", "mask_token_id"].iter().chain(&NESTED) {
        copy(config, key, &mut nested);
    }
    nested.insert("target_layer_ids".to_owned(), taps(config, num_target_layers)?);
    flat.insert("dflash_config".to_owned(), Value::Object(nested));
    Ok(Value::Object(flat))
}

fn copy(from: &Value, key: &str, to: &mut Map<String, Value>) {
    if let Some(value) = from.get(key).filter(|value| !value.is_null()) {
        to.insert(key.to_owned(), value.clone());
    }
}

/// Tap ids counted from 0.
fn taps(config: &Value, num_target_layers: usize) -> std::result::Result<Value, String> {
    const KEY: &str = "aux_hidden_state_layer_ids";
    let Some(list) = config.get(KEY).and_then(Value::as_array) else {
        return Err(format!(
            "{KEY}: expected a list of target layers counted from 1, got {}; speculators would take three layers of \
             EAGLE's rule",
            config.get(KEY).unwrap_or(&Value::Null)
        ));
    };
    let one = |value: &Value| match value.as_u64() {
        Some(0) => Err(format!(
            "{KEY}: 0 is the output of the embedding, which no published drafter reads; expected ids from 1"
        )),
        Some(id) if (id as usize) < num_target_layers => Ok(id - 1),
        Some(id) if id as usize == num_target_layers => Err(format!(
            "{KEY}: {id} is the last layer of the target ({num_target_layers} layers), which engines return after its \
             final norm; expected ids below it"
        )),
        _ => Err(format!(
            "{KEY}: expected ids from 1 to {}, got {value}",
            num_target_layers.saturating_sub(1)
        )),
    };
    list.iter()
        .map(one)
        .collect::<std::result::Result<Vec<u64>, _>>()
        .map(|ids| json!(ids))
}

/// Writes `config` and `tensors` as a speculators folder and reads it back; `head` is carried along when given.
///
/// # Errors
/// When the format cannot say the configuration (a causal layer that does not slide, a sliding layer beside them of
/// another rule), the tensors are not its list, a value is not finite in `stored`, the destination is taken, or writing
/// fails. Nothing is left behind then.
pub fn write(
    dir: &Path,
    source: &Source,
    verifier: &Verifier,
    head: Option<&TargetHead>,
    stored: DType,
    existing: Existing,
) -> Result<()> {
    let json = config_json(&source.config, verifier, stored)?;
    let mut tensors = source.tensors.clone();
    if let Some(head) = head {
        tensors.insert(EMBEDDING.to_owned(), head.embed.clone());
        tensors.insert(HEAD.to_owned(), head.head.clone());
    }
    place(dir, existing, &|fresh| {
        write_tensors(&fresh.join("model.safetensors"), &tensors, stored)?;
        write_text(&fresh.join("config.json"), &pretty(&json)?)?;
        let folder = TensorFolder::open(fresh)?;
        let one = |name: &str| Ok((name.to_owned(), folder.get(name, &Device::Cpu)?));
        let read: Tensors = folder.iter().map(|(name, _)| one(name)).collect::<Result<_>>()?;
        verify_stored(fresh, &read, &tensors)?;
        sync_folder(fresh)
    })
}

/// The folder's `config.json`.
///
/// # Errors
/// As [`write()`] about the configuration.
pub fn config_json(config: &DrafterConfig, verifier: &Verifier, stored: DType) -> Result<Value> {
    let flat = config.to_json_stored_as(stored)?;
    let mut inner = Map::new();
    for (key, value) in flat.as_object().into_iter().flatten() {
        let outer = [
            "architectures",
            "block_size",
            "dflash_config",
            "dtype",
            "torch_dtype",
            "is_causal",
            "num_target_layers",
            // one spelling: its reader flattens rope_parameters itself
            "rope_theta",
            "rope_scaling",
        ];
        if !outer.contains(&key.as_str()) {
            inner.insert(key.clone(), value.clone());
        }
    }
    let kind = if config.is_dflash2() { "dflash2" } else { "dflash" };
    let aux: Vec<usize> = config.target_layer_ids.iter().map(|id| id + 1).collect();
    let mut json = json!({
        "architectures": flat["architectures"],
        "aux_hidden_state_layer_ids": aux,
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "dtype": flat["dtype"],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": false,
        "sliding_window_non_causal": sliding_non_causal(config)?,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": config.block_size - 1,
                "verifier_accept_k": 1,
            }],
            "verifier": { "architectures": verifier.architectures, "name_or_path": verifier.name },
        },
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "target_hidden_size": null,
        "tie_word_embeddings": false,
        "transformer_layer_config": inner,
    });
    for key in NESTED {
        if let (Some(value), Some(json)) = (flat["dflash_config"].get(key), json.as_object_mut()) {
            json.insert(key.to_owned(), value.clone());
        }
    }
    Ok(json)
}

/// The flag of the format: sliding layers are bidirectional, and full ones always are.
fn sliding_non_causal(config: &DrafterConfig) -> Result<bool> {
    for (i, layer) in config.layers.iter().enumerate() {
        if layer.window.is_none() && layer.causal {
            bail!(
                "layer {i} is causal and does not slide: speculators has no such layer, its full layers see the whole block"
            )
        }
    }
    Ok(!config.layers.iter().any(|layer| layer.causal))
}
