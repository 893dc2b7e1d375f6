//! The published drafter folder: what is written, what is read back, and nothing beside it.
//!
//! ```text
//! config.json            the double-spelled configuration, see `drafter_config`
//! model.safetensors      one file, BF16 unless asked otherwise, metadata {"format": "pt"}, exactly the names of `tensor_shapes`
//! README.md              model card
//! dflash_export.json     where the weights come from, as the caller tells it
//! ```
//!
//! Engines are lenient in different places: one skips unknown names, one fills missing tensors with ones, one loads
//! every `*.safetensors` it sees. So the folder is strict in both directions: a name, a shape or a file that does
//! not belong is an error here, before an engine turns it into a drafter that is never accepted.

mod card;
mod read;
mod write;

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Result};

use crate::drafter_config::DrafterConfig;

pub use card::{ACCEPTANCE_DEFINITION, AcceptanceRow, DraftCounts, ModelCard, shell};
pub(crate) use read::verify_stored;
pub use read::{check_finite, extra_files, list_problems, read_config, read_tensors, verify_written};
pub use write::{Contents, Existing, check_destination, place, sync_folder, write, write_files};
pub(crate) use write::{pretty, write_tensors, write_text};

/// Names of the files of the folder.
pub const FILES: [&str; 4] = [CONFIG, TENSORS, CARD, PROVENANCE];

const CONFIG: &str = "config.json";
const TENSORS: &str = "model.safetensors";
const CARD: &str = "README.md";
/// Name of the file that says where the weights come from.
pub const PROVENANCE: &str = "dflash_export.json";

/// Shape and type of a tensor that was found or given.
type Shape = (Vec<usize>, DType);

/// Everything in which `found` differs from the tensor list of `config`, one line a problem.
pub(crate) fn differences(config: &DrafterConfig, found: &BTreeMap<String, Shape>) -> Vec<String> {
    let expected: BTreeMap<String, Vec<usize>> = config.tensor_shapes().into_iter().collect();
    let missing: Vec<&str> = names(expected.keys().filter(|name| !found.contains_key(*name)));
    let unexpected: Vec<&str> = names(found.keys().filter(|name| !expected.contains_key(*name)));
    let mut problems = Vec::new();
    if !missing.is_empty() {
        problems.push(format!("missing ({}): {}", missing.len(), missing.join(", ")));
    }
    if !unexpected.is_empty() {
        problems.push(format!("unexpected ({}): {}", unexpected.len(), unexpected.join(", ")));
    }
    problems.extend(hints(&unexpected));
    for (name, (shape, dtype)) in found {
        let Some(wanted) = expected.get(name) else { continue };
        if !matches!(dtype, DType::BF16 | DType::F16 | DType::F32 | DType::F64) {
            problems.push(format!(
                "{name}: expected BF16, F16 or F32 values, got {}; quantised drafters are not supported",
                dtype.as_str()
            ));
        }
        if shape != wanted {
            problems.push(format!(
                "{name}: expected shape {wanted:?}, got {shape:?}{}",
                shape_hint(config, name)
            ));
        }
    }
    problems
}

fn names<'n>(names: impl Iterator<Item = &'n String>) -> Vec<&'n str> {
    names.map(String::as_str).collect()
}

/// What is behind the unexpected names that occur in the wild.
fn hints(unexpected: &[&str]) -> Vec<String> {
    let any = |applies: fn(&str) -> bool| unexpected.iter().any(|name| applies(name));
    let hints = [
        (
            any(|name| name.ends_with("_codebook.weight")),
            "the codebooks are bare parameters: their published names end in _codebook, without .weight",
        ),
        (
            any(|name| name.starts_with("model.")),
            "published drafter names have no model. prefix",
        ),
        (
            any(|name| name.ends_with("embed_tokens.weight") || name.ends_with("lm_head.weight")),
            "a published drafter borrows embedding and head from its target and carries neither",
        ),
        (
            any(|name| name.contains("_packed") || name.ends_with("_scale") || name.contains(".qweight")),
            "the weights are quantised; drafters are read as BF16, F16 or F32",
        ),
        (
            any(|name| matches!(name, "d2t" | "t2d")),
            "d2t and t2d map a reduced vocabulary, which is not supported",
        ),
    ];
    hints
        .into_iter()
        .filter(|(applies, _)| *applies)
        .map(|(_, hint)| hint.to_owned())
        .collect()
}

fn shape_hint(config: &DrafterConfig, name: &str) -> String {
    if name == "fc.weight" {
        return format!(
            " (hidden_size {}, {} taps in target_layer_ids)",
            config.hidden_size,
            config.target_layer_ids.len()
        );
    }
    String::new()
}

/// Puts the path before an I/O error.
pub(crate) fn at<T>(path: &Path, outcome: std::io::Result<T>) -> Result<T> {
    outcome.map_err(|error| candle_core::Error::msg(format!("{}: {error}", path.display())))
}
