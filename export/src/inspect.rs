//! What a drafter folder says of itself, and whether its parts agree. Reads headers only.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Result, ensure};
use candle_core::DType;
use dflash_eval::folder::drafter_in;
use dflash_model::folder::{DraftCounts, extra_files, read_config};
use dflash_model::formats::{self, Facts, Format};
use dflash_model::{DrafterConfig, TargetConfig, TargetInfo, TensorFolder};
use serde::Serialize;
use serde_json::Value;

use crate::convert::target_info;
use crate::engines::{Judgement, Seen, judge};

/// What was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// The folder or file.
    pub folder: String,
    /// Its format; null when it is none that is known.
    pub format: Option<&'static str>,
    /// `DFlash` or `DFlash 2`; null when the configuration is refused.
    pub method: Option<&'static str>,
    /// The configuration in its canonical spelling; null when it is refused.
    pub config: Option<Value>,
    /// Visibility rule of each layer.
    pub layers: Vec<Layer>,
    /// What each engine has to be told for full blocks.
    pub draft_counts: Option<DraftCounts>,
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
    /// What each engine makes of it.
    pub engines: Vec<Judgement>,
}

/// One layer's rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Layer {
    /// W of |q - k| < W; null for no limit.
    pub window: Option<usize>,
    /// Whether a slot sees only itself and earlier slots of its block.
    pub causal: bool,
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
    /// Bytes of its numbers.
    pub bytes: u64,
}

/// Reads the drafter at `path`, of any format, and the configuration of `target`; of the target that a speculators folder
/// names, when it lies here and no other is given.
///
/// # Errors
/// Only when the drafter does not exist or the target's configuration cannot be read: what is wrong with the drafter is
/// part of the result.
pub fn inspect(path: &Path, target: Option<&Path>) -> Result<Inspection> {
    ensure!(path.exists(), "{}: no such folder", path.display());
    let path = &drafter_in(path)?;
    let named = formats::named_target(path);
    let info = match target {
        Some(target) => Some(TargetConfig::read(target)?.info),
        None => target_info(path, None)?,
    };
    let mut problems = Vec::new();
    let format = kept(formats::detect(path), &mut problems);
    // without its depth nothing can be said of the taps, and so of any engine
    ensure!(
        info.is_some() || matches!(format, None | Some(Format::Published)),
        "{}: a {} does not say how deep its target is: name the target with --target FOLDER",
        path.display(),
        format.map_or("drafter", Format::name)
    );
    let mut seen = Seen {
        name: path.display().to_string(),
        format: format.unwrap_or(Format::Published),
        raw: formats::config_value(path).unwrap_or_default(),
        config: None,
        refused: None,
        tensors: BTreeMap::new(),
        stray: Vec::new(),
        remote_code: path.join("dflash.py").exists(),
        target: info.clone(),
        target_name: target.map(|target| target.display().to_string()).or(named),
    };
    let mut rows = Vec::new();
    if let (Some(format), true) = (format, problems.is_empty()) {
        rows = look(path, format, info.as_ref(), &mut seen, &mut problems);
    }
    if let (Some(config), Some(info)) = (&seen.config, &info) {
        kept(config.check_target(info), &mut problems);
    }
    let config = seen.config.as_ref();
    let numbers = |row: &TensorRow| row.shape.iter().map(|&size| size as u64).product::<u64>();
    Ok(Inspection {
        folder: path.display().to_string(),
        format: format.map(Format::name),
        method: config.map(method),
        layers: config.map(layers).unwrap_or_default(),
        draft_counts: config.map(|config| DraftCounts::of(config.block_size)),
        config: config.map(DrafterConfig::to_json).transpose()?,
        parameters: rows.iter().map(numbers).sum(),
        bytes: rows.iter().map(|row| row.bytes).sum(),
        tensors: rows,
        target: target.map(|target| target.display().to_string()),
        warnings: match format {
            Some(Format::Published) => DrafterConfig::remarks(&seen.raw),
            _ => Vec::new(),
        },
        engines: if format.is_some() { judge(&seen) } else { Vec::new() },
        problems,
    })
}

/// Reads the headers into `seen` and `problems`; returns the stored tensors.
fn look(
    path: &Path,
    format: Format,
    info: Option<&TargetInfo>,
    seen: &mut Seen,
    problems: &mut Vec<String>,
) -> Vec<TensorRow> {
    let folder = match format {
        Format::Gguf => None,
        Format::Published | Format::Speculators => kept(TensorFolder::open(path), problems),
    };
    let read = folder.is_some() || format == Format::Gguf;
    if let Some(folder) = &folder {
        seen.tensors = folder
            .iter()
            .map(|(name, info)| (name.to_owned(), info.shape.clone()))
            .collect();
        seen.stray = kept(extra_files(folder), problems).unwrap_or_default();
    }
    let outcome = if read {
        Some(formats::facts(path, info).map(|facts| (facts.config.clone(), Some(facts))))
    } else {
        // the weights are a problem already; the configuration may be one, too
        let published = format == Format::Published;
        published.then(|| read_config(path).map(|config| (config, None)))
    };
    let facts = match outcome {
        None => None,
        Some(Ok((config, facts))) => {
            seen.config = Some(config);
            facts
        }
        Some(Err(error)) => {
            seen.refused = Some(error.to_string());
            problems.push(error.to_string());
            problems.extend(seen.stray.iter().cloned());
            None
        }
    };
    if let Some(facts) = &facts {
        problems.extend(facts.problems());
        seen.tensors = facts
            .tensors
            .iter()
            .map(|(name, (shape, _))| (name.clone(), shape.clone()))
            .collect();
    }
    match (folder, facts) {
        (Some(folder), _) => folder.iter().map(row).collect(),
        (None, Some(facts)) => facts
            .tensors
            .iter()
            .map(|(name, stored)| gguf_row(name, stored, &facts))
            .collect(),
        (None, None) => Vec::new(),
    }
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
        let _ = writeln!(text, "format      {}", self.format.unwrap_or("none that is known"));
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
        for judgement in &self.engines {
            let reasons = judgement.reasons.join("; ");
            let _ = writeln!(
                text,
                "{:<11} {:<16} {reasons}",
                judgement.engine.name(),
                judgement.verdict.name()
            );
            if let Some(command) = &judgement.command {
                let _ = writeln!(text, "              {command}");
            }
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

fn row((name, info): (&str, &dflash_model::tensor_file::TensorInfo)) -> TensorRow {
    TensorRow {
        name: name.to_owned(),
        dtype: info.dtype.as_str().to_owned(),
        bytes: (info.shape.iter().product::<usize>() * info.dtype.size_in_bytes()) as u64,
        shape: info.shape.clone(),
    }
}

/// A tensor of a GGUF file, under its published name.
fn gguf_row(name: &str, (shape, dtype): &(Vec<usize>, DType), facts: &Facts) -> TensorRow {
    let numbers: usize = shape.iter().product();
    let quantised = facts.quantised.get(name);
    let bytes = quantised.and_then(|element| element.bytes(numbers as u64));
    TensorRow {
        name: name.to_owned(),
        dtype: quantised.map_or(dtype.as_str(), |element| element.name()).to_owned(),
        bytes: bytes.unwrap_or((numbers * dtype.size_in_bytes()) as u64),
        shape: shape.clone(),
    }
}
