//! Whether what is about to be made fits: free disk and free memory, asked before the work starts.
//!
//! Only what is certain to be needed counts, so a refusal is never a guess; a system that does not tell what is free
//! refuses nothing.

use std::path::Path;

use anyhow::{Result, ensure};
use candle_core::Tensor;
use dflash_model::TargetHead;
use sysinfo::System;

use crate::config::CodebookKind;
use crate::progress::bytes;
use crate::resolve::Resolved;

/// Numbers in a drafter's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Those that are trained, f32.
    pub trained: u64,
    /// Those that are published, BF16.
    pub published: u64,
}

impl Sizes {
    /// The sizes of the drafter that a run trains.
    pub fn of(resolved: &Resolved) -> Self {
        let drafter = &resolved.drafter;
        let published = drafter.parameter_count();
        let trained = match (drafter.selector, resolved.codebooks) {
            // two [V, r] tables are products of a frozen matrix and a [r, H] factor
            (Some(selector), CodebookKind::Factored) => {
                published.saturating_sub(2 * Self::product(drafter.vocab_size, selector.rank))
                    + 2 * Self::product(selector.rank, drafter.hidden_size)
            }
            _ => published,
        };
        Self { trained, published }
    }

    fn product(a: usize, b: usize) -> u64 {
        (a as u64).saturating_mul(b as u64)
    }

    /// Bytes of a published folder's weights.
    pub fn weights(self) -> u64 {
        self.published.saturating_mul(2)
    }

    /// Bytes of a checkpoint: BF16 weights, f32 masters and two f32 moments.
    pub fn checkpoint(self) -> u64 {
        self.weights().saturating_add(self.trained.saturating_mul(12))
    }

    /// Bytes in memory of masters, two moments and gradients.
    pub fn training(self) -> u64 {
        self.trained.saturating_mul(16)
    }

    /// Bytes in memory while an initialised drafter is published: masters, and the BF16 file read back.
    pub fn initialising(self) -> u64 {
        self.trained.saturating_mul(4).saturating_add(self.weights())
    }
}

/// Bytes of the target's embedding and head, which training holds as they are stored.
pub fn head_bytes(head: &TargetHead) -> u64 {
    let bytes = |matrix: &Tensor| (matrix.elem_count() * matrix.dtype().size_in_bytes()) as u64;
    let tied = head.embed.id() == head.head.id();
    bytes(&head.head) + if tied { 0 } else { bytes(&head.embed) }
}

/// Refuses to put `need` bytes into `folder` when its file system has fewer free. The folder need not exist yet.
///
/// # Errors
/// Naming `what`, the bytes needed and the bytes free.
pub fn check_disk(what: &str, folder: &Path, need: u64) -> Result<()> {
    let existing = folder.ancestors().find(|place| place.exists());
    let existing = existing.filter(|place| !place.as_os_str().is_empty());
    let Ok(free) = fs4::available_space(existing.unwrap_or(Path::new("."))) else {
        return Ok(());
    };
    compare(what, need, free, &format!("on the disk of {}", folder.display()))
}

/// Refuses to hold `need` bytes when fewer are available to this process.
///
/// # Errors
/// Naming `what`, the bytes needed and the bytes available.
pub fn check_memory(what: &str, need: u64) -> Result<()> {
    let mut system = System::new();
    system.refresh_memory();
    let limit = system.cgroup_limits().map_or(u64::MAX, |limits| limits.total_memory);
    match system.available_memory().min(limit) {
        0 => Ok(()),
        free => compare(what, need, free, "in memory"),
    }
}

fn compare(what: &str, need: u64, free: u64, place: &str) -> Result<()> {
    ensure!(
        need <= free,
        "{what}: needs {} {place}, {} are free",
        bytes(need as f64),
        bytes(free as f64)
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_both_sizes_and_the_rest_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("not/made/yet");
        check_disk("a test", &deep, 1).unwrap();
        let error = check_disk("a test", &deep, u64::MAX).unwrap_err().to_string();
        assert!(
            error.starts_with("a test: needs 16777216.0 TiB on the disk of") && error.ends_with("are free"),
            "{error}"
        );
        check_disk("a test", Path::new("relative"), 1).unwrap();
        check_memory("a test", 1).unwrap();
        let error = check_memory("a test", u64::MAX).unwrap_err().to_string();
        assert!(error.contains("in memory"), "{error}");
    }
}
