//! Fills what a run file leaves open, from the warm-start folder, the target, or the published default shape.
//!
//! Tap layers by z-lab's formula, for n taps of N target layers: `round(1 + i (N - 4) / (n - 1))`, i = 0..n-1,
//! halves to the even number. Slot decay gamma by block size B: 4 at 8, 5 at 10, 7 at 16, linear between them.

use anyhow::{Result, bail, ensure};
use dflash_model::drafter_config::default_target_layer_ids;
use dflash_model::{ConvConfig, DrafterConfig, LayerRule, SelectorConfig, TargetInfo};

use crate::config::{Algorithm, CodebookKind, DrafterSection, RunConfig, TrackerName};
use crate::limits;
use crate::warm_start::agree;

/// Taps of a new drafter.
const TAPS: usize = 5;
/// Default window of every layer, in positions; what every engine is tested with.
const WINDOW: usize = 2048;

/// A run with nothing left open.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved {
    /// The run file with every key of `[drafter]`, `taps.layers` and `train.gamma` written.
    pub config: RunConfig,
    /// The drafter's shape.
    pub drafter: DrafterConfig,
    /// How the selector's codebooks are trained.
    pub codebooks: CodebookKind,
    /// Slot decay, in slots.
    pub gamma: f64,
}

/// Resolves `config` for a target, and for the drafter it starts from, if any.
pub fn resolve(config: &RunConfig, target: &TargetInfo, init: Option<&DrafterConfig>) -> Result<Resolved> {
    let mut config = config.clone();
    let allow = config.drafter.allow.clone();
    match init {
        Some(init) => agree::target(init, target, &allow)?,
        None => ensure!(
            allow.is_empty(),
            "drafter.allow: only with drafter.init_from, there is nothing to differ from"
        ),
    }
    let layers = resolve_taps(&config, target, init)?;
    let section = &mut config.drafter;

    let given = section.algorithm.is_some();
    let algorithm = *section.algorithm.get_or_insert(match init {
        // a plain warm start keeps the family; the upgrade is asked for by name
        Some(init) if init.conv.is_none() && init.selector.is_none() => Algorithm::Dflash,
        _ => Algorithm::Dflash2,
    });
    let count = *section.layers.get_or_insert(init.map_or(5, |init| init.layers.len()));
    let heads = *section.heads.get_or_insert(init.map_or(32, |init| init.num_heads));
    let kv_heads = *section.kv_heads.get_or_insert(init.map_or(8, |init| init.num_kv_heads));
    let head_dim = *section.head_dim.get_or_insert(init.map_or(128, |init| init.head_dim));
    let ffn = *section
        .ffn
        .get_or_insert(init.map_or(target.intermediate_size, |init| init.intermediate_size));
    let block_size = *section.block_size.get_or_insert(init.map_or(8, |init| init.block_size));
    let mask_token_id = match section.mask_token_id.or(init.map(|init| init.mask_token_id)) {
        Some(id) => id,
        None => default_mask_token(target.vocab_size)?,
    };
    section.mask_token_id = Some(mask_token_id);
    let rope_theta = *section
        .rope_theta
        .get_or_insert(init.map_or(target.rope_theta, |init| init.rope_theta));

    let layer_rules = resolve_layers(section, init, count);

    let (conv, selector) = if algorithm == Algorithm::Dflash2 {
        let (conv, selector) = resolve_dflash2(section, init);
        (Some(conv), Some(selector))
    } else {
        refuse_dflash2_keys(&config, given)?;
        (None, None)
    };
    let has_codebooks = init.is_some_and(|init| init.selector.is_some());
    let codebooks = config.drafter.codebooks.unwrap_or(if has_codebooks {
        CodebookKind::Free
    } else {
        CodebookKind::Factored
    });
    if algorithm == Algorithm::Dflash2 {
        config.drafter.codebooks = Some(codebooks);
        ensure!(
            !(has_codebooks && codebooks == CodebookKind::Factored),
            "drafter.codebooks: a published codebook has no factored form; expected \"free\", got \"factored\""
        );
    }

    let gamma = resolve_train(&mut config, block_size)?;
    config.taps.layers = Some(layers.clone());
    if config.data.conversations.is_none() {
        config.generate.get_or_insert_default();
    }
    if config.tracking.contains(&TrackerName::Wandb) {
        config.wandb = Some(config.wandb());
    }

    let drafter = DrafterConfig {
        hidden_size: target.hidden_size,
        intermediate_size: ffn,
        num_heads: heads,
        num_kv_heads: kv_heads,
        head_dim,
        layers: layer_rules,
        vocab_size: target.vocab_size,
        num_target_layers: target.num_layers,
        target_layer_ids: layers,
        block_size,
        mask_token_id,
        rms_norm_eps: init.map_or(target.rms_norm_eps, |init| init.rms_norm_eps),
        rope_theta,
        max_positions: init.map_or(target.max_positions, |init| init.max_positions),
        output_multiplier: init.map_or(1.0, |init| init.output_multiplier),
        final_logit_softcapping: init.and_then(|init| init.final_logit_softcapping),
        input_embedding_scale: init.map_or(1.0, |init| init.input_embedding_scale),
        conv,
        selector,
    };
    // once more, for what a warm-start folder brought in
    limits::check(&config)?;
    check_shape(&drafter)?;
    if let Some(init) = init {
        agree::drafter(&drafter, count, init, &allow)?;
    }
    Ok(Resolved {
        config,
        drafter,
        codebooks,
        gamma,
    })
}

/// z-lab's tap layers: `count` of `layers`, from the second to the third from last.
pub fn default_taps(layers: usize, count: usize) -> Result<Vec<usize>> {
    ensure!(
        count == 1 || layers >= 4 && count > 0,
        "taps.layers: no default for {count} taps of a target of {layers} layers; name them"
    );
    let taps = default_target_layer_ids(layers, count);
    ensure!(
        taps.windows(2).all(|pair| pair[0] < pair[1]),
        "taps.layers: the default {taps:?} repeats a layer of a target of {layers} layers; name them"
    );
    Ok(taps)
}

/// The mask token of the two published vocabularies.
pub fn default_mask_token(vocab_size: usize) -> Result<u32> {
    match vocab_size {
        248_320 => Ok(248_070),
        151_936 => Ok(151_669),
        _ => bail!(
            "drafter.mask_token_id: no default for a vocabulary of {vocab_size} rows; name an unused row below it"
        ),
    }
}

/// The slot decay that goes with a block size.
pub fn default_gamma(block_size: usize) -> Result<f64> {
    let known = [(8.0, 4.0), (10.0, 5.0), (16.0, 7.0)];
    let size = block_size as f64;
    for pair in known.windows(2) {
        let ((low, low_gamma), (high, high_gamma)) = (pair[0], pair[1]);
        if (low..=high).contains(&size) {
            return Ok(low_gamma + (high_gamma - low_gamma) * (size - low) / (high - low));
        }
    }
    bail!("train.gamma: no default for blocks of {block_size} slots (only for 8 to 16); name it")
}

fn resolve_taps(config: &RunConfig, target: &TargetInfo, init: Option<&DrafterConfig>) -> Result<Vec<usize>> {
    let layers = match (&config.taps.layers, init) {
        (Some(layers), _) => layers.clone(),
        // in a target of another depth the same numbers are other layers
        (None, Some(init)) if init.num_target_layers != target.num_layers => {
            default_taps(target.num_layers, init.target_layer_ids.len())?
        }
        (None, Some(init)) => init.target_layer_ids.clone(),
        (None, None) => default_taps(target.num_layers, TAPS)?,
    };
    ensure!(!layers.is_empty(), "taps.layers: expected at least one layer, got none");
    ensure!(
        layers.windows(2).all(|pair| pair[0] < pair[1]),
        "taps.layers: expected strictly increasing layers, got {layers:?}"
    );
    let last = target.num_layers.saturating_sub(1);
    if let Some(layer) = layers.iter().find(|&&layer| layer >= last) {
        bail!("taps.layers: expected layers below {last}, the target's last, got {layer}");
    }
    Ok(layers)
}

/// Length and slot decay of the training; the decay is returned.
fn resolve_train(config: &mut RunConfig, block_size: usize) -> Result<f64> {
    let train = &mut config.train;
    if train.steps.is_none() {
        train.epochs.get_or_insert(6);
    }
    let gamma = match train.gamma {
        Some(gamma) => gamma,
        None => default_gamma(block_size)?,
    };
    train.gamma = Some(gamma);
    Ok(gamma)
}

/// Window and causality of every layer.
fn resolve_layers(section: &mut DrafterSection, init: Option<&DrafterConfig>, count: usize) -> Vec<LayerRule> {
    match init {
        // a published folder may mix windows; only a key in the run file replaces them
        Some(init) if section.sliding_window.is_none() && section.causal.is_none() => init.layers.clone(),
        _ => {
            let saved = init.and_then(|init| init.layers.first().copied());
            let window = *section
                .sliding_window
                .get_or_insert(saved.map_or(WINDOW, |rule| rule.window.unwrap_or(0)));
            let causal = *section.causal.get_or_insert(saved.is_some_and(|rule| rule.causal));
            let rule = LayerRule {
                window: (window > 0).then_some(window),
                causal,
            };
            vec![rule; count]
        }
    }
}

/// Sizes of the parts that DFlash 2 adds.
fn resolve_dflash2(section: &mut DrafterSection, init: Option<&DrafterConfig>) -> (ConvConfig, SelectorConfig) {
    let conv = init.and_then(|init| init.conv);
    let selector = init.and_then(|init| init.selector);
    (
        ConvConfig {
            kernel_size: *section
                .conv_kernel
                .get_or_insert(conv.map_or(2, |conv| conv.kernel_size)),
            group_size: *section
                .conv_group
                .get_or_insert(conv.map_or(16, |conv| conv.group_size)),
        },
        SelectorConfig {
            rank: *section.selector_rank.get_or_insert(selector.map_or(256, |s| s.rank)),
            top_k: *section.selector_top_k.get_or_insert(selector.map_or(16, |s| s.top_k)),
        },
    )
}

/// Refuses keys of DFlash 2 in the run of a DFlash; `said`: the run file itself says that it is one.
fn refuse_dflash2_keys(config: &RunConfig, said: bool) -> Result<()> {
    let section = &config.drafter;
    let given = [
        ("conv_kernel", section.conv_kernel.is_some()),
        ("conv_group", section.conv_group.is_some()),
        ("selector_rank", section.selector_rank.is_some()),
        ("selector_top_k", section.selector_top_k.is_some()),
        ("codebooks", section.codebooks.is_some()),
    ];
    if let Some((key, _)) = given.iter().find(|(_, given)| *given) {
        ensure!(
            said,
            "drafter.{key}: only for a DFlash 2, and drafter.init_from is a DFlash; drafter.algorithm = \"dflash2\" makes one \
             of it"
        );
        bail!("drafter.{key}: only for algorithm \"dflash2\", but algorithm is \"dflash\"");
    }
    Ok(())
}

/// How the sizes must fit each other; each by itself is in its range already.
fn check_shape(drafter: &DrafterConfig) -> Result<()> {
    ensure!(
        drafter.num_heads.is_multiple_of(drafter.num_kv_heads),
        "drafter.kv_heads: expected a divisor of drafter.heads = {}, got {}",
        drafter.num_heads,
        drafter.num_kv_heads
    );
    ensure!(
        drafter.head_dim.is_multiple_of(2),
        "drafter.head_dim: expected an even number, got {}",
        drafter.head_dim
    );
    ensure!(
        drafter.block_size <= drafter.max_positions,
        "drafter.block_size: expected at most the {} positions that the drafter serves, got {}",
        drafter.max_positions,
        drafter.block_size
    );
    ensure!(
        (drafter.mask_token_id as usize) < drafter.vocab_size,
        "drafter.mask_token_id: expected a row below {}, got {}",
        drafter.vocab_size,
        drafter.mask_token_id
    );
    if let Some(window) = drafter.layers.iter().filter_map(|rule| rule.window).min() {
        ensure!(
            window >= drafter.block_size,
            "drafter.sliding_window: expected at least the block size {}, got {window}",
            drafter.block_size
        );
    }
    if let Some(conv) = drafter.conv {
        ensure!(
            conv.kernel_size <= drafter.block_size,
            "drafter.conv_kernel: expected 1 to the block size {}, got {}",
            drafter.block_size,
            conv.kernel_size
        );
        ensure!(
            drafter.hidden_size.is_multiple_of(conv.group_size),
            "drafter.conv_group: expected a divisor of the width {}, got {}",
            drafter.hidden_size,
            conv.group_size
        );
    }
    if let Some(selector) = drafter.selector {
        ensure!(
            selector.top_k <= drafter.vocab_size,
            "drafter.selector_top_k: expected 1 to the vocabulary {}, got {}",
            drafter.vocab_size,
            selector.top_k
        );
    }
    // what the published format asks for besides
    Ok(drafter.validate()?)
}
