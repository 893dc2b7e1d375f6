//! Stored taps: memory-mapped shards, any record at any time, checked before its first use.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use half::bf16;
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::tensor::{Dtype, Metadata, SafeTensors};

use crate::manifest::{Identity, Manifest, RecordEntry, checksum};
use crate::source::Sample;
use crate::tokens::Example;

/// An opened tap folder.
#[derive(Debug)]
pub struct TapStore {
    identity: Identity,
    shards: Vec<Shard>,
    records: Vec<Place>,
}

/// One record, still in the mapped file.
#[derive(Debug, Clone, Copy)]
pub struct Record<'s> {
    tokens: &'s [u8],
    loss_mask: &'s [u8],
    taps: &'s [u8],
    tap_width: usize,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    map: Mmap,
}

#[derive(Debug)]
struct Place {
    entry: RecordEntry,
    tokens: (usize, usize),
    loss_mask: (usize, usize),
    taps: (usize, usize),
    verified: AtomicBool,
}

impl TapStore {
    /// Opens a complete tap folder that must hold what the run expects.
    ///
    /// # Errors
    /// When the taps are of another target, tokenizer, template, thinking mode or layer list (both values named),
    /// when the capture is not complete, or when a shard is missing, cut off or lacks a record.
    pub fn open(folder: &Path, expected: &Identity) -> Result<Self> {
        let store = Self::open_any(folder)?;
        store
            .identity
            .check(expected)
            .with_context(|| folder.display().to_string())?;
        Ok(store)
    }

    /// Opens a complete tap folder, whosever taps it holds.
    pub fn open_any(folder: &Path) -> Result<Self> {
        let manifest = Manifest::read(folder)?;
        ensure!(
            manifest.records.len() == manifest.total,
            "{}: holds {} of {} examples: the capture was interrupted, run it again to complete it",
            folder.display(),
            manifest.records.len(),
            manifest.total
        );
        let mut shards = Vec::with_capacity(manifest.shards.len());
        let mut tensors = Vec::with_capacity(manifest.shards.len());
        for name in &manifest.shards {
            let path = folder.join(name);
            let (map, placed) = open_shard(&path).with_context(|| path.display().to_string())?;
            shards.push(Shard { path, map });
            tensors.push(placed);
        }
        let tap_width = manifest.identity.tap_width();
        let records = manifest
            .records
            .into_iter()
            .enumerate()
            .map(|(i, entry)| {
                let path = &shards[entry.shard].path;
                place(&tensors[entry.shard], i, entry, tap_width).with_context(|| path.display().to_string())
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            identity: manifest.identity,
            shards,
            records,
        })
    }

    /// Whose taps these are.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Number of records.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there are no records.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Tokens of every record, in order.
    pub fn lengths(&self) -> Vec<usize> {
        self.records.iter().map(|place| place.entry.tokens).collect()
    }

    /// Length of a tap row, n_taps * H.
    pub fn tap_width(&self) -> usize {
        self.identity.tap_width()
    }

    /// Record `i`. Its checksum is verified the first time.
    ///
    /// # Errors
    /// When there is no such record, or its bytes are not those that were captured.
    pub fn get(&self, i: usize) -> Result<Record<'_>> {
        let place = self.place(i)?;
        let record = self.record(place);
        if !place.verified.load(Ordering::Acquire) {
            let found = checksum(&[record.tokens, record.loss_mask, record.taps]);
            ensure!(
                found == place.entry.checksum,
                "{}: record {i} is damaged: checksum {found}, the manifest says {}",
                self.shards[place.entry.shard].path.display(),
                place.entry.checksum
            );
            place.verified.store(true, Ordering::Release);
        }
        Ok(record)
    }

    /// Tokens and mask of record `i`, without touching its taps.
    ///
    /// # Errors
    /// When there is no such record, or its tokens or mask are not those that were captured.
    pub fn example(&self, i: usize) -> Result<Example> {
        let place = self.place(i)?;
        let record = self.record(place);
        let found = checksum(&[record.tokens, record.loss_mask]);
        ensure!(
            found == place.entry.inputs,
            "{}: tokens of record {i} are damaged: checksum {found}, the manifest says {}",
            self.shards[place.entry.shard].path.display(),
            place.entry.inputs
        );
        Ok(Example {
            tokens: record.tokens(),
            loss_mask: record.loss_mask(),
            source: place.entry.source,
        })
    }

    /// Reads everything and verifies every checksum, on all threads.
    pub fn verify_all(&self) -> Result<()> {
        (0..self.len()).into_par_iter().try_for_each(|i| self.get(i).map(|_| ()))
    }

    fn place(&self, i: usize) -> Result<&Place> {
        let count = self.records.len();
        self.records.get(i).with_context(|| format!("record {i}: the folder holds {count}"))
    }

    fn record(&self, place: &Place) -> Record<'_> {
        let map = &self.shards[place.entry.shard].map;
        Record {
            tokens: &map[place.tokens.0..place.tokens.1],
            loss_mask: &map[place.loss_mask.0..place.loss_mask.1],
            taps: &map[place.taps.0..place.taps.1],
            tap_width: self.tap_width(),
        }
    }
}

impl Record<'_> {
    /// Token ids, [T].
    pub fn tokens(&self) -> Vec<u32> {
        let quads = self.tokens.chunks_exact(4);
        quads.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    /// Loss mask, [T].
    pub fn loss_mask(&self) -> Vec<bool> {
        self.loss_mask.iter().map(|&byte| byte != 0).collect()
    }

    /// Tap values in row order, read from the mapped file as they are asked for.
    pub fn taps(&self) -> impl ExactSizeIterator<Item = bf16> + '_ {
        self.taps.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]))
    }

    /// Length of a tap row, n_taps * H.
    pub fn tap_width(&self) -> usize {
        self.tap_width
    }

    /// The record in memory.
    pub fn to_sample(&self) -> Sample {
        Sample {
            tokens: self.tokens(),
            loss_mask: self.loss_mask(),
            taps: self.taps().collect(),
            tap_width: self.tap_width,
        }
    }
}

/// Type, shape and byte range in the file of each tensor of a shard, by name.
type Placed = HashMap<String, (Dtype, Vec<usize>, (usize, usize))>;

fn open_shard(path: &Path) -> Result<(Mmap, Placed)> {
    let file = File::open(path).context("cannot open")?;
    let map = map(&file).context("cannot map")?;
    let (header, metadata): (usize, Metadata) =
        SafeTensors::read_metadata(&map).map_err(|error| anyhow::anyhow!("not a safetensors file: {error}"))?;
    let data = 8 + header;
    let expected = data + metadata.data_len();
    ensure!(map.len() == expected, "{} bytes, its header says {expected}: cut off or overwritten", map.len());
    let placed = metadata
        .tensors()
        .into_iter()
        .map(|(name, info)| {
            let range = (data + info.data_offsets.0, data + info.data_offsets.1);
            (name, (info.dtype, info.shape.clone(), range))
        })
        .collect();
    Ok((map, placed))
}

#[expect(unsafe_code, reason = "a memory map cannot be made otherwise")]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: shards are never changed in place: they are written under another name and renamed, and a capture only
    // adds new ones. Whoever truncates one by hand while it is mapped gets a bus error, as with any mapped file.
    unsafe { Mmap::map(file) }
}

fn place(tensors: &Placed, i: usize, entry: RecordEntry, tap_width: usize) -> Result<Place> {
    let find = |part: &str, dtype: Dtype, shape: &[usize]| {
        let name = format!("{i:08}.{part}");
        let (found_dtype, found_shape, range) = tensors.get(&name).with_context(|| format!("no tensor {name}"))?;
        ensure!(
            *found_dtype == dtype && found_shape == shape,
            "{name}: {found_dtype:?} {found_shape:?}, expected {dtype:?} {shape:?}"
        );
        Ok(*range)
    };
    Ok(Place {
        tokens: find("tokens", Dtype::U32, &[entry.tokens])?,
        loss_mask: find("loss_mask", Dtype::U8, &[entry.tokens])?,
        taps: find("taps", Dtype::BF16, &[entry.tokens, tap_width])?,
        entry,
        verified: AtomicBool::new(false),
    })
}
