//! The target's tokenizer as llama.cpp keeps it: texts and kinds of all tokens, merges, special ids, chat template.
//!
//! llama.cpp has its splitting expressions built in and knows them by name; the name follows from the expression in
//! `tokenizer.json`. A token list is as long as the embedding has rows, its texts are distinct and none is empty.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use dflash_model::formats::gguf::Value;
use serde_json::Value as Json;

/// Splitting expressions, and what llama.cpp calls them.
const SPLITS: [(&str, &str); 2] = [
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen35",
    ),
];

/// Kinds of tokens, llama.cpp's numbers.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// A tokenizer to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct Tokenizer {
    /// llama.cpp's name for the splitting expression.
    pub pre: &'static str,
    /// Text of every token; rows of the embedding that stand for none are `[PADn]`.
    pub tokens: Vec<String>,
    /// Kind of every token.
    pub kinds: Vec<i32>,
    /// Merges in order of rank, both halves with a space between.
    pub merges: Vec<String>,
    /// Special ids by their place in the key: `bos`, `eos`, `padding`, `unknown`.
    pub special: Vec<(&'static str, u32)>,
    /// Whether a text begins with `bos`.
    pub add_bos: bool,
    /// Chat template.
    pub template: Option<String>,
}

impl Tokenizer {
    /// Reads the tokenizer of a target whose embedding has `rows` rows.
    ///
    /// # Errors
    /// When a file is missing or is not of the kind that Qwen targets have, or llama.cpp would refuse the result.
    pub fn read(folder: &Path, rows: usize) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let json = read_json(&path)?.with_context(|| format!("{}: no such file", path.display()))?;
        let mut tokenizer = Self::from_json(&json, rows).with_context(|| path.display().to_string())?;
        let settings_path = folder.join("tokenizer_config.json");
        let settings = read_json(&settings_path)?.unwrap_or(Json::Null);
        tokenizer.add_bos = settings.get("add_bos_token") == Some(&Json::Bool(true));
        tokenizer.special = tokenizer
            .special_ids(folder, &settings)
            .with_context(|| settings_path.display().to_string())?;
        ensure!(
            !tokenizer.add_bos || tokenizer.special.iter().any(|(name, _)| *name == "bos"),
            "{}: add_bos_token is true but there is no bos_token",
            settings_path.display()
        );
        tokenizer.template = template(folder, &settings)?;
        Ok(tokenizer)
    }

    /// The metadata, in order.
    pub fn metadata(&self) -> Vec<(String, Value)> {
        let list = |texts: &[String]| Value::Array(texts.iter().cloned().map(Value::String).collect());
        let kinds = self.kinds.iter().copied().map(Value::I32).collect();
        let mut keys = vec![
            ("tokenizer.ggml.model".to_owned(), Value::String("gpt2".to_owned())),
            ("tokenizer.ggml.pre".to_owned(), Value::String(self.pre.to_owned())),
            ("tokenizer.ggml.tokens".to_owned(), list(&self.tokens)),
            ("tokenizer.ggml.token_type".to_owned(), Value::Array(kinds)),
            ("tokenizer.ggml.merges".to_owned(), list(&self.merges)),
        ];
        for (name, id) in &self.special {
            keys.push((format!("tokenizer.ggml.{name}_token_id"), Value::U32(*id)));
        }
        keys.push(("tokenizer.ggml.add_bos_token".to_owned(), Value::Bool(self.add_bos)));
        if let Some(template) = &self.template {
            keys.push(("tokenizer.chat_template".to_owned(), Value::String(template.clone())));
        }
        keys
    }

    fn from_json(json: &Json, rows: usize) -> Result<Self> {
        let model = json.get("model").context("model: missing")?;
        let kind = model.get("type").and_then(Json::as_str).unwrap_or("nothing");
        ensure!(kind == "BPE", "model.type: expected BPE, got {kind}");
        ensure!(
            model.get("byte_fallback") != Some(&Json::Bool(true)),
            "model.byte_fallback: expected false, got true"
        );
        let pre = split_name(json)?;
        let mut texts = BTreeMap::new();
        let vocab = model
            .get("vocab")
            .and_then(Json::as_object)
            .context("model.vocab: expected an object")?;
        for (text, id) in vocab {
            let id = row(id, rows).with_context(|| format!("model.vocab {text:?}"))?;
            if let Some((other, _)) = texts.insert(id, (text.clone(), NORMAL)) {
                bail!("model.vocab: {other:?} and {text:?} both have the id {id}")
            }
        }
        for (index, token) in json
            .get("added_tokens")
            .and_then(Json::as_array)
            .into_iter()
            .flatten()
            .enumerate()
        {
            let at = || format!("added_tokens[{index}]");
            let text = token.get("content").and_then(Json::as_str).with_context(at)?;
            let id = row(token.get("id").unwrap_or(&Json::Null), rows).with_context(at)?;
            // what looks like markup is control whatever the file says, as in llama.cpp's converter
            let markup = text.starts_with("<|") && text.ends_with("|>");
            let control = token.get("special") == Some(&Json::Bool(true)) || markup;
            texts.insert(id, (text.to_owned(), if control { CONTROL } else { USER_DEFINED }));
        }
        let (tokens, kinds): (Vec<String>, Vec<i32>) = (0..rows)
            .map(|id| texts.remove(&id).unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED)))
            .unzip();
        check_distinct(&tokens)?;
        let merges = model
            .get("merges")
            .and_then(Json::as_array)
            .context("model.merges: expected a list")?;
        let merges = merges
            .iter()
            .enumerate()
            .map(|(rank, pair)| {
                merge(pair).with_context(|| format!("model.merges[{rank}]: expected two texts, got {pair}"))
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            pre,
            tokens,
            kinds,
            merges,
            special: Vec::new(),
            add_bos: false,
            template: None,
        })
    }

    /// Special ids: the tokenizer's own settings first, then the model's configuration.
    fn special_ids(&self, folder: &Path, settings: &Json) -> Result<Vec<(&'static str, u32)>> {
        let config = read_json(&folder.join("config.json"))?.unwrap_or(Json::Null);
        let generation = read_json(&folder.join("generation_config.json"))?.unwrap_or(Json::Null);
        let mut special = Vec::new();
        for (name, key) in [("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")] {
            let text = settings.get(format!("{key}_token")).and_then(|token| {
                let content = token.get("content").unwrap_or(token);
                content.as_str().map(str::to_owned)
            });
            let id = match text {
                Some(text) => {
                    let id = self.tokens.iter().position(|token| *token == text);
                    Some(id.with_context(|| format!("{key}_token {text:?}: no such token in tokenizer.json"))?)
                }
                None => [&generation, config.get("text_config").unwrap_or(&config), &config]
                    .into_iter()
                    .filter_map(|file| file.get(format!("{key}_token_id")))
                    .find_map(|id| id.as_array().and_then(|ids| ids.first()).unwrap_or(id).as_u64())
                    .map(|id| id as usize)
                    .filter(|id| *id < self.tokens.len()),
            };
            special.extend(id.map(|id| (name, id as u32)));
        }
        Ok(special)
    }
}

/// llama.cpp's name for the expression that splits a text before merging.
fn split_name(json: &Json) -> Result<&'static str> {
    let splitter = json.get("pre_tokenizer").context("pre_tokenizer: missing")?;
    let parts = splitter.get("pretokenizers").and_then(Json::as_array);
    let parts: Vec<&Json> = parts.map_or_else(|| vec![splitter], |parts| parts.iter().collect());
    let of_kind = |kind: &str| {
        parts
            .iter()
            .find(|part| part.get("type").and_then(Json::as_str) == Some(kind))
    };
    ensure!(
        of_kind("ByteLevel").is_some(),
        "pre_tokenizer: expected one of byte level, as Qwen's tokenizers have"
    );
    let pattern = of_kind("Split").and_then(|part| part.pointer("/pattern/Regex")?.as_str());
    let pattern = pattern.context("pre_tokenizer: expected a Split with a Regex")?;
    match SPLITS.into_iter().find(|(known, _)| *known == pattern) {
        Some((_, name)) => Ok(name),
        None => {
            bail!("pre_tokenizer: expected the expression of qwen2 or qwen35, which llama.cpp knows, got {pattern}")
        }
    }
}

/// An id that the embedding has a row for.
fn row(id: &Json, rows: usize) -> Result<usize> {
    match id.as_u64() {
        Some(id) if id < rows as u64 => Ok(id as usize),
        _ => bail!("expected an id below the embedding's {rows} rows, got {id}"),
    }
}

/// llama.cpp stops at an empty or repeated text.
fn check_distinct(tokens: &[String]) -> Result<()> {
    let mut seen = BTreeMap::new();
    for (id, text) in tokens.iter().enumerate() {
        ensure!(!text.is_empty(), "token {id}: expected a text, got an empty one");
        if let Some(other) = seen.insert(text, id) {
            bail!("tokens {other} and {id} have the same text {text:?}")
        }
    }
    Ok(())
}

/// A merge in either spelling: two texts, or one with a space between.
fn merge(pair: &Json) -> Option<String> {
    let joined = match pair {
        Json::String(text) => text.clone(),
        Json::Array(parts) if parts.len() == 2 => format!("{} {}", parts[0].as_str()?, parts[1].as_str()?),
        _ => return None,
    };
    let (first, second) = joined.split_once(' ')?;
    (!first.is_empty() && !second.is_empty() && !second.contains(' ')).then_some(joined)
}

fn template(folder: &Path, settings: &Json) -> Result<Option<String>> {
    let path = folder.join("chat_template.jinja");
    if path.is_file() {
        return fs::read_to_string(&path)
            .map(Some)
            .with_context(|| path.display().to_string());
    }
    Ok(settings.get("chat_template").and_then(Json::as_str).map(str::to_owned))
}

/// A JSON file, if it is there.
fn read_json(path: &Path) -> Result<Option<Json>> {
    if !path.is_file() {
        return Ok(None);
    }
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text)
        .map(Some)
        .with_context(|| path.display().to_string())
}
