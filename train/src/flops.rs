//! How near a training step comes to what this machine's products reach: its multiply-adds beside one large product.

use std::time::Instant;

use candle_core::{Device, Result, Tensor};
use dflash_model::ops::{Compute, Weight};
use dflash_model::{DrafterConfig, init};

/// Products of which the fastest tells the rate.
const REPEATS: usize = 5;

/// Floating-point operations (a multiply-add is two) of the products with weights in one step: forward and gradients of
/// `anchors` blocks, every slot but the anchors supervised, on `context` rows. Attention, convolutions, pair scores and
/// everything element by element are left out, so a share of the machine's rate that is formed from it is on the low side.
pub fn of_step(config: &DrafterConfig, context: usize, anchors: usize) -> f64 {
    let h = config.hidden_size;
    let slots = anchors * config.block_size;
    let supervised = anchors * (config.block_size - 1);
    let (queries, keys) = (
        config.num_heads * config.head_dim,
        2 * config.num_kv_heads * config.head_dim,
    );
    let layer = slots * h * (2 * queries + keys + 3 * config.intermediate_size) + context * h * keys;
    let selector = config.selector.map_or(0, |selector| supervised * h * selector.rank);
    // taps want no gradient
    let join = 2 * context * config.target_layer_ids.len() * h * h;
    // logits, and the head's rows weighted by them; the head is frozen
    let head = 2 * supervised * h * config.vocab_size;
    2. * (3 * (config.layers.len() * layer + selector) + join + head) as f64
}

/// Floating-point operations a second of one product [1024, 1024] x [1024, 8192] as a step computes it, its weight packed
/// anew each time.
///
/// # Errors
/// When memory is short.
pub fn product_rate(compute: Compute) -> Result<f64> {
    let (rows, k, n) = (1024, 1024, 8192);
    let random = |seed, rows: usize| Tensor::from_vec(init::normal(seed, rows * k, 0.5), (rows, k), &Device::Cpu);
    let (x, weight) = (random(1, rows)?, Weight::Plain(random(2, n)?, compute));
    let mut best = f64::INFINITY;
    for _ in 0..REPEATS {
        let start = Instant::now();
        weight.apply(&x)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(2. * (rows * k * n) as f64 / best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflash_model::LayerRule;

    #[test]
    fn a_step_counted_by_hand() {
        let rule = LayerRule {
            window: None,
            causal: false,
        };
        let config = DrafterConfig {
            hidden_size: 8,
            intermediate_size: 16,
            num_heads: 2,
            num_kv_heads: 1,
            head_dim: 4,
            layers: vec![rule; 2],
            vocab_size: 32,
            num_target_layers: 4,
            target_layer_ids: vec![1, 2],
            block_size: 4,
            mask_token_id: 31,
            rms_norm_eps: 1e-6,
            rope_theta: 1e4,
            max_positions: 64,
            output_multiplier: 1.0,
            final_logit_softcapping: None,
            input_embedding_scale: 1.0,
            conv: None,
            selector: None,
        };
        // a slot: q 64, o 64, k and v 64, gate, up and down 384; a context row: k and v 64, join 128
        let (slots, context, supervised) = (3 * 4, 20, 3 * 3);
        let layers = 2 * (slots * 576 + context * 64);
        let expected = 2 * (3 * layers + 2 * context * 128 + 2 * supervised * 8 * 32);
        assert!((of_step(&config, context, 3) - f64::from(expected as u32)).abs() < 0.5);
    }
}
