//! A drafter's names in llama.cpp: its metadata keys, and each published tensor's name there.
//!
//! Facts from llama.cpp's `src/llama-arch.cpp` and `src/models/dflash.cpp` (version 0.6.0).

/// `general.architecture` of a drafter, and the prefix of its keys.
pub const ARCHITECTURE: &str = "dflash";

/// Keys of a drafter behind `dflash.`: what is read here and written by `dflash-export gguf`.
pub mod keys {
    /// Longest position, tokens.
    pub const CONTEXT_LENGTH: &str = "context_length";
    /// H.
    pub const EMBEDDING_LENGTH: &str = "embedding_length";
    /// Layers.
    pub const BLOCK_COUNT: &str = "block_count";
    /// Feed-forward width.
    pub const FEED_FORWARD_LENGTH: &str = "feed_forward_length";
    /// Query heads.
    pub const HEAD_COUNT: &str = "attention.head_count";
    /// Key/value heads.
    pub const HEAD_COUNT_KV: &str = "attention.head_count_kv";
    /// Channels of a key head.
    pub const KEY_LENGTH: &str = "attention.key_length";
    /// Channels of a value head.
    pub const VALUE_LENGTH: &str = "attention.value_length";
    /// Epsilon of every norm.
    pub const RMS_EPSILON: &str = "attention.layer_norm_rms_epsilon";
    /// Whether a slot sees only itself and earlier slots, in every layer.
    pub const CAUSAL: &str = "attention.causal";
    /// Window of the sliding layers.
    pub const SLIDING_WINDOW: &str = "attention.sliding_window";
    /// Which layers slide, a flag a layer.
    pub const SLIDING_WINDOW_PATTERN: &str = "attention.sliding_window_pattern";
    /// RoPE base.
    pub const ROPE_BASE: &str = "rope.freq_base";
    /// Channels that RoPE rotates.
    pub const ROPE_DIMENSIONS: &str = "rope.dimension_count";
    /// For targets with three-part positions: [half a head, 0, 0, 0], which is plain RoPE.
    pub const ROPE_SECTIONS: &str = "rope.dimension_sections";
    /// Slots of a block, anchor included.
    pub const BLOCK_SIZE: &str = "block_size";
    /// Tapped layers, counted by what enters them: our ids plus 1.
    pub const TARGET_LAYERS: &str = "target_layers";
    /// Whether slot 0 predicts, too.
    pub const SAMPLE_FROM_ANCHOR: &str = "sample_from_anchor";
    /// Taps of the convolution.
    pub const CONV_KERNEL_SIZE: &str = "conv_kernel_size";
    /// Channels that share a coefficient.
    pub const CONV_GROUP_SIZE: &str = "conv_group_size";
    /// Codebook width.
    pub const SELECTOR_RANK: &str = "selector_rank";
    /// Candidates a slot.
    pub const SELECTOR_TOP_K: &str = "selector_top_k";
    /// Multiplies the logits.
    pub const LOGIT_SCALE: &str = "logit_scale";
    /// Soft cap of the logits, 0 for none.
    pub const SOFTCAP: &str = "final_logit_softcapping";
    /// Multiplies the block's embeddings.
    pub const EMBEDDING_SCALE: &str = "embedding_scale";
    /// Activation of the feed-forward layers.
    pub const HIDDEN_ACTIVATION: &str = "hidden_activation";
    /// Rows of the target's embedding.
    pub const VOCAB_SIZE: &str = "vocab_size";

    /// All of the above.
    pub const ALL: [&str; 27] = [
        CONTEXT_LENGTH,
        EMBEDDING_LENGTH,
        BLOCK_COUNT,
        FEED_FORWARD_LENGTH,
        HEAD_COUNT,
        HEAD_COUNT_KV,
        KEY_LENGTH,
        VALUE_LENGTH,
        RMS_EPSILON,
        CAUSAL,
        SLIDING_WINDOW,
        SLIDING_WINDOW_PATTERN,
        ROPE_BASE,
        ROPE_DIMENSIONS,
        ROPE_SECTIONS,
        BLOCK_SIZE,
        TARGET_LAYERS,
        SAMPLE_FROM_ANCHOR,
        CONV_KERNEL_SIZE,
        CONV_GROUP_SIZE,
        SELECTOR_RANK,
        SELECTOR_TOP_K,
        LOGIT_SCALE,
        SOFTCAP,
        EMBEDDING_SCALE,
        HIDDEN_ACTIVATION,
        VOCAB_SIZE,
    ];
}

/// Key of the mask token's id.
pub const MASK_TOKEN: &str = "tokenizer.ggml.mask_token_id";
/// Key of the token texts.
pub const TOKENS: &str = "tokenizer.ggml.tokens";

/// Published name and GGUF name of the tensors outside the layers.
const OUTSIDE: [(&str, &str); 6] = [
    ("fc.weight", "fc.weight"),
    ("hidden_norm.weight", "enc.output_norm.weight"),
    ("norm.weight", "output_norm.weight"),
    ("candidate_selector.predecessor_codebook", "selector_predecessor.weight"),
    ("candidate_selector.successor_codebook", "selector_successor.weight"),
    ("candidate_selector.hidden_projection.weight", "selector_hidden.weight"),
];

/// The same inside a layer: behind `layers.N.` and `blk.N.`.
const INSIDE: [(&str, &str); 15] = [
    ("input_layernorm.weight", "attn_norm.weight"),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
    ("attention_conv.base_kernel", "attn_conv_base"),
    ("attention_conv.kernel_projection.weight", "attn_conv_proj.weight"),
    ("mlp_conv.base_kernel", "ffn_conv_base"),
    ("mlp_conv.kernel_projection.weight", "ffn_conv_proj.weight"),
];

/// A published tensor's name in a GGUF file; none for a name that no drafter has.
pub fn tensor_name(published: &str) -> Option<String> {
    let among = |table: &[(&str, &'static str)], name: &str| {
        table.iter().find(|(ours, _)| *ours == name).map(|(_, theirs)| *theirs)
    };
    if let Some(name) = among(&OUTSIDE, published) {
        return Some(name.to_owned());
    }
    let (layer, name) = published.strip_prefix("layers.")?.split_once('.')?;
    Some(format!("blk.{layer}.{}", among(&INSIDE, name)?))
}
