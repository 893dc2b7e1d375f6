//! What cannot be known must not be learned: tokens drawn at random, each with its own identity in its taps.
//!
//! Any accuracy above chance would mean that a block sees its labels' taps, another block's, or its own labels. The
//! control shifts the visible context over the labels and must be learned, so the test can fail.

use candle_core::{Device, Tensor};
use dflash_data::rng::Stream;
use dflash_model::ops::Compute;
use dflash_model::{Block, Blocks, ConvConfig, DrafterConfig, LayerRule, SelectorConfig, TargetHead, init};
use dflash_train::loss::StepSums;

use crate::learn;

const VOCAB: usize = 16;
const HIDDEN: usize = 32;
const BLOCK: usize = 4;
const LENGTH: usize = 40;
const STEPS: u64 = 300;

fn config() -> DrafterConfig {
    DrafterConfig {
        hidden_size: HIDDEN,
        intermediate_size: 64,
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 32,
        layers: vec![LayerRule {
            window: None,
            causal: false,
        }],
        vocab_size: VOCAB,
        num_target_layers: 4,
        target_layer_ids: vec![1],
        block_size: BLOCK,
        mask_token_id: 15,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        max_positions: 512,
        output_multiplier: 1.0,
        final_logit_softcapping: None,
        input_embedding_scale: 1.0,
        conv: Some(ConvConfig {
            kernel_size: 2,
            group_size: 16,
        }),
        selector: Some(SelectorConfig { rank: 8, top_k: 4 }),
    }
}

fn random(seed: u64, rows: usize, deviation: f64) -> Tensor {
    let values = init::normal(seed, rows * HIDDEN, deviation);
    Tensor::from_vec(values, (rows, HIDDEN), &Device::Cpu).unwrap()
}

/// Two packed samples of random tokens; the taps of a position are its own token's row of `features`.
fn batch(step: u64, features: &Tensor, shift: usize) -> (Blocks, Tensor) {
    let mut stream = Stream::new(&[17, step]);
    let tokens: Vec<u32> = (0..2 * LENGTH).map(|_| stream.below(15) as u32).collect();
    let mut blocks = Blocks {
        block_size: BLOCK,
        blocks: Vec::new(),
        anchors: Vec::new(),
        context_positions: (0..2 * LENGTH).map(|i| (i % LENGTH) as u32).collect(),
        labels: Vec::new(),
        supervised: Vec::new(),
    };
    for start in [0, LENGTH] {
        // anchors closer than a block, so that leaks between neighbours would show too
        for anchor in (1..LENGTH - BLOCK).step_by(3) {
            blocks.blocks.push(Block {
                context_start: start,
                anchor: anchor + shift,
            });
            blocks.anchors.push(tokens[start + anchor]);
            blocks
                .labels
                .extend_from_slice(&tokens[start + anchor..start + anchor + BLOCK]);
            blocks.supervised.extend((0..BLOCK).map(|slot| slot != 0));
        }
    }
    let ids = Tensor::from_slice(&tokens, tokens.len(), &Device::Cpu).unwrap();
    (blocks, features.index_select(&ids, 0).unwrap())
}

/// Accuracy of the last tenth of the steps, unary and of the selector on its hits.
fn accuracy(shift: usize) -> (f64, f64) {
    let (config, embed) = (config(), random(1, VOCAB, 0.3));
    let head = TargetHead {
        head: embed.clone(),
        embed,
    };
    let features = random(2, VOCAB, 1.0);
    let batches = (0..STEPS).map(|step| batch(step, &features, shift));
    let steps = learn(config, Compute::F32, false, &head, (0.99, 0.0), batches);
    let mut last = StepSums::default();
    for sums in &steps[steps.len() * 9 / 10..] {
        last.add(sums);
    }
    let correct: u64 = last.slot_correct.iter().sum();
    (
        correct as f64 / last.slots() as f64,
        last.selector_correct as f64 / last.hits.max(1) as f64,
    )
}

#[test]
fn random_tokens_cannot_be_learned_unless_their_taps_are_shown() {
    let (unary, selector) = accuracy(0);
    // chance is 1 in 15, and 1 in 4 on hits; some 1,900 slots are counted
    assert!(unary < 0.1, "a leak: {unary} of random tokens were predicted");
    assert!(
        selector < 0.35,
        "a leak: the selector found {selector} of random tokens"
    );
    let (shown, _) = accuracy(BLOCK);
    assert!(shown > 0.3, "the control learned only {shown}");
}
