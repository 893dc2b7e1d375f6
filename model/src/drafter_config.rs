//! The drafter's `config.json`: every published spelling in, one resolved struct out.

/// A drafter's shape and rules, resolved: no field depends on another's default any more.
#[derive(Debug, Clone, PartialEq)]
pub struct DrafterConfig {
    /// Residual width, H; equal to the target's.
    pub hidden_size: usize,
    /// Feed-forward width, I.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Channels of a head; RoPE rotates all of them.
    pub head_dim: usize,
    /// One entry a drafter layer: its visibility rule.
    pub layers: Vec<LayerRule>,
    /// Rows of the target's embedding, V.
    pub vocab_size: usize,
    /// Decoder layers of the target.
    pub num_target_layers: usize,
    /// Tapped target layers (output of layer id), strictly increasing, each below `num_target_layers - 1`.
    pub target_layer_ids: Vec<usize>,
    /// Slots of a block, anchor included, B >= 2.
    pub block_size: usize,
    /// Embedding row that fills the slots to be predicted.
    pub mask_token_id: u32,
    /// Epsilon of every norm.
    pub rms_norm_eps: f64,
    /// RoPE base.
    pub rope_theta: f64,
    /// Longest position served, in tokens.
    pub max_positions: usize,
    /// Multiplies the logits before the soft cap; 1 when absent.
    pub output_multiplier: f64,
    /// u = cap * tanh(u / cap) when present.
    pub final_logit_softcapping: Option<f64>,
    /// Multiplies the block's embeddings; 1 when absent.
    pub input_embedding_scale: f64,
    /// DFlash 2's grouped dynamic convolution around both sublayers.
    pub conv: Option<ConvConfig>,
    /// DFlash 2's candidate selector.
    pub selector: Option<SelectorConfig>,
}

/// Who sees whom in one layer. Context is visible strictly before the anchor in every case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerRule {
    /// W of `|q - k| < W` (causal: `0 <= q - k < W`); no limit when absent.
    pub window: Option<usize>,
    /// Whether a slot sees only itself and the slots before it in its block.
    pub causal: bool,
}

/// Sizes of the grouped dynamic convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvConfig {
    /// Taps, K: the current slot and K - 1 before it.
    pub kernel_size: usize,
    /// Channels that share a dynamic coefficient, g; divides H.
    pub group_size: usize,
}

/// Sizes of the candidate selector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectorConfig {
    /// Codebook width, r.
    pub rank: usize,
    /// Candidates a slot, k.
    pub top_k: usize,
}
