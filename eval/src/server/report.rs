//! What a run against a server measured, as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::acceptance::macro_acceptance_length;
use crate::bootstrap::bootstrap_interval;
use crate::sampling::SamplingConfig;
use crate::server::detect::Engine;
use crate::server::reading::{Reading, Theirs};

/// How the numbers are defined; written into every report.
const DEFINITIONS: &[(&str, &str)] = &[
    (
        "round",
        "one draft and its verification; K_r tokens drafted, a_r leading ones accepted",
    ),
    (
        "acceptance_length",
        "1 + sum a_r / rounds, over all rounds (micro), cut ones as the engine counts them; includes the correction or bonus \
         token",
    ),
    (
        "acceptance_length_macro",
        "mean over answers of each one's acceptance length, where the engine counts by answer",
    ),
    (
        "acceptance_length_ci95",
        "95 % percentile bootstrap over answers of acceptance_length, seeded",
    ),
    (
        "draft_acceptance_rate",
        "sum a_r / sum K_r; depends on K, not comparable across block sizes",
    ),
    (
        "accept_at_pos",
        "share of rounds with a_r >= i, i = 1..K (joint); sums to mean_accepted_drafts",
    ),
    ("accept_cond", "share with a_r >= i of the rounds with a_r >= i - 1"),
    ("histogram", "rounds by a_r, 0..K"),
    (
        "tokens_per_verify_e2e",
        "completion tokens but each answer's first / rounds, after every cut",
    ),
    (
        "exact",
        "whether acceptance_length is counted; false where it is derived as `basis` says, or unknown",
    ),
    (
        "tokens_per_s",
        "completion tokens of all answers / seconds from the first request to the last answer, at this concurrency: prefill, \
         queueing and network included",
    ),
];

/// A run against a server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServerReport {
    /// `server`.
    pub kind: String,
    /// The engine.
    pub engine: Engine,
    /// Its version as it says.
    pub version: Option<String>,
    /// Its address, without credentials.
    pub url: String,
    /// The model's name there.
    pub model: String,
    /// By our definitions.
    pub ours: Ours,
    /// By the engine's.
    pub theirs: Theirs,
    /// Answers.
    pub prompts: usize,
    /// Tokens of all answers.
    pub completion_tokens: u64,
    /// From the first request to the last answer.
    pub wall_seconds: f64,
    /// See the definitions.
    pub tokens_per_s: f64,
    /// What every number means.
    pub definitions: BTreeMap<String, String>,
    /// Under which circumstances.
    pub setting: ServerSetting,
    /// Answer by answer.
    pub per_prompt: Vec<ServerPrompt>,
    /// What a reader should know.
    pub warnings: Vec<String>,
}

/// By our definitions.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Ours {
    /// 1 + accepted / rounds.
    pub acceptance_length: Option<f64>,
    /// Mean of the answers' own.
    pub acceptance_length_macro: Option<f64>,
    /// Over answers.
    pub acceptance_length_ci95: Option<[f64; 2]>,
    /// Accepted / rounds.
    pub mean_accepted_drafts: Option<f64>,
    /// Accepted / drafted.
    pub draft_acceptance_rate: Option<f64>,
    /// Tokens after the prefill's / rounds.
    pub tokens_per_verify_e2e: Option<f64>,
    /// Rounds.
    pub rounds: Option<u64>,
    /// Drafted tokens.
    pub drafted: Option<u64>,
    /// Accepted drafts.
    pub accepted: Option<u64>,
    /// Joint, positions 1..K; empty when unknown.
    pub accept_at_pos: Vec<Option<f64>>,
    /// Conditional, positions 1..K; empty when unknown.
    pub accept_cond: Vec<Option<f64>>,
    /// Rounds by accepted drafts; empty when unknown.
    pub histogram: Vec<u64>,
    /// Whether the length is counted.
    pub exact: bool,
    /// What the numbers rest on.
    pub basis: String,
}

impl Ours {
    pub(super) fn of(reading: &Reading, seed: u64) -> Self {
        let mut ours = Self {
            tokens_per_verify_e2e: reading.tokens_per_verify,
            exact: reading.exact,
            basis: reading.basis.clone(),
            ..Self::default()
        };
        let Some(counts) = &reading.counts else { return ours };
        ours.acceptance_length = counts.acceptance_length();
        ours.acceptance_length_macro = macro_acceptance_length(&reading.texts);
        ours.acceptance_length_ci95 = bootstrap_interval(&reading.texts, seed);
        ours.mean_accepted_drafts = counts.mean_accepted_drafts();
        ours.draft_acceptance_rate = counts.draft_acceptance_rate();
        (ours.rounds, ours.accepted) = (Some(counts.rounds), Some(counts.accepted));
        ours.drafted = (counts.drafted > 0).then_some(counts.drafted);
        ours.accept_at_pos = counts.accept_at_pos();
        ours.accept_cond = counts.accept_cond();
        ours.histogram.clone_from(&counts.histogram);
        ours
    }
}

/// Under which circumstances a server was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServerSetting {
    /// File of the prompts.
    pub prompts_file: String,
    /// SHA-256 over the prompts sent, hexadecimal.
    pub prompts_sha256: String,
    /// Which prompts: name, source, revision, sample count, order.
    pub prompt_set: serde_json::Value,
    /// Most new tokens an answer.
    pub max_new: usize,
    /// How tokens are chosen; every value is sent.
    pub sampling: SamplingConfig,
    /// Seed of sampling (sent when the temperature is above 0) and of the bootstrap.
    pub seed: u64,
    /// Requests at a time.
    pub concurrency: usize,
    /// `on`, `off` or `template default`; a row's own switch stands above it.
    pub thinking: String,
    /// Longest wait for an answer, seconds.
    pub timeout_seconds: f64,
    /// Version of this program.
    pub version: String,
}

/// One answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServerPrompt {
    /// `file:line`.
    pub id: String,
    /// Domain or category.
    pub domain: Option<String>,
    /// Tokens of the prompt as the server counts them.
    pub prompt_tokens: Option<u64>,
    /// Those of them that came out of the server's cache.
    pub cached_tokens: Option<u64>,
    /// Tokens of the answer.
    pub completion_tokens: u64,
    /// `stop`, `length`, ...
    pub finish_reason: Option<String>,
    /// From request to answer.
    pub seconds: f64,
    /// Rounds, where the engine counts by answer.
    pub rounds: Option<u64>,
    /// Drafted tokens, likewise.
    pub drafted: Option<u64>,
    /// Accepted drafts, likewise.
    pub accepted: Option<u64>,
    /// 1 + accepted / rounds, likewise.
    pub acceptance_length: Option<f64>,
}

/// The definitions as a map.
pub(super) fn definitions() -> BTreeMap<String, String> {
    DEFINITIONS
        .iter()
        .map(|&(name, text)| (name.into(), text.into()))
        .collect()
}
