//! Reads a drafter from a GGUF file of llama.cpp's architecture `dflash`.
//!
//! [`file`](GgufFile) is the container, [`names`] says what llama.cpp calls a drafter's parts, and this file turns one
//! into a configuration and the published tensors. What the file does not say is the depth of its target; taps are
//! counted by what enters a layer there, by what leaves it here.

mod file;
pub mod names;
mod value;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{DType, Result, Tensor, bail};

use super::{Facts, Format, Shapes, Source, Tensors};
use crate::drafter_config::{ConvConfig, DrafterConfig, LayerRule, SelectorConfig};
use crate::target::TargetInfo;

pub use file::{GgufFile, TensorInfo, is_gguf};
pub use value::{ElementType, Value};

use names::{ARCHITECTURE, MASK_TOKEN, TOKENS, keys, tensor_name};

/// Slots of a block where the file does not say, as in llama.cpp.
const DEFAULT_BLOCK_SIZE: u64 = 16;

/// Reads the drafter for `target`.
///
/// # Errors
/// When the file is no whole GGUF file of a DFlash drafter, `target` is not given or is another one, a key is missing
/// or says what no drafter of ours does, tensors are missing, unexpected or misshapen (all of them listed), or a value
/// is not a finite number.
pub(super) fn read(path: &Path, target: Option<&TargetInfo>) -> Result<Source> {
    let (file, config, mut notes) = open(path, target)?;
    let at = |problem: String| candle_core::Error::msg(format!("{}: {problem}", path.display()));
    check_tensors(&file, &config).map_err(at)?;
    let mut tensors = BTreeMap::new();
    let mut widened = BTreeMap::<&str, usize>::new();
    for (published, _) in config.tensor_shapes() {
        let name = gguf_name(&published);
        let tensor = file.tensor(&name)?;
        refuse_special(path, &name, &tensor)?;
        if let Some(info) = file.tensors().get(&name).filter(|info| info.element.float().is_none()) {
            *widened.entry(info.element.name()).or_default() += 1;
        }
        tensors.insert(published, tensor);
    }
    notes.extend(
        widened
            .iter()
            .map(|(name, count)| format!("{count} tensors were widened from {name} to F32")),
    );
    Ok(Source {
        format: Format::Gguf,
        config,
        tensors,
        carried: Tensors::new(),
        notes,
    })
}

/// The file, its configuration, and what had to be assumed.
fn open(path: &Path, target: Option<&TargetInfo>) -> Result<(GgufFile, DrafterConfig, Vec<String>)> {
    let file = GgufFile::open(path)?;
    let at = |problem: String| candle_core::Error::msg(format!("{}: {problem}", path.display()));
    Keys(&file).check_architecture().map_err(at)?;
    let Some(target) = target else {
        bail!(
            "{}: a GGUF file does not say how many layers its target has: the target's folder is needed",
            path.display()
        )
    };
    let mut notes = Vec::new();
    let config = Keys(&file).config(target, &mut notes).map_err(at)?;
    config.validate().map_err(|error| at(error.to_string()))?;
    config.check_target(target).map_err(|error| at(error.to_string()))?;
    Ok((file, config, notes))
}

/// Configuration and tensor list of the file; tensors that are not on the configuration's list keep their GGUF names.
///
/// # Errors
/// As [`read`], about header and keys.
pub(super) fn facts(path: &Path, target: Option<&TargetInfo>) -> Result<Facts> {
    let (file, config, _) = open(path, target)?;
    let published: BTreeMap<String, String> = config
        .tensor_shapes()
        .into_iter()
        .map(|(name, _)| (gguf_name(&name), name))
        .collect();
    let (mut tensors, mut quantised) = (Shapes::new(), BTreeMap::new());
    for (name, info) in file.tensors() {
        let name = published.get(name).unwrap_or(name);
        if info.element.float().is_none() {
            quantised.insert(name.clone(), info.element);
        }
        // what is quantised is widened when it is read
        let dtype = info.element.float().unwrap_or(DType::F32);
        tensors.insert(name.clone(), (info.shape.clone(), dtype));
    }
    Ok(Facts {
        config,
        tensors,
        quantised,
        carried: Shapes::new(),
        stray: Vec::new(),
    })
}

/// The name in the file of a tensor out of a configuration's list.
fn gguf_name(published: &str) -> String {
    // the list and the table are held together by a test
    tensor_name(published).unwrap_or_else(|| published.to_owned())
}

fn check_tensors(file: &GgufFile, config: &DrafterConfig) -> std::result::Result<(), String> {
    let expected: BTreeMap<String, Vec<usize>> = config
        .tensor_shapes()
        .into_iter()
        .map(|(published, shape)| (gguf_name(&published), shape))
        .collect();
    let listed = |names: Vec<&str>| format!("({}): {}", names.len(), names.join(", "));
    let absent = |name: &&String| !file.tensors().contains_key(*name);
    let missing: Vec<&str> = expected.keys().filter(absent).map(String::as_str).collect();
    let unknown = |name: &&String| !expected.contains_key(*name);
    let unexpected: Vec<&str> = file.tensors().keys().filter(unknown).map(String::as_str).collect();
    let mut problems = Vec::new();
    if !missing.is_empty() {
        problems.push(format!("missing {}", listed(missing)));
    }
    if unexpected
        .iter()
        .any(|name| ["token_embd.weight", "output.weight"].contains(name))
    {
        problems.push("a drafter with an embedding or a head of its own is not read".to_owned());
    }
    if unexpected.iter().any(|name| name.starts_with("markov_")) {
        problems.push("a Markov head makes it a DSpark drafter, which is not read".to_owned());
    }
    if !unexpected.is_empty() {
        problems.push(format!("unexpected {}", listed(unexpected)));
    }
    for (name, info) in file.tensors() {
        if let Some(shape) = expected.get(name).filter(|shape| **shape != info.shape) {
            problems.push(format!("{name}: expected shape {shape:?}, got {:?}", info.shape));
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(format!(
        "not the drafter that its keys describe: {}",
        problems.join("; ")
    ))
}

/// Refuses NaN and infinities: a drafter with one drafts nothing that is ever accepted.
fn refuse_special(path: &Path, name: &str, tensor: &Tensor) -> Result<()> {
    let values = tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(at) => bail!("{}: tensor {name}: element {at} is not a finite number", path.display()),
    }
}

/// Typed access to a drafter's keys.
struct Keys<'f>(&'f GgufFile);

type Read<T> = std::result::Result<T, String>;

impl Keys<'_> {
    fn check_architecture(&self) -> Read<()> {
        match self.0.get("general.architecture") {
            Some(value) if value.as_str() == Some(ARCHITECTURE) => Ok(()),
            Some(other) => Err(format!(
                "general.architecture: expected \"{ARCHITECTURE}\", a drafter, got {}",
                other.brief()
            )),
            None => Err(format!("general.architecture: missing, expected \"{ARCHITECTURE}\"")),
        }
    }

    fn config(&self, target: &TargetInfo, notes: &mut Vec<String>) -> Read<DrafterConfig> {
        self.refuse_unknown()?;
        let num_heads = self.size(keys::HEAD_COUNT)?;
        let hidden_size = self.size(keys::EMBEDDING_LENGTH)?;
        let head_dim = match self.get(keys::KEY_LENGTH) {
            Some(_) => self.size(keys::KEY_LENGTH)?,
            None => hidden_size.checked_div(num_heads).unwrap_or(0),
        };
        self.refuse_other_attention(head_dim)?;
        let block_size = if self.get(keys::BLOCK_SIZE).is_some() {
            self.size(keys::BLOCK_SIZE)?
        } else {
            notes.push(format!(
                "{ARCHITECTURE}.{}: missing, taken as llama.cpp does to be {DEFAULT_BLOCK_SIZE}",
                keys::BLOCK_SIZE
            ));
            DEFAULT_BLOCK_SIZE as usize
        };
        let (conv, selector) = self.dflash2()?;
        Ok(DrafterConfig {
            hidden_size,
            intermediate_size: self.size(keys::FEED_FORWARD_LENGTH)?,
            num_heads,
            num_kv_heads: match self.get(keys::HEAD_COUNT_KV) {
                Some(_) => self.size(keys::HEAD_COUNT_KV)?,
                None => num_heads,
            },
            head_dim,
            layers: self.layers()?,
            vocab_size: self.vocab_size(target)?,
            num_target_layers: target.num_layers,
            target_layer_ids: self.taps()?,
            block_size,
            mask_token_id: match self.0.get(MASK_TOKEN).map(|value| (value.as_u64(), value)) {
                Some((Some(id), _)) if u32::try_from(id).is_ok() => id as u32,
                Some((_, other)) => return Err(format!("{MASK_TOKEN}: expected a token id, got {}", other.brief())),
                None => return Err(format!("{MASK_TOKEN}: missing, it fills the slots to be predicted")),
            },
            rms_norm_eps: self.number(keys::RMS_EPSILON)?,
            rope_theta: self.number(keys::ROPE_BASE)?,
            max_positions: self.size(keys::CONTEXT_LENGTH)?,
            output_multiplier: self.number_or(keys::LOGIT_SCALE, 1.0)?,
            // 0 switches the cap off
            final_logit_softcapping: Some(self.number_or(keys::SOFTCAP, 0.0)?).filter(|cap| *cap != 0.0),
            input_embedding_scale: self.number_or(keys::EMBEDDING_SCALE, 1.0)?,
            conv,
            selector,
        })
    }

    /// A key that is not known may change what the drafter computes.
    fn refuse_unknown(&self) -> Read<()> {
        let known: BTreeSet<&str> = keys::ALL.into_iter().collect();
        let prefix = format!("{ARCHITECTURE}.");
        let unknown = |key: &&String| key.strip_prefix(&prefix).is_some_and(|key| !known.contains(key));
        let unknown: Vec<&str> = self.0.metadata().keys().filter(unknown).map(String::as_str).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        Err(format!(
            "{}: not known; what such a drafter computes is not what is computed here",
            unknown.join(", ")
        ))
    }

    /// Whatever llama.cpp could be told about attention but no drafter of ours does.
    fn refuse_other_attention(&self, head_dim: usize) -> Read<()> {
        for key in [keys::VALUE_LENGTH, keys::ROPE_DIMENSIONS] {
            if self.get(key).is_some() && self.size(key)? != head_dim {
                return Err(self.expected(key, &format!("the length of a key, {head_dim}")));
            }
        }
        let activation = self.get(keys::HIDDEN_ACTIVATION);
        if activation.is_some_and(|value| value.as_str() != Some("silu")) {
            return Err(self.expected(keys::HIDDEN_ACTIVATION, "\"silu\""));
        }
        if self.flag_or(keys::SAMPLE_FROM_ANCHOR, false)? {
            return Err(self.expected(
                keys::SAMPLE_FROM_ANCHOR,
                "false: slot 0 is the anchor and predicts nothing",
            ));
        }
        if self.get(keys::ROPE_SECTIONS).is_some() {
            let sections = self.wholes(keys::ROPE_SECTIONS)?;
            let plain = [head_dim as u64 / 2, 0, 0, 0];
            if sections != plain && sections.iter().any(|&section| section != 0) {
                return Err(self.expected(
                    keys::ROPE_SECTIONS,
                    &format!("{plain:?}, plain RoPE over the whole head"),
                ));
            }
        }
        Ok(())
    }

    fn layers(&self) -> Read<Vec<LayerRule>> {
        let (count, most) = (self.size(keys::BLOCK_COUNT)?, self.0.tensors().len());
        if count > most {
            return Err(self.expected(
                keys::BLOCK_COUNT,
                &format!("at most as many as the file has tensors, {most}"),
            ));
        }
        let causal = self.flag_or(keys::CAUSAL, false)?;
        let window = match self.get(keys::SLIDING_WINDOW) {
            Some(_) => Some(self.size(keys::SLIDING_WINDOW)?).filter(|window| *window > 0),
            None => None,
        };
        let slides = match (window, self.get(keys::SLIDING_WINDOW_PATTERN)) {
            (None, _) => vec![false; count],
            (Some(_), None) => {
                let key = keys::SLIDING_WINDOW_PATTERN;
                return Err(format!("{ARCHITECTURE}.{key}: missing, it says which layers slide"));
            }
            (Some(_), Some(pattern)) => {
                let flag = |value: &Value| value.as_bool().or_else(|| value.as_u64().map(|value| value != 0));
                let flags = pattern
                    .as_array()
                    .and_then(|values| values.iter().map(flag).collect::<Option<Vec<_>>>());
                match flags {
                    Some(flags) if flags.len() == count => flags,
                    _ => return Err(self.expected(keys::SLIDING_WINDOW_PATTERN, &format!("{count} flags"))),
                }
            }
        };
        let rule = |slides: bool| LayerRule {
            window: window.filter(|_| slides),
            causal,
        };
        Ok(slides.into_iter().map(rule).collect())
    }

    fn taps(&self) -> Read<Vec<usize>> {
        let entering = self.wholes(keys::TARGET_LAYERS)?;
        if entering.contains(&0) {
            return Err(self.expected(
                keys::TARGET_LAYERS,
                "at least 1 each: 0 is the embedding, which is no layer's output",
            ));
        }
        Ok(entering.iter().map(|&layer| layer as usize - 1).collect())
    }

    /// Rows of the embedding: as many as there are tokens.
    fn vocab_size(&self, target: &TargetInfo) -> Read<usize> {
        let tokens = self.0.get(TOKENS).map(|value| (value.as_array(), value));
        let listed = match tokens {
            Some((Some(tokens), _)) => Some(tokens.len()),
            Some((None, other)) => return Err(format!("{TOKENS}: expected a list, got {}", other.brief())),
            None => None,
        };
        let said = match self.get(keys::VOCAB_SIZE) {
            Some(_) => Some(self.size(keys::VOCAB_SIZE)?),
            None => None,
        };
        match (listed, said) {
            (Some(listed), Some(said)) if listed != said => {
                Err(self.expected(keys::VOCAB_SIZE, &format!("the number of tokens, {listed}")))
            }
            (listed, said) => Ok(listed.or(said).unwrap_or(target.vocab_size)),
        }
    }

    fn dflash2(&self) -> Read<(Option<ConvConfig>, Option<SelectorConfig>)> {
        let parts = [
            keys::CONV_KERNEL_SIZE,
            keys::CONV_GROUP_SIZE,
            keys::SELECTOR_RANK,
            keys::SELECTOR_TOP_K,
        ];
        if parts.iter().all(|key| self.get(key).is_none()) {
            return Ok((None, None));
        }
        let conv = ConvConfig {
            kernel_size: self.size(keys::CONV_KERNEL_SIZE)?,
            group_size: self.size(keys::CONV_GROUP_SIZE)?,
        };
        let selector = SelectorConfig {
            rank: self.size(keys::SELECTOR_RANK)?,
            top_k: self.size(keys::SELECTOR_TOP_K)?,
        };
        Ok((Some(conv), Some(selector)))
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(&format!("{ARCHITECTURE}.{key}"))
    }

    fn required(&self, key: &str) -> Read<&Value> {
        self.get(key).ok_or_else(|| format!("{ARCHITECTURE}.{key}: missing"))
    }

    fn size(&self, key: &str) -> Read<usize> {
        let size = self.required(key)?.as_u64().and_then(|size| u32::try_from(size).ok());
        size.map(|size| size as usize)
            .ok_or_else(|| self.expected(key, "a whole number"))
    }

    fn number(&self, key: &str) -> Read<f64> {
        self.required(key)?
            .as_f64()
            .ok_or_else(|| self.expected(key, "a number"))
    }

    fn number_or(&self, key: &str, default: f64) -> Read<f64> {
        self.get(key).map_or(Ok(default), |_| self.number(key))
    }

    fn flag_or(&self, key: &str, default: bool) -> Read<bool> {
        match self.get(key).map(Value::as_bool) {
            None => Ok(default),
            Some(Some(flag)) => Ok(flag),
            Some(None) => Err(self.expected(key, "true or false")),
        }
    }

    fn wholes(&self, key: &str) -> Read<Vec<u64>> {
        let values = self.required(key)?.as_array();
        let small = |value: &Value| value.as_u64().filter(|value| u32::try_from(*value).is_ok());
        values
            .and_then(|values| values.iter().map(small).collect())
            .ok_or_else(|| self.expected(key, "a list of whole numbers"))
    }

    fn expected(&self, key: &str, what: &str) -> String {
        let got = self.get(key).map_or_else(|| "nothing".to_owned(), Value::brief);
        format!("{ARCHITECTURE}.{key}: expected {what}, got {got}")
    }
}
