//! `manifest.json` of a tap folder: whose taps these are, and where each record lies.
//!
//! ```json
//! {"format": "dflash-taps", "version": 1, "dtype": "bf16", "total": 1200,
//!  "identity": {"target": "...", "tokenizer": "...", "template": "...", "thinking": false, "layers": [1, 3, 5], "hidden_size": 256},
//!  "shards": ["taps-00000.safetensors"],
//!  "records": [{"source": 1, "tokens": 87, "shard": 0, "inputs": "16 hex", "checksum": "16 hex"}]}
//! ```
//! Records stand in the order of the examples; their number over `total` says how far a capture got. `inputs` is the
//! start of SHA-256 over tokens (u32, little-endian) and mask (one byte each), `checksum` over those and the taps.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::files::{hex, read_text, write_whole};

/// Name of the file in its folder.
pub(crate) const FILE: &str = "manifest.json";
const FORMAT: &str = "dflash-taps";
const VERSION: u32 = 1;
const DTYPE: &str = "bf16";
/// Characters of a checksum: 64 bits, enough against accidents.
const CHECKSUM_CHARACTERS: usize = 16;

/// Everything that taps depend on, apart from the examples.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// [`crate::target_hash()`] of the target folder.
    pub target: String,
    /// SHA-256 of `tokenizer.json`.
    pub tokenizer: String,
    /// SHA-256 of the chat template.
    pub template: String,
    /// Thinking switch of the run.
    pub thinking: Option<bool>,
    /// Tap ids, strictly increasing; id i is the output of layer i before the final norm.
    pub layers: Vec<usize>,
    /// Width of one tap, H.
    pub hidden_size: usize,
}

impl Identity {
    /// Refuses taps that were made otherwise than expected; the error names the field and both values.
    pub fn check(&self, expected: &Self) -> Result<()> {
        let differs = |name: &str, stored: &dyn std::fmt::Debug, wanted: &dyn std::fmt::Debug| {
            anyhow::anyhow!(
                "the stored taps are of {name} {stored:?}, this run wants {wanted:?}: capture into another folder"
            )
        };
        // destructured, so that a new field cannot be forgotten here
        let Self {
            target,
            tokenizer,
            template,
            thinking,
            layers,
            hidden_size,
        } = self;
        if *target != expected.target {
            return Err(differs("target", target, &expected.target));
        }
        if *tokenizer != expected.tokenizer {
            return Err(differs("tokenizer", tokenizer, &expected.tokenizer));
        }
        if *template != expected.template {
            return Err(differs("template", template, &expected.template));
        }
        if *thinking != expected.thinking {
            return Err(differs("thinking", thinking, &expected.thinking));
        }
        if *layers != expected.layers {
            return Err(differs("layers", layers, &expected.layers));
        }
        if *hidden_size != expected.hidden_size {
            return Err(differs("hidden_size", hidden_size, &expected.hidden_size));
        }
        Ok(())
    }

    /// Length of a tap row, n_taps * H.
    pub fn tap_width(&self) -> usize {
        self.layers.len() * self.hidden_size
    }
}

/// One stored example.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RecordEntry {
    /// Line of the row that it comes from.
    pub(crate) source: usize,
    /// Its tokens, T.
    pub(crate) tokens: usize,
    /// Index into the list of shards.
    pub(crate) shard: usize,
    /// Checksum of tokens and mask.
    pub(crate) inputs: String,
    /// Checksum of tokens, mask and taps.
    pub(crate) checksum: String,
}

/// The whole file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    format: String,
    version: u32,
    dtype: String,
    /// Examples that the finished folder will hold.
    pub(crate) total: usize,
    pub(crate) identity: Identity,
    pub(crate) shards: Vec<String>,
    pub(crate) records: Vec<RecordEntry>,
}

impl Manifest {
    pub(crate) fn new(identity: Identity, total: usize) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            dtype: DTYPE.to_owned(),
            total,
            identity,
            shards: Vec::new(),
            records: Vec::new(),
        }
    }

    /// Reads the manifest of a folder and checks that it holds together.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(FILE);
        let manifest: Self = serde_json::from_str(&read_text(&path)?)
            .with_context(|| format!("{}: not a manifest of taps", path.display()))?;
        manifest.check().with_context(|| path.display().to_string())?;
        Ok(manifest)
    }

    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        write_whole(&folder.join(FILE), text.as_bytes())
    }

    fn check(&self) -> Result<()> {
        ensure!(
            self.format == FORMAT,
            "format: expected {FORMAT:?}, found {:?}",
            self.format
        );
        ensure!(
            self.version == VERSION,
            "version: expected {VERSION}, found {}",
            self.version
        );
        ensure!(self.dtype == DTYPE, "dtype: expected {DTYPE:?}, found {:?}", self.dtype);
        if self.records.len() > self.total {
            bail!("{} records, more than the total of {}", self.records.len(), self.total)
        }
        for (i, record) in self.records.iter().enumerate() {
            ensure!(
                record.shard < self.shards.len(),
                "record {i}: shard {} of {}",
                record.shard,
                self.shards.len()
            );
        }
        // a name with a path in it would reach outside of the folder
        if let Some(name) = self.shards.iter().find(|name| name.contains(['/', '\\'])) {
            bail!("shards: {name:?} is not a plain file name")
        }
        Ok(())
    }
}

/// First characters of the SHA-256 over some byte strings, one after another.
pub(crate) fn checksum(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part);
    }
    let mut text = hex(&hash.finalize());
    text.truncate(CHECKSUM_CHARACTERS);
    text
}
