//! A folder as a command line names it: on this machine, or on the hub as `hf://org/name@revision`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result};
use dflash_data::hub;

use crate::progress::transfer;

/// What an option names. It is looked up when it is first asked for, after the cheap checks, and once.
#[derive(Debug, Clone)]
pub struct Folder {
    named: PathBuf,
    place: OnceLock<PathBuf>,
}

impl Folder {
    /// Where it is on this machine: the path itself, or a folder of the hub's cache, fetched with progress unless `quiet`.
    ///
    /// # Errors
    /// Names `option`; when the reference is none, or the hub or its cache do not have it.
    pub fn place(&self, option: &str, quiet: bool) -> Result<&Path> {
        if let Some(place) = self.place.get() {
            return Ok(place);
        }
        let place = place(option, &self.named, quiet)?;
        Ok(self.place.get_or_init(|| place))
    }

    /// As it was named.
    pub fn named(&self) -> &Path {
        &self.named
    }
}

// what the parser of command lines looks for
impl From<OsString> for Folder {
    fn from(named: OsString) -> Self {
        Self {
            named: named.into(),
            place: OnceLock::new(),
        }
    }
}

/// Puts the folder that `path` means in its place, as [`place`].
///
/// # Errors
/// As [`place`].
pub fn settle(option: &str, path: &mut PathBuf, quiet: bool) -> Result<()> {
    *path = place(option, path, quiet)?;
    Ok(())
}

/// The folder that a path means: itself, or for `hf://..` one of the hub's cache, fetched with progress unless `quiet`.
///
/// # Errors
/// Names `option`, or the key of a run file; when the reference is none, or the hub or its cache do not have it.
pub fn place(option: &str, path: &Path, quiet: bool) -> Result<PathBuf> {
    hub::fetch(path, || (!quiet).then(|| transfer("download"))).with_context(|| option.to_owned())
}
