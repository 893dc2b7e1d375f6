//! The target as everything else sees it: one trait, one session, one verify transaction.
//!
//! A [`Target`] is shared and immutable; a [`Session`] is one sequence being decoded, with its attention and
//! gated-delta-net caches. Tap id `i` is the output of decoder layer `i` (0-based), before the final norm.

pub(crate) mod attention;
mod composed;
mod composed_delta;
mod composed_session;
pub mod config;
mod cpu;
mod cpu_mixers;
mod cpu_session;
mod delta;
mod delta_chunk;
pub(crate) mod kernels;
mod weights;

use std::path::Path;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::tensor_file::TensorFolder;
pub use config::TargetConfig;
pub use weights::Weights;

/// Loads the target in `dir` (`config.json` and its tensors) onto `device`, computing in `compute`: F32 or BF16.
///
/// # Errors
/// When the model is not a dense Qwen3.5 or Qwen3, a tensor is missing, unexpected or misshapen, or `compute` is another
/// type.
pub fn load(dir: &Path, device: &Device, compute: DType) -> Result<Box<dyn Target>> {
    if !device.is_cpu() {
        return load_composed(dir, device, compute);
    }
    let (config, folder) = open(dir, compute)?;
    let weights = weights::Weights::check(&folder, &config)?;
    Ok(Box::new(cpu::CpuTarget::load(
        &weights,
        config,
        compute == DType::BF16,
    )?))
}

/// As [`load`], made of candle tensor operations on any device: slower on the CPU, where it serves as the twin of the
/// kernels.
///
/// # Errors
/// As [`load`].
pub fn load_composed(dir: &Path, device: &Device, compute: DType) -> Result<Box<dyn Target>> {
    let (config, folder) = open(dir, compute)?;
    let weights = weights::Weights::check(&folder, &config)?;
    Ok(Box::new(composed::ComposedTarget::load(
        &weights, config, device, compute,
    )?))
}

fn open(dir: &Path, compute: DType) -> Result<(TargetConfig, TensorFolder)> {
    if !matches!(compute, DType::F32 | DType::BF16) {
        bail!("compute type {}: expected f32 or bf16", compute.as_str())
    }
    Ok((TargetConfig::read(dir)?, TensorFolder::open(dir)?))
}

/// What other rooms need to know of a target.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetInfo {
    /// `qwen3_5` or `qwen3`.
    pub model_type: String,
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Decoder layers, N.
    pub num_layers: usize,
    /// Rows of the embedding (padded vocabulary), V.
    pub vocab_size: usize,
    /// Longest sequence that the target was made for, in tokens.
    pub max_positions: usize,
    /// RoPE base of the full-attention layers.
    pub rope_theta: f64,
    /// Epsilon of the RMS norms.
    pub rms_norm_eps: f64,
    /// Whether the head is the embedding.
    pub tied: bool,
}

/// The two frozen matrices that a drafter borrows from its target, in their stored type.
#[derive(Debug, Clone)]
pub struct TargetHead {
    /// Token embedding, [V, H].
    pub embed: Tensor,
    /// Language-model head, [V, H]; the same tensor as `embed` when tied.
    pub head: Tensor,
}

impl TargetHead {
    /// Both matrices widened to f32; one copy when tied.
    pub fn in_f32(&self) -> Result<Self> {
        let head = self.head.to_dtype(DType::F32)?;
        let embed = if self.embed.id() == self.head.id() {
            head.clone()
        } else {
            self.embed.to_dtype(DType::F32)?
        };
        Ok(Self { embed, head })
    }
}

/// Which rows of a forward pass get logits (each costs V x H multiplications).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// No logits: filling a cache.
    None,
    /// The last row only, [1, V].
    Last,
    /// All rows, [T, V].
    All,
}

/// What one forward pass over T tokens returns.
#[derive(Debug, Clone)]
pub struct Forward {
    /// f32 logits, [rows, V]; absent for [`LogitRows::None`].
    pub logits: Option<Tensor>,
    /// Tap states concatenated in the order of the session's tap list, [T, n_taps * H], compute dtype.
    pub taps: Tensor,
}

/// A frozen language model.
pub trait Target: Send + Sync {
    /// Sizes and names.
    fn info(&self) -> &TargetInfo;

    /// Embedding and head, shared, not copied.
    fn head(&self) -> &TargetHead;

    /// Starts an empty sequence that reports these taps.
    ///
    /// # Errors
    /// When a tap id is not below N - 1 or the list is not strictly increasing.
    fn session(&self, taps: &[usize]) -> Result<Box<dyn Session + '_>>;

    /// Tap states of a whole sequence, [T, n_taps * H], without logits and without the layers above the last tap.
    fn taps(&self, tokens: &[u32], taps: &[usize]) -> Result<Tensor>;
}

/// One sequence and its caches.
pub trait Session {
    /// Tokens already in the caches.
    fn len(&self) -> usize;

    /// Whether nothing has been fed yet.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Feeds tokens after those cached and keeps them. Prompt and plain decoding both come through here.
    fn forward(&mut self, tokens: &[u32], rows: LogitRows) -> Result<Forward>;

    /// Runs tokens after those cached without keeping them: the session changes only by [`VerifyStep::commit`].
    fn verify(&mut self, tokens: &[u32]) -> Result<VerifyStep<'_>>;

    /// What the gated-delta-net layers remember, one entry a layer, `None` for full attention. For inspection.
    ///
    /// # Errors
    /// When this kind of session keeps no such states.
    fn delta_net_states(&self) -> Result<Vec<Option<DeltaNetState>>> {
        bail!("this session keeps no gated-delta-net states")
    }
}

/// The memory of one gated-delta-net layer.
#[derive(Debug, Clone)]
pub struct DeltaNetState {
    /// Last inputs of the convolution, oldest first, [taps - 1, channels].
    pub conv_tail: Tensor,
    /// S, f32, [value heads, key channels, value channels].
    pub state: Tensor,
}

/// What a target hands out of a verify pass: the outcome and the half-finished cache update.
pub trait Verified {
    /// Keeps the first `n` of the verified tokens in the session's caches.
    fn commit(self: Box<Self>, n: usize) -> Result<()>;
}

/// A verify pass over T tokens that is not yet part of the session. Dropping it leaves the session as it was.
pub struct VerifyStep<'s> {
    /// f32 logits of every row, [T, V].
    pub logits: Tensor,
    /// Tap states of every row, [T, n_taps * H].
    pub taps: Tensor,
    /// Number of tokens verified, T.
    pub rows: usize,
    pending: Box<dyn Verified + 's>,
}

impl<'s> VerifyStep<'s> {
    /// Wraps a pass; called by targets.
    pub fn new(logits: Tensor, taps: Tensor, rows: usize, pending: Box<dyn Verified + 's>) -> Self {
        Self {
            logits,
            taps,
            rows,
            pending,
        }
    }

    /// Keeps the first `n` of the T tokens (0 <= n <= T) and drops the rest.
    ///
    /// # Errors
    /// When `n` is larger than T; the session is then unchanged.
    pub fn commit(self, n: usize) -> Result<()> {
        if n > self.rows {
            bail!("commit of {n} tokens: the verify pass had {}", self.rows)
        }
        self.pending.commit(n)
    }
}

/// Refuses a tap list that is not strictly increasing below N - 1.
pub(crate) fn check_taps(taps: &[usize], info: &TargetInfo) -> Result<()> {
    if let Some([first, second]) = taps.windows(2).find(|pair| pair[0] >= pair[1]) {
        bail!("taps {taps:?}: {first} does not come before {second}, expected strictly increasing ids")
    }
    match taps.last() {
        Some(last) if last + 1 >= info.num_layers => bail!(
            "taps {taps:?}: layer {last} of {} layers; the last layer's output is only used after the final norm, expected \
             ids below {}",
            info.num_layers,
            info.num_layers - 1
        ),
        _ => Ok(()),
    }
}

/// Refuses an empty input, ids outside the vocabulary and positions that the target was not made for.
pub(crate) fn check_tokens(tokens: &[u32], start: usize, info: &TargetInfo) -> Result<()> {
    if tokens.is_empty() {
        bail!("no tokens to run")
    }
    if let Some((i, token)) = tokens
        .iter()
        .enumerate()
        .find(|(_, token)| **token as usize >= info.vocab_size)
    {
        bail!(
            "token {i} is {token}: the target's vocabulary has {} rows",
            info.vocab_size
        )
    }
    let end = start + tokens.len();
    if end > info.max_positions {
        bail!(
            "{start} tokens and {} more: the target serves {} positions",
            tokens.len(),
            info.max_positions
        )
    }
    Ok(())
}
