//! Warm start: a drafter of any format into fresh variables.
//!
//! Strict: every tensor of the drafter must find its variable, and a variable without a tensor may only belong to the
//! parts that DFlash 2 adds to a drafter that has none of them. Those start as the identity (convolutions) and at zero
//! (successor), so that a DFlash 2 made from a DFlash drafts exactly as that did. What may change on the way besides
//! is said in [`agree`]; `carry` takes the weights across such a change.

pub mod agree;
mod carry;
mod start;

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use dflash_data::target_hash;
use dflash_eval::folder::{drafter_in, names_its_target, sizes_for};
use dflash_model::folder::PROVENANCE;
use dflash_model::formats::{self, Format, Source};
use dflash_model::{DrafterConfig, Params, Target};
use serde_json::Value;

use crate::config::Change;
use crate::materials::Materials;
pub use start::Start;

/// The key of the run file that all of this is about.
const KEY: &str = "drafter.init_from";

/// Reads the drafter at `path` whole; an embedding or head that came along must be the target's unless `allow` says
/// otherwise.
///
/// # Errors
/// When a tensor is missing, unknown, not finite or of another shape, or such a matrix differs; by key and path.
pub fn read(path: &Path, target: &dyn Target, allow: &[Change]) -> Result<Source> {
    let path = &drafter_in(path).context(KEY)?;
    let source = formats::read(path, Some(&sizes_for(path, target.info()))).context(KEY)?;
    if !allow.contains(&Change::Target) {
        source.check_carried(target.head()).with_context(|| {
            format!(
                "{KEY}: {} (if that is meant: {})",
                path.display(),
                agree::how(Change::Target)
            )
        })?;
    }
    Ok(source)
}

/// Reads the drafter that a fresh run starts from, before the first stage, and returns what there is to know about the start:
/// one line each, none without a warm start.
///
/// # Errors
/// As [`read`].
pub fn check(materials: &Materials) -> Result<Vec<String>> {
    let config = materials.config();
    let Some(path) = &config.drafter.init_from else {
        return Ok(Vec::new());
    };
    let source = read(path, materials.target.as_ref(), &config.drafter.allow)?;
    let mut lines = vec![format!("starts from {}, a {}", path.display(), source.format.name())];
    lines.extend(agree::changes(&materials.resolved.drafter, &source.config));
    lines.extend(source.notes);
    if source.format != Format::Published && !drafter_in(path).is_ok_and(|path| names_its_target(&path)) {
        lines.push(format!(
            "does not say how deep its target is; taken to be as deep as this one, {} layers",
            materials.target.info().num_layers
        ));
    }
    if let Some(hash) = recorded_target(path)
        && hash != target_hash(&config.target.path)?
    {
        lines.push(
            "was made for another target than this one: it drafts worse at first, which is what training is for"
                .to_owned(),
        );
    }
    Ok(lines.into_iter().map(|line| format!("{KEY}: {line}")).collect())
}

/// Hash of the target that a folder of ours was made for.
fn recorded_target(path: &Path) -> Option<String> {
    let path = drafter_in(path).ok()?.join(PROVENANCE);
    let provenance: Value = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    Some(provenance.pointer("/target/hash")?.as_str()?.to_owned())
}

/// Overwrites `params`, the fresh variables of `drafter`, by the tensors of `source`.
///
/// # Errors
/// When the tensors are not those of `params`; names the first.
pub fn load(params: &Params, drafter: &DrafterConfig, source: &Source) -> Result<()> {
    let unexpected: Vec<&str> = source
        .tensors
        .keys()
        .map(String::as_str)
        .filter(|name| !params.vars().contains_key(*name))
        .collect();
    ensure!(
        unexpected.is_empty(),
        "{KEY}: tensors without a place in this drafter: {}",
        unexpected.join(", ")
    );
    let upgrade = !source.tensors.keys().any(|name| added_by_dflash2(name));
    for (name, var) in params.vars() {
        let Some(tensor) = source.tensors.get(name) else {
            if upgrade && added_by_dflash2(name) {
                continue;
            }
            bail!("{KEY}: tensor {name} is missing");
        };
        let values = carry::across(name, tensor, var, &source.config, drafter)?;
        ensure!(
            values.shape() == var.shape(),
            "{KEY}: tensor {name}: expected shape {:?}, got {:?}",
            var.dims(),
            values.dims()
        );
        params.set(name, &values)?;
    }
    Ok(())
}

fn added_by_dflash2(name: &str) -> bool {
    name.starts_with("candidate_selector.") || name.contains(".attention_conv.") || name.contains(".mlp_conv.")
}
