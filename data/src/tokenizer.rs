//! The checkpoint's tokenizer: text to ids and back, nothing added, nothing cut.

use std::path::Path;

use anyhow::{Result, anyhow};

use crate::files::sha256_hex;

/// A loaded `tokenizer.json`.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    hash: String,
}

impl Tokenizer {
    /// Loads `tokenizer.json` of a checkpoint folder.
    pub fn load(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|error| anyhow!("{}: cannot read: {error}", path.display()))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes)
            .map_err(|error| anyhow!("{}: not a tokenizer: {error}", path.display()))?;
        // some files carry settings of a past training run that would cut or fill every text
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|error| anyhow!("{}: {error}", path.display()))?;
        Ok(Self {
            inner,
            hash: sha256_hex(&bytes),
        })
    }

    /// Ids of a text. Special tokens written in it are recognised; none is added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self
            .inner
            .encode_fast(text, false)
            .map_err(|error| anyhow!("cannot tokenise a text of {} bytes: {error}", text.len()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of some ids, with or without special tokens.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        self.inner
            .decode(ids, skip_special_tokens)
            .map_err(|error| anyhow!("cannot decode {} ids: {error}", ids.len()))
    }

    /// Id of a token by its exact text.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Number of tokens, added ones included. The embedding may have more rows.
    pub fn len(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// One above the largest id.
    pub fn id_end(&self) -> usize {
        let largest = self.inner.get_vocab(true).into_values().max();
        largest.map_or(0, |id| id as usize + 1)
    }

    /// Whether there is no token at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// SHA-256 of `tokenizer.json`.
    pub fn hash(&self) -> &str {
        &self.hash
    }
}
