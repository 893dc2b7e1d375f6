//! Writes GGUF files: planned first, then tensor by tensor, whole or not at all, read back before they get their name.
//!
//! The layout is the one of `dflash_model::formats::gguf`, version 3, aligned to 32 bytes. Tensors are produced one at
//! a time, so the memory needed is that of the largest one.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::QTensor;
use candle_core::{DType, Device, Tensor};
use clap::ValueEnum;
use dflash_model::folder::sync_folder;
use dflash_model::formats::gguf::{ElementType, GgufFile, Value, is_gguf};

/// Bytes that the tensors are aligned to.
const ALIGNMENT: u64 = 32;

/// Longest tensor name of ggml, bytes.
const LONGEST_NAME: usize = 63;

/// What the matrices of a file are stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Stored {
    /// 32-bit floats.
    #[value(name = "f32")]
    F32,
    /// IEEE half floats.
    #[value(name = "f16")]
    F16,
    /// bfloat16, the published type.
    #[value(name = "bf16")]
    Bf16,
    /// Blocks of 32 signed bytes with a scale.
    #[value(name = "q8_0")]
    Q8_0,
}

impl Stored {
    /// The element type.
    pub fn element(self) -> ElementType {
        match self {
            Self::F32 => ElementType::F32,
            Self::F16 => ElementType::F16,
            Self::Bf16 => ElementType::BF16,
            Self::Q8_0 => ElementType::Q8_0,
        }
    }

    /// `general.file_type`: llama.cpp's number for a file of mostly this type.
    pub fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 7,
            Self::Bf16 => 32,
        }
    }
}

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    /// Its name in the file.
    pub name: String,
    /// What its elements are stored as.
    pub element: ElementType,
    /// Row-major shape.
    pub shape: Vec<usize>,
}

/// A file to be written: its metadata in order, and its tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Keys with their values.
    pub metadata: Vec<(String, Value)>,
    /// Tensors in file order.
    pub tensors: Vec<Planned>,
}

impl Plan {
    /// Everything that keeps the tensors from being stored as planned, one line each.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for Planned { name, element, shape } in &self.tensors {
            let row = shape.last().copied().unwrap_or(0);
            if !row.is_multiple_of(element.block()) {
                problems.push(format!(
                    "tensor {name}: {} needs rows of a multiple of {} numbers, got {row} (shape {shape:?})",
                    element.name(),
                    element.block()
                ));
            }
            if name.len() > LONGEST_NAME {
                problems.push(format!(
                    "tensor {name}: expected a name of at most {LONGEST_NAME} bytes"
                ));
            }
        }
        problems
    }

    /// Writes the file to `path`: beside it first, read back and compared, then renamed. `load` makes the values of the
    /// tensor of a given index; `verify` sees the finished file before it gets its name.
    ///
    /// # Errors
    /// When `path` exists and `replace` is not set, a value cannot be stored in its type, reading back shows any
    /// difference, or the disk fails. Nothing is left behind then.
    pub fn write(
        &self,
        path: &Path,
        replace: bool,
        load: &dyn Fn(usize) -> Result<Tensor>,
        verify: &dyn Fn(&Path) -> Result<()>,
    ) -> Result<u64> {
        let parent = parent_of(path);
        let mut beside = tempfile::Builder::new();
        beside.prefix(".dflash-").suffix(".gguf.partial");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            // as for any other file; the process's mask takes its part
            beside.permissions(fs::Permissions::from_mode(0o666));
        }
        let beside = beside
            .tempfile_in(parent)
            .with_context(|| format!("{}: cannot write there", parent.display()))?;
        let at = || beside.path().display().to_string();
        self.write_to(beside.as_file(), load).with_context(at)?;
        self.compare(beside.path(), load).context("read back")?;
        verify(beside.path()).context("read back")?;
        let bytes = beside.as_file().metadata().with_context(at)?.len();
        let outcome = if replace {
            beside.persist(path)
        } else {
            beside.persist_noclobber(path)
        };
        outcome
            .map_err(|error| error.error)
            .with_context(|| format!("{}: cannot put the new file there", path.display()))?;
        sync_folder(parent)?;
        Ok(bytes)
    }

    fn write_to(&self, file: &File, load: &dyn Fn(usize) -> Result<Tensor>) -> Result<()> {
        let mut head = Vec::new();
        head.extend_from_slice(b"GGUF");
        head.extend_from_slice(&3_u32.to_le_bytes());
        head.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        head.extend_from_slice(&(self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_text(&mut head, key);
            head.extend_from_slice(&value.kind().to_le_bytes());
            put_value(&mut head, value).with_context(|| key.clone())?;
        }
        let mut offset = 0_u64;
        for Planned { name, element, shape } in &self.tensors {
            put_text(&mut head, name);
            head.extend_from_slice(&(shape.len() as u32).to_le_bytes());
            for &size in shape.iter().rev() {
                head.extend_from_slice(&(size as u64).to_le_bytes());
            }
            head.extend_from_slice(&element.id().to_le_bytes());
            head.extend_from_slice(&offset.to_le_bytes());
            offset += bytes_of(name, *element, shape)?.next_multiple_of(ALIGNMENT);
        }
        pad(&mut head);
        let mut out = BufWriter::new(file);
        out.write_all(&head)?;
        for (index, planned) in self.tensors.iter().enumerate() {
            let mut bytes = encode(planned, &load(index)?)?;
            pad(&mut bytes);
            out.write_all(&bytes)?;
        }
        out.flush()?;
        drop(out);
        file.sync_all()?;
        Ok(())
    }

    /// Reads the file through the strict reader and compares everything in it.
    fn compare(&self, path: &Path, load: &dyn Fn(usize) -> Result<Tensor>) -> Result<()> {
        let file = GgufFile::open(path)?;
        for (key, value) in &self.metadata {
            ensure!(file.get(key) == Some(value), "key {key} is not what was written");
        }
        ensure!(
            file.metadata().len() == self.metadata.len() && file.tensors().len() == self.tensors.len(),
            "{} keys and {} tensors, {} and {} were written",
            file.metadata().len(),
            file.tensors().len(),
            self.metadata.len(),
            self.tensors.len()
        );
        for (index, planned) in self.tensors.iter().enumerate() {
            let Some(info) = file.tensors().get(&planned.name) else {
                bail!("tensor {} is missing", planned.name)
            };
            let same = info.element == planned.element && info.shape == planned.shape;
            let same = same && file.bytes(&planned.name)? == encode(planned, &load(index)?)?;
            ensure!(same, "tensor {} is not what was written", planned.name);
        }
        Ok(())
    }
}

/// Refuses a destination before the work: a folder, something that is no file, and an existing file unless `replace` is
/// given and it is a GGUF file or empty; `source` may not be written over.
///
/// # Errors
/// Naming it and what was expected.
pub fn check_destination(path: &Path, replace: bool, source: &Path) -> Result<()> {
    let at = || format!("--out {}", path.display());
    ensure!(
        path.file_name().is_some() && !path.as_os_str().as_encoded_bytes().ends_with(b"/"),
        "{}: expected the name of a file",
        at()
    );
    let parent = parent_of(path);
    ensure!(
        parent.is_dir(),
        "{}: there is no folder {}; make it first",
        at(),
        parent.display()
    );
    let Ok(found) = fs::symlink_metadata(path) else {
        return Ok(());
    };
    ensure!(
        found.is_file(),
        "{}: expected a file or a new name, found a folder, link or device",
        at()
    );
    ensure!(replace, "{}: the file exists; --force replaces it", at());
    let read = fs::canonicalize(source).with_context(|| source.display().to_string())?;
    ensure!(
        fs::canonicalize(path).with_context(at)? != read,
        "{}: not replaced, it is what is to be read",
        at()
    );
    ensure!(
        found.len() == 0 || is_gguf(path).is_ok_and(|is| is),
        "{}: not replaced, it is no GGUF file",
        at()
    );
    Ok(())
}

/// The values of a tensor as they are stored.
///
/// # Errors
/// When the shape is not the planned one, or a value is not finite, before or after rounding; tensor and value are named.
pub fn encode(planned: &Planned, tensor: &Tensor) -> Result<Vec<u8>> {
    let Planned { name, element, shape } = planned;
    ensure!(
        tensor.dims() == shape.as_slice(),
        "tensor {name}: expected shape {shape:?}, got {:?}",
        tensor.dims()
    );
    // candle rounds F64 to the halves by dropping bits: by way of F32
    let wide = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    let values = |tensor: &Tensor| -> Result<Vec<f32>> { Ok(tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?) };
    let (given, stored, bytes) = if let Some(dtype) = element.float() {
        let rounded = wide.to_dtype(dtype)?;
        (values(&wide)?, values(&rounded)?, bytes_of_floats(&rounded)?)
    } else {
        let blocks = QTensor::quantize(&wide, element.ggml()).with_context(|| format!("tensor {name}"))?;
        let stored = values(&blocks.dequantize(&Device::Cpu)?)?;
        (values(&wide)?, stored, blocks.data()?.into_owned())
    };
    if let Some(at) = stored.iter().position(|value| !value.is_finite()) {
        let reason = if given[at].is_finite() {
            format!("is too large for {}", element.name())
        } else {
            "is not finite".to_owned()
        };
        bail!("tensor {name}: element {at} is {:e}, which {reason}", given[at])
    }
    Ok(bytes)
}

fn bytes_of_floats(tensor: &Tensor) -> Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::F16 => flat
            .to_vec1::<half::f16>()?
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
        DType::BF16 => flat
            .to_vec1::<half::bf16>()?
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
        _ => flat
            .to_vec1::<f32>()?
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
    })
}

fn bytes_of(name: &str, element: ElementType, shape: &[usize]) -> Result<u64> {
    let elements = shape.iter().map(|&size| size as u64).product();
    element.bytes(elements).with_context(|| {
        format!(
            "tensor {name}: shape {shape:?} is no whole number of {} blocks",
            element.name()
        )
    })
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) -> Result<()> {
    match value {
        Value::U8(value) => out.extend_from_slice(&value.to_le_bytes()),
        Value::I8(value) => out.extend_from_slice(&value.to_le_bytes()),
        Value::U16(value) => out.extend_from_slice(&value.to_le_bytes()),
        Value::I16(value) => out.extend_from_slice(&value.to_le_bytes()),
        Value::U32(value) => out.extend_from_slice(&value.to_le_bytes()),
        Value::I32(value) => out.extend_from_slice(&value.to_le_bytes()),
        Value::U64(value) => out.extend_from_slice(&value.to_le_bytes()),
        Value::I64(value) => out.extend_from_slice(&value.to_le_bytes()),
        Value::F32(value) => out.extend_from_slice(&value.to_le_bytes()),
        Value::F64(value) => out.extend_from_slice(&value.to_le_bytes()),
        Value::Bool(value) => out.push(u8::from(*value)),
        Value::String(text) => put_text(out, text),
        Value::Array(values) => {
            let kind = values.first().map_or(Value::U32(0).kind(), Value::kind);
            ensure!(
                values.iter().all(|value| value.kind() == kind),
                "expected a list of values of one type"
            );
            out.extend_from_slice(&kind.to_le_bytes());
            out.extend_from_slice(&(values.len() as u64).to_le_bytes());
            for value in values {
                put_value(out, value)?;
            }
        }
    }
    Ok(())
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
}

fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}
