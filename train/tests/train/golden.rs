//! The loss of every step of a short run, held to what was recorded: a change of the loss, a gradient, the initial values or
//! the optimizer shows here, however small.
//!
//! `DFLASH_RECORD=1 cargo test -p dflash-train --test train golden` records anew; say in the commit why the curve moved.

use std::path::Path;

use candle_core::{Device, Tensor};
use dflash_data::rng::Stream;
use dflash_model::ops::Compute;
use dflash_model::{Block, Blocks, ConvConfig, DrafterConfig, LayerRule, SelectorConfig, TargetHead, init};
use dflash_train::loss::StepSums;

use crate::learn;

const VOCAB: usize = 48;
const HIDDEN: usize = 32;
const BLOCK: usize = 6;
const LENGTH: usize = 64;
const STEPS: u64 = 60;

/// Two layers of every kind: a causal one with a window, and one that sees all.
fn config(second: bool) -> DrafterConfig {
    let rule = |window, causal| LayerRule { window, causal };
    DrafterConfig {
        hidden_size: HIDDEN,
        intermediate_size: 80,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 8,
        layers: vec![rule(Some(16), true), rule(None, false)],
        vocab_size: VOCAB,
        num_target_layers: 6,
        target_layer_ids: vec![1, 3],
        block_size: BLOCK,
        mask_token_id: 47,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        max_positions: 512,
        output_multiplier: 1.0,
        final_logit_softcapping: None,
        input_embedding_scale: 1.0,
        conv: second.then_some(ConvConfig {
            kernel_size: 2,
            group_size: 16,
        }),
        selector: second.then_some(SelectorConfig { rank: 8, top_k: 4 }),
    }
}

fn random(seed: u64, rows: usize, columns: usize, deviation: f64) -> Tensor {
    let values = init::normal(seed, rows * columns, deviation);
    Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap()
}

/// A text in which each token mostly decides the next, its taps, and blocks on it.
fn batch(step: u64, features: &Tensor) -> (Blocks, Tensor) {
    let mut stream = Stream::new(&[23, step]);
    let mut tokens = vec![stream.below(47) as u32];
    while tokens.len() < LENGTH {
        let last = tokens[tokens.len() - 1];
        let surprise = stream.below(8) == 0;
        tokens.push(if surprise {
            stream.below(47) as u32
        } else {
            (last * 5 + 3) % 47
        });
    }
    let starts: Vec<usize> = (1..LENGTH - BLOCK).step_by(7).collect();
    let labels = starts.iter().flat_map(|start| tokens[*start..start + BLOCK].to_vec());
    let blocks = Blocks {
        block_size: BLOCK,
        blocks: starts
            .iter()
            .map(|anchor| Block {
                context_start: 0,
                anchor: *anchor,
            })
            .collect(),
        anchors: starts.iter().map(|start| tokens[*start]).collect(),
        context_positions: (0..LENGTH as u32).collect(),
        labels: labels.collect(),
        supervised: (0..starts.len() * BLOCK).map(|slot| slot % BLOCK != 0).collect(),
    };
    let ids = Tensor::from_slice(&tokens, LENGTH, &Device::Cpu).unwrap();
    (blocks, features.index_select(&ids, 0).unwrap())
}

/// Mean loss of every step, nats: tokens' and, where there is a selector, the selector's.
fn curve(second: bool, compute: Compute, recompute: bool) -> Vec<[f64; 2]> {
    let config = config(second);
    let embed = random(1, VOCAB, HIDDEN, 0.3);
    let head = random(4, VOCAB, HIDDEN, 0.3);
    let head = TargetHead { embed, head };
    let features = random(2, VOCAB, 2 * HIDDEN, 1.0);
    let mean = |sums: StepSums| {
        [
            sums.base_loss / sums.weight,
            sums.selector_loss / sums.selector_weight.max(1e-9),
        ]
    };
    let steps = learn(
        config,
        compute,
        recompute,
        &head,
        (0.95, 0.01),
        (0..STEPS).map(|step| batch(step, &features)),
    );
    steps.into_iter().map(mean).collect()
}

/// `tolerance`: relative, for the last bits in which processors differ, grown over the steps.
fn golden(name: &str, second: bool, compute: Compute, tolerance: f64) {
    let now = curve(second, compute, false);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/golden/{name}.json"));
    if std::env::var_os("DFLASH_RECORD").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, serde_json::to_string_pretty(&now).unwrap() + "\n").unwrap();
    }
    let recorded: Vec<[f64; 2]> = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(now.len(), recorded.len());
    for (step, (now, recorded)) in now.iter().zip(&recorded).enumerate() {
        for (now, recorded) in now.iter().zip(recorded) {
            let apart = (now - recorded).abs();
            assert!(
                apart <= tolerance * (1.0 + recorded),
                "{name}, step {step}: loss {now}, recorded {recorded}"
            );
        }
    }
    let mean = |steps: &[[f64; 2]]| steps.iter().map(|loss| loss[0]).sum::<f64>() / steps.len() as f64;
    assert!(mean(&now[50..]) < 0.8 * mean(&now[..5]), "nothing was learned: {now:?}");
}

#[test]
fn dflash_in_f32_learns_as_recorded() {
    golden("dflash-f32", false, Compute::F32, 1e-4);
}

#[test]
fn dflash2_in_f32_learns_as_recorded() {
    golden("dflash2-f32", true, Compute::F32, 1e-4);
}

#[test]
fn dflash2_in_bf16_learns_as_recorded() {
    golden("dflash2-bf16", true, Compute::Bf16, 1e-2);
}

#[test]
fn recomputed_activations_learn_the_same_bits() {
    for compute in [Compute::F32, Compute::Bf16] {
        assert_eq!(curve(true, compute, false), curve(true, compute, true));
    }
}
