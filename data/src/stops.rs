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
pub fn stop_ids(folder: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for name in ["generation_config.json", "config.json"] {
        let path = folder.join(name);
        if !path.exists() {
            continue;
        }
        let config = read_json(&path)?;
        for (field, holder) in [("", Some(&config)), ("text_config.", config.get("text_config"))] {
            if let Some(value) = holder.and_then(|holder| holder.get("eos_token_id")) {
                add(&mut ids, value, &format!("{}: {field}eos_token_id", path.display()))?;
            }
        }
    }
    ids.extend(END_TOKENS.iter().filter_map(|token| tokenizer.id_of(token)));
    let mut unique = Vec::new();
    for id in ids {
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

fn add(ids: &mut Vec<u32>, value: &Value, place: &str) -> Result<()> {
    match value {
        Value::Null => Ok(()),
        Value::Array(list) => list.iter().try_for_each(|item| add(ids, item, place)),
        other => match other.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) => {
                ids.push(id);
                Ok(())
            }
            None => bail!("{place}: expected a token id or a list of them, got {other}"),
        },
    }
}
