//! temporary
use candle_core::{Device, Result, Tensor};
/// temporary
pub fn read_tensors(
    dir: &std::path::Path,
    _: &crate::DrafterConfig,
    device: &Device,
) -> Result<std::collections::BTreeMap<String, Tensor>> {
    Ok(candle_core::safetensors::load(dir.join("model.safetensors"), device)?
        .into_iter()
        .collect())
}
