//! Files that appear whole or not at all: written beside, synced, renamed; and hashes of what is read.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// Writes `bytes` to `path` so that a reader sees the old file or the new one, never a part.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let beside = beside(path);
    let written = File::create(&beside).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    if let Err(error) = written {
        let _ = fs::remove_file(&beside);
        return Err(error).with_context(|| format!("{}: cannot write", beside.display()));
    }
    publish(&beside, path)
}

/// Renames a finished, synced file to its final name and syncs the folder.
pub(crate) fn publish(beside: &Path, path: &Path) -> Result<()> {
    fs::rename(beside, path).with_context(|| format!("{}: cannot rename to {}", beside.display(), path.display()))?;
    sync_folder(path)
}

/// Name of the unfinished form of a file.
pub(crate) fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".unfinished");
    path.with_file_name(name)
}

/// Reads a text file; the error names it.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("{}: cannot read", path.display()))
}

/// Reads a JSON file; the error names it and the place in it.
pub(crate) fn read_json(path: &Path) -> Result<serde_json::Value> {
    serde_json::from_str(&read_text(path)?).with_context(|| format!("{}: not JSON", path.display()))
}

/// Lower-case hexadecimal SHA-256 of some bytes.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Lower-case hexadecimal SHA-256 of a file, read once from its first byte to its last.
pub fn sha256_of_file(path: &Path) -> Result<String> {
    let cannot = || format!("{}: cannot read", path.display());
    let mut file = File::open(path).with_context(cannot)?;
    let (mut hash, mut block) = (Sha256::new(), vec![0; 1 << 16]);
    loop {
        match file.read(&mut block).with_context(cannot)? {
            0 => return Ok(hex(&hash.finalize())),
            count => hash.update(&block[..count]),
        }
    }
}

/// Lower-case hexadecimal form of some bytes.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
            // writing to a String cannot fail
            let _ = write!(text, "{byte:02x}");
            text
        })
}

#[cfg(unix)]
fn sync_folder(path: &Path) -> Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    File::open(folder)
        .and_then(|handle| handle.sync_all())
        .with_context(|| format!("{}: cannot sync the folder", folder.display()))
}

/// Folders cannot be opened as files here; the rename itself is as durable as the system makes it.
#[cfg(not(unix))]
fn sync_folder(_path: &Path) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rewritten_file_is_whole_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        write_whole(&path, b"first").unwrap();
        write_whole(&path, b"second").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_unwritable_place_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let error = write_whole(&folder.path().join("missing/a.json"), b"x").unwrap_err();
        assert!(format!("{error:#}").contains("missing"), "{error:#}");
    }

    #[test]
    fn sha256_is_the_standard_one() {
        let folder = tempfile::tempdir().unwrap();
        let (path, bytes) = (folder.path().join("a"), vec![7; 200_000]);
        fs::write(&path, &bytes).unwrap();
        assert_eq!(sha256_of_file(&path).unwrap(), sha256_hex(&bytes));
        assert_eq!(
            sha256_hex(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
