//! The target as everything else sees it: one trait, one session, one verify transaction.
//!
//! A [`Target`] is shared and immutable; a [`Session`] is one sequence being decoded, with its attention and
//! gated-delta-net caches. Tap id `i` is the output of decoder layer `i` (0-based), before the final norm.

use candle_core::{DType, Result, Tensor};

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
            candle_core::bail!("commit of {n} tokens: the verify pass had {}", self.rows)
        }
        self.pending.commit(n)
    }
}
