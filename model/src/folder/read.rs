//! Reads a published drafter folder, strictly: every expected tensor, no other, no stray weight file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;

use super::{CONFIG, at, differences, write};
use crate::drafter_config::DrafterConfig;
use crate::tensor_file::TensorFolder;

/// The folder's configuration.
///
/// # Errors
/// As [`DrafterConfig::from_json_file`].
pub fn read_config(dir: &Path) -> Result<DrafterConfig> {
    DrafterConfig::from_json_file(&dir.join(CONFIG))
}

/// The folder's tensors on `device`, each in its stored type (BF16, F16, F32 or F64), by published name.
///
/// # Errors
/// Listing together all names that are missing or unexpected, all shapes and types that do not fit `config`, and
/// all files that an engine would load beside the drafter; then naming the first tensor that holds NaN or an infinity.
pub fn read_tensors(dir: &Path, config: &DrafterConfig, device: &Device) -> Result<BTreeMap<String, Tensor>> {
    let folder = TensorFolder::open(dir)?;
    let mut problems = list_problems(config, &folder);
    problems.extend(extra_files(&folder)?);
    if !problems.is_empty() {
        bail!(
            "{}: not the drafter that its config.json describes: {}",
            dir.display(),
            problems.join("; ")
        )
    }
    let names: Vec<&str> = folder.iter().map(|(name, _)| name).collect();
    let load = |name: &str| {
        check_finite(&folder, name)?;
        Ok((name.to_owned(), folder.get(name, device)?))
    };
    names.into_iter().map(load).collect()
}

/// Refuses a tensor that holds NaN or an infinity: a drafter with one drafts nothing that is ever accepted.
///
/// # Errors
/// Naming the file, the tensor and the first such element, row-major.
pub fn check_finite(folder: &TensorFolder, name: &str) -> Result<()> {
    let Some(info) = folder.info(name) else {
        bail!("{}: no tensor named {name}", folder.dir().display())
    };
    // all exponent bits set, in the little-endian value's highest bytes
    let (size, high): (usize, u16) = match info.dtype {
        DType::BF16 => (2, 0x7f80),
        DType::F16 => (2, 0x7c00),
        DType::F32 => (4, 0x7f80),
        DType::F64 => (8, 0x7ff0),
        _ => return Ok(()),
    };
    let special = |value: &[u8]| u16::from_le_bytes([value[size - 2], value[size - 1]]) & high == high;
    let bytes = folder.bytes(name)?;
    let Some(at) = bytes.par_chunks_exact(size).position_first(special) else {
        return Ok(());
    };
    bail!(
        "{}: tensor {name}: element {at} is not a finite number",
        folder.file_of(name).display()
    )
}

/// Everything in which the folder's tensor list differs from the one that `config` stands for.
pub fn list_problems(config: &DrafterConfig, folder: &TensorFolder) -> Vec<String> {
    let found = folder
        .iter()
        .map(|(name, info)| (name.to_owned(), (info.shape.clone(), info.dtype)));
    differences(config, &found.collect())
}

/// Files that change what an engine loads: weight files beside those of the drafter, a replaced mask embedding.
///
/// # Errors
/// When the folder cannot be listed.
pub fn extra_files(folder: &TensorFolder) -> Result<Vec<String>> {
    let dir = folder.dir();
    let used: BTreeSet<&Path> = folder.iter().map(|(name, _)| folder.file_of(name)).collect();
    let mut extra = BTreeSet::new();
    for entry in at(dir, std::fs::read_dir(dir))? {
        let path = at(dir, entry)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.extension().is_some_and(|extension| extension == "safetensors") && !used.contains(path.as_path()) {
            extra.insert(format!("extra weight file {name}: engines would load it too"));
        }
        if name == "mask_embedding.pt" {
            extra.insert(format!("{name}: a mask embedding of its own is not supported"));
        }
    }
    Ok(extra.into_iter().collect())
}

/// Reads a folder back and checks that every tensor is the one in `tensors` rounded to the stored type, bit for bit.
///
/// # Errors
/// Naming the first tensor and element that differs, or whatever keeps the folder from being read.
pub fn verify_written(dir: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
    let config = read_config(dir)?;
    verify_stored(dir, &read_tensors(dir, &config, &Device::Cpu)?, tensors)
}

/// As [`verify_written`], of tensors that are already read from `dir`.
///
/// # Errors
/// As [`verify_written`].
pub(crate) fn verify_stored(
    dir: &Path,
    stored: &BTreeMap<String, Tensor>,
    tensors: &BTreeMap<String, Tensor>,
) -> Result<()> {
    // every stored type widens to f32 without loss
    let values = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    for (name, stored) in stored {
        let Some(given) = tensors.get(name) else {
            bail!("{}: tensor {name} was not given", dir.display())
        };
        let given = values(&write::rounded(name, given, stored.dtype())?)?;
        let stored = values(stored)?;
        if stored.len() != given.len() {
            bail!(
                "{}: tensor {name} holds {} values, {} were given",
                dir.display(),
                stored.len(),
                given.len()
            )
        }
        let differs = stored.iter().zip(&given).position(|(a, b)| a.to_bits() != b.to_bits());
        if let Some(i) = differs {
            bail!(
                "{}: tensor {name} holds {} at element {i}, given was {}",
                dir.display(),
                stored[i],
                given[i]
            )
        }
    }
    Ok(())
}
