//! Files and folders that appear whole or not at all.
//!
//! Everything is written beside its place under another name, flushed to the disk, and renamed: files by
//! [`dflash_data::files`], folders here. A folder that is to vanish is renamed to a dotted name first, so that a half-deleted one is never mistaken for a whole one.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

pub use dflash_data::files::write_whole as replace_file;

/// Makes a folder whole: `fill` writes into an empty one beside it, which then takes its place. A failure leaves
/// nothing.
pub fn replace_folder(path: &Path, fill: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
    let partial = dotted(path, "partial")?;
    if partial.exists() {
        fs::remove_dir_all(&partial).with_context(|| format!("removing {}", partial.display()))?;
    }
    fs::create_dir_all(&partial).with_context(|| format!("making {}", partial.display()))?;
    if let Err(error) = fill(&partial).and_then(|()| flush_tree(&partial)) {
        // a full disk above all is not to stay full; the first error is the one to report
        let _ = fs::remove_dir_all(&partial);
        return Err(error);
    }
    remove_folder(path)?;
    fs::rename(&partial, path).with_context(|| format!("renaming to {}", path.display()))?;
    flush_parent(path);
    Ok(())
}

/// Removes a folder if it is there.
pub fn remove_folder(path: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let removed = dotted(path, "removed")?;
    if removed.exists() {
        fs::remove_dir_all(&removed).with_context(|| format!("removing {}", removed.display()))?;
    }
    fs::rename(path, &removed).with_context(|| format!("renaming {}", path.display()))?;
    fs::remove_dir_all(&removed).with_context(|| format!("removing {}", removed.display()))
}

/// Removes a file if it is there.
pub fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Removes what an interrupted writer left in `folder`.
pub fn sweep(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let ours = name.starts_with('.') && (name.ends_with(".partial") || name.ends_with(".removed"));
        if !ours && !name.ends_with(".unfinished") {
            continue;
        }
        let path = entry.path();
        let removal = if entry.file_type()?.is_dir() {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        };
        removal.with_context(|| format!("removing {}", path.display()))?;
    }
    Ok(())
}

fn dotted(path: &Path, suffix: &str) -> Result<PathBuf> {
    let name = path
        .file_name()
        .with_context(|| format!("{}: expected a path with a name", path.display()))?;
    Ok(path.with_file_name(format!(".{}.{suffix}", name.to_string_lossy())))
}

fn flush_tree(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            flush_tree(&entry.path())?;
        } else {
            flush(&entry.path())?;
        }
    }
    flush_folder(folder);
    Ok(())
}

fn flush(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .with_context(|| format!("flushing {}", path.display()))
}

fn flush_parent(path: &Path) {
    if let Some(parent) = path.parent() {
        flush_folder(parent);
    }
}

/// Folders cannot be opened on every system, and losing only the rename leaves the older whole state.
fn flush_folder(folder: &Path) {
    if let Ok(handle) = File::open(folder) {
        let _unsupported = handle.sync_all();
    }
}
