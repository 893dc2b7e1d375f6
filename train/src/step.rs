//! One pass: hidden states of all blocks, loss, gradient of every variable.

use crate::loss::{LossSettings, StepSums, loss};
use candle_core::{DType, Result, Tensor};
use dflash_model::{Blocks, Drafter, Params, TargetHead};
use std::collections::BTreeMap;

/// Gradients by variable name.
pub type Gradients = BTreeMap<String, Tensor>;

/// Runs a pass over `blocks` and returns its sums with the gradients of loss / `denominator`.
///
/// `drafter` must be built over `params`; `taps`: [T, n_taps * H] in any float type; `head` in f32;
/// `denominator`: [`crate::loss::total_weight`] of the whole optimizer step, which may span several passes.
/// `None` when no slot is supervised.
///
/// # Errors
/// When the loss is not finite, or a gradient is not: the message names the tensor. Nothing has been updated then.
pub fn gradients(
    drafter: &Drafter,
    params: &Params,
    head: &TargetHead,
    blocks: &Blocks,
    taps: &Tensor,
    settings: LossSettings,
    denominator: f64,
) -> Result<Option<(StepSums, Gradients)>> {
    let hidden = drafter.hidden(blocks, &taps.to_dtype(DType::F32)?, head)?;
    let Some((total, sums)) = loss(drafter, &hidden, head, blocks, settings, denominator)? else {
        return Ok(None);
    };
    if !(sums.base_loss.is_finite() && sums.selector_loss.is_finite()) {
        candle_core::bail!(
            "loss is not finite: base {}, selector {}; no update was made",
            sums.base_loss / sums.weight,
            sums.mean_selector_loss()
        )
    }
    let grads = total.backward()?;
    let mut named = Gradients::new();
    for (name, var) in params.vars() {
        // Absent without a hit: the selector then has no loss.
        if let Some(gradient) = grads.get(var) {
            named.insert(name.clone(), gradient.clone());
        }
    }
    Ok(Some((sums, named)))
}
