//! The GGUF container: header, metadata and tensor table of one file, and its tensors on demand.
//!
//! ```text
//! "GGUF"  version u32  tensors u64  keys u64          little-endian throughout
//! keys x  { name, type u32, value }                   a text is its length u64 and UTF-8; a list its type, length, values
//! tensors x { name, dimensions u32, sizes u64 ..., type u32, offset u64 }        sizes fastest first
//! padding to the alignment, then the tensors at their offsets, each on the alignment
//! ```
//!
//! Versions 2 and 3 are read, as in llama.cpp. Nothing that a file says of itself is believed: every length is held
//! against the bytes that are left before memory is taken for it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::{Device, Result, Tensor, bail};

use super::value::{ARRAY, ElementType, Value};

/// Values of all lists together: a vocabulary of a million tokens with its merges stays far below.
const MOST_LISTED: u64 = 1 << 24;

/// Bytes of a key or of a tensor's name; llama.cpp's keys are below 100, its tensors' names below 64.
const LONGEST_NAME: u64 = 512;

/// Dimensions of a tensor, as in ggml.
const MOST_DIMENSIONS: u32 = 4;

/// Bytes that tensors are aligned to unless the file says otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;

/// A GGUF file whose header has been read and checked.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, TensorInfo>,
}

/// Where one tensor lies and what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Type of its elements.
    pub element: ElementType,
    /// Shape, row-major as everywhere in this crate: slowest first.
    pub shape: Vec<usize>,
    /// First byte in the file.
    start: u64,
    /// Bytes.
    bytes: u64,
}

/// Whether the file starts as a GGUF file does.
///
/// # Errors
/// When the file cannot be opened.
pub fn is_gguf(path: &Path) -> Result<bool> {
    let mut magic = [0; 4];
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) => bail!("{}: {error}", path.display()),
    };
    Ok(file.read_exact(&mut magic).is_ok() && &magic == b"GGUF")
}

impl GgufFile {
    /// Reads metadata and tensor table.
    ///
    /// # Errors
    /// When the file is no GGUF file, is cut short, contradicts itself, or holds a type that is not read. The message
    /// names the file and the key or tensor.
    pub fn open(path: &Path) -> Result<Self> {
        match Header::read(path) {
            Ok((metadata, tensors)) => Ok(Self {
                path: path.to_path_buf(),
                metadata,
                tensors,
            }),
            Err(problem) => bail!("{}: {problem}", path.display()),
        }
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A metadata value.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// All metadata, by key.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// The tensor table, by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// A tensor's bytes as stored.
    ///
    /// # Errors
    /// When there is no such tensor or the file cannot be read.
    pub fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        let info = self.info(name)?;
        // checked against the file's length when it was opened
        let mut bytes = vec![0; info.bytes as usize];
        let read = File::open(&self.path).and_then(|mut file| {
            file.seek(SeekFrom::Start(info.start))?;
            file.read_exact(&mut bytes)
        });
        match read {
            Ok(()) => Ok(bytes),
            Err(error) => bail!("{}: tensor {name}: {error}", self.path.display()),
        }
    }

    /// A tensor on the CPU: floats in their stored type, quantised elements widened to F32.
    ///
    /// # Errors
    /// As [`GgufFile::bytes`].
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let (info, bytes) = (self.info(name)?, self.bytes(name)?);
        let tensor = match info.element.float() {
            Some(dtype) => Tensor::from_raw_buffer(&bytes, dtype, &info.shape, &Device::Cpu),
            None => qtensor_from_ggml(info.element.ggml(), &bytes, info.shape.clone(), &Device::Cpu)
                .and_then(|blocks| blocks.dequantize(&Device::Cpu)),
        };
        match tensor {
            Ok(tensor) => Ok(tensor),
            Err(error) => bail!("{}: tensor {name}: {error}", self.path.display()),
        }
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        match self.tensors.get(name) {
            Some(info) => Ok(info),
            None => bail!("{}: no tensor named {name}", self.path.display()),
        }
    }
}

/// Why a file is refused; the caller puts the path before it.
type Checked<T> = std::result::Result<T, String>;

/// The part of a file before its tensors, read front to back.
struct Header {
    file: BufReader<File>,
    at: u64,
    length: u64,
    listed: u64,
}

impl Header {
    fn read(path: &Path) -> Checked<(BTreeMap<String, Value>, BTreeMap<String, TensorInfo>)> {
        let file = File::open(path).map_err(|error| error.to_string())?;
        let length = file.metadata().map_err(|error| error.to_string())?.len();
        let mut header = Self {
            file: BufReader::new(file),
            at: 0,
            length,
            listed: 0,
        };
        if &header.take::<4>("the magic")? != b"GGUF" {
            return Err("not a GGUF file: it does not begin with GGUF".to_owned());
        }
        let version = header.u32("the version")?;
        if !(2..=3).contains(&version) {
            return Err(format!(
                "GGUF version: expected 2 or 3 (little-endian), got {version:#x}"
            ));
        }
        let (tensors, keys) = (header.u64("the number of tensors")?, header.u64("the number of keys")?);
        // the shortest key takes 13 bytes, the shortest tensor 24
        header.room(keys.saturating_mul(13), &format!("{keys} keys"))?;
        header.room(tensors.saturating_mul(24), &format!("{tensors} tensors"))?;

        let mut metadata = BTreeMap::new();
        for _ in 0..keys {
            let key = header.name("a key")?;
            let kind = header.u32(&key)?;
            let value = header.value(kind, &key)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(format!("key {key} occurs twice"));
            }
        }
        let mut table = BTreeMap::new();
        for _ in 0..tensors {
            let (name, info) = header.tensor()?;
            if table.insert(name.clone(), info).is_some() {
                return Err(format!("tensor {name} occurs twice"));
            }
        }
        header.place(alignment(&metadata)?, &mut table)?;
        Ok((metadata, table))
    }

    /// Turns offsets into places of the file, and checks that every tensor lies in it, beside all others.
    fn place(&self, alignment: u64, table: &mut BTreeMap<String, TensorInfo>) -> Checked<()> {
        let data = self.at.next_multiple_of(alignment);
        let mut places = Vec::with_capacity(table.len());
        for (name, info) in table {
            if !info.start.is_multiple_of(alignment) {
                return Err(format!(
                    "tensor {name}: offset {} is no multiple of the alignment {alignment}",
                    info.start
                ));
            }
            let start = data.checked_add(info.start);
            let end = start.and_then(|start| start.checked_add(info.bytes));
            match (start, end) {
                (Some(start), Some(end)) if end <= self.length => {
                    info.start = start;
                    places.push((start, end, name));
                }
                _ => {
                    return Err(format!(
                        "tensor {name}: {} bytes at offset {} lie beyond the end of the file ({} bytes); is it cut short?",
                        info.bytes, info.start, self.length
                    ));
                }
            }
        }
        places.sort();
        match places.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            Some(pair) => Err(format!("tensors {} and {} overlap", pair[0].2, pair[1].2)),
            None => Ok(()),
        }
    }

    fn tensor(&mut self) -> Checked<(String, TensorInfo)> {
        let name = self.name("a tensor's name")?;
        let dimensions = self.u32(&name)?;
        if dimensions == 0 || dimensions > MOST_DIMENSIONS {
            return Err(format!(
                "tensor {name}: expected 1 to {MOST_DIMENSIONS} dimensions, got {dimensions}"
            ));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.push(self.u64(&name)?);
        }
        shape.reverse();
        let id = self.u32(&name)?;
        let Some(element) = ElementType::from_id(id) else {
            return Err(format!("tensor {name}: element type {id} is not read"));
        };
        let start = self.u64(&name)?;
        let row = shape.last().copied().unwrap_or(0);
        let elements = shape.iter().try_fold(1_u64, |product, &size| product.checked_mul(size));
        let bytes = elements.and_then(|elements| element.bytes(elements));
        let whole = row.is_multiple_of(element.block() as u64) && !shape.contains(&0);
        let (Some(bytes), true) = (bytes, whole) else {
            return Err(format!(
                "tensor {name}: no {} tensor has the shape {shape:?} (rows are multiples of {})",
                element.name(),
                element.block()
            ));
        };
        self.fits(bytes, &format!("tensor {name}"))?;
        let shape = shape.into_iter().map(|size| size as usize).collect();
        let info = TensorInfo {
            element,
            shape,
            start,
            bytes,
        };
        Ok((name, info))
    }

    fn value(&mut self, kind: u32, key: &str) -> Checked<Value> {
        if kind != ARRAY {
            return self.scalar(kind, key);
        }
        let kind = self.u32(key)?;
        let length = self.u64(key)?;
        self.listed = self.listed.saturating_add(length);
        if self.listed > MOST_LISTED {
            return Err(format!("{key}: a list of {length} values is more than any model needs"));
        }
        // one byte is the least that a value takes
        self.room(length, key)?;
        (0..length)
            .map(|_| self.scalar(kind, key))
            .collect::<Checked<_>>()
            .map(Value::Array)
    }

    fn scalar(&mut self, kind: u32, key: &str) -> Checked<Value> {
        Ok(match kind {
            0 => Value::U8(u8::from_le_bytes(self.take(key)?)),
            1 => Value::I8(i8::from_le_bytes(self.take(key)?)),
            2 => Value::U16(u16::from_le_bytes(self.take(key)?)),
            3 => Value::I16(i16::from_le_bytes(self.take(key)?)),
            4 => Value::U32(self.u32(key)?),
            5 => Value::I32(i32::from_le_bytes(self.take(key)?)),
            6 => Value::F32(f32::from_le_bytes(self.take(key)?)),
            7 => match u8::from_le_bytes(self.take(key)?) {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                other => return Err(format!("{key}: expected 0 or 1 for false or true, got {other}")),
            },
            8 => Value::String(self.text(key)?),
            10 => Value::U64(self.u64(key)?),
            11 => Value::I64(i64::from_le_bytes(self.take(key)?)),
            12 => Value::F64(f64::from_le_bytes(self.take(key)?)),
            ARRAY => return Err(format!("{key}: lists of lists are not read")),
            other => return Err(format!("{key}: there is no value type {other}")),
        })
    }

    /// A text that stands in messages: of some hundred printable characters at most.
    fn name(&mut self, what: &str) -> Checked<String> {
        let length = self.u64(what)?;
        if length > LONGEST_NAME {
            return Err(format!("{what}: expected at most {LONGEST_NAME} bytes, got {length}"));
        }
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes, what)?;
        let name = String::from_utf8(bytes).map_err(|_| format!("{what}: expected UTF-8"))?;
        if name.chars().any(char::is_control) {
            return Err(format!("{what}: expected printable characters, got {name:?}"));
        }
        Ok(name)
    }

    fn text(&mut self, what: &str) -> Checked<String> {
        let length = self.u64(what)?;
        self.room(length, what)?;
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes, what)?;
        String::from_utf8(bytes).map_err(|_| format!("{what}: expected UTF-8"))
    }

    fn u32(&mut self, what: &str) -> Checked<u32> {
        self.take(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Checked<u64> {
        self.take(what).map(u64::from_le_bytes)
    }

    fn take<const N: usize>(&mut self, what: &str) -> Checked<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8], what: &str) -> Checked<()> {
        self.room(bytes.len() as u64, what)?;
        self.file
            .read_exact(bytes)
            .map_err(|error| format!("{what}: {error}"))?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Whether `bytes` more are left to be read.
    fn room(&self, bytes: u64, what: &str) -> Checked<()> {
        let left = self.length.saturating_sub(self.at);
        if bytes <= left {
            return Ok(());
        }
        Err(format!(
            "{what}: at least {bytes} bytes expected, the file ends after {left}; is it cut short?"
        ))
    }

    /// Whether `bytes` could lie in the file at all, and in memory.
    fn fits(&self, bytes: u64, what: &str) -> Checked<()> {
        if bytes <= self.length && usize::try_from(bytes).is_ok() {
            return Ok(());
        }
        Err(format!(
            "{what}: {bytes} bytes expected, the whole file has {}; is it cut short?",
            self.length
        ))
    }
}

fn alignment(metadata: &BTreeMap<String, Value>) -> Checked<u64> {
    match metadata.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(Value::U32(alignment)) if alignment.is_power_of_two() => Ok((*alignment).into()),
        Some(other) => Err(format!(
            "general.alignment: expected a power of two, got {}",
            other.brief()
        )),
    }
}
