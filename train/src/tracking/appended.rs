//! A file that only grows: every call reaches the system before it returns, and a failure names the file.
//!
//! What a call wrote survives the end of the process, whatever ends it; only a failing machine may lose it.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

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

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_that_names_the_file() {
        let mut full = Appended::open(Path::new("/dev/full")).unwrap();
        let error = format!("{:#}", full.write(b"12345").unwrap_err());
        assert!(error.starts_with("/dev/full: cannot append 5 bytes: "), "{error}");
        let missing = Appended::open(Path::new("/nowhere/log")).unwrap_err();
        assert!(format!("{missing:#}").starts_with("/nowhere/log: cannot open"));
    }
}
