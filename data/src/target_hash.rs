//! A hash that tells target folders apart without reading all of a large one.
//!
//! SHA-256 over `config.json` (all of it) and, for each `*.safetensors` by name: the name, the size, the header (all
//! of it), and the content: whole up to 64 MiB, else sixteen blocks of 1 MiB spread evenly from the first byte to
//! the last. Every fine-tuning changes weights everywhere, so the blocks see it; a change of a few bytes between
//! them in a large file is not seen.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::files::hex;

const BLOCK: u64 = 1 << 20;
const BLOCKS: u64 = 16;
const READ_WHOLE: u64 = 64 << 20;

/// Hash of a target or drafter folder, or of a file that is a whole model; 64 hexadecimal characters.
pub fn target_hash(folder: &Path) -> Result<String> {
    let config = folder.join("config.json");
    let mut hash = Sha256::new();
    if folder.is_file() {
        add_file(&mut hash, folder).with_context(|| format!("{}: cannot read", folder.display()))?;
        return Ok(hex(&hash.finalize()));
    }
    add(
        &mut hash,
        &std::fs::read(&config).with_context(|| format!("{}: cannot read", config.display()))?,
    );
    let files = tensor_files(folder)?;
    ensure!(!files.is_empty(), "{}: no *.safetensors file", folder.display());
    for path in files {
        add(&mut hash, path.file_name().unwrap_or_default().as_encoded_bytes());
        add_file(&mut hash, &path).with_context(|| format!("{}: cannot read", path.display()))?;
    }
    Ok(hex(&hash.finalize()))
}

fn tensor_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("{}: cannot list", folder.display()))? {
        let path = entry
            .with_context(|| format!("{}: cannot list", folder.display()))?
            .path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn add_file(hash: &mut Sha256, path: &Path) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    hash.update(size.to_le_bytes());
    if size <= READ_WHOLE {
        let mut content = Vec::with_capacity(size as usize);
        file.read_to_end(&mut content)?;
        hash.update(&content);
        return Ok(());
    }
    let mut prefix = [0; 8];
    file.read_exact(&mut prefix)?;
    // a broken length must not become a huge allocation: the loader of the target names the fault
    let header = u64::from_le_bytes(prefix).min(size - 8);
    std::io::copy(&mut (&mut file).take(header), &mut Absorb(hash))?;
    for block in 0..BLOCKS - 1 {
        file.seek(SeekFrom::Start((size - BLOCK) / (BLOCKS - 1) * block))?;
        std::io::copy(&mut (&mut file).take(BLOCK), &mut Absorb(hash))?;
    }
    file.seek(SeekFrom::Start(size - BLOCK))?;
    std::io::copy(&mut (&mut file).take(BLOCK), &mut Absorb(hash))?;
    Ok(())
}

/// Adds a byte string with its length, so that two of them cannot be cut in another place.
fn add(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

/// A hash that can be written to.
struct Absorb<'h>(&'h mut Sha256);

impl std::io::Write for Absorb<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn folder(config: &str, tensors: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), config).unwrap();
        for (name, bytes) in tensors {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        folder
    }

    #[test]
    fn config_names_sizes_and_content_all_count() {
        let hash = |config: &str, tensors: &[(&str, &[u8])]| target_hash(folder(config, tensors).path()).unwrap();
        let base = hash("{}", &[("a.safetensors", b"12345678"), ("notes.txt", b"x")]);
        assert_eq!(base, hash("{}", &[("a.safetensors", b"12345678"), ("notes.txt", b"y")]));
        for other in [
            hash("{ }", &[("a.safetensors", b"12345678")]),
            hash("{}", &[("b.safetensors", b"12345678")]),
            hash("{}", &[("a.safetensors", b"12345679")]),
            hash("{}", &[("a.safetensors", b"1234567")]),
        ] {
            assert_ne!(base, other);
        }
        let error = target_hash(folder("{}", &[]).path()).unwrap_err();
        assert!(format!("{error:#}").contains("no *.safetensors"));
    }

    #[test]
    fn a_large_file_is_sampled_from_its_first_byte_to_its_last() {
        let folder = folder("{}", &[]);
        let path = folder.path().join("model.safetensors");
        let file = File::create(&path).unwrap();
        let size = READ_WHOLE + 5_000_000;
        // sparse: holes read as zeros
        file.set_len(size).unwrap();
        let base = target_hash(folder.path()).unwrap();
        for changed in [8, (size - BLOCK) / (BLOCKS - 1) * 7 + 100, size - 1] {
            use std::io::Write;
            let mut file = File::options().write(true).open(&path).unwrap();
            file.seek(SeekFrom::Start(changed)).unwrap();
            file.write_all(&[1]).unwrap();
            assert_ne!(base, target_hash(folder.path()).unwrap(), "byte {changed}");
            file.seek(SeekFrom::Start(changed)).unwrap();
            file.write_all(&[0]).unwrap();
            assert_eq!(base, target_hash(folder.path()).unwrap());
        }
    }
}
