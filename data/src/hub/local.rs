//! A file of this machine as it was when it was checked: nothing else is sent under its name.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Task, Poll};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures_core::Stream;
use hf_hub::repository::{AddSource, CommitOperation, SourceByteStream, StreamFactory, StreamSource};
use hf_hub::{HFError, HFResult};
use sha2::{Digest, Sha256};

use super::INLINE_LIMIT;
use super::intact::begun;
use crate::files::{hex, sha256_of_file};

/// Bytes of a file's beginning by which the hub tells text from data.
const SAMPLE: usize = 512;

/// Bytes that are read at once.
const BLOCK: usize = 1 << 18;

/// One file to send.
#[derive(Clone, PartialEq, Eq)]
pub struct LocalFile {
    /// Its name in the repository, without folders.
    pub name: String,
    /// Where it lies, links resolved.
    pub path: PathBuf,
    /// Bytes.
    pub size: u64,
    /// What it was when it was read.
    pub sha256: String,
    pub(super) git: String,
    pub(super) sample: Vec<u8>,
    /// All of it, up to [`INLINE_LIMIT`].
    small: Option<Bytes>,
}

impl LocalFile {
    /// Reads a file from its first byte to its last.
    ///
    /// # Errors
    /// When it cannot be read, or grows or shrinks meanwhile.
    pub fn read(name: &str, path: &Path) -> Result<Self> {
        let cannot = || format!("{}: cannot read", path.display());
        let mut file = File::open(path).with_context(cannot)?;
        let size = file.metadata().with_context(cannot)?.len();
        let (mut sha256, mut git) = (Sha256::new(), begun(size));
        let (mut block, mut done) = (vec![0; BLOCK], 0_u64);
        let (mut sample, mut small) = (Vec::new(), (size <= INLINE_LIMIT).then(Vec::new));
        loop {
            let count = file.read(&mut block).with_context(cannot)?;
            if count == 0 {
                break;
            }
            let part = &block[..count];
            done += count as u64;
            ensure!(done <= size, "{}: grows while it is read", path.display());
            sha256.update(part);
            git.update(part);
            sample.extend_from_slice(&part[..count.min(SAMPLE - sample.len())]);
            if let Some(small) = &mut small {
                small.extend_from_slice(part);
            }
        }
        ensure!(done == size, "{}: shrinks while it is read", path.display());
        Ok(Self {
            name: name.to_owned(),
            path: path.to_owned(),
            size,
            sha256: hex(&sha256.finalize()),
            git: hex(&git.finalize()),
            sample,
            small: small.map(Bytes::from),
        })
    }

    /// All of it if it is a small one, as it was when it was read.
    pub fn bytes(&self) -> Option<&[u8]> {
        self.small.as_deref()
    }

    /// Checks that it still is what it was.
    ///
    /// # Errors
    /// When it is not, or is gone.
    pub(super) fn check_unchanged(&self) -> Result<()> {
        ensure!(
            sha256_of_file(&self.path)? == self.sha256,
            "{}: changed since it was checked: push again when nothing writes there",
            self.path.display()
        );
        Ok(())
    }

    /// Adds it to a commit: a small one out of memory, a large one as a stream that ends in an error if it is not what it was.
    pub(super) fn added(&self) -> CommitOperation {
        match &self.small {
            Some(small) => CommitOperation::add_bytes(&self.name, small.clone()),
            None => CommitOperation::Add {
                path_in_repo: self.name.clone(),
                source: AddSource::Stream(StreamSource::new(Arc::new(Opened(self.clone())), self.size)),
            },
        }
    }
}

impl fmt::Debug for LocalFile {
    /// Everything but the content.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes, {})", self.name, self.size, self.sha256)
    }
}

/// Opens a file anew each time that the client asks for its bytes.
struct Opened(LocalFile);

impl StreamFactory for Opened {
    fn open(&self) -> SourceByteStream {
        Box::pin(Read {
            expected: self.0.clone(),
            file: None,
            hash: Sha256::new(),
            done: 0,
            ended: false,
        })
    }
}

/// The bytes of a large file; the last ones are held back until its hash is known to be right.
struct Read {
    expected: LocalFile,
    file: Option<File>,
    hash: Sha256,
    done: u64,
    ended: bool,
}

impl Read {
    fn next(&mut self) -> std::io::Result<Option<Bytes>> {
        let file = match &mut self.file {
            Some(file) => file,
            None => self.file.insert(File::open(&self.expected.path)?),
        };
        let mut block = vec![0; BLOCK];
        let count = file.read(&mut block)?;
        block.truncate(count);
        self.hash.update(&block);
        self.done += count as u64;
        let size = self.expected.size;
        let whole = self.done == size && hex(&self.hash.clone().finalize()) == self.expected.sha256;
        if (count == 0 || self.done >= size) && !whole {
            let message = format!(
                "{}: changed since it was checked: push again when nothing writes there",
                self.expected.path.display()
            );
            return Err(std::io::Error::other(message));
        }
        Ok((count > 0).then(|| Bytes::from(block)))
    }
}

impl Stream for Read {
    type Item = HFResult<Bytes>;

    // reads of a local file are short: nothing else waits in the meantime
    fn poll_next(mut self: Pin<&mut Self>, _: &mut Task<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let next = self.next().map_err(HFError::Io);
        self.ended = !matches!(next, Ok(Some(_)));
        Poll::Ready(next.transpose())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(file: &LocalFile) -> Result<u64, String> {
        let mut read = Read {
            expected: file.clone(),
            file: None,
            hash: Sha256::new(),
            done: 0,
            ended: false,
        };
        let mut sum = 0;
        while let Some(bytes) = read.next().map_err(|error| error.to_string())? {
            sum += bytes.len() as u64;
        }
        Ok(sum)
    }

    #[test]
    fn a_large_file_that_changes_ends_in_an_error_before_its_last_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.gguf");
        let bytes = vec![7; 11_000_000];
        std::fs::write(&path, &bytes).unwrap();
        let file = LocalFile::read("x.gguf", &path).unwrap();
        assert!(file.bytes().is_none() && file.sample.len() == SAMPLE);
        assert_eq!((all(&file), file.check_unchanged().is_ok()), (Ok(11_000_000), true));
        let mut other = bytes.clone();
        other[5] = 8;
        let longer = [&bytes[..], b"x"].concat();
        for changed in [&other[..], &bytes[..9], &longer] {
            std::fs::write(&path, changed).unwrap();
            // what is appended is not sent at all
            assert!(changed.len() > bytes.len() || all(&file).unwrap_err().contains("changed since"));
            assert!(file.check_unchanged().is_err());
        }
    }
}
