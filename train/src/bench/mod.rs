//! `dflash-train bench step`: how long one training step takes, on the shapes that the peer's benchmark uses.
//!
//! Random weights and taps: time does not depend on them. With `--peer DIR`, what `speculators_step.py --dump DIR` wrote is
//! read instead, and loss and gradients must equal the peer's before anything is timed.

mod dump;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use clap::{Args, ValueEnum};
use dflash_eval::console::threads;
use dflash_eval::speed::peak_memory;
use dflash_model::{Block, Blocks, Codebooks, ConvConfig, Drafter, DrafterConfig, LayerRule, Params, SelectorConfig};
use dflash_model::{TargetHead, init, with_threads_awake};
use serde::Serialize;

use crate::config::{Algorithm, Precision};
use crate::failure::{Blame, Failure};
use crate::flops;
use crate::gradient::Gradient;
use crate::loss::{LossSettings, total_weight};
use crate::optim::{AdamW, AdamWSettings};
use crate::step;
use dump::Dump;

/// Most context tokens, the positions of the shapes.
const MOST_CONTEXT: usize = 32_768;

/// Standard deviation of the numbers of embedding and head.
const DEVIATION: f64 = 0.02;

/// What to time.
#[derive(Debug, Clone, Args)]
pub struct StepArguments {
    /// Drafter and batch.
    #[arg(long, value_enum, default_value = "small")]
    pub shape: ShapeName,
    /// dflash or dflash2.
    #[arg(long, value_parser = algorithm, default_value = "dflash2")]
    pub algo: Algorithm,
    /// What the products are computed in: f32 or bf16.
    #[arg(long, value_parser = precision, default_value = "f32")]
    pub dtype: Precision,
    /// Timed steps, after one that is not.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub repeats: u32,
    /// Context tokens [default: the shape's].
    #[arg(long, value_name = "TOKENS")]
    pub context: Option<usize>,
    /// Blocks [default: the shape's].
    #[arg(long, value_name = "BLOCKS")]
    pub anchors: Option<usize>,
    /// Sliding window of every layer, in tokens [default: none].
    #[arg(long, value_name = "TOKENS")]
    pub window: Option<usize>,
    /// Standard deviation of the logits, which random weights leave below 1; a trained drafter is surer of its tokens. Not
    /// with --peer.
    #[arg(long, value_name = "S", conflicts_with = "peer")]
    pub logit_spread: Option<f64>,
    /// Computes activations again for the gradients instead of keeping them, as `train.recompute`.
    #[arg(long)]
    pub recompute: bool,
    /// CPU threads [default: all].
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
    /// Weights, batch, loss and gradients that speculators_step.py --dump wrote for this shape, to be equalled first.
    #[arg(long, value_name = "DIR")]
    pub peer: Option<PathBuf>,
    /// Prints one line of JSON, with the peer's field names.
    #[arg(long)]
    pub json: bool,
}

/// The peer's shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ShapeName {
    /// H 256, 2 layers, V 4,096, B 8, 256 tokens, 16 blocks.
    Tiny,
    /// H 512, 5 layers, V 8,192, B 16, 512 tokens, 32 blocks.
    Small,
    /// H 1,024, 5 layers, V 248,320, B 16, 1,024 tokens, 64 blocks.
    #[value(name = "08b")]
    #[serde(rename = "08b")]
    Large,
}

fn algorithm(text: &str) -> Result<Algorithm, String> {
    match text {
        "dflash" => Ok(Algorithm::Dflash),
        "dflash2" => Ok(Algorithm::Dflash2),
        other => Err(format!("{other:?}: expected dflash or dflash2")),
    }
}

fn precision(text: &str) -> Result<Precision, String> {
    match text {
        "f32" => Ok(Precision::F32),
        "bf16" => Ok(Precision::Bf16),
        other => Err(format!("{other:?}: expected f32 or bf16")),
    }
}

/// Medians in seconds, with what they were measured on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepReport {
    /// `dflash-train`.
    pub trainer: String,
    /// `dflash` or `dflash2`.
    pub algo: Algorithm,
    /// Which drafter and batch.
    pub shape: ShapeName,
    /// Compute type.
    pub dtype: Precision,
    /// Context tokens, T.
    pub context: usize,
    /// Blocks, N.
    pub anchors: usize,
    /// Sliding window, tokens.
    pub window: Option<usize>,
    /// Whether activations were computed again.
    pub recompute: bool,
    /// CPU threads.
    pub threads: usize,
    /// Trained numbers.
    pub trainable: usize,
    /// Base loss of the last step, nats a unit of weight.
    pub loss: f64,
    /// Forward and backward.
    pub gradients_s: f64,
    /// Clip and optimizer.
    pub update_s: f64,
    /// Both.
    pub step_s: f64,
    /// Supervised slots a second.
    pub slots_per_s: f64,
    /// Floating-point operations of the step's products with weights a second, by its whole time, in 1e9.
    pub step_gflops: f64,
    /// The same of one large product in the compute type, in this run.
    pub product_gflops: f64,
    /// Most memory that the process held, MB; null where the system does not tell.
    pub peak_rss_mb: Option<u64>,
    /// Largest relative distance of a gradient from the peer's; null without `--peer`.
    pub off_peer: Option<f64>,
}

/// Times the step.
///
/// # Errors
/// On sizes that leave no room for the blocks, on a dump of another shape or with other results, and when a step fails.
pub fn step(arguments: &StepArguments) -> Result<StepReport, Failure> {
    let (config, context, anchors) = shape(arguments).input()?;
    let params = Params::init(&config, Codebooks::Free, 1, &Device::Cpu).work()?;
    let read = |dir: &PathBuf| {
        let dump = Dump::read(dir, &params)?;
        let batch = dump.batch(&config, context, anchors)?;
        Ok::<_, anyhow::Error>((batch, Some(dump)))
    };
    let (batch, dump) = match &arguments.peer {
        Some(dir) => read(dir).input()?,
        None => (
            Batch::random(&config, context, anchors, arguments.logit_spread).work()?,
            None,
        ),
    };
    timed(arguments, &config, &params, &batch, dump.as_ref()).work()
}

fn timed(
    arguments: &StepArguments,
    config: &DrafterConfig,
    params: &Params,
    batch: &Batch,
    dump: Option<&Dump>,
) -> Result<StepReport> {
    let (context, anchors, block_size) = (
        batch.blocks.context_positions.len(),
        batch.blocks.blocks.len(),
        config.block_size,
    );
    let drafter = |dtype: Precision| {
        let drafter = Drafter::computing(config.clone(), params, dtype.compute())?;
        Ok::<_, anyhow::Error>(if arguments.recompute {
            drafter.recomputing()
        } else {
            drafter
        })
    };
    let settings = LossSettings {
        gamma: if block_size == 16 { 7.0 } else { 4.0 },
        selector_alpha: 1.0,
        inject_gold: true,
        selector_detached: false,
    };
    let denominator = total_weight(&batch.blocks, settings.gamma);
    let gradients = |drafter: &Drafter| {
        let Batch { blocks, taps, head } = batch;
        let found = step::gradients(drafter, params, head, blocks, taps, settings, denominator)?;
        found.context("no slot is supervised")
    };
    let off_peer = match dump {
        Some(dump) => {
            // held to the peer in f32, whatever is timed
            let (sums, found) = gradients(&drafter(Precision::F32)?)?;
            Some(dump.distance(sums.mean_base_loss(), &found, params, &batch.blocks, denominator)?)
        }
        None => None,
    };

    let adamw = AdamWSettings {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.0,
        clip: 1.0,
    };
    let mut optimizer = AdamW::new(adamw, params.vars())?;
    let drafter = drafter(arguments.dtype)?;
    let (mut both, mut forth, mut update, mut loss) = (Vec::new(), Vec::new(), Vec::new(), f64::NAN);
    for repeat in 0..=arguments.repeats {
        let start = Instant::now();
        let (sums, mut found) = with_threads_awake(|| gradients(&drafter))?;
        let middle = Instant::now();
        for (name, var) in params.vars() {
            if !found.contains_key(name) {
                found.insert(name.clone(), Gradient::zero(name, var)?);
            }
        }
        optimizer.step(params.vars(), &found, 6e-4)?;
        let end = Instant::now();
        loss = sums.mean_base_loss();
        if repeat > 0 {
            both.push((end - start).as_secs_f64());
            forth.push((middle - start).as_secs_f64());
            update.push((end - middle).as_secs_f64());
        }
    }
    let step_s = median(both);
    // before the product, which has nothing to do with what a step holds
    let peak_rss_mb = peak_memory().map(|bytes| bytes >> 20);
    let product_gflops = flops::product_rate(arguments.dtype.compute())? / 1e9;
    Ok(StepReport {
        trainer: "dflash-train".into(),
        algo: arguments.algo,
        shape: arguments.shape,
        dtype: arguments.dtype,
        context,
        anchors,
        window: arguments.window,
        recompute: arguments.recompute,
        threads: rayon::current_num_threads(),
        trainable: params.vars().values().map(|var| var.elem_count()).sum(),
        loss,
        gradients_s: median(forth),
        update_s: median(update),
        step_s,
        slots_per_s: (anchors * (block_size - 1)) as f64 / step_s,
        step_gflops: flops::of_step(config, context, anchors) / step_s / 1e9,
        product_gflops,
        peak_rss_mb,
        off_peer,
    })
}

/// Drafter, context tokens and blocks.
fn shape(arguments: &StepArguments) -> Result<(DrafterConfig, usize, usize)> {
    let (hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, layers, vocab_size, block_size, t, n) =
        match arguments.shape {
            ShapeName::Tiny => (256, 4, 2, 64, 768, 2, 4096, 8, 256, 16),
            ShapeName::Small => (512, 8, 2, 64, 1536, 5, 8192, 16, 512, 32),
            ShapeName::Large => (1024, 8, 2, 128, 3584, 5, 248_320, 16, 1024, 64),
        };
    let (context, anchors) = (arguments.context.unwrap_or(t), arguments.anchors.unwrap_or(n));
    ensure!(
        (block_size + 9..=MOST_CONTEXT).contains(&context),
        "--context {context}: expected {} to {MOST_CONTEXT} tokens for blocks of {block_size}",
        block_size + 9
    );
    ensure!(
        (1..=context - (block_size + 8)).contains(&anchors),
        "--anchors {anchors}: {context} context tokens have room for 1 to {} blocks of {block_size}",
        context - (block_size + 8)
    );
    if let Some(window) = arguments.window {
        ensure!(
            window >= block_size,
            "--window {window}: expected at least the block, {block_size}"
        );
    }
    if let Some(spread) = arguments.logit_spread {
        ensure!(
            spread > 0.0 && spread <= 100.0,
            "--logit-spread {spread}: expected above 0 and up to 100"
        );
    }
    let second = arguments.algo == Algorithm::Dflash2;
    let rule = LayerRule {
        window: arguments.window,
        causal: false,
    };
    let config = DrafterConfig {
        hidden_size,
        intermediate_size,
        num_heads,
        num_kv_heads,
        head_dim,
        layers: vec![rule; layers],
        vocab_size,
        num_target_layers: 8,
        target_layer_ids: vec![1, 2, 3, 4, 5],
        block_size,
        mask_token_id: vocab_size as u32 - 1,
        rms_norm_eps: 1e-6,
        rope_theta: 1e7,
        max_positions: MOST_CONTEXT,
        output_multiplier: 1.0,
        final_logit_softcapping: None,
        input_embedding_scale: 1.0,
        conv: second.then_some(ConvConfig {
            kernel_size: 2,
            group_size: 16,
        }),
        selector: second.then_some(SelectorConfig {
            rank: hidden_size.min(256),
            top_k: 16,
        }),
    };
    Ok((config, context, anchors))
}

/// What a step works on.
struct Batch {
    blocks: Blocks,
    /// [T, n_taps * H].
    taps: Tensor,
    head: TargetHead,
}

impl Batch {
    fn random(config: &DrafterConfig, context: usize, anchors: usize, logit_spread: Option<f64>) -> Result<Self> {
        let normal = |seed: u64, rows: usize, columns: usize, deviation: f64| {
            Tensor::from_vec(
                init::normal(seed, rows * columns, deviation),
                (rows, columns),
                &Device::Cpu,
            )
        };
        let (h, v) = (config.hidden_size, config.vocab_size);
        let tokens: Vec<u32> = (0..context)
            .map(|i| (init::uniform(7, i as u64) * (v - 2) as f64) as u32)
            .collect();
        let last = context - config.block_size - 1;
        let rows: Vec<usize> = (0..anchors)
            .map(|i| 8 + i * (last - 8) / (anchors - 1).max(1))
            .collect();
        Ok(Self {
            blocks: blocks(config.block_size, &tokens, &rows),
            taps: normal(11, context, config.target_layer_ids.len() * h, 0.5)?,
            head: TargetHead {
                embed: random_halves(12, v, h, DEVIATION)?,
                // hidden rows have a mean square of 1
                head: random_halves(
                    13,
                    v,
                    h,
                    logit_spread.map_or(DEVIATION, |spread| spread / (h as f64).sqrt()),
                )?,
            },
        })
    }
}

/// A BF16 matrix, made some rows at a time: its f32 form would be the most memory that the benchmark ever holds.
fn random_halves(seed: u64, rows: usize, columns: usize, deviation: f64) -> candle_core::Result<Tensor> {
    const PIECE: usize = 1 << 12;
    let piece = |first: usize| {
        let count = PIECE.min(rows - first);
        let values = init::normal(seed + ((first as u64) << 8), count * columns, deviation);
        Tensor::from_vec(values, (count, columns), &Device::Cpu)?.to_dtype(DType::BF16)
    };
    let pieces: Vec<Tensor> = (0..rows).step_by(PIECE).map(piece).collect::<Result<_, _>>()?;
    Tensor::cat(&pieces, 0)
}

/// Blocks at `rows` of one sample, every slot but the anchor's supervised.
fn blocks(block_size: usize, tokens: &[u32], rows: &[usize]) -> Blocks {
    let slots = || {
        rows.iter()
            .flat_map(|row| (0..block_size).map(move |slot| (row + slot, slot)))
    };
    Blocks {
        block_size,
        blocks: rows
            .iter()
            .map(|&anchor| Block {
                context_start: 0,
                anchor,
            })
            .collect(),
        anchors: rows.iter().map(|row| tokens[*row]).collect(),
        context_positions: (0..tokens.len() as u32).collect(),
        labels: slots().map(|(row, _)| tokens.get(row).copied().unwrap_or(0)).collect(),
        supervised: slots().map(|(row, slot)| slot > 0 && row < tokens.len()).collect(),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The report for a terminal.
pub fn table(report: &StepReport) -> String {
    let memory = report.peak_rss_mb.map_or("unknown".into(), |mb| format!("{mb} MB"));
    let peer = report.off_peer.map_or(String::new(), |off| {
        format!("\nloss and gradients equal the peer's to {off:.1e}")
    });
    format!(
        "{:.4} s a step ({:.4} forward and backward, {:.4} update), {:.1} slots/s\n\
         products with weights {:.0} GFLOP/s, {:.0} % of one large product's {:.0}\n\
         {} context tokens, {} blocks, {} trained numbers, {}, {} threads, peak memory {memory}{peer}",
        report.step_s,
        report.gradients_s,
        report.update_s,
        report.slots_per_s,
        report.step_gflops,
        100. * report.step_gflops / report.product_gflops,
        report.product_gflops,
        report.context,
        report.anchors,
        report.trainable,
        report.dtype,
        report.threads,
    )
}
