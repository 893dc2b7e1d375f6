//! Weights across a change of taps or vocabulary.

use anyhow::Result;
use candle_core::{DType, Tensor};
use dflash_model::DrafterConfig;

/// `tensor` of the drafter `from`, in f32 on the device of `fresh`, as the drafter `to` starts with it.
///
/// `fresh` is what `to` would start with by itself: rows of the codebooks that `from` does not have are taken from it.
pub(super) fn across(
    name: &str,
    tensor: &Tensor,
    fresh: &Tensor,
    from: &DrafterConfig,
    to: &DrafterConfig,
) -> Result<Tensor> {
    let tensor = tensor.to_device(fresh.device())?.to_dtype(DType::F32)?;
    if name == "fc.weight" && from.target_layer_ids != to.target_layer_ids {
        return columns(&tensor, &pair_taps(from, to));
    }
    if name.ends_with("_codebook") && from.vocab_size != to.vocab_size {
        let common = from.vocab_size.min(to.vocab_size);
        let new = fresh.narrow(0, common, to.vocab_size - common)?;
        return Ok(Tensor::cat(&[&tensor.narrow(0, 0, common)?, &new], 0)?);
    }
    Ok(tensor)
}

/// For each tap of `to`, the tap of `from` whose weights it takes over.
///
/// In a target of the same depth a layer keeps its weights, and those of the layers that fell away go to the new ones
/// in order. In one of another depth a layer's number means nothing, so the first takes over from the first. A tap
/// that is left without starts at zero: taps that are only added leave the drafter what it was.
fn pair_taps(from: &DrafterConfig, to: &DrafterConfig) -> Vec<Option<usize>> {
    let (old, new) = (&from.target_layer_ids, &to.target_layer_ids);
    if from.num_target_layers != to.num_target_layers {
        return (0..new.len()).map(|i| (i < old.len()).then_some(i)).collect();
    }
    let mut fallen = (0..old.len()).filter(|&i| !new.contains(&old[i]));
    new.iter()
        .map(|layer| old.iter().position(|kept| kept == layer).or_else(|| fallen.next()))
        .collect()
}

/// `fc` [H, taps * H] with a tap's H columns in the order of `pairs`, zeros for none.
fn columns(fc: &Tensor, pairs: &[Option<usize>]) -> Result<Tensor> {
    let width = fc.dim(0)?;
    let part = |pair: &Option<usize>| match pair {
        Some(tap) => fc.narrow(1, tap * width, width),
        None => Tensor::zeros((width, width), fc.dtype(), fc.device()),
    };
    let parts: Vec<Tensor> = pairs.iter().map(part).collect::<candle_core::Result<_>>()?;
    Ok(Tensor::cat(&parts, 1)?)
}
