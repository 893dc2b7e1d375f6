//! Writes a published drafter folder, whole or not at all.
//!
//! The files go into a hidden sibling of the destination, are flushed to the disk, and one rename makes them
//! visible. Tensors are rounded to BF16 and written one at a time, so the memory needed is that of the largest one.
//! The weight file is: 8 bytes little-endian header length, a JSON header padded with spaces to 8 bytes, the data.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Result, Tensor, bail};
use safetensors::View as _;
use serde_json::{Map, Value, json};

use super::{CARD, CONFIG, FILES, ModelCard, PROVENANCE, TENSORS, at, differences};
use crate::drafter_config::DrafterConfig;

/// What to do with a destination that already holds something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Leave it and fail.
    Refuse,
    /// Replace it if it is a drafter folder with no other file in it, fail otherwise.
    ReplaceDrafter,
}

/// Writes the drafter to `dir`: configuration, tensors of any float type rounded to BF16, card and `provenance`.
///
/// # Errors
/// When the configuration is unsound, the tensors are not exactly its list, a value is not finite in BF16, the
/// destination is taken, or writing fails. Nothing is left behind then.
pub fn write(
    dir: &Path,
    config: &DrafterConfig,
    tensors: &BTreeMap<String, Tensor>,
    card: &ModelCard,
    provenance: &Value,
    existing: Existing,
) -> Result<()> {
    place(dir, existing, &|fresh| {
        write_files(fresh, config, tensors, card, provenance)
    })
}

/// Everything that a published folder is made of.
#[derive(Debug, Clone, Copy)]
pub struct Contents<'c> {
    /// The configuration.
    pub config: &'c DrafterConfig,
    /// Exactly its tensors, of any float type.
    pub tensors: &'c BTreeMap<String, Tensor>,
    /// Type to store them in: BF16, F16 or F32.
    pub stored: DType,
    /// The card.
    pub card: &'c ModelCard,
    /// Where the weights come from.
    pub provenance: &'c Value,
}

/// Puts a folder in the place of `dir`, whole or not at all: `fill` writes into a new folder beside it, which is then
/// renamed.
///
/// # Errors
/// When the destination is taken, or `fill` or the renaming fails. Nothing is left behind then.
pub fn place(dir: &Path, existing: Existing, fill: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
    // a link stays a link: its folder is replaced
    let dir = fs::canonicalize(dir).unwrap_or_else(|_| dir.to_path_buf());
    let occupied = check_destination(&dir, existing)?;
    let Some(name) = dir.file_name() else {
        bail!("{}: not a folder name", dir.display())
    };
    let parent = match dir.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    at(parent, fs::create_dir_all(parent))?;
    let fresh = sibling(parent, &name.to_string_lossy(), "partial")?;
    let outcome = fill(&fresh).and_then(|()| {
        if occupied {
            replace(&fresh, &dir, parent, &name.to_string_lossy())
        } else {
            // an empty folder may stand there; not every system renames over one
            let _ = fs::remove_dir(&dir);
            at(&dir, fs::rename(&fresh, &dir))
        }
    });
    if outcome.is_err() {
        // the first error is the one to report
        let _ = fs::remove_dir_all(&fresh);
        return outcome;
    }
    sync_folder(parent)
}

/// Writes the files of the drafter into the existing folder `dir`, in BF16, and flushes them: for callers who put more
/// files beside them and rename the folder themselves.
///
/// # Errors
/// As [`write()`]; a file that is already there is an error too.
pub fn write_files(
    dir: &Path,
    config: &DrafterConfig,
    tensors: &BTreeMap<String, Tensor>,
    card: &ModelCard,
    provenance: &Value,
) -> Result<()> {
    let contents = Contents {
        config,
        tensors,
        stored: DType::BF16,
        card,
        provenance,
    };
    contents.write_into(dir)
}

impl Contents<'_> {
    /// Writes the files into the existing folder `dir` and flushes them.
    ///
    /// # Errors
    /// When the configuration is unsound, the tensors are not exactly its list, a value is not finite in the stored type,
    /// or writing fails; a file that is already there is an error too.
    pub fn write_into(&self, dir: &Path) -> Result<()> {
        let json = self.config.to_json_stored_as(self.stored)?;
        let given = self
            .tensors
            .iter()
            .map(|(name, tensor)| (name.clone(), (tensor.dims().to_vec(), tensor.dtype())));
        let problems = differences(self.config, &given.collect());
        if !problems.is_empty() {
            bail!(
                "{}: the tensors are not those of the configuration: {}",
                dir.display(),
                problems.join("; ")
            )
        }
        write_tensors(&dir.join(TENSORS), self.tensors, self.stored)?;
        write_text(&dir.join(CONFIG), &pretty(&json)?)?;
        write_text(&dir.join(CARD), &self.card.markdown(self.config))?;
        write_text(&dir.join(PROVENANCE), &pretty(self.provenance)?)?;
        sync_folder(dir)
    }
}

/// The tensor on the CPU, its values rounded to `stored`.
///
/// # Errors
/// Naming tensor, index and value of the first one that is not finite, before or after rounding.
pub(super) fn rounded(name: &str, tensor: &Tensor, stored: DType) -> Result<Tensor> {
    let given = tensor.to_device(&Device::Cpu)?.contiguous()?;
    // by way of F32: the direct conversion from F64 to BF16 drops the lower half before it rounds
    let rounded = given.to_dtype(DType::F32)?.to_dtype(stored)?;
    let values: Vec<f32> = rounded.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?;
    let Some(place) = values.iter().position(|value| !value.is_finite()) else {
        return Ok(rounded);
    };
    let value: f64 = given.flatten_all()?.get(place)?.to_dtype(DType::F64)?.to_scalar()?;
    let problem = if value.is_finite() {
        format!("is too large for {}", stored.as_str().to_uppercase())
    } else {
        "is not finite".to_owned()
    };
    bail!(
        "tensor {name}: value {value:e} at {:?} {problem}",
        index_of(place, tensor.dims())
    )
}

/// The index along each dimension of the `place`-th value, row-major.
fn index_of(mut place: usize, dims: &[usize]) -> Vec<usize> {
    let mut index = vec![0; dims.len()];
    for (i, &size) in index.iter_mut().zip(dims).rev() {
        (*i, place) = (place % size, place / size);
    }
    index
}

/// Writes one safetensors file, tensors by name, each rounded to `stored`; others (BOOL, I64) are not taken.
///
/// # Errors
/// When a value is not finite in the stored type, the file exists or cannot be written.
pub(crate) fn write_tensors(path: &Path, tensors: &BTreeMap<String, Tensor>, stored: DType) -> Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut end = 0;
    for (name, tensor) in tensors {
        let start = end;
        end += tensor.elem_count() * stored.size_in_bytes();
        header.insert(
            name.clone(),
            json!({
                "dtype": stored.as_str().to_uppercase(),
                "shape": tensor.dims(),
                "data_offsets": [start, end],
            }),
        );
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');

    let mut file = BufWriter::new(at(path, File::create_new(path))?);
    at(path, file.write_all(&(header.len() as u64).to_le_bytes()))?;
    at(path, file.write_all(&header))?;
    for (name, tensor) in tensors {
        let rounded = rounded(name, tensor, stored)?;
        at(path, file.write_all(&rounded.data()))?;
    }
    let file = at(path, file.into_inner().map_err(std::io::IntoInnerError::into_error))?;
    at(path, file.sync_all())
}

pub(crate) fn write_text(path: &Path, text: &str) -> Result<()> {
    let mut file = at(path, File::create_new(path))?;
    at(path, file.write_all(text.as_bytes()))?;
    at(path, file.sync_all())
}

pub(crate) fn pretty(value: &Value) -> Result<String> {
    Ok(serde_json::to_string_pretty(value).map_err(candle_core::Error::wrap)? + "\n")
}

/// Whether `dir` holds a drafter that may be replaced: what [`place`] looks at, for callers to ask before the work.
///
/// # Errors
/// When it holds anything that may not.
pub fn check_destination(dir: &Path, existing: Existing) -> Result<bool> {
    // a link stays a link: its folder is replaced
    let dir = &fs::canonicalize(dir).unwrap_or_else(|_| dir.to_path_buf());
    let Ok(metadata) = fs::symlink_metadata(dir) else {
        return Ok(false);
    };
    if !metadata.is_dir() {
        bail!(
            "{}: there is already a file of this name, expected a folder or nothing",
            dir.display()
        )
    }
    let mut entries = Vec::new();
    for entry in at(dir, fs::read_dir(dir))? {
        entries.push(at(dir, entry)?.file_name().to_string_lossy().into_owned());
    }
    if entries.is_empty() {
        return Ok(false);
    }
    if existing == Existing::Refuse {
        bail!(
            "{}: the folder is not empty; a drafter there is replaced when that is asked for (--force)",
            dir.display()
        )
    }
    entries.sort();
    if let Some(other) = entries.iter().find(|entry| !FILES.contains(&entry.as_str())) {
        bail!(
            "{}: not replaced, it holds {other}, which is no file of a drafter",
            dir.display()
        )
    }
    if !is_drafter(&dir.join(CONFIG)) {
        bail!(
            "{}: not replaced, its config.json is not that of a drafter",
            dir.display()
        )
    }
    Ok(true)
}

fn is_drafter(config: &Path) -> bool {
    let value = fs::read(config)
        .ok()
        .and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
    let architecture = value
        .as_ref()
        .and_then(|value| value.pointer("/architectures/0")?.as_str());
    matches!(architecture, Some("DFlashDraftModel" | "DFlash2DraftModel"))
}

/// Makes a new hidden folder in `parent` that carries `name`.
fn sibling(parent: &Path, name: &str, purpose: &str) -> Result<PathBuf> {
    for attempt in 0_u32..1000 {
        let path = parent.join(format!(".{name}.{purpose}-{}-{attempt}", std::process::id()));
        match fs::create_dir(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            outcome => return at(&path, outcome).map(|()| path),
        }
    }
    bail!(
        "{}: too many unfinished folders named .{name}.{purpose}-*",
        parent.display()
    )
}

/// Swaps `fresh` for the drafter in `dir`; the old one comes back when that fails.
fn replace(fresh: &Path, dir: &Path, parent: &Path, name: &str) -> Result<()> {
    let old = sibling(parent, name, "replaced")?;
    at(dir, fs::rename(dir, &old))?;
    if let Err(error) = fs::rename(fresh, dir) {
        at(&old, fs::rename(&old, dir))?;
        return at(dir, Err(error));
    }
    at(&old, fs::remove_dir_all(&old))
}

/// Makes the names in a folder durable, where the system can open a folder.
///
/// # Errors
/// When the folder cannot be opened or flushed.
pub fn sync_folder(dir: &Path) -> Result<()> {
    if cfg!(unix) {
        at(dir, File::open(dir).and_then(|folder| folder.sync_all()))?;
    }
    Ok(())
}
