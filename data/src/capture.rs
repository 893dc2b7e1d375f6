//! Capture: runs the target over examples once and stores its taps.
//!
//! A folder holds `manifest.json` and `taps-NNNNN.safetensors`. Record i of a shard is three tensors:
//! `{i:08}.tokens` U32 `[T]`, `{i:08}.loss_mask` U8 `[T]`, `{i:08}.taps` BF16 [T, n_taps * H].
//! Examples fill shards in their order; a shard is written beside, synced, renamed and only then recorded in the
//! manifest. So a killed capture goes on with the first shard that is not recorded, and ends with the same bytes as
//! one that was never interrupted.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device};
use dflash_model::{Target, with_threads_awake};
use half::bf16;
use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::files::{beside, publish};
use crate::manifest::{Identity, Manifest, RecordEntry, checksum};
use crate::tokens::Example;

/// Size at which a shard is closed unless the caller says otherwise: 512 MiB.
pub const DEFAULT_SHARD_BYTES: u64 = 512 << 20;

/// Settings of [`capture`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaptureConfig {
    /// Folder of the taps; made when missing.
    pub folder: PathBuf,
    /// Whose taps these are. A folder that holds others is refused.
    pub identity: Identity,
    /// Size of a shard, in bytes. One record may be larger. It is also about what a capture holds in memory.
    pub shard_bytes: u64,
    /// Examples that run at a time: 0 for one a thread. 1 leaves all threads (or the device) to each example.
    pub workers: usize,
}

/// Bytes that the taps of so many tokens take on disk, without file headers.
pub fn estimate_bytes(tokens: usize, taps: usize, hidden_size: usize) -> u64 {
    // per token: u32 id, one byte of mask, bf16 taps
    tokens as u64 * (4 + 1 + 2 * taps as u64 * hidden_size as u64)
}

/// Stores the taps of all examples that the folder does not hold yet. `progress` hears (done, total) in examples.
///
/// # Errors
/// When the folder holds taps of another target, tokenizer, template, thinking mode or layer list, or of other
/// examples; when another capture is writing into it; when a tap id is not allowed; when the target gives a
/// non-finite tap. Complete shards stay.
pub fn capture(
    target: &dyn Target,
    examples: &[Example],
    config: &CaptureConfig,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<()> {
    let identity = &config.identity;
    check_layers(&identity.layers, target.info().num_layers)?;
    ensure!(
        identity.hidden_size == target.info().hidden_size,
        "hidden_size: the run says {}, the target has {}",
        identity.hidden_size,
        target.info().hidden_size
    );
    ensure!(!examples.is_empty(), "no examples to take taps of");
    let folder = &config.folder;
    std::fs::create_dir_all(folder).with_context(|| format!("{}: cannot make the folder", folder.display()))?;
    let _lock = lock(folder)?;
    let mut manifest = manifest_to_continue(folder, identity, examples)?;
    progress(manifest.records.len(), examples.len());
    for shard in plan_shards(
        manifest.records.len(),
        examples,
        identity.tap_width(),
        config.shard_bytes,
    ) {
        let mut done = shard[0];
        let one = |i: usize| record(target, identity, i, &examples[i]);
        let records = in_parallel(&shard, config.workers, &one, &mut || {
            done += 1;
            progress(done, examples.len());
        })?;
        let index = manifest.shards.len();
        let name = format!("taps-{index:05}.safetensors");
        write_shard(&folder.join(&name), &records, identity.tap_width())?;
        manifest.shards.push(name);
        manifest.records.extend(records.into_iter().map(|record| RecordEntry {
            shard: index,
            ..record.entry
        }));
        manifest.write(folder)?;
    }
    Ok(())
}

/// Tap ids must be strictly increasing and below N - 1: what layer N - 1 gives is named differently by every tool
/// (before or after the final norm).
pub fn check_layers(layers: &[usize], num_layers: usize) -> Result<()> {
    ensure!(!layers.is_empty(), "tap layers: expected at least one");
    for pair in layers.windows(2) {
        ensure!(
            pair[0] < pair[1],
            "tap layers {layers:?}: expected strictly increasing ids"
        );
    }
    for &layer in layers {
        ensure!(
            layer + 1 < num_layers,
            "tap layer {layer}: expected an id below {} (the target has {num_layers} layers, and its last cannot be tapped)",
            num_layers.saturating_sub(1)
        );
    }
    Ok(())
}

/// Taps of one example, rounded to bf16: [T, n_taps * H], row-major. `i` is its index, for errors.
pub(crate) fn taps_of_example(target: &dyn Target, layers: &[usize], i: usize, example: &Example) -> Result<Vec<bf16>> {
    let info = target.info();
    let place = || format!("example {i} (line {})", example.source);
    let length = example.tokens.len();
    ensure!(
        (1..=info.max_positions).contains(&length) && example.loss_mask.len() == length,
        "{}: {length} tokens with a mask of {}, expected 1 to {}",
        place(),
        example.loss_mask.len(),
        info.max_positions
    );
    if let Some(token) = example.tokens.iter().find(|&&token| token as usize >= info.vocab_size) {
        bail!(
            "{}: token {token}, but the target has {} rows of embedding",
            place(),
            info.vocab_size
        )
    }
    let taps = with_threads_awake(|| target.taps(&example.tokens, layers)).with_context(place)?;
    let expected = [length, layers.len() * info.hidden_size];
    ensure!(
        taps.dims() == expected,
        "{}: taps of shape {:?}, expected {expected:?}",
        place(),
        taps.dims()
    );
    let values = taps
        .to_dtype(DType::BF16)
        .and_then(|taps| taps.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<bf16>())
        .with_context(place)?;
    if let Some(at) = values.iter().position(|value| !value.is_finite()) {
        let (row, column) = (at / expected[1], at % expected[1]);
        bail!(
            "{}: tap {} of layer {} is {} at position {row}",
            place(),
            column % info.hidden_size,
            layers[column / info.hidden_size],
            values[at]
        )
    }
    Ok(values)
}

/// Little-endian bytes of tokens and mask, as they are stored and hashed.
pub(crate) fn input_bytes(example: &Example) -> (Vec<u8>, Vec<u8>) {
    (
        example.tokens.iter().flat_map(|token| token.to_le_bytes()).collect(),
        example.loss_mask.iter().map(|&on| u8::from(on)).collect(),
    )
}

/// One example ready to be written.
struct Record {
    index: usize,
    tokens: Vec<u8>,
    loss_mask: Vec<u8>,
    taps: Vec<u8>,
    entry: RecordEntry,
}

fn record(target: &dyn Target, identity: &Identity, index: usize, example: &Example) -> Result<Record> {
    let taps = taps_of_example(target, &identity.layers, index, example)?;
    let taps: Vec<u8> = taps.iter().flat_map(|value| value.to_le_bytes()).collect();
    let (tokens, loss_mask) = input_bytes(example);
    let entry = RecordEntry {
        source: example.source,
        tokens: example.tokens.len(),
        shard: 0,
        inputs: checksum(&[&tokens, &loss_mask]),
        checksum: checksum(&[&tokens, &loss_mask, &taps]),
    };
    Ok(Record {
        index,
        tokens,
        loss_mask,
        taps,
        entry,
    })
}

/// The manifest of the folder, if what it holds is a beginning of what is asked for; else a new one.
fn manifest_to_continue(folder: &Path, identity: &Identity, examples: &[Example]) -> Result<Manifest> {
    if !folder.join(crate::manifest::FILE).exists() {
        return Ok(Manifest::new(identity.clone(), examples.len()));
    }
    let mut manifest = Manifest::read(folder)?;
    let place = || folder.display().to_string();
    manifest.identity.check(identity).with_context(place)?;
    ensure!(
        manifest.records.len() <= examples.len(),
        "{}: holds {} examples, this run has {}: capture into another folder",
        place(),
        manifest.records.len(),
        examples.len()
    );
    for (i, (stored, example)) in manifest.records.iter().zip(examples).enumerate() {
        let (tokens, loss_mask) = input_bytes(example);
        let wanted = checksum(&[&tokens, &loss_mask]);
        ensure!(
            stored.inputs == wanted,
            "{}: example {i} is {} (line {}), this run has {wanted} (line {}): capture into another folder",
            place(),
            stored.inputs,
            stored.source,
            example.source
        );
    }
    manifest.total = examples.len();
    Ok(manifest)
}

/// Groups the examples from `first` on, in order, into shards of at most `shard_bytes` (or one record).
fn plan_shards(first: usize, examples: &[Example], tap_width: usize, shard_bytes: u64) -> Vec<Vec<usize>> {
    let mut shards: Vec<Vec<usize>> = Vec::new();
    let mut filled = 0;
    for (i, example) in examples.iter().enumerate().skip(first) {
        let bytes = estimate_bytes(example.tokens.len(), 1, tap_width);
        match shards.last_mut() {
            Some(open) if filled + bytes <= shard_bytes => {
                open.push(i);
                filled += bytes;
            }
            _ => {
                shards.push(vec![i]);
                filled = bytes;
            }
        }
    }
    shards
}

fn write_shard(path: &Path, records: &[Record], tap_width: usize) -> Result<()> {
    let mut tensors = Vec::with_capacity(3 * records.len());
    for record in records {
        let (name, rows) = (format!("{:08}", record.index), record.entry.tokens);
        let parts = [
            ("tokens", Dtype::U32, vec![rows], &record.tokens),
            ("loss_mask", Dtype::U8, vec![rows], &record.loss_mask),
            ("taps", Dtype::BF16, vec![rows, tap_width], &record.taps),
        ];
        for (part, dtype, shape, bytes) in parts {
            tensors.push((format!("{name}.{part}"), TensorView::new(dtype, shape, bytes)?));
        }
    }
    let unfinished = beside(path);
    let written = safetensors::serialize_to_file(tensors, None, &unfinished)
        .map_err(anyhow::Error::from)
        .and_then(|()| Ok(File::open(&unfinished)?.sync_all()?));
    if let Err(error) = written {
        let _ = std::fs::remove_file(&unfinished);
        return Err(error.context(format!("{}: cannot write", unfinished.display())));
    }
    publish(&unfinished, path)
}

/// Runs `job` over items on `workers` threads, results in the order of the items; `done` is called on this thread
/// after each.
fn in_parallel<T: Send>(
    items: &[usize],
    workers: usize,
    job: &(dyn Fn(usize) -> Result<T> + Sync),
    done: &mut dyn FnMut(),
) -> Result<Vec<T>> {
    if workers == 1 {
        let mut results = Vec::with_capacity(items.len());
        for &item in items {
            results.push(job(item)?);
            done();
        }
        return Ok(results);
    }
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(workers)
        .build()
        .context("cannot start the worker threads")?;
    std::thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        let running = scope.spawn(move || {
            pool.install(|| {
                items
                    .par_iter()
                    .with_max_len(1)
                    .map_with(sender, |sender, &item| {
                        let result = job(item)?;
                        // the receiver outlives all senders
                        let _ = sender.send(());
                        Ok(result)
                    })
                    .collect::<Result<Vec<T>>>()
            })
        });
        for () in receiver {
            done();
        }
        match running.join() {
            Ok(results) => results,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Holds the folder for this process; the system lets go of it when the process ends, however it ends.
#[cfg(unix)]
fn lock(folder: &Path) -> Result<File> {
    let handle = File::open(folder).with_context(|| format!("{}: cannot open", folder.display()))?;
    match handle.try_lock() {
        Ok(()) => Ok(handle),
        Err(std::fs::TryLockError::WouldBlock) => {
            bail!("{}: another capture is writing into this folder", folder.display())
        }
        Err(std::fs::TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("{}: cannot lock", folder.display()))
        }
    }
}

/// Folders cannot be opened as files here, so two captures into one folder are not told apart.
#[cfg(not(unix))]
fn lock(_folder: &Path) -> Result<()> {
    Ok(())
}
