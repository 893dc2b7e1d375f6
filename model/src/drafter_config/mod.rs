//! The drafter's `config.json`: every published spelling in, one resolved struct out.
//!
//! `parse` reads the three spellings in the wild (flat, nested since June 2026, DFlash 2) and refuses what they
//! contradict each other about; `write` puts down one file that every engine reads; `shapes` is the tensor list
//! that a configuration stands for; `remarks` says what a readable file leaves to the guess of an engine. What makes a configuration sound is said once, in [`DrafterConfig::validate`].

mod keys;
mod parse;
mod remarks;
mod shapes;
mod write;

use candle_core::Result;

use crate::target::TargetInfo;

/// The largest size that any field may hold: keeps every product of two of them, and their sum, inside 64 bits.
const LARGEST_SIZE: usize = 1 << 24;

/// The most layers that a drafter or its target may have.
const MOST_LAYERS: usize = 1 << 12;

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

/// The taps that a drafter of `num_layers` layers has when its configuration names none: evenly spaced from layer
/// 1 to layer N - 3, round(1 + i (N - 4) / (n - 1)) with halves to the even number; N / 2 for a single layer.
///
/// Too small a target gives repeated ids, which [`DrafterConfig::validate`] refuses.
pub fn default_target_layer_ids(num_target_layers: usize, num_layers: usize) -> Vec<usize> {
    if num_layers == 1 {
        return vec![num_target_layers / 2];
    }
    let span = num_target_layers as f64 - 4.0;
    let gaps = num_layers as f64 - 1.0;
    (0..num_layers)
        .map(|i| (1.0 + i as f64 * span / gaps).round_ties_even() as usize)
        .collect()
}

impl DrafterConfig {
    /// Whether this is a DFlash 2 drafter: convolution and selector, or neither.
    pub fn is_dflash2(&self) -> bool {
        self.selector.is_some()
    }

    /// The one window of all sliding layers, if any layer slides.
    pub fn sliding_window(&self) -> Option<usize> {
        self.layers.iter().find_map(|layer| layer.window)
    }

    /// Checks everything that a published configuration promises.
    ///
    /// # Errors
    /// On the first field that does not hold, naming it, what was expected and what came.
    pub fn validate(&self) -> Result<()> {
        self.check().map_err(candle_core::Error::msg)
    }

    /// Checks that this drafter was made for a target of these sizes.
    ///
    /// # Errors
    /// Listing every size that differs.
    pub fn check_target(&self, info: &TargetInfo) -> Result<()> {
        let pairs = [
            ("hidden_size", self.hidden_size, info.hidden_size),
            ("vocab_size", self.vocab_size, info.vocab_size),
            ("num_target_layers", self.num_target_layers, info.num_layers),
        ];
        let mismatches: Vec<String> = pairs
            .iter()
            .filter(|(_, drafter, target)| drafter != target)
            .map(|(field, drafter, target)| format!("{field}: the drafter expects {drafter}, the target has {target}"))
            .collect();
        if mismatches.is_empty() {
            return Ok(());
        }
        candle_core::bail!("this drafter belongs to another target: {}", mismatches.join("; "))
    }

    fn check(&self) -> std::result::Result<(), String> {
        self.check_sizes()?;
        self.check_numbers()?;
        self.check_taps()?;
        self.check_layers()?;
        self.check_dflash2()
    }

    fn check_sizes(&self) -> std::result::Result<(), String> {
        let sizes = [
            ("hidden_size", self.hidden_size, LARGEST_SIZE),
            ("intermediate_size", self.intermediate_size, LARGEST_SIZE),
            ("num_attention_heads", self.num_heads, LARGEST_SIZE),
            ("num_key_value_heads", self.num_kv_heads, LARGEST_SIZE),
            ("head_dim", self.head_dim, LARGEST_SIZE),
            ("num_hidden_layers", self.layers.len(), MOST_LAYERS),
            ("vocab_size", self.vocab_size, LARGEST_SIZE),
            ("num_target_layers", self.num_target_layers, MOST_LAYERS),
            ("max_position_embeddings", self.max_positions, LARGEST_SIZE),
        ];
        for (field, size, most) in sizes {
            if size == 0 || size > most {
                return Err(format!("{field}: expected 1 to {most}, got {size}"));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(format!(
                "num_key_value_heads: expected a divisor of num_attention_heads {}, got {}",
                self.num_heads, self.num_kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!(
                "head_dim: expected an even number, RoPE rotates halves, got {}",
                self.head_dim
            ));
        }
        if self.block_size < 2 || self.block_size > LARGEST_SIZE {
            return Err(format!(
                "block_size: expected at least 2 (the anchor and one predicted slot) and at most {LARGEST_SIZE}, got {}",
                self.block_size
            ));
        }
        if self.block_size > self.max_positions {
            return Err(format!(
                "block_size: expected at most max_position_embeddings {}, got {}",
                self.max_positions, self.block_size
            ));
        }
        if self.mask_token_id as usize >= self.vocab_size {
            return Err(format!(
                "mask_token_id: expected a row below vocab_size {}, got {}",
                self.vocab_size, self.mask_token_id
            ));
        }
        Ok(())
    }

    fn check_numbers(&self) -> std::result::Result<(), String> {
        let numbers = [
            ("rms_norm_eps", Some(self.rms_norm_eps)),
            ("rope_theta", Some(self.rope_theta)),
            ("output_multiplier", Some(self.output_multiplier)),
            ("input_embedding_scale", Some(self.input_embedding_scale)),
            ("final_logit_softcapping", self.final_logit_softcapping),
        ];
        for (field, number) in numbers {
            if let Some(number) = number
                && !(number.is_finite() && number > 0.0)
            {
                return Err(format!("{field}: expected a finite number above 0, got {number}"));
            }
        }
        Ok(())
    }

    fn check_taps(&self) -> std::result::Result<(), String> {
        let taps = &self.target_layer_ids;
        if taps.is_empty() {
            return Err("target_layer_ids: expected at least one target layer, got none".to_owned());
        }
        if let Some([before, after, ..]) = taps.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(format!(
                "target_layer_ids: expected distinct, increasing ids, got {before} before {after} in {taps:?}"
            ));
        }
        let last = taps[taps.len() - 1];
        if last + 1 >= self.num_target_layers {
            return Err(format!(
                "target_layer_ids: expected ids below {} (num_target_layers {} without the last layer), got {last} \
                 in {taps:?}",
                self.num_target_layers - 1,
                self.num_target_layers
            ));
        }
        Ok(())
    }

    /// The format knows one window for all sliding layers, and causality either for all layers or by sliding.
    fn check_layers(&self) -> std::result::Result<(), String> {
        let mut first_window = None;
        for (i, layer) in self.layers.iter().enumerate() {
            let Some(window) = layer.window else { continue };
            if window == 0 || window > LARGEST_SIZE {
                return Err(format!(
                    "sliding_window: expected 1 to {LARGEST_SIZE}, got {window} in layer {i}"
                ));
            }
            if self.block_size > window {
                return Err(format!(
                    "block_size: expected at most sliding_window {window} (layer {i}), a slot must see its whole \
                     block, got {}",
                    self.block_size
                ));
            }
            let first = *first_window.get_or_insert(window);
            if window != first {
                return Err(format!(
                    "sliding_window: the format holds one window for all sliding layers, got {first} and {window} \
                     (layer {i})"
                ));
            }
        }
        let uniform = self.layers.iter().all(|layer| layer.causal == self.layers[0].causal);
        let by_sliding = self.layers.iter().all(|layer| layer.causal == layer.window.is_some());
        if !uniform && !by_sliding {
            let causal: Vec<bool> = self.layers.iter().map(|layer| layer.causal).collect();
            return Err(format!(
                "is_causal: the format can say all layers, no layer, or exactly the sliding ones; got {causal:?} \
                 layer by layer"
            ));
        }
        Ok(())
    }

    fn check_dflash2(&self) -> std::result::Result<(), String> {
        let (conv, selector) = match (self.conv, self.selector) {
            (None, None) => return Ok(()),
            (Some(conv), Some(selector)) => (conv, selector),
            (Some(_), None) => {
                return Err(
                    "selector_rank, selector_top_k: expected beside conv_kernel_size and conv_group_size (DFlash 2 \
                     has both parts, DFlash neither), got none"
                        .to_owned(),
                );
            }
            (None, Some(_)) => {
                return Err(
                    "conv_kernel_size, conv_group_size: expected beside selector_rank and selector_top_k (DFlash 2 \
                     has both parts, DFlash neither), got none"
                        .to_owned(),
                );
            }
        };
        if conv.kernel_size == 0 || conv.kernel_size > self.block_size {
            return Err(format!(
                "conv_kernel_size: expected 1 to block_size {}, got {}",
                self.block_size, conv.kernel_size
            ));
        }
        if conv.group_size == 0 || !self.hidden_size.is_multiple_of(conv.group_size) {
            return Err(format!(
                "conv_group_size: expected a divisor of hidden_size {}, got {}",
                self.hidden_size, conv.group_size
            ));
        }
        if selector.rank == 0 || selector.rank > LARGEST_SIZE {
            return Err(format!(
                "selector_rank: expected 1 to {LARGEST_SIZE}, got {}",
                selector.rank
            ));
        }
        if selector.top_k == 0 || selector.top_k > self.vocab_size {
            return Err(format!(
                "selector_top_k: expected 1 to vocab_size {}, got {}",
                self.vocab_size, selector.top_k
            ));
        }
        Ok(())
    }
}
