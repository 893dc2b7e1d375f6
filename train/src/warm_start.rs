//! Warm start: the tensors of a published folder into fresh variables of the same shape.
//!
//! Strict: every tensor of the folder must find its variable, and a variable without a tensor may only belong to
//! the parts that DFlash 2 adds to a folder that has none of them. Those start as the identity (convolutions) and at zero (successor), so that a
//! DFlash 2 made from a DFlash drafts exactly as that did.

use std::path::Path;

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Device};
use dflash_model::Params;
use dflash_model::folder::{read_config, read_tensors};

/// Overwrites `params` by the tensors of the drafter in `folder`.
///
/// # Errors
/// When the folder is not a whole drafter of finite values, or its tensors are not those of `params`.
pub fn load(params: &Params, folder: &Path) -> Result<()> {
    let tensors = read_tensors(folder, &read_config(folder)?, &Device::Cpu)?;
    let path = folder;
    let mut unexpected: Vec<&str> = tensors
        .keys()
        .map(String::as_str)
        .filter(|name| !params.vars().contains_key(*name))
        .collect();
    unexpected.sort_unstable();
    ensure!(
        unexpected.is_empty(),
        "{}: unexpected tensors {}",
        path.display(),
        unexpected.join(", ")
    );
    let upgrade = !tensors.keys().any(|name| added_by_dflash2(name));
    for (name, var) in params.vars() {
        let Some(tensor) = tensors.get(name) else {
            if upgrade && added_by_dflash2(name) {
                continue;
            }
            bail!("{}: tensor {name} is missing", path.display());
        };
        ensure!(
            tensor.shape() == var.shape(),
            "{}: tensor {name}: expected shape {:?}, got {:?}",
            path.display(),
            var.dims(),
            tensor.dims()
        );
        let values = tensor.to_dtype(DType::F32)?.to_device(var.device())?;
        params.set(name, &values)?;
    }
    Ok(())
}

fn added_by_dflash2(name: &str) -> bool {
    name.starts_with("candidate_selector.") || name.contains(".attention_conv.") || name.contains(".mlp_conv.")
}
