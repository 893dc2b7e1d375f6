//! Which tokens end a generated turn.
//!
//! Union of `eos_token_id` in `generation_config.json` and `config.json` (each an id or a list), and of the chat
//! ends `<|im_end|>` and `<|endoftext|>` where the tokenizer has them. `config.json` alone would miss the chat end
//! of Qwen3.5: its id there is the end of a document.

use std::path::Path;

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use crate::files::read_json;
use crate::tokenizer::Tokenizer;

/// Texts that end a turn in this family of models.
const END_TOKENS: [&str; 2] = ["<|im_end|>", "<|endoftext|>"];

/// Stop ids of a checkpoint folder, in the order found, without repeats; at least one.
///
/// # Errors
/// When there is none, a value is no token id, or an id lies outside the vocabulary: `vocab_size` of `config.json`, else
/// the tokenizer's. Such an id could never be written, so no turn would end on it.
pub fn stop_ids(folder: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    let mut vocabulary = None;
    for name in ["generation_config.json", "config.json"] {
        let path = folder.join(name);
        if !path.exists() {
            continue;
        }
        let config = read_json(&path)?;
        for (section, holder) in [("", Some(&config)), ("text_config.", config.get("text_config"))] {
            let Some(holder) = holder else { continue };
            if let Some(value) = holder.get("eos_token_id") {
                add(&mut ids, value, &format!("{}: {section}eos_token_id", path.display()))?;
            }
            if let ("config.json", Some(size)) = (name, holder.get("vocab_size").and_then(Value::as_u64)) {
                vocabulary = Some((size, format!("{section}vocab_size of config.json")));
            }
        }
    }
    for token in END_TOKENS {
        if let Some(id) = tokenizer.id_of(token) {
            ids.push((id, format!("{}: {token}", folder.join("tokenizer.json").display())));
        }
    }
    let (size, of) = vocabulary.unwrap_or_else(|| (tokenizer.id_end() as u64, "tokenizer.json".to_owned()));
    let mut unique = Vec::new();
    for (id, place) in ids {
        ensure!(
            u64::from(id) < size,
            "{place}: expected an id below {size} ({of}), found {id}"
        );
        if !unique.contains(&id) {
            unique.push(id);
        }
    }
    ensure!(
        !unique.is_empty(),
        "{}: no stop token: no eos_token_id in generation_config.json or config.json, none of {END_TOKENS:?} in the tokenizer",
        folder.display()
    );
    Ok(unique)
}

fn add(ids: &mut Vec<(u32, String)>, value: &Value, place: &str) -> Result<()> {
    match value {
        Value::Null => Ok(()),
        Value::Array(list) => list.iter().try_for_each(|item| add(ids, item, place)),
        other => match other.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) => {
                ids.push((id, place.to_owned()));
                Ok(())
            }
            None => bail!("{place}: expected a token id or a list of them, found {other}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stop ids of a folder whose tokenizer has the ids 0 to 2, the last of them `<|im_end|>`.
    fn stops(config: &str, generation: &str) -> Result<Vec<u32>> {
        let folder = tempfile::tempdir()?;
        let tokenizer = r#"{"version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": null, "added_tokens": [{"id": 2, "content": "<|im_end|>", "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}"#;
        for (name, text) in [
            ("tokenizer.json", tokenizer),
            ("config.json", config),
            ("generation_config.json", generation),
        ] {
            std::fs::write(folder.path().join(name), text)?;
        }
        stop_ids(folder.path(), &Tokenizer::load(folder.path())?)
    }

    #[test]
    fn ids_of_all_files_come_together_without_repeats() {
        let config = r#"{"text_config": {"eos_token_id": 1, "vocab_size": 4}}"#;
        assert_eq!(stops(config, r#"{"eos_token_id": [3, 1]}"#).unwrap(), [3, 1, 2]);
    }

    #[test]
    fn an_id_outside_the_vocabulary_is_refused_with_its_file() {
        for (config, generation, expected) in [
            (
                r#"{"text_config": {"vocab_size": 4}}"#,
                r#"{"eos_token_id": [1, 4]}"#,
                "generation_config.json: eos_token_id: expected an id below 4 (text_config.vocab_size of config.json), found 4",
            ),
            (
                r#"{"vocab_size": 3, "eos_token_id": 9}"#,
                "{}",
                "config.json: eos_token_id: expected an id below 3",
            ),
            (
                r#"{"eos_token_id": 3}"#,
                "{}",
                "expected an id below 3 (tokenizer.json), found 3",
            ),
            (
                r#"{"vocab_size": 2}"#,
                "{}",
                "tokenizer.json: <|im_end|>: expected an id below 2",
            ),
            (
                "{}",
                r#"{"eos_token_id": -1}"#,
                "expected a token id or a list of them, found -1",
            ),
        ] {
            let error = format!("{:#}", stops(config, generation).unwrap_err());
            assert!(error.contains(expected), "{expected:?} not in {error:?}");
        }
    }
}
