//! What a warm start may change, and what it may change only when asked by name.
//!
//! - never: the width, and every other size of a tensor but the number of taps and the rows of the codebooks
//! - by [`Change`]: what leaves every tensor its shape and the drafter in ruins: mask row, taps, target, RoPE base
//! - freely: block size, window, causality, candidates, and DFlash to DFlash 2; [`changes`] tells of them

use anyhow::{Result, ensure};
use dflash_model::{DrafterConfig, TargetInfo};

use crate::config::Change;

/// How to ask for a change.
pub(super) fn how(change: Change) -> String {
    let name = change.name();
    format!("--allow {name}, or drafter.allow = [\"{name}\"]")
}

/// Refuses a target that is not the one which `init` was made for, as far as its sizes tell.
///
/// # Errors
/// Naming the sizes, what would go wrong, and how to allow it.
pub fn target(init: &DrafterConfig, target: &TargetInfo, allow: &[Change]) -> Result<()> {
    ensure!(
        init.hidden_size == target.hidden_size,
        "drafter.init_from: made for a target of width {}, this one has {}; a drafter works in its target's width",
        init.hidden_size,
        target.hidden_size
    );
    let same = (init.num_target_layers, init.vocab_size) == (target.num_layers, target.vocab_size);
    ensure!(
        same || allow.contains(&Change::Target),
        "drafter.init_from: made for a target of {} layers and {} rows; this target has {} and {}, so taps and token ids \
         mean something else. If that is meant: {}",
        init.num_target_layers,
        init.vocab_size,
        target.num_layers,
        target.vocab_size,
        how(Change::Target)
    );
    Ok(())
}

/// Refuses to start `drafter`, of `layers` layers, from `init` where weights would not fit, or would fit and mean something else.
///
/// # Errors
/// Naming the key, both values, and how to allow it where that is possible.
pub fn drafter(drafter: &DrafterConfig, layers: usize, init: &DrafterConfig, allow: &[Change]) -> Result<()> {
    // asked for by the run file; the rules of the layers may be those of `init` all the same
    ensure!(
        layers == init.layers.len(),
        "drafter.layers: the drafter started from has {}, got {layers}",
        init.layers.len()
    );
    sizes(drafter, init)?;
    let asked = |change: Change, same: bool, key: &str, values: [String; 2], why: &str| {
        let [was, is] = values;
        ensure!(
            same || allow.contains(&change),
            "{key}: the drafter started from has {was}, got {is}; {why}. Leave the key out to keep {was}; if the change \
             is meant: {}",
            how(change)
        );
        Ok(())
    };
    asked(
        Change::Mask,
        drafter.mask_token_id == init.mask_token_id,
        "drafter.mask_token_id",
        [init.mask_token_id.to_string(), drafter.mask_token_id.to_string()],
        "it would find an embedding in its slots that it never saw",
    )?;
    // in a target of another depth, which was allowed before, the layers cannot stay
    let moved = drafter.num_target_layers != init.num_target_layers;
    asked(
        Change::Taps,
        moved || drafter.target_layer_ids == init.target_layer_ids,
        "taps.layers",
        [
            format!("{:?}", init.target_layer_ids),
            format!("{:?}", drafter.target_layer_ids),
        ],
        "it would read states that it never saw",
    )?;
    asked(
        Change::Rope,
        drafter.rope_theta.to_bits() == init.rope_theta.to_bits(),
        "drafter.rope_theta",
        [init.rope_theta.to_string(), drafter.rope_theta.to_string()],
        "it would take every distance for another one",
    )
}

/// Everything that decides the shape of a tensor and that no weights can be carried across.
fn sizes(drafter: &DrafterConfig, init: &DrafterConfig) -> Result<()> {
    let same = |key: &str, wanted: usize, saved: usize| {
        ensure!(
            wanted == saved,
            "drafter.{key}: the drafter started from has {saved}, got {wanted}"
        );
        Ok(())
    };
    same("heads", drafter.num_heads, init.num_heads)?;
    same("kv_heads", drafter.num_kv_heads, init.num_kv_heads)?;
    same("head_dim", drafter.head_dim, init.head_dim)?;
    same("ffn", drafter.intermediate_size, init.intermediate_size)?;
    ensure!(
        drafter.conv.is_some() || init.conv.is_none() && init.selector.is_none(),
        "drafter.algorithm: a DFlash 2 drafter cannot become \"dflash\""
    );
    if let (Some(conv), Some(saved)) = (drafter.conv, init.conv) {
        same("conv_kernel", conv.kernel_size, saved.kernel_size)?;
        same("conv_group", conv.group_size, saved.group_size)?;
    }
    if let (Some(selector), Some(saved)) = (drafter.selector, init.selector) {
        same("selector_rank", selector.rank, saved.rank)?;
    }
    Ok(())
}

/// What differs between a drafter and the one it starts from, one line each.
pub fn changes(drafter: &DrafterConfig, init: &DrafterConfig) -> Vec<String> {
    let family = |config: &DrafterConfig| if config.is_dflash2() { "DFlash 2" } else { "DFlash" };
    let windows = |config: &DrafterConfig| {
        let window = |rule: &dflash_model::LayerRule| match (rule.window, rule.causal) {
            (None, false) => "none".to_owned(),
            (None, true) => "none, causal".to_owned(),
            (Some(window), false) => window.to_string(),
            (Some(window), true) => format!("{window}, causal"),
        };
        config.layers.iter().map(window).collect::<Vec<_>>().join("; ")
    };
    let candidates = |config: &DrafterConfig| config.selector.map_or(0, |selector| selector.top_k);
    let values = |config: &DrafterConfig| {
        [
            ("family", family(config).to_owned()),
            ("block size", config.block_size.to_string()),
            ("mask token", config.mask_token_id.to_string()),
            ("taps", format!("{:?}", config.target_layer_ids)),
            ("target layers", config.num_target_layers.to_string()),
            ("vocabulary rows", config.vocab_size.to_string()),
            ("RoPE base", config.rope_theta.to_string()),
            ("windows", windows(config)),
            ("candidates a slot", candidates(config).to_string()),
        ]
    };
    let differing = values(init)
        .into_iter()
        .zip(values(drafter))
        .filter(|(was, is)| was != is);
    differing
        .map(|((name, was), (_, is))| format!("{name}: {was} -> {is}"))
        .collect()
}
