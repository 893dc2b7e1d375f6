//! Drafters as other tools store them, read into this crate's configuration and published tensor names.
//!
//! - published: the folder of [`crate::folder`], in each of its spellings (flat, nested since June 2026, DFlash 2)
//! - [`speculators`]: taps counted from 1, layers in an object of their own, maybe embedding and head
//! - GGUF: one file for llama.cpp, taps counted from 1, maybe quantised
//!
//! Neither of the last two says how deep its target is, so reading them takes the target's sizes.

pub mod gguf;
pub mod speculators;

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor, bail};
use serde_json::Value;

use crate::drafter_config::DrafterConfig;
use crate::folder::{differences, extra_files, read_config, read_tensors};
use crate::target::{TargetHead, TargetInfo};
use crate::tensor_file::TensorFolder;

/// Tensors by name.
pub type Tensors = BTreeMap<String, Tensor>;

/// Shapes and stored types by name.
pub type Shapes = BTreeMap<String, (Vec<usize>, DType)>;

/// Rows of an embedding that are compared together, so that no second copy of the matrix is made.
const ROWS_AT_ONCE: usize = 4096;

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

impl Format {
    /// The format's name in a sentence.
    pub fn name(self) -> &'static str {
        match self {
            Self::Published => "published folder",
            Self::Speculators => "speculators folder",
            Self::Gguf => "GGUF file",
        }
    }
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
    pub tensors: Tensors,
    /// Embedding and head that came along, by their speculators names; [`Source::check_carried`] compares them.
    pub carried: Tensors,
    /// What was left out or changed on the way, one line each.
    pub notes: Vec<String>,
}

/// A drafter's headers: what can be told without reading a weight.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Its configuration.
    pub config: DrafterConfig,
    /// What is stored under published names, whether it belongs there or not.
    pub tensors: Shapes,
    /// Stored types that are no type of a tensor here, by tensor: quantised ones.
    pub quantised: BTreeMap<String, gguf::ElementType>,
    /// Embedding and head that came along.
    pub carried: Shapes,
    /// Files beside it that an engine would load, too.
    pub stray: Vec<String>,
}

impl Facts {
    /// Everything in which the stored tensors differ from those of the configuration, one line each.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = differences(&self.config, &self.tensors);
        problems.extend(self.stray.iter().cloned());
        problems
    }

    fn check(&self, path: &Path) -> Result<()> {
        let problems = self.problems();
        if !problems.is_empty() {
            bail!(
                "{}: not the drafter that its configuration describes: {}",
                path.display(),
                problems.join("; ")
            )
        }
        Ok(())
    }
}

impl Source {
    /// Checks that an embedding or head that came along is the target's, to the bit of the narrower of both types.
    ///
    /// # Errors
    /// Naming the matrix and the first row that differs.
    pub fn check_carried(&self, head: &TargetHead) -> Result<()> {
        let pairs = [(speculators::EMBEDDING, &head.embed), (speculators::HEAD, &head.head)];
        for (name, target) in pairs {
            let Some(own) = self.carried.get(name) else { continue };
            if own.dims() != target.dims() {
                bail!(
                    "{name}: expected the target's shape {:?}, got {:?}",
                    target.dims(),
                    own.dims()
                )
            }
            let narrow = if own.dtype().size_in_bytes() < target.dtype().size_in_bytes() {
                own.dtype()
            } else {
                target.dtype()
            };
            let rows = own.dims()[0];
            for start in (0..rows).step_by(ROWS_AT_ONCE) {
                let values = |tensor: &Tensor| -> Result<Vec<Vec<f32>>> {
                    let part = tensor.narrow(0, start, ROWS_AT_ONCE.min(rows - start))?;
                    let part = part.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                    part.to_dtype(narrow)?.to_dtype(DType::F32)?.to_vec2()
                };
                let differs = values(own)?.iter().zip(&values(target)?).position(|(a, b)| a != b);
                if let Some(row) = differs {
                    bail!(
                        "{name}: row {} is not the target's: this drafter was made with another embedding or head",
                        start + row
                    )
                }
            }
        }
        Ok(())
    }
}

/// Tells the format of `path` from its configuration or first bytes.
///
/// # Errors
/// When `path` is neither a GGUF file nor a folder with a readable `config.json`.
pub fn detect(path: &Path) -> Result<Format> {
    if path.is_file() {
        if gguf::is_gguf(path)? {
            return Ok(Format::Gguf);
        }
        bail!("{}: expected a drafter folder or a GGUF file", path.display())
    }
    if path.exists() && !path.is_dir() {
        bail!(
            "{}: expected a drafter folder or a GGUF file, found a device or pipe",
            path.display()
        )
    }
    let config = config_value(path)?;
    Ok(if speculators::is_speculators(&config) {
        Format::Speculators
    } else {
        Format::Published
    })
}

/// Repository or path of the target, where the format names it.
pub fn named_target(path: &Path) -> Option<String> {
    speculators::verifier(&config_value(path).ok()?)
}

/// Reads configuration and tensor list; `target` is needed where the format does not tell the depth of its target.
///
/// # Errors
/// When the configuration cannot be read or said in the published format, or needs `target` and it is not given.
pub fn facts(path: &Path, target: Option<&TargetInfo>) -> Result<Facts> {
    match detect(path)? {
        Format::Published => {
            let folder = TensorFolder::open(path)?;
            Ok(Facts {
                config: read_config(path)?,
                tensors: shapes(&folder),
                quantised: BTreeMap::new(),
                carried: Shapes::new(),
                stray: extra_files(&folder)?,
            })
        }
        Format::Speculators => speculators::facts(path, &config_value(path)?, target),
        Format::Gguf => gguf::facts(path, target),
    }
}

/// Reads the drafter at `path`; `target` is needed where the format does not tell the depth of its target.
///
/// # Errors
/// When the drafter is not whole, cannot be said in the published format, or needs `target` and it is not given.
pub fn read(path: &Path, target: Option<&TargetInfo>) -> Result<Source> {
    match detect(path)? {
        Format::Published => {
            let config = read_config(path)?;
            Ok(Source {
                format: Format::Published,
                tensors: read_tensors(path, &config, &Device::Cpu)?,
                config,
                carried: Tensors::new(),
                notes: Vec::new(),
            })
        }
        Format::Speculators => speculators::read(path, &config_value(path)?, target),
        Format::Gguf => gguf::read(path, target),
    }
}

/// The folder's `config.json` as it stands.
///
/// # Errors
/// When the file cannot be read or is not JSON.
pub fn config_value(dir: &Path) -> Result<Value> {
    let path = dir.join("config.json");
    let bytes =
        std::fs::read(&path).map_err(|error| candle_core::Error::msg(format!("{}: {error}", path.display())))?;
    serde_json::from_slice(&bytes)
        .map_err(|error| candle_core::Error::msg(format!("{}: not a JSON file: {error}", path.display())))
}

fn shapes(folder: &TensorFolder) -> Shapes {
    let shape =
        |(name, info): (&str, &crate::tensor_file::TensorInfo)| (name.to_owned(), (info.shape.clone(), info.dtype));
    folder.iter().map(shape).collect()
}
