//! GGUF files for llama.cpp, made without Python: `dflash-export gguf` and `dflash-export gguf-target`.
//!
//! - [`drafter`]: keys and tensors of a drafter, and what llama.cpp would refuse
//! - [`target`]: the same for the target that it belongs to
//! - [`tokenizer`]: the target's tokenizer, which both files carry
//! - [`mod@file`]: the container, written whole or not at all

pub mod drafter;
pub mod file;
pub mod target;
pub mod tokenizer;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use dflash_data::hub::cached;
use dflash_eval::console::{self, Failure};
use dflash_eval::folder::{drafter_in, local, settle};
use dflash_model::formats;
use dflash_model::formats::gguf::Value;
use dflash_model::{TargetConfig, TensorFolder};

use file::{Stored, check_destination};
use tokenizer::Tokenizer;

/// What `dflash-export gguf` is told.
#[derive(Debug, Args)]
pub struct DrafterArgs {
    /// Drafter: a published folder or any other format that is read.
    source: PathBuf,
    /// Target model folder: its tokenizer goes into the file, its sizes must fit.
    #[arg(long, value_name = "FOLDER")]
    target: PathBuf,
    #[command(flatten)]
    output: Output,
}

/// What `dflash-export gguf-target` is told.
#[derive(Debug, Args)]
pub struct TargetArgs {
    /// Target model folder (Hugging Face layout).
    folder: PathBuf,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Args)]
struct Output {
    /// File to write.
    #[arg(long, value_name = "FILE.gguf")]
    out: PathBuf,
    /// What matrices are stored as; norms stay f32, a drafter's convolution and selector are never quantised.
    #[arg(long, default_value = "bf16", value_enum)]
    dtype: Stored,
    /// Replace the file if it exists.
    #[arg(long)]
    force: bool,
}

impl DrafterArgs {
    /// Puts folders of this machine in the place of those on the hub.
    ///
    /// # Errors
    /// When the hub does not have one.
    pub fn fetch(&mut self) -> Result<()> {
        settle("SOURCE", &mut self.source, false)?;
        settle("--target", &mut self.target, false)
    }
}

impl TargetArgs {
    /// Puts a folder of this machine in the place of one on the hub.
    ///
    /// # Errors
    /// When the hub does not have it.
    pub fn fetch(&mut self) -> Result<()> {
        settle("FOLDER", &mut self.folder, false)
    }
}

/// Writes a drafter.
///
/// # Errors
/// As input: whatever cannot be read, does not fit, or would be refused by llama.cpp. As failure of the run: a disk that
/// fails or a file that is not read back as it was written.
pub fn run_drafter(args: &DrafterArgs) -> Result<bool, Failure> {
    let output = &args.output;
    let prepare = || {
        local("--out", &output.out)?;
        let path = drafter_in(&args.source)?;
        check_destination(&output.out, output.force, &path)?;
        let target = TargetConfig::read(&args.target).with_context(|| format!("--target {}", args.target.display()))?;
        let source = formats::read(&path, Some(&target.info))?;
        let tokenizer = Tokenizer::read(&args.target, target.info.vocab_size)?;
        let (name, base) = (name_of(&args.source), name_of(&args.target));
        let (plan, published) = drafter::plan(&source, &target, &tokenizer, &name, &base, output.dtype)
            .with_context(|| args.source.display().to_string())?;
        Ok((target, source, plan, published))
    };
    let (target, source, plan, published) = prepare().map_err(Failure::Input)?;
    let load = |index: usize| {
        let name: &String = &published[index];
        source
            .tensors
            .get(name)
            .cloned()
            .with_context(|| format!("tensor {name} is missing"))
    };
    // a value that the type cannot hold is the input's fault, not the disk's
    for (index, planned) in plan.tensors.iter().enumerate() {
        let encoded = load(index).and_then(|tensor| file::encode(planned, &tensor));
        encoded
            .with_context(|| args.source.display().to_string())
            .map_err(Failure::Input)?;
    }
    let verify = |path: &Path| drafter::compare(path, &source, &target);
    let bytes = plan
        .write(&output.out, output.force, &load, &verify)
        .map_err(Failure::Run)?;
    report(&output.out, &plan, bytes, &source.notes)
}

/// Writes a target.
///
/// # Errors
/// As [`run_drafter`].
pub fn run_target(args: &TargetArgs) -> Result<bool, Failure> {
    let output = &args.output;
    let prepare = || {
        local("--out", &output.out)?;
        check_destination(&output.out, output.force, &args.folder)?;
        let config = TargetConfig::read(&args.folder)?;
        let tokenizer = Tokenizer::read(&args.folder, config.info.vocab_size)?;
        let sections = target::mrope_sections(&args.folder)?;
        let planned = target::plan(
            &config,
            sections.as_deref(),
            &tokenizer,
            &name_of(&args.folder),
            output.dtype,
        )
        .with_context(|| args.folder.display().to_string())?;
        let folder = TensorFolder::open(&args.folder)?;
        target::weights(&folder, &config)?;
        Ok((config, folder, planned))
    };
    let (config, folder, (plan, origins, note)) = prepare().map_err(Failure::Input)?;
    let weights = target::weights(&folder, &config).map_err(Failure::Input)?;
    let load = |index: usize| target::load(&weights, &origins[index], config.linear.as_ref());
    let bytes = plan
        .write(&output.out, output.force, &load, &|_| Ok(()))
        .map_err(Failure::Run)?;
    report(&output.out, &plan, bytes, note.as_slice())
}

/// Tells what was written.
fn report(out: &Path, plan: &file::Plan, bytes: u64, notes: &[String]) -> Result<bool, Failure> {
    let mut text = format!(
        "{}: {} tensors, {} keys, {bytes} bytes, read back and equal\n",
        out.display(),
        plan.tensors.len(),
        plan.metadata.len()
    );
    for note in notes {
        let _ = writeln!(text, "note: {note}");
    }
    console::print(&text).map_err(Failure::Run)?;
    Ok(true)
}

/// Keys that every file begins with.
fn general(architecture: &str, name: &str, stored: Stored) -> Vec<(String, Value)> {
    let text = |text: &str| Value::String(text.to_owned());
    let mut keys = vec![
        ("general.architecture".to_owned(), text(architecture)),
        ("general.type".to_owned(), text("model")),
        ("general.name".to_owned(), text(name)),
        ("general.file_type".to_owned(), Value::U32(stored.file_type())),
    ];
    if stored == Stored::Q8_0 {
        // the second layout of quantised blocks, the only one in use
        keys.push(("general.quantization_version".to_owned(), Value::U32(2)));
    }
    keys
}

/// A number as llama.cpp keeps it.
fn number(number: f64) -> Value {
    Value::F32(number as f32)
}

/// The last part of a path, for people; the whole path when it has none.
fn name_of(path: &Path) -> String {
    if let Some(reference) = cached(path) {
        // the folder is named by a commit
        let inner = reference.inner.as_deref().unwrap_or(&reference.repository);
        let name = inner.rsplit('/').next().unwrap_or(inner);
        return name.strip_suffix(".gguf").unwrap_or(name).to_owned();
    }
    let whole = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let Some(name) = whole.file_name().map(|name| name.to_string_lossy()) else {
        return path.display().to_string();
    };
    // of a folder, what follows a dot is no ending: Qwen3.5-4B
    name.strip_suffix(".gguf").unwrap_or(&name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dot_in_the_name_of_a_folder_is_no_ending() {
        for (path, name) in [
            ("models/Qwen3.5-4B", "Qwen3.5-4B"),
            ("models/Qwen3.5-4B.gguf", "Qwen3.5-4B"),
            ("/", "/"),
        ] {
            assert_eq!(name_of(Path::new(path)), name);
        }
    }
}
