//! The training operations, forward and backward, at the sizes of a step of the small shape (H 512, 5 layers, B 16, 512
//! context rows, 32 blocks, V 8,192). `scripts/bench.sh ops`; criterion keeps the last run and prints the change.

use std::hint::black_box;
use std::sync::Arc;

use candle_core::{Device, Result, Tensor, Var};
use criterion::Criterion;
use dflash_model::ops::{self, AttentionPlan, Compute, LogitShape, Rotation, Weight};
use dflash_model::{Block, LayerRule, init};

const HIDDEN: usize = 512;
const INTERMEDIATE: usize = 1536;
const VOCAB: usize = 8192;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const CONTEXT: usize = 512;
const BLOCKS: usize = 32;
const BLOCK: usize = 16;
const SLOTS: usize = BLOCKS * BLOCK;
const CANDIDATES: usize = 16;

fn random(seed: u64, shape: &[usize]) -> Result<Tensor> {
    let values = init::normal(seed, shape.iter().product(), 0.5);
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// Times `forward`, and `forward` with the gradients of `vars`.
fn both(c: &mut Criterion, name: &str, vars: &[&Var], forward: impl Fn() -> Result<Tensor>) {
    let mut group = c.benchmark_group(name);
    group.sample_size(20);
    group.bench_function("forward", |b| b.iter(|| black_box(forward())));
    group.bench_function("forward and backward", |b| {
        b.iter(|| {
            let gradients = forward().and_then(|y| y.backward());
            let found = gradients.map(|all| vars.iter().filter(|var| all.get(var).is_some()).count());
            assert_eq!(found.ok(), Some(vars.len()), "{name}: a gradient is missing");
        });
    });
    group.finish();
}

fn matrix_products(c: &mut Criterion) -> Result<()> {
    let (x, w) = (
        Var::from_tensor(&random(1, &[SLOTS, HIDDEN])?)?,
        Var::from_tensor(&random(2, &[INTERMEDIATE, HIDDEN])?)?,
    );
    for (name, compute) in [("linear f32", Compute::F32), ("linear bf16", Compute::Bf16)] {
        let weight = Weight::Plain(w.as_tensor().clone(), compute);
        both(c, name, &[&x, &w], || weight.apply(&x));
    }
    Ok(())
}

fn loss(c: &mut Criterion) -> Result<()> {
    let hidden = random(1, &[SLOTS, HIDDEN])?;
    let head = random(2, &[VOCAB, HIDDEN])?.to_dtype(candle_core::DType::BF16)?;
    let labels: Vec<u32> = (0..SLOTS).map(|i| (i * 37 % VOCAB) as u32).collect();
    let weights = vec![1.0 / SLOTS as f32; SLOTS];
    let shape = LogitShape {
        multiplier: 1.0,
        softcap: None,
    };
    for (name, compute) in [("f32", Compute::F32), ("bf16", Compute::Bf16)] {
        let id = format!("linear_cross_entropy {name}, loss, gradient and {CANDIDATES} best");
        c.bench_function(&id, |b| {
            b.iter(|| {
                black_box(ops::linear_cross_entropy(
                    &hidden, &head, &labels, &weights, shape, CANDIDATES, compute,
                ))
            });
        });
    }
    Ok(())
}

fn attention(c: &mut Criterion) -> Result<()> {
    let q = Var::from_tensor(&random(1, &[SLOTS, HEADS, HEAD_DIM])?)?;
    let k = Var::from_tensor(&random(2, &[CONTEXT + SLOTS, KV_HEADS, HEAD_DIM])?)?;
    let v = Var::from_tensor(&random(3, &[CONTEXT + SLOTS, KV_HEADS, HEAD_DIM])?)?;
    let blocks: Vec<Block> = (0..BLOCKS)
        .map(|i| Block {
            context_start: 0,
            anchor: 8 + i * (CONTEXT - 32) / BLOCKS,
        })
        .collect();
    for (name, window) in [("block_attention", None), ("block_attention, window 64", Some(64))] {
        let plan = AttentionPlan {
            blocks: Arc::new(blocks.clone()),
            block_size: BLOCK,
            context_rows: CONTEXT,
            rule: LayerRule { window, causal: false },
        };
        both(c, name, &[&q, &k, &v], || ops::block_attention(&q, &k, &v, &plan));
    }
    Ok(())
}

fn row_by_row(c: &mut Criterion) -> Result<()> {
    let x = Var::from_tensor(&random(1, &[SLOTS, HIDDEN])?)?;
    let norm = Var::from_tensor(&random(2, &[HIDDEN])?)?;
    both(c, "rms_norm", &[&x, &norm], || ops::rms_norm(&x, &norm, 1e-6));

    let q = Var::from_tensor(&random(3, &[SLOTS, HEADS, HEAD_DIM])?)?;
    let rotation = Rotation::new(0..SLOTS, HEAD_DIM, 1e7);
    both(c, "rope", &[&q], || ops::rope(&q, &rotation));

    let gate = Var::from_tensor(&random(4, &[SLOTS, INTERMEDIATE])?)?;
    let up = Var::from_tensor(&random(5, &[SLOTS, INTERMEDIATE])?)?;
    both(c, "swiglu", &[&gate, &up], || ops::swiglu(&gate, &up));

    let delta = Var::from_tensor(&random(6, &[SLOTS, 2 * 2 * HIDDEN / 16])?)?;
    let base = Var::from_tensor(&random(7, &[2, 2, HIDDEN])?)?;
    both(c, "grouped_conv", &[&x, &delta, &base], || {
        ops::grouped_conv(&x, &delta, &base, 0, BLOCK)
    });

    let table = Var::from_tensor(&random(8, &[VOCAB, 256])?)?;
    let paired = Var::from_tensor(&random(9, &[SLOTS, 256])?)?;
    let ids: Arc<Vec<u32>> = Arc::new((0..SLOTS * CANDIDATES).map(|i| (i * 131 % VOCAB) as u32).collect());
    both(c, "gathered_dot", &[&paired, &table], || {
        ops::gathered_dot(&paired, &table, &ids, CANDIDATES)
    });
    Ok(())
}

fn main() {
    dflash_model::leave_threads_to_rayon();
    let mut criterion = Criterion::default().configure_from_args();
    for part in [matrix_products, loss, attention, row_by_row] {
        if let Err(error) = part(&mut criterion) {
            eprintln!("ops: {error}");
            std::process::exit(1);
        }
    }
    criterion.final_summary();
}
