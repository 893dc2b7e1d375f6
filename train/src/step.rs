//! One pass: hidden states of all blocks, loss, gradient of every variable.

use crate::gradient::{Gradient, Gradients, by_rows};
use crate::loss::{LossSettings, StepSums, loss};
use candle_core::{DType, Result, Tensor};
use dflash_model::{Blocks, Drafter, Params, TargetHead};

/// Runs a pass over `blocks` and returns its sums with the gradients of loss / `denominator`.
///
/// `drafter` must be built over `params`; `taps`: [T, n_taps * H] and `head` in any float type;
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
    // what a pass that failed may have left
    drop(drafter.take_gradients()?);
    let hidden = drafter.hidden(blocks, &taps.to_dtype(DType::F32)?, head)?;
    let Some((total, sums, touched)) = loss(drafter, &hidden, head, blocks, settings, denominator)? else {
        return Ok(None);
    };
    if !(sums.base_loss.is_finite() && sums.selector_loss.is_finite()) {
        candle_core::bail!(
            "loss is not finite: base {}, selector {}; no update was made",
            sums.base_loss / sums.weight,
            sums.mean_selector_loss()
        )
    }
    let mut grads = total.backward()?;
    grads.extend(drafter.take_gradients()?)?;
    let mut named = Gradients::new();
    // detached: a gradient may hold the graph that it was formed from
    for (name, var) in params.vars() {
        // Absent without a hit: the selector then has no loss.
        if let Some(gradient) = grads.get(var) {
            named.insert(name.clone(), Gradient::Whole(gradient.detach()));
        }
    }
    for table in touched {
        let Some(var) = params.vars().get(table.name) else {
            continue;
        };
        let Some(values) = grads.get(&table.rows) else { continue };
        let rows = Gradient::Rows {
            ids: table.ids,
            values: values.detach(),
        };
        let gradient = if by_rows(table.name, var) {
            rows
        } else {
            Gradient::Whole(rows.whole(var)?)
        };
        named.insert(table.name.to_owned(), gradient);
    }
    Ok(Some((sums, named)))
}
