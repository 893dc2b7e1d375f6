//! What a drafter folder says of itself, and whether its parts agree. Reads headers only.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Result, ensure};
use candle_core::DType;
use dflash_model::folder::{DraftCounts, extra_files, list_problems, read_config};
use dflash_model::{DrafterConfig, TargetConfig, TensorFolder};
use serde::Serialize;
use serde_json::Value;

/// What was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// The folder.
    pub folder: String,
    /// `DFlash` or `DFlash 2`; null when the configuration is refused.
    pub method: Option<&'static str>,
    /// The configuration in its canonical spelling; null when it is refused.
    pub config: Option<Value>,
    /// Visibility rule of each layer.
    pub layers: Vec<Layer>,
    /// What each engine has to be told for full blocks.
    pub draft_counts: Option<Counts>,
    /// Every stored tensor, by name.
    pub tensors: Vec<TensorRow>,
    /// Numbers in them.
    pub parameters: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The target that the folder was checked against.
    pub target: Option<String>,
    /// Everything that is wrong; empty for a folder that can be used.
    pub problems: Vec<String>,
    /// What the configuration leaves to the guess of an engine.
    pub warnings: Vec<String>,
}

/// One layer's rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Layer {
    /// W of |q - k| < W; null for no limit.
    pub window: Option<usize>,
    /// Whether a slot sees only itself and earlier slots of its block.
    pub causal: bool,
}

/// Tokens that each engine wants to be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// `num_speculative_tokens`.
    pub vllm: usize,
    /// `--speculative-num-draft-tokens`.
    pub sglang: usize,
    /// `--spec-draft-n-max`.
    pub llama_cpp: usize,
    /// `num_speculative_tokens`.
    pub max: usize,
}

/// One stored tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TensorRow {
    /// Its name.
    pub name: String,
    /// Stored type.
    pub dtype: String,
    /// Stored shape.
    pub shape: Vec<usize>,
}

/// Reads the folder, and the configuration of `target` when there is one.
///
/// # Errors
/// Only when a folder does not exist or the target's configuration cannot be read: what is wrong with the drafter is
/// part of the result.
pub fn inspect(folder: &Path, target: Option<&Path>) -> Result<Inspection> {
    ensure!(folder.is_dir(), "{}: no such folder", folder.display());
    let mut problems = Vec::new();
    let config = kept(read_config(folder), &mut problems);
    let tensors = kept(TensorFolder::open(folder), &mut problems);
    if let (Some(config), Some(tensors)) = (&config, &tensors) {
        problems.extend(list_problems(config, tensors));
    }
    if let Some(tensors) = &tensors {
        problems.extend(extra_files(tensors)?);
    }
    if let Some(target) = target {
        let info = TargetConfig::read(target)?.info;
        if let Some(config) = &config {
            kept(config.check_target(&info), &mut problems);
        }
    }
    let rows: Vec<TensorRow> = tensors.iter().flat_map(TensorFolder::iter).map(row).collect();
    let sizes = |info: &dflash_model::tensor_file::TensorInfo| info.shape.iter().map(|&size| size as u64).product();
    let counts: Vec<(u64, DType)> = tensors
        .iter()
        .flat_map(TensorFolder::iter)
        .map(|(_, info)| (sizes(info), info.dtype))
        .collect();
    Ok(Inspection {
        folder: folder.display().to_string(),
        method: config.as_ref().map(method),
        layers: config.as_ref().map(layers).unwrap_or_default(),
        draft_counts: config.as_ref().map(|config| draft_counts(config.block_size)),
        config: config.as_ref().map(DrafterConfig::to_json).transpose()?,
        tensors: rows,
        parameters: counts.iter().map(|(count, _)| count).sum(),
        bytes: counts
            .iter()
            .map(|(count, dtype)| count * dtype.size_in_bytes() as u64)
            .sum(),
        target: target.map(|target| target.display().to_string()),
        problems,
        warnings: remarks(folder),
    })
}

impl Inspection {
    /// Whether nothing is wrong.
    pub fn passed(&self) -> bool {
        self.problems.is_empty()
    }

    /// The result for a terminal.
    pub fn table(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(text, "folder      {}", self.folder);
        if let (Some(method), Some(config)) = (self.method, &self.config) {
            let _ = writeln!(text, "method      {method}");
            self.write_config(&mut text, config);
        }
        for tensor in &self.tensors {
            let _ = writeln!(text, "  {:<56} {:<5} {:?}", tensor.name, tensor.dtype, tensor.shape);
        }
        let _ = writeln!(
            text,
            "tensors     {}, {} parameters, {} bytes",
            self.tensors.len(),
            self.parameters,
            self.bytes
        );
        if let (Some(target), true) = (&self.target, self.passed()) {
            let _ = writeln!(text, "target      {target}: fits");
        }
        for problem in &self.problems {
            let _ = writeln!(text, "problem     {problem}");
        }
        for warning in &self.warnings {
            let _ = writeln!(text, "warning     {warning}");
        }
        let verdict = if self.passed() { "a whole drafter" } else { "not usable" };
        let _ = writeln!(text, "verdict     {verdict}");
        text
    }

    fn write_config(&self, text: &mut String, config: &Value) {
        for (i, layer) in self.layers.iter().enumerate() {
            let window = layer
                .window
                .map_or_else(|| "full".to_owned(), |window| format!("window {window}"));
            let causal = if layer.causal {
                "causal in the block"
            } else {
                "bidirectional in the block"
            };
            let _ = writeln!(text, "layer {i:<5} {window}, {causal}");
        }
        let shown = |(key, value): (&String, &Value)| match value {
            Value::Object(inner) => inner
                .iter()
                .map(|(inner, value)| (format!("{key}.{inner}"), value.to_string()))
                .collect(),
            value => vec![(key.clone(), value.to_string())],
        };
        for (key, value) in config.as_object().into_iter().flatten().flat_map(shown) {
            let _ = writeln!(text, "  {key:<38} {value}");
        }
        if let Some(counts) = self.draft_counts {
            let _ = writeln!(
                text,
                "drafting    vLLM {}, SGLang {} (counts the anchor), llama.cpp {}, MAX {}",
                counts.vllm, counts.sglang, counts.llama_cpp, counts.max
            );
        }
    }
}

/// The value, or its error among the problems.
/// Remarks on a configuration that can be read; one that cannot is a problem and has none.
fn remarks(folder: &Path) -> Vec<String> {
    let value = std::fs::read(folder.join("config.json"))
        .ok()
        .and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
    value.as_ref().map(DrafterConfig::remarks).unwrap_or_default()
}

fn kept<T>(outcome: candle_core::Result<T>, problems: &mut Vec<String>) -> Option<T> {
    outcome.map_err(|error| problems.push(error.to_string())).ok()
}

fn method(config: &DrafterConfig) -> &'static str {
    if config.is_dflash2() { "DFlash 2" } else { "DFlash" }
}

fn layers(config: &DrafterConfig) -> Vec<Layer> {
    let layer = |rule: &dflash_model::LayerRule| Layer {
        window: rule.window,
        causal: rule.causal,
    };
    config.layers.iter().map(layer).collect()
}

fn draft_counts(block_size: usize) -> Counts {
    let DraftCounts {
        vllm,
        sglang,
        llama_cpp,
        max,
    } = DraftCounts::of(block_size);
    Counts {
        vllm,
        sglang,
        llama_cpp,
        max,
    }
}

fn row((name, info): (&str, &dflash_model::tensor_file::TensorInfo)) -> TensorRow {
    TensorRow {
        name: name.to_owned(),
        dtype: info.dtype.as_str().to_owned(),
        shape: info.shape.clone(),
    }
}
