//! A folder as a command line names it: on this machine, or on the hub as `hf://org/name@revision`; a run's for the drafter
//! that the run published.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail, ensure};
use dflash_data::hub;
use dflash_model::{TargetConfig, TargetInfo, formats};

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

/// Refuses a place on the hub where something is to be written: only `dflash-export push` writes there.
///
/// # Errors
/// Names `option`.
pub fn local(option: &str, path: &Path) -> Result<()> {
    ensure!(
        !path.to_string_lossy().starts_with(hub::SCHEME),
        "{option} {}: expected a place on this machine; dflash-export push sends a folder to the hub",
        path.display()
    );
    Ok(())
}

/// Sizes to read a drafter with that does not say how deep its target is: those of the target at hand, with the depth of
/// the one that the drafter names, where that one lies on this machine.
pub fn sizes_for(drafter: &Path, target: &TargetInfo) -> TargetInfo {
    let mut sizes = target.clone();
    // one that is broken says nothing of the target at hand
    if let Ok(Some(named)) = named_info(drafter) {
        sizes.num_layers = named.num_layers;
    }
    sizes
}

/// Whether a drafter names its target, and that one lies on this machine.
pub fn names_its_target(drafter: &Path) -> bool {
    named_info(drafter).is_ok_and(|named| named.is_some())
}

/// Sizes of the target that a drafter names, where that one lies on this machine.
///
/// # Errors
/// When its configuration cannot be read.
pub fn named_info(drafter: &Path) -> Result<Option<TargetInfo>> {
    let named = formats::named_target(drafter).map(PathBuf::from);
    let Some(named) = named.filter(|named| named.is_dir()) else {
        return Ok(None);
    };
    let config = TargetConfig::read(&named)
        .with_context(|| format!("{} names {} as its target", drafter.display(), named.display()))?;
    Ok(Some(config.info))
}

/// The drafter that a path stands for: a run folder for its `final`, everything else for itself.
///
/// # Errors
/// When nothing is there, or the run has published nothing yet.
pub fn drafter_in(path: &Path) -> Result<PathBuf> {
    ensure!(path.exists(), "{}: no such file or folder", path.display());
    if path.join("config.json").exists() || !path.join("config.resolved.toml").exists() {
        return Ok(path.to_owned());
    }
    let published = path.join("final");
    if published.exists() {
        return Ok(published);
    }
    let mut checkpoints: Vec<String> = std::fs::read_dir(path)
        .with_context(|| path.display().to_string())?
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .filter(|name| name.starts_with("step-"))
        .collect();
    checkpoints.sort();
    match checkpoints.last() {
        None => bail!(
            "{}: the run has neither a published drafter nor a checkpoint",
            path.display()
        ),
        Some(last) => bail!(
            "{}: the run is not finished and has no final; name a checkpoint, the last one is {}",
            path.display(),
            path.join(last).display()
        ),
    }
}
