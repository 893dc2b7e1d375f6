//! Reads a drafter from a GGUF file.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use candle_core::{Result, bail};

use super::{Facts, Source};
use crate::target::TargetInfo;

/// Whether the file starts as a GGUF file does.
pub(super) fn is_gguf(path: &Path) -> Result<bool> {
    let mut magic = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    Ok(read.is_ok() && &magic == b"GGUF")
}

/// Configuration and tensor list of the file.
pub(super) fn facts(path: &Path, _target: Option<&TargetInfo>) -> Result<Facts> {
    bail!("{}: GGUF is not read yet", path.display())
}

/// Reads the drafter.
pub(super) fn read(path: &Path, _target: Option<&TargetInfo>) -> Result<Source> {
    bail!("{}: GGUF is not read yet", path.display())
}
