//! `--dry-run`: what a run would take, and an initialised drafter to try in the engine that is to serve it.
//!
//! Tokens and steps are exact once the conversations exist; before that, answers count with their longest length.
//! Time is multiply-adds over the rate of one measured matrix product, so it is a rough lower bound.

use std::fmt::Write;
use std::time::Instant;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use dflash_data::anchors::anchor_candidates;
use dflash_data::capture::estimate_bytes;
use dflash_data::conversation::read_conversations;
use dflash_data::tokens::{Example, prompt_tokens};
use rayon::prelude::*;

use crate::config::{RunConfig, TapMode, TrackerName};
use crate::durable::replace_folder;
use crate::examples::{self, Examples};
use crate::failure::{Blame, Failure};
use crate::materials::Materials;
use crate::progress::{Display, bytes, duration};
use crate::publish::Publisher;
use crate::room::{self, Sizes};
use crate::source::Order;
use crate::training::parameters;

/// Prints the plan and writes `run_dir/initialised`.
///
/// # Errors
/// When a file that the run names cannot be read, or the drafter fits neither memory nor disk: before it is made.
pub fn dry_run(materials: &Materials, display: Display) -> Result<String, Failure> {
    let config = materials.config();
    let sizes = Sizes::of(&materials.resolved);
    let folder = config.run_dir.join("initialised");
    if materials.device.is_cpu() {
        room::check_memory("the drafter to initialise", sizes.initialising()).work()?;
    }
    room::check_disk("the drafter to initialise", &folder, sizes.weights()).work()?;
    let (examples, exact) = if materials.conversations().exists() {
        (examples::load(materials, display).input()?, true)
    } else {
        (longest_answers(materials).input()?, false)
    };
    let params = parameters(materials, true)?;
    let publisher = Publisher::new(materials).work()?;
    replace_folder(&folder, &|partial| publisher.write(partial, &params, None)).work()?;

    let mut text = plan(materials, &examples, sizes).work()?;
    let (source, conversations) = match (exact, &config.data.prompts) {
        (true, Some(_)) => ("exact", "exists and is trained on; data.prompts is not used"),
        (true, None) => ("exact", "exists and is trained on"),
        (false, _) => (
            "upper bound: conversations are not made yet",
            "is to be made: the target answers data.prompts first, which takes time of its own",
        ),
    };
    let path = materials.conversations();
    let _ = writeln!(text, "tokens and steps   {source}");
    let _ = writeln!(text, "conversations      {} {conversations}", path.display());
    let _ = write!(text, "wrote              {}", folder.display());
    Ok(text)
}

fn plan(materials: &Materials, examples: &Examples, sizes: Sizes) -> Result<String> {
    let config = materials.config();
    let (drafter, info) = (&materials.resolved.drafter, materials.target.info());
    let tokens: usize = examples.all.iter().map(|example| example.tokens.len()).sum();
    let lengths: Vec<usize> = examples.all.iter().map(|example| example.tokens.len()).collect();
    let order = Order::new(config, &lengths, examples.train.clone());
    let steps = order.total_steps();
    let steps_an_epoch = order.epoch(0).len().max(1);
    let blocks: usize = examples
        .train
        .iter()
        .map(|&index| {
            anchor_candidates(&examples.all[index].loss_mask)
                .count()
                .min(config.train.anchors)
        })
        .sum();
    let context: usize = examples.train.iter().map(|&index| lengths[index]).sum();
    let (blocks, context) = (blocks / steps_an_epoch, context / steps_an_epoch);

    let Sizes { trained, published } = sizes;
    let taps = match config.taps.mode {
        TapMode::Stored => estimate_bytes(tokens, drafter.target_layer_ids.len(), info.hidden_size),
        TapMode::Online => 0,
    };
    let checkpoints = config.checkpoint.keep_last as u64 + u64::from(config.checkpoint.keep_best);
    // `final` has weights alone
    let saved = checkpoints.saturating_mul(sizes.checkpoint()) + sizes.weights();
    let head = room::head_bytes(materials.target.head());
    let rows = (blocks * drafter.block_size) as u64;
    let wide = drafter.num_heads * drafter.head_dim;
    // f32 values that one row of one layer keeps for the backward pass, roughly
    let kept = (8 * info.hidden_size + 4 * drafter.intermediate_size + 4 * wide) as u64;
    let layers = drafter.layers.len() as u64;
    let activations = if config.train.recompute {
        // one layer's at a time, and the input of each
        4 * rows * (kept + layers * info.hidden_size as u64)
    } else {
        4 * kept * rows * layers
    };
    let memory = sizes.training() + head + activations;

    let backbone = (drafter.layers.len()
        * (3 * info.hidden_size * drafter.intermediate_size
            + 2 * info.hidden_size * (wide + drafter.num_kv_heads * drafter.head_dim))) as f64;
    let context_work = (drafter.target_layer_ids.len() * info.hidden_size * info.hidden_size
        + drafter.layers.len() * 2 * info.hidden_size * drafter.num_kv_heads * drafter.head_dim)
        as f64;
    let head_work = (info.vocab_size * info.hidden_size) as f64;
    // forward and both gradients: three products; the frozen head needs only its input's gradient: two
    let step_work =
        2.0 * (3.0 * backbone * rows as f64 + 3.0 * context_work * context as f64 + 2.0 * head_work * rows as f64);
    let rate = matmul_rate(&materials.device)?;

    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<18} {value}");
    };
    line(
        "examples",
        format!(
            "{} to train on, {} held out, {tokens} tokens",
            examples.train.len(),
            examples.validation.len()
        ),
    );
    line(
        "steps",
        format!("{steps}, {steps_an_epoch} an epoch, about {blocks} blocks and {context} context tokens each"),
    );
    line("parameters", format!("{trained} trained, {published} published"));
    line(
        "disk",
        format!("{} of taps, {} of checkpoints", bytes(taps as f64), bytes(saved as f64)),
    );
    line("memory", format!("about {} besides the target", bytes(memory as f64)));
    line("tracking", tracked(config));
    let seconds = step_work / rate * steps as f64;
    line(
        "training time",
        format!("{} or more, at {:.0} GFLOP/s measured", duration(seconds), rate / 1e9),
    );
    Ok(text)
}

/// Where the numbers of the training will lie.
fn tracked(config: &RunConfig) -> String {
    let places = config.tracking.iter().map(|name| match name {
        TrackerName::Jsonl => "",
        TrackerName::Tensorboard => ", tensorboard/",
        TrackerName::Wandb => ", wandb/ (offline)",
    });
    format!(
        "metrics.jsonl{} in {}",
        places.collect::<String>(),
        config.run_dir.display()
    )
}

/// Examples as long as the answers may become.
fn longest_answers(materials: &Materials) -> Result<Examples> {
    let config = materials.config();
    let path = config.data.prompts.as_ref().with_context(|| {
        format!(
            "{} is missing, and data.prompts is not set",
            materials.conversations().display()
        )
    })?;
    let rows = read_conversations(path)?;
    let all: Vec<Example> = rows
        .par_iter()
        .map(|(line, row)| {
            let prompt = prompt_tokens(&materials.chat, row, Some(config.data.thinking))
                .with_context(|| format!("{}:{line}", path.display()))?;
            let room = config.data.max_length.saturating_sub(prompt.len());
            let answer = vec![0; config.generation().max_new.min(room)];
            Ok(Example::of_response(&prompt, &answer, *line))
        })
        .collect::<Result<_>>()?;
    Ok(Examples {
        train: (0..all.len()).collect(),
        validation: Vec::new(),
        all,
    })
}

/// Floating-point operations a second of an f32 matrix product on `device`.
fn matmul_rate(device: &Device) -> Result<f64> {
    let size = 768;
    let a = Tensor::ones((size, size), DType::F32, device)?;
    let run = || -> Result<f32> { Ok(a.matmul(&a)?.sum_all()?.to_scalar::<f32>()?) };
    run()?; // the first one also starts threads
    let (started, mut products) = (Instant::now(), 0);
    while started.elapsed().as_millis() < 200 {
        run()?;
        products += 1;
    }
    let work = 2.0 * (size as f64).powi(3) * f64::from(products);
    Ok(work / started.elapsed().as_secs_f64())
}
