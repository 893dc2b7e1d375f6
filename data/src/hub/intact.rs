//! Whether a file of the cache is the one that its name stands for.
//!
//! The cache names a large file by its SHA-256 and a small one by git's hash of it. The client stores whatever body it
//! gets under that name, an error page too, and would never ask for it again.

use std::path::Path;

use anyhow::{Context, Result, bail};
use sha1::{Digest, Sha1};

use crate::files::{hex, sha256_of_file};

/// Compares a file with the hash that the cache names it by; a file that is not a link into the cache has none.
///
/// # Errors
/// When it is another one, with both hashes.
pub(crate) fn check(path: &Path) -> Result<()> {
    let Ok(target) = std::fs::read_link(path) else {
        return Ok(());
    };
    let name = target.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let (kind, found) = match name.len() {
        64 => ("SHA-256", sha256_of_file(path)?),
        40 => {
            let bytes = std::fs::read(path).with_context(|| format!("{}: cannot read", path.display()))?;
            ("git hash", git_hash(&bytes))
        }
        _ => return Ok(()),
    };
    if found != name {
        bail!(
            "{}: damaged: expected {kind} {name}, found {found}. Remove the file that it links to and fetch it again",
            path.display()
        );
    }
    Ok(())
}

/// The hash by which git, and so the hub, knows a small file.
pub fn git_hash(bytes: &[u8]) -> String {
    let mut hash = Sha1::new();
    hash.update(format!("blob {}\0", bytes.len()));
    hash.update(bytes);
    hex(&hash.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_a_small_file_is_gits() {
        // printf 'hello\n' | git hash-object --stdin
        assert_eq!(git_hash(b"hello\n"), "ce013625030ba8dba906f756967f9e9ca394464a");
    }
}
