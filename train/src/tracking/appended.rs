//! A file that only grows: every call reaches the system before it returns, and a failure names the file.
//!
//! What a call wrote survives the end of the process, whatever ends it; only a failing machine may lose it.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Makes a folder with those above it, unless it is there.
pub fn make_folder(path: &Path) -> Result<()> {
    ensure!(
        path.is_dir() || !path.exists(),
        "{}: expected a folder, got a file",
        path.display()
    );
    fs::create_dir_all(path).with_context(|| format!("making {}", path.display()))
}

/// A file open for appending.
#[derive(Debug)]
pub struct Appended {
    path: PathBuf,
    file: File,
}

impl Appended {
    /// Opens a file at its end; it is made when absent.
    pub fn open(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path);
        Ok(Self {
            file: file.with_context(|| format!("{}: cannot open to append", path.display()))?,
            path: path.to_owned(),
        })
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.file.write_all(bytes);
        written.with_context(|| format!("{}: cannot append {} bytes", self.path.display(), bytes.len()))
    }

    /// Waits until the disk has what was written.
    pub fn sync(&self) -> Result<()> {
        let synced = self.file.sync_all();
        synced.with_context(|| format!("{}: cannot flush to the disk", self.path.display()))
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file in `folder` that no call can write, as on a full disk.
    #[cfg(test)]
    pub fn that_fails(folder: &Path) -> Self {
        let path = folder.join("read-only");
        fs::write(&path, "").unwrap();
        let file = File::open(&path).unwrap();
        Self { path, file }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_in_the_file_when_the_call_returns() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        for part in ["ab", "c"] {
            let mut file = Appended::open(&path).unwrap();
            file.write(part.as_bytes()).unwrap();
            std::mem::forget(file); // a killed process closes nothing
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"abc");
    }

    #[test]
    fn a_failed_call_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut full = Appended::that_fails(folder.path());
        let error = format!("{:#}", full.write(b"12345").unwrap_err());
        let path = full.path().display();
        assert!(
            error.starts_with(&format!("{path}: cannot append 5 bytes: ")),
            "{error}"
        );
        let missing = folder.path().join("nowhere/log");
        let error = format!("{:#}", Appended::open(&missing).unwrap_err());
        assert!(
            error.starts_with(&format!("{}: cannot open", missing.display())),
            "{error}"
        );
    }
}
