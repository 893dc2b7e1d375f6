//! What a readable `config.json` leaves to the guess of the engine that serves it.
//!
//! None of this changes what this crate computes: such a folder loads here. Engines fill the gaps differently, or do
//! not load the folder at all, so whoever looks at a folder is told.

use serde_json::Value;

use super::DrafterConfig;
use super::keys::{Keys, Read};

impl DrafterConfig {
    /// One line for each thing that the file says badly or not at all, though it can be read.
    pub fn remarks(value: &Value) -> Vec<String> {
        // a file that cannot be read has a problem, not a remark
        let found = Self::from_json(value, "config.json").ok();
        found
            .and_then(|config| remarks(value, &config).ok())
            .unwrap_or_default()
    }
}

fn remarks(value: &Value, config: &DrafterConfig) -> Read<Vec<String>> {
    let keys = Keys::of(value)?;
    let mut found = Vec::new();
    let mut absent = |key: &str, there: bool, meaning: &str| {
        if !there {
            found.push(format!("{key}: missing, {meaning}"));
        }
    };
    absent(
        "model_type",
        keys.top("model_type").is_some(),
        "read as \"qwen3\"; vLLM and SGLang do not load a folder without it",
    );
    absent(
        "layer_types",
        keys.top("layer_types").is_some(),
        "every layer read as the other keys have it; engines want one entry a layer",
    );
    absent(
        "block_size",
        keys.top("block_size").is_some(),
        "it stands in dflash_config alone, older loaders read it at the top",
    );
    absent(
        "dflash_config.block_size",
        keys.nested("block_size").is_some(),
        "it stands at the top alone, newer loaders read it there",
    );
    absent(
        "dflash_config.target_layer_ids",
        keys.nested("target_layer_ids").is_some(),
        "they stand at the top alone, engines read them there",
    );
    absent(
        "dflash_config.mask_token_id",
        keys.nested("mask_token_id").is_some(),
        "it stands at the top alone, engines read it there",
    );
    let slides = config.layers.iter().any(|layer| layer.window.is_some());
    let uniform = config
        .layers
        .iter()
        .all(|layer| layer.causal == config.layers[0].causal);
    let said = keys.top("is_causal").is_some() || keys.nested("causal").is_some();
    absent(
        "is_causal",
        // the one mixed rule is said by leaving the key out
        said || !uniform || !slides,
        "read as causal in sliding layers; engines disagree",
    );
    if keys.top("tie_word_embeddings").is_some_and(|field| field.value == true) {
        found.push(
            "tie_word_embeddings: true, but a drafter has no embedding to tie; it means nothing here and is best false"
                .to_owned(),
        );
    }
    if config.mask_token_id == 0 {
        found.push("mask_token_id: 0 is an ordinary token in most vocabularies; expected an unused row".to_owned());
    }
    Ok(found)
}
