//! Whether a file of the cache is the one that its name stands for.
//!
//! The cache names a large file by its SHA-256 and a small one by git's hash of it. Other tools store whatever body they
//! get under that name, an error page too, and would never ask for it again.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use sha1::{Digest, Sha1};
use sha2::Sha256;

use super::tree::Entry;
use crate::files::{hex, sha256_of_file};

/// Checks where a link of the cache leads to, and returns the hash that it names; none for a file that is no link.
///
/// # Errors
/// When it leads elsewhere than to a file of the cache.
pub(crate) fn named(path: &Path) -> Result<Option<String>> {
    let Ok(target) = std::fs::read_link(path) else {
        return Ok(None);
    };
    let name = target.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let folder = target.parent().and_then(Path::file_name);
    ensure!(
        (is_hex(name, 40) || is_hex(name, 64)) && folder.is_some_and(|folder| folder == "blobs"),
        "{}: leads to {} and not to a file of the cache that is named by its hash: not used. Remove it and fetch it again",
        path.display(),
        target.display()
    );
    Ok(Some(name.to_owned()))
}

/// Compares a file with the hash that the cache names it by; a file that is not a link into the cache has none.
///
/// # Errors
/// When it is another one, with both hashes, or a link to elsewhere.
pub(crate) fn check(path: &Path) -> Result<()> {
    let Some(name) = named(path)? else { return Ok(()) };
    let large = name.len() == 64;
    let found = hash_of(path, large)?;
    if found != name {
        let kind = kind_of(large);
        bail!(
            "{}: damaged: expected {kind} {name}, found {found}. Remove the file that it links to and fetch it again",
            path.display()
        );
    }
    Ok(())
}

/// Whether a text is so many hexadecimal digits: 40 are a commit or git's hash of a file, 64 a SHA-256.
pub(super) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// What the hash of a file is called.
pub(super) fn kind_of(large: bool) -> &'static str {
    if large { "SHA-256" } else { "git hash" }
}

/// A file's SHA-256 if it is a large one, else git's hash of it.
pub(super) fn hash_of(path: &Path, large: bool) -> Result<String> {
    if large {
        return sha256_of_file(path);
    }
    let cannot = || format!("{}: cannot read", path.display());
    let mut file = File::open(path).with_context(cannot)?;
    let mut hash = begun(file.metadata().with_context(cannot)?.len());
    let mut block = vec![0; 1 << 16];
    loop {
        match file.read(&mut block).with_context(cannot)? {
            0 => return Ok(hex(&hash.finalize())),
            count => hash.update(&block[..count]),
        }
    }
}

/// The hash by which git, and so the hub, knows a small file.
pub fn git_hash(bytes: &[u8]) -> String {
    let mut hash = begun(bytes.len() as u64);
    hash.update(bytes);
    hex(&hash.finalize())
}

/// Git's hash of a file of `size` bytes, before the first of them.
pub(super) fn begun(size: u64) -> Sha1 {
    Sha1::new_with_prefix(format!("blob {size}\0"))
}

/// Hashes a file of a listing as it comes.
pub(super) enum Hasher {
    Small(Sha1),
    Large(Sha256),
}

impl Hasher {
    pub(super) fn of(entry: &Entry) -> Self {
        if entry.is_large() {
            Self::Large(Sha256::new())
        } else {
            Self::Small(begun(entry.size))
        }
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Small(hash) => hash.update(bytes),
            Self::Large(hash) => hash.update(bytes),
        }
    }

    pub(super) fn finish(self) -> String {
        match self {
            Self::Small(hash) => hex(&hash.finalize()),
            Self::Large(hash) => hex(&hash.finalize()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_a_small_file_is_gits() {
        // printf 'hello\n' | git hash-object --stdin
        let hash = "ce013625030ba8dba906f756967f9e9ca394464a";
        assert_eq!(git_hash(b"hello\n"), hash);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "hello\n").unwrap();
        assert_eq!(hash_of(file.path(), false).unwrap(), hash);
    }
}
