//! Reads the tensors of a checkpoint folder, memory-mapped, in the type in which each was stored.
//!
//! A folder holds, in this order of precedence: `model.safetensors.index.json` with the shards that it names;
//! one `model.safetensors`; or any number of `*.safetensors`, read in name order. Nothing is copied until
//! [`TensorFolder::get`]. Every error names the file, and the tensor where there is one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Result, Tensor, bail};
use memmap2::Mmap;
use safetensors::SafeTensors;

/// The tensors of one checkpoint folder.
#[derive(Debug)]
pub struct TensorFolder {
    dir: PathBuf,
    files: Vec<MappedFile>,
    tensors: BTreeMap<String, Entry>,
}

/// Where one tensor lies and what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Stored element type.
    pub dtype: DType,
    /// Stored shape.
    pub shape: Vec<usize>,
}

impl TensorFolder {
    /// Maps every tensor file of `dir` and reads their headers.
    ///
    /// # Errors
    /// When there is no tensor file, a shard is missing, truncated or malformed, two files hold the same name, a
    /// tensor has a type that candle does not know, or the index disagrees with its shards.
    pub fn open(dir: &Path) -> Result<Self> {
        let index = dir.join(INDEX);
        let single = dir.join(SINGLE);
        if index.is_file() {
            let map = read_index(&index)?;
            let names: BTreeSet<&String> = map.values().collect();
            let folder = Self::map(dir, names.into_iter().map(|name| dir.join(name)).collect())?;
            folder.check_index(&index, &map)?;
            Ok(folder)
        } else if single.is_file() {
            Self::map(dir, vec![single])
        } else {
            let files = tensor_files(dir)?;
            if files.is_empty() {
                bail!("{}: no {INDEX}, no {SINGLE} and no other *.safetensors", dir.display())
            }
            Self::map(dir, files)
        }
    }

    /// The folder that was opened.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Tensor names in order, with type and shape.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), &entry.info))
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether the files hold no tensor.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Type and shape of one tensor, if it is there.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|entry| &entry.info)
    }

    /// The file that holds the tensor, for messages; the folder when it is in none.
    pub fn file_of(&self, name: &str) -> &Path {
        self.tensors
            .get(name)
            .map_or(&self.dir, |entry| &self.files[entry.file].path)
    }

    /// The tensor's little-endian bytes in the mapped file, row-major.
    ///
    /// # Errors
    /// When the folder has no such tensor.
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let entry = self.entry(name)?;
        Ok(&self.files[entry.file].map[entry.bytes.clone()])
    }

    /// The tensor on `device` in its stored type.
    ///
    /// # Errors
    /// When the folder has no such tensor or the device cannot hold its type.
    pub fn get(&self, name: &str, device: &Device) -> Result<Tensor> {
        let entry = self.entry(name)?;
        let file = &self.files[entry.file];
        let bytes = &file.map[entry.bytes.clone()];
        match Tensor::from_raw_buffer(bytes, entry.info.dtype, &entry.info.shape, device) {
            Ok(tensor) => Ok(tensor),
            Err(error) => bail!("{}: tensor {name}: {error}", file.path.display()),
        }
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        match self.tensors.get(name) {
            Some(entry) => Ok(entry),
            None => bail!("{}: no tensor named {name}", self.dir.display()),
        }
    }

    fn map(dir: &Path, paths: Vec<PathBuf>) -> Result<Self> {
        let mut files: Vec<MappedFile> = Vec::with_capacity(paths.len());
        let mut tensors: BTreeMap<String, Entry> = BTreeMap::new();
        for path in paths {
            let (map, found) = map_file(&path)?;
            for (name, info, bytes) in found {
                let entry = Entry {
                    file: files.len(),
                    info,
                    bytes,
                };
                if let Some(first) = tensors.insert(name.clone(), entry) {
                    let first = &files[first.file].path;
                    bail!("{}: tensor {name} is also in {}", path.display(), first.display())
                }
            }
            files.push(MappedFile { path, map });
        }
        Ok(Self {
            dir: dir.to_path_buf(),
            files,
            tensors,
        })
    }

    fn check_index(&self, index: &Path, map: &BTreeMap<String, String>) -> Result<()> {
        for (name, shard) in map {
            match self.tensors.get(name) {
                None => bail!(
                    "{}: tensor {name} is said to be in {shard}, which lacks it",
                    index.display()
                ),
                Some(entry) if self.files[entry.file].path != self.dir.join(shard) => bail!(
                    "{}: tensor {name} is said to be in {shard}, it is in {}",
                    index.display(),
                    self.files[entry.file].path.display()
                ),
                Some(_) => {}
            }
        }
        Ok(())
    }
}

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

#[derive(Debug)]
struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

#[derive(Debug)]
struct Entry {
    file: usize,
    info: TensorInfo,
    bytes: Range<usize>,
}

type Found = (String, TensorInfo, Range<usize>);

fn map_file(path: &Path) -> Result<(Mmap, Vec<Found>)> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) => bail!("{}: {error}", path.display()),
    };
    #[expect(
        unsafe_code,
        reason = "memory-mapping: a 54 GB checkpoint is not read twice into memory"
    )]
    // SAFETY: the map is read-only and private to this struct; a checkpoint that another process truncates while it
    // is being read is outside what this program supports, as for every loader that maps weights.
    let map = match unsafe { Mmap::map(&file) } {
        Ok(map) => map,
        Err(error) => bail!("{}: {error}", path.display()),
    };
    // the header's offsets are checked against the length of the buffer, so a truncated file stops here
    let (header, metadata) = match SafeTensors::read_metadata(&map) {
        Ok(found) => found,
        Err(error) => bail!("{}: not a whole safetensors file: {error}", path.display()),
    };
    let start = header + 8;
    let mut found = Vec::new();
    for (name, info) in metadata.tensors() {
        let dtype = match DType::try_from(info.dtype) {
            Ok(dtype) => dtype,
            Err(error) => bail!("{}: tensor {name}: {error}", path.display()),
        };
        let (first, last) = info.data_offsets;
        found.push((
            name,
            TensorInfo {
                dtype,
                shape: info.shape.clone(),
            },
            start + first..start + last,
        ));
    }
    Ok((map, found))
}

fn read_index(path: &Path) -> Result<BTreeMap<String, String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => bail!("{}: {error}", path.display()),
    };
    let index: Index = match serde_json::from_str(&text) {
        Ok(index) => index,
        Err(error) => bail!("{}: {error}", path.display()),
    };
    for (name, shard) in &index.weight_map {
        // a shard is a file of this folder; anything else would let a downloaded index read elsewhere
        if Path::new(shard).file_name().is_none_or(|file| file != shard.as_str()) {
            bail!(
                "{}: tensor {name}: shard {shard:?} is not a plain file name",
                path.display()
            )
        }
    }
    if index.weight_map.is_empty() {
        bail!("{}: weight_map is empty", path.display())
    }
    Ok(index.weight_map)
}

fn tensor_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) => bail!("{}: {error}", dir.display()),
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn write(path: &Path, names: &[&str]) {
        let tensors: HashMap<String, Tensor> = names
            .iter()
            .enumerate()
            .map(|(i, name)| {
                (
                    (*name).to_string(),
                    Tensor::full(i as f32, (2, 3), &Device::Cpu).expect("tensor"),
                )
            })
            .collect();
        candle_core::safetensors::save(&tensors, path).expect("save");
    }

    fn message(result: Result<TensorFolder>) -> String {
        result.expect_err("should be refused").to_string()
    }

    #[test]
    fn shards_are_read_through_the_index_and_each_fault_names_the_file() {
        let dir = tempfile::tempdir().expect("dir");
        let dir = dir.path();
        write(&dir.join("a-1.safetensors"), &["x", "y"]);
        write(&dir.join("a-2.safetensors"), &["z"]);
        let index = |text: &str| std::fs::write(dir.join(INDEX), text).expect("index");

        index(r#"{"weight_map": {"x": "a-1.safetensors", "y": "a-1.safetensors", "z": "a-2.safetensors"}}"#);
        let folder = TensorFolder::open(dir).expect("open");
        assert_eq!(folder.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["x", "y", "z"]);
        let y = folder.get("y", &Device::Cpu).expect("y");
        assert_eq!(y.to_vec2::<f32>().expect("values"), vec![vec![1.0; 3]; 2]);
        assert!(
            folder
                .get("w", &Device::Cpu)
                .expect_err("absent")
                .to_string()
                .contains("no tensor named w")
        );

        index(r#"{"weight_map": {"x": "a-1.safetensors", "z": "a-3.safetensors"}}"#);
        assert!(message(TensorFolder::open(dir)).contains("a-3.safetensors"));
        index(r#"{"weight_map": {"x": "a-2.safetensors", "y": "a-1.safetensors"}}"#);
        assert!(message(TensorFolder::open(dir)).contains("tensor x is said to be in a-2.safetensors"));
        index(r#"{"weight_map": {"q": "a-2.safetensors"}}"#);
        assert!(message(TensorFolder::open(dir)).contains("tensor q"));
        index(r#"{"weight_map": {"x": "../a-1.safetensors"}}"#);
        assert!(message(TensorFolder::open(dir)).contains("not a plain file name"));
        index("{");
        assert!(message(TensorFolder::open(dir)).contains(INDEX));
    }

    #[test]
    fn a_name_in_two_files_is_refused_unless_the_single_file_settles_it() {
        let dir = tempfile::tempdir().expect("dir");
        let dir = dir.path();
        assert!(message(TensorFolder::open(dir)).contains("no model.safetensors"));
        write(&dir.join("b.safetensors"), &["x"]);
        write(&dir.join("a.safetensors"), &["x"]);
        let text = message(TensorFolder::open(dir));
        assert!(
            text.contains("tensor x is also in") && text.contains("b.safetensors"),
            "{text}"
        );
        write(&dir.join(SINGLE), &["x"]);
        assert_eq!(TensorFolder::open(dir).expect("single file").len(), 1);
    }

    #[test]
    fn a_truncated_file_is_refused_by_name() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join(SINGLE);
        write(&path, &["x", "y"]);
        let whole = std::fs::read(&path).expect("bytes");
        for keep in [0, 4, 40, whole.len() - 1] {
            std::fs::write(&path, &whole[..keep]).expect("cut");
            assert!(
                message(TensorFolder::open(dir.path())).contains(SINGLE),
                "{keep} bytes kept"
            );
        }
    }
}
