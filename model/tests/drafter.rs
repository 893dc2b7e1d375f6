//! The drafter against the authors' reference, and what must hold of any drafter.
//!
//! Fixtures: `fixtures/drafter/*`, written by `scripts/fixtures/drafter.py`.

#![expect(clippy::unwrap_used, reason = "fixtures are part of the test")]

use candle_core::{DType, Device, Tensor};
use dflash_model::ops::Compute;
use dflash_model::walk::{draft_distribution, walk};
use dflash_model::{
    Block, Blocks, BoundDrafter, Codebooks, ConvConfig, Drafter, DrafterConfig, Drafting, LayerRule, Params, Sampling,
    SelectorConfig, TargetHead,
};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

type Case = HashMap<String, Tensor>;

const TOLERANCE: f64 = 1e-5; // relative L2, f32

fn load_case(name: &str) -> (BoundDrafter, Case) {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/drafter")
        .join(name);
    let case = candle_core::safetensors::load(dir.with_extension("safetensors"), &Device::Cpu).unwrap();
    let head = TargetHead {
        embed: case["embed"].clone(),
        head: case["head"].clone(),
    };
    let drafter = if name == "v2_window_below_block" {
        with_narrow_windows(&dir)
    } else {
        Drafter::load(&dir, &Device::Cpu).unwrap()
    };
    (BoundDrafter::new(drafter, &head).unwrap(), case)
}

/// A drafter whose windows end inside its block. No such folder is read, because engines refuse it, but the mask is the
/// reference's all the same.
fn with_narrow_windows(dir: &Path) -> Drafter {
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    let narrow = json["sliding_window"].as_u64().unwrap() as usize;
    let refusal = Drafter::load(dir, &Device::Cpu).unwrap_err().to_string();
    assert!(refusal.contains(&format!("sliding_window {narrow}")), "{refusal}");
    json["sliding_window"] = 64.into();
    let mut config = DrafterConfig::from_json(&json, "config.json").unwrap();
    let params = Params::init(&config, Codebooks::Free, 0, &Device::Cpu).unwrap();
    for (name, tensor) in candle_core::safetensors::load(dir.join("model.safetensors"), &Device::Cpu).unwrap() {
        params.set(&name, &tensor).unwrap();
    }
    for layer in &mut config.layers {
        layer.window = layer.window.and(Some(narrow));
    }
    Drafter::new(config, &params).unwrap()
}

fn relative_l2(a: &Tensor, b: &Tensor) -> f64 {
    let norm = |t: &Tensor| f64::from(t.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap()).sqrt();
    norm(&(a - b).unwrap()) / norm(b)
}

fn ids(case: &Case, name: &str) -> Vec<u32> {
    let flat = case[name].to_dtype(DType::I64).unwrap().flatten_all().unwrap();
    flat.to_vec1::<i64>().unwrap().into_iter().map(|id| id as u32).collect()
}

const CASES: [&str; 9] = [
    "v1_full",
    "v1_mixed_causal",
    "v2_window_short",
    "v2_window_long",
    "v2_window_below_block",
    "v2_causal",
    "v2_scaled",
    "v2_kernel3",
    "v2_sampled",
];

/// Hidden states, logits and the greedy walk of every published variant equal the reference's.
#[test]
fn decoding_equals_the_reference() {
    for name in CASES {
        let (bound, case) = load_case(name);
        let drafter = bound.drafter();
        let mut context = drafter.decoding_context();
        // Fed in two pieces, as decoding does.
        let taps = &case["taps"];
        let rows = taps.dim(0).unwrap();
        drafter
            .extend(&mut context, &taps.narrow(0, 0, rows / 3).unwrap())
            .unwrap();
        drafter
            .extend(&mut context, &taps.narrow(0, rows / 3, rows - rows / 3).unwrap())
            .unwrap();
        let block = ids(&case, "block_ids");
        let b = drafter.config.block_size;
        let hidden = drafter.block_hidden(&context, block[0], b, bound.head()).unwrap();
        let distance = relative_l2(&hidden, &case["hidden"]);
        assert!(distance <= TOLERANCE, "{name}: hidden off by {distance:e}");
        let (slots, logits) = bound.slots(&context, block[0], b - 1).unwrap();
        let distance = relative_l2(&logits, &case["logits"]);
        assert!(distance <= TOLERANCE, "{name}: logits off by {distance:e}");
        let proposal = walk(&bound, &slots, &logits, block[0], &mut Sampling::Greedy).unwrap();
        assert_eq!(proposal.tokens(), ids(&case, "walk"), "{name}");
        if let Some(candidates) = case.get("candidates") {
            let expected: Vec<Vec<u32>> = candidates.to_dtype(DType::U32).unwrap().to_vec2().unwrap();
            for (slot, expected) in proposal.slots.iter().zip(expected) {
                let (mut a, mut b) = (slot.candidates.clone(), expected);
                a.sort_unstable();
                b.sort_unstable();
                assert_eq!(a, b, "{name}");
            }
        }
    }
}

/// The realised q of a sampled walk equals the reference's row along the same forced tokens.
#[test]
fn sampled_rows_equal_the_reference() {
    let (bound, case) = load_case("v2_sampled");
    let drafter = bound.drafter();
    let mut context = drafter.decoding_context();
    drafter.extend(&mut context, &case["taps"]).unwrap();
    let anchor = ids(&case, "block_ids")[0];
    let temperature = f64::from(case["temperature"].to_vec1::<f32>().unwrap()[0]);
    let forced = ids(&case, "forced");
    let (hidden, logits) = bound.slots(&context, anchor, forced.len()).unwrap();
    let rows = case["q"].to_vec2::<f32>().unwrap();
    let row_ids = case["q_candidates"]
        .to_dtype(DType::U32)
        .unwrap()
        .to_vec2::<u32>()
        .unwrap();
    let mut previous = anchor;
    for (i, token) in forced.iter().enumerate() {
        // A generator that always lands in the forced token's stretch of the cumulative row.
        let slot_hidden = hidden.narrow(0, i, 1).unwrap();
        let slot_logits = logits.narrow(0, i, 1).unwrap();
        let mut zero = || 0.0;
        let mut sampling = Sampling::Random {
            temperature,
            uniform: &mut zero,
        };
        let slot = &walk(&bound, &slot_hidden, &slot_logits, previous, &mut sampling)
            .unwrap()
            .slots[0];
        let total: f32 = slot.q.iter().sum();
        assert!((total - 1.0).abs() < 1e-5);
        for (id, q) in row_ids[i].iter().zip(&rows[i]) {
            let at = slot.candidates.iter().position(|c| c == id).unwrap();
            assert!(
                (slot.q[at] - q).abs() < 2e-5,
                "slot {i} token {id}: {} against {q}",
                slot.q[at]
            );
        }
        previous = *token;
    }
}

/// A sampled walk draws each candidate with its realised probability.
#[test]
fn a_walk_samples_its_own_distribution() {
    let (bound, case) = load_case("v2_sampled");
    let mut context = bound.drafter().decoding_context();
    bound.drafter().extend(&mut context, &case["taps"]).unwrap();
    let anchor = ids(&case, "block_ids")[0];
    let (hidden, logits) = bound.slots(&context, anchor, 1).unwrap();
    let draws = 4000;
    let mut counts: HashMap<u32, f64> = HashMap::new();
    let mut row = None;
    for i in 0..draws {
        let mut uniform = || dflash_model::init::uniform(5, i);
        let mut sampling = Sampling::Random {
            temperature: 1.3,
            uniform: &mut uniform,
        };
        let slot = walk(&bound, &hidden, &logits, anchor, &mut sampling)
            .unwrap()
            .slots
            .remove(0);
        *counts.entry(slot.token).or_default() += 1.0;
        row = Some((slot.candidates, slot.q));
    }
    let (candidates, q) = row.unwrap();
    let chi_square: f64 = candidates
        .iter()
        .zip(&q)
        .map(|(id, q)| {
            let expected = f64::from(*q) * draws as f64;
            (counts.get(id).copied().unwrap_or(0.0) - expected).powi(2) / expected.max(1e-9)
        })
        .sum();
    assert!(chi_square < 25.0, "chi-square {chi_square} over {} candidates", q.len());
    let uniform = draft_distribution(&[0.0, 0.0], 1.0);
    assert_eq!(uniform, [0.5, 0.5]);
}

fn small_config(dflash2: bool) -> DrafterConfig {
    DrafterConfig {
        hidden_size: 32,
        intermediate_size: 48,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 16,
        layers: vec![
            LayerRule {
                window: Some(20),
                causal: false,
            },
            LayerRule {
                window: Some(20),
                causal: false,
            },
        ],
        vocab_size: 64,
        num_target_layers: 8,
        target_layer_ids: vec![1, 4],
        block_size: 6,
        mask_token_id: 63,
        rms_norm_eps: 1e-6,
        rope_theta: 1e7,
        max_positions: 4096,
        output_multiplier: 1.0,
        final_logit_softcapping: None,
        input_embedding_scale: 1.0,
        conv: dflash2.then_some(ConvConfig {
            kernel_size: 2,
            group_size: 16,
        }),
        selector: dflash2.then_some(SelectorConfig { rank: 8, top_k: 5 }),
    }
}

fn random(seed: u64, shape: &[usize]) -> Tensor {
    let values = dflash_model::init::normal(seed, shape.iter().product(), 1.0);
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn small_head() -> TargetHead {
    let embed = random(100, &[64, 32]);
    TargetHead {
        head: embed.clone(),
        embed,
    }
}

fn blocks(anchors: &[(usize, usize)], lengths: &[usize]) -> Blocks {
    let b = 6;
    Blocks {
        block_size: b,
        blocks: anchors
            .iter()
            .map(|(context_start, anchor)| Block {
                context_start: *context_start,
                anchor: *anchor,
            })
            .collect(),
        anchors: (0..anchors.len() as u32).map(|n| n * 7 % 60).collect(),
        context_positions: lengths.iter().flat_map(|len| 0..*len as u32).collect(),
        labels: (0..(anchors.len() * b) as u32).map(|i| i * 5 % 60).collect(),
        supervised: (0..anchors.len() * b).map(|i| i % b != 0).collect(),
    }
}

/// Invariant 3: before its first update a DFlash 2 gives the bits of the DFlash inside it.
#[test]
fn a_fresh_dflash2_equals_dflash_bit_for_bit() {
    let (taps, head) = (random(1, &[30, 64]), small_head());
    let blocks = blocks(&[(0, 3), (0, 17), (18, 12)], &[18, 12]);
    let hidden = |dflash2: bool| {
        let params = Params::init(&small_config(dflash2), Codebooks::Factored, 7, &Device::Cpu).unwrap();
        let drafter = Drafter::new(small_config(dflash2), &params).unwrap();
        let hidden = drafter.hidden(&blocks, &taps, &head).unwrap();
        (hidden.to_vec2::<f32>().unwrap(), drafter)
    };
    let ((one, plain), (two, with_parts)) = (hidden(false), hidden(true));
    assert_eq!(one, two);
    // And the zero successor makes the walk the unary argmax.
    let propose = |drafter: Drafter| {
        let bound = BoundDrafter::new(drafter, &head).unwrap();
        let mut context = bound.drafter().decoding_context();
        bound.drafter().extend(&mut context, &taps).unwrap();
        let (hidden, logits) = bound.slots(&context, 9, 5).unwrap();
        walk(&bound, &hidden, &logits, 9, &mut Sampling::Greedy)
            .unwrap()
            .tokens()
    };
    assert_eq!(propose(plain), propose(with_parts));
}

/// Positions are computed, not looked up: a drafter whose stated limit is below its target's goes on past it.
#[test]
fn a_context_beyond_the_drafters_own_limit_drafts_as_under_a_wider_one() {
    let (taps, head) = (random(3, &[50, 64]), small_head());
    let drafts = |max_positions: usize| {
        let config = DrafterConfig {
            max_positions,
            ..small_config(true)
        };
        let params = perturbed(&config, Codebooks::Free);
        let bound = BoundDrafter::new(Drafter::new(config, &params).unwrap(), &head).unwrap();
        let mut session = bound.session().unwrap();
        session.extend(&taps).unwrap();
        session.propose(9, 5, &mut Sampling::Greedy).unwrap().tokens()
    };
    assert_eq!(drafts(16), drafts(4096));
}

/// Randomises every variable, so that no part is at its identity.
fn perturbed(config: &DrafterConfig, codebooks: Codebooks) -> Params {
    let params = Params::init(config, codebooks, 7, &Device::Cpu).unwrap();
    for (i, (name, var)) in params.vars().iter().enumerate() {
        let noise = (random(i as u64 + 500, var.dims()) * 0.2).unwrap();
        params.set(name, &(var.as_tensor() + noise).unwrap()).unwrap();
    }
    params
}

/// One set of weights gives the same hidden states over packed blocks and in a decoding context.
#[test]
fn training_form_equals_decoding_form() {
    let (taps, head) = (random(1, &[42, 64]), small_head());
    let blocks = blocks(&[(0, 0), (0, 3), (0, 29), (30, 12)], &[30, 12]);
    let config = small_config(true);
    let drafter = Drafter::new(config.clone(), &perturbed(&config, Codebooks::Factored)).unwrap();
    let all = drafter.hidden(&blocks, &taps, &head).unwrap();
    for (n, block) in blocks.blocks.iter().enumerate() {
        let mut context = drafter.decoding_context();
        drafter
            .extend(
                &mut context,
                &taps.narrow(0, block.context_start, block.anchor).unwrap(),
            )
            .unwrap();
        let one = drafter.block_hidden(&context, blocks.anchors[n], 6, &head).unwrap();
        let distance = relative_l2(&one, &all.narrow(0, n * 6, 6).unwrap());
        assert!(distance < 1e-5, "block {n}: {distance:e}");
    }
}

/// What a pass does not keep it computes again: hidden states and every gradient have the bits of a pass that kept all.
#[test]
fn recomputed_layers_give_the_same_bits() {
    let (head, blocks) = (small_head(), blocks(&[(0, 0), (0, 3), (0, 29), (30, 12)], &[30, 12]));
    for (second, compute) in [(false, Compute::F32), (true, Compute::F32), (true, Compute::Bf16)] {
        let config = small_config(second);
        let params = perturbed(&config, Codebooks::Factored);
        let taps = candle_core::Var::from_tensor(&random(1, &[42, 64])).unwrap();
        let run = |recompute: bool| {
            let drafter = Drafter::computing(config.clone(), &params, compute).unwrap();
            let drafter = if recompute { drafter.recomputing() } else { drafter };
            let hidden = drafter.hidden(&blocks, &taps, &head).unwrap();
            let loss = (&hidden * random(2, &[24, 32])).unwrap().sum_all().unwrap();
            let mut grads = loss.backward().unwrap();
            let inner = drafter.take_gradients().unwrap();
            let known: Vec<_> = params.vars().values().map(|var| var.id()).collect();
            assert!(
                inner.get_ids().all(|id| known.contains(id)),
                "a gradient that holds its graph"
            );
            grads.extend(inner).unwrap();
            assert_eq!(drafter.take_gradients().unwrap().get_ids().count(), 0, "taken twice");
            let bits = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let vars = params.vars().iter();
            let by_name = vars.filter_map(|(name, var)| Some((name.as_str(), bits(grads.get(var)?))));
            let all: Vec<(&str, Vec<f32>)> = by_name.chain([("taps", bits(grads.get(&taps).unwrap()))]).collect();
            (bits(&hidden), all)
        };
        let (kept, again) = (run(false), run(true));
        assert_eq!(kept.0, again.0);
        // all but the selector's, which these hidden states do not reach
        assert!(
            kept.1.len() > config.layers.len() * 11 && kept.1.iter().all(|(_, values)| values.iter().any(|x| *x != 0.))
        );
        for (kept, again) in kept.1.iter().zip(&again.1) {
            assert!(kept == again, "{} and {}", kept.0, again.0);
        }
        assert_eq!(kept.1.len(), again.1.len());
    }
}

/// Publication multiplies the factors out: the free codebooks score the same candidates alike.
#[test]
fn factored_codebooks_equal_their_published_tables() {
    let (head, config) = (small_head(), small_config(true));
    let params = perturbed(&config, Codebooks::Factored);
    let factored = Drafter::new(config.clone(), &params).unwrap();
    let published = params.published(&head).unwrap();
    let names: Vec<&String> = published.keys().collect();
    let expected: Vec<String> = config.tensor_shapes().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, expected.iter().collect::<Vec<_>>());
    let free = Params::init(&config, Codebooks::Free, 1, &Device::Cpu).unwrap();
    for (name, tensor) in &published {
        free.set(name, tensor).unwrap();
    }
    let free = Drafter::new(config, &free).unwrap();
    let hidden = random(3, &[4, 32]);
    let candidates = std::sync::Arc::new((0..20).map(|i| i * 3).collect::<Vec<u32>>());
    let edges = |drafter: &Drafter| {
        drafter
            .selector
            .as_ref()
            .unwrap()
            .edges(&hidden, &[1, 9, 63, 0], &candidates, &head)
            .unwrap()
            .scores
    };
    assert!(relative_l2(&edges(&factored), &edges(&free)) < 1e-5);
}

/// Invariants 1 and 2: what a block's hidden states depend on, exactly.
#[test]
fn no_gradient_reaches_the_anchor_or_another_block() {
    let (head, config) = (small_head(), small_config(true));
    let drafter = Drafter::new(config.clone(), &perturbed(&config, Codebooks::Factored)).unwrap();
    let layout = [(0usize, 5usize), (0, 6), (0, 11), (20, 4)];
    let blocks = blocks(&layout, &[20, 10]);
    let taps = candle_core::Var::from_tensor(&random(1, &[30, 64])).unwrap();
    let hidden = drafter.hidden(&blocks, taps.as_tensor(), &head).unwrap();
    for (n, (start, anchor)) in layout.iter().enumerate() {
        let mine = hidden.narrow(0, n * 6, 6).unwrap().sqr().unwrap().sum_all().unwrap();
        let grads = mine.backward().unwrap();
        let reach = grads
            .get(taps.as_tensor())
            .unwrap()
            .abs()
            .unwrap()
            .sum(1)
            .unwrap()
            .to_vec1::<f32>()
            .unwrap();
        for (row, reach) in reach.iter().enumerate() {
            let visible = row >= *start && row < start + anchor;
            assert_eq!(visible, *reach != 0.0, "block {n}, context row {row}");
        }
        // Another block's anchor token changes nothing here, not even a bit.
        let mut other = blocks.clone();
        other.anchors[(n + 1) % layout.len()] += 1;
        let changed = drafter.hidden(&other, taps.as_tensor(), &head).unwrap();
        let bits = |t: &Tensor| t.narrow(0, n * 6, 6).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(bits(&hidden), bits(&changed), "block {n}");
    }
}
