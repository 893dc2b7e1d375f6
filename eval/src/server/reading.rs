//! What was read of an engine after a run: ours and theirs side by side.

use serde::{Deserialize, Serialize};

use crate::acceptance::Counts;

/// An engine's counts of one run.
#[derive(Debug, Clone)]
pub(super) struct Reading {
    /// All rounds; nothing when the engine does not tell enough.
    pub(super) counts: Option<Counts>,
    /// Counts of each text in the order of the prompts; empty when only the sum is known.
    pub(super) texts: Vec<Counts>,
    /// Tokens after the prefill's / rounds, cuts included.
    pub(super) tokens_per_verify: Option<f64>,
    /// Whether `counts` is counted, not derived.
    pub(super) exact: bool,
    /// What it rests on.
    pub(super) basis: String,
    /// By the engine's own definition.
    pub(super) theirs: Theirs,
    /// What a reader should know.
    pub(super) warnings: Vec<String>,
}

/// The engine's own number.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Theirs {
    /// What the engine calls it.
    pub name: String,
    /// How the engine computes it.
    pub formula: String,
    /// Its value over this run.
    pub acceptance_length: Option<f64>,
    /// The same formula over the sums of all answers, where the engine takes it an answer at a time.
    pub pooled: Option<f64>,
    /// The server's average since it started, other people's requests included.
    pub since_start: Option<f64>,
    /// Accepted / drafted by the engine's counts.
    pub draft_acceptance_rate: Option<f64>,
    /// Why it differs from ours.
    pub difference: String,
    /// Part of `pooled` that comes from the tokens that prefills wrote.
    pub prefill_share: Option<f64>,
    /// Part of ours that stops and limits cut and `pooled` therefore lacks.
    pub cut_share: Option<f64>,
}

/// A warning when a server wrote more than it wrote for us.
pub(super) fn foreign(generated: Option<u64>, ours: u64) -> Option<String> {
    let generated = generated?;
    (generated != ours).then(|| {
        format!(
            "the server wrote {generated} tokens meanwhile, {ours} of them for these prompts: the counters are not of this \
             run alone"
        )
    })
}
