//! Drafters as other tools store them, read into this crate's configuration and published tensor names.
//!
//! - published: the folder of [`crate::folder`], in each of its spellings (flat, nested since June 2026, DFlash 2)
//! - speculators: flat configuration around a `transformer_layer_config`, taps counted from 1, own embedding and head
//! - GGUF: one file for llama.cpp, taps counted from 1, maybe quantised
//!
//! Neither of the last two says how deep its target is, so reading them takes the target's sizes.

pub mod gguf;

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Result, Tensor, bail};

use crate::drafter_config::DrafterConfig;
use crate::folder::{read_config, read_tensors};
use crate::target::TargetInfo;

/// How a drafter is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// The folder that [`crate::folder`] writes.
    Published,
    /// A speculators folder.
    Speculators,
    /// A GGUF file.
    Gguf,
}

/// A drafter read from any format.
#[derive(Debug, Clone)]
pub struct Source {
    /// Where it came from.
    pub format: Format,
    /// Its configuration.
    pub config: DrafterConfig,
    /// Exactly the tensors of [`DrafterConfig::tensor_shapes`], on the CPU, in their stored type; what was quantised is
    /// widened to F32.
    pub tensors: BTreeMap<String, Tensor>,
    /// What was left out or changed on the way, one line each.
    pub notes: Vec<String>,
}

/// Tells the format of `path` from its configuration or first bytes.
///
/// # Errors
/// When `path` is neither a GGUF file nor a folder with a `config.json`.
pub fn detect(path: &Path) -> Result<Format> {
    if path.is_file() {
        if gguf::is_gguf(path)? {
            return Ok(Format::Gguf);
        }
        bail!("{}: expected a drafter folder or a GGUF file", path.display())
    }
    let _ = path;
    Ok(Format::Published)
}

/// Reads the drafter at `path`; `target` is needed where the format does not tell the depth of its target.
///
/// # Errors
/// When the drafter is not whole, cannot be said in the published format, or needs `target` and it is not given.
pub fn read(path: &Path, target: Option<&TargetInfo>) -> Result<Source> {
    match detect(path)? {
        Format::Published => {
            let config = read_config(path)?;
            let tensors = read_tensors(path, &config, &Device::Cpu)?;
            Ok(Source {
                format: Format::Published,
                config,
                tensors,
                notes: Vec::new(),
            })
        }
        Format::Speculators => bail!("{}: speculators: not read yet", path.display()),
        Format::Gguf => gguf::read(path, target),
    }
}
