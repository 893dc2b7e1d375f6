//! vLLM: global counters of whole rounds, read before and after.
//!
//! `vllm/v1/spec_decode/metrics.py` counts, in `SpecDecodingStats.observe_draft`, one draft a round, its drafted and its
//! accepted tokens, and the positions accepted; `SpecDecodingLogging.log` prints 1 + accepted / drafts as the mean acceptance
//! length, which is our definition. Two things differ from our own loop: a round that a stop token or the limit cut is
//! counted in full, and nothing tells it apart; and a step without any draft is no round. The counters exist only when
//! speculation is on, and are summed over the engines of a data-parallel server.

use anyhow::{Result, bail, ensure};

use crate::server::chat::Answer;
use crate::server::client::Client;
use crate::server::counters::{Found, Names, Snapshot, between, read, settled};
use crate::server::reading::{Reading, Theirs, foreign};

const NAMES: Names = Names {
    prefix: "vllm:",
    generated: "vllm:generation_tokens",
};

/// The counters before a run.
///
/// # Errors
/// When there are none.
pub(super) fn before(client: &Client) -> Result<Snapshot> {
    match read(client, NAMES)? {
        Found::Counters(snapshot) => Ok(*snapshot),
        Found::Absent(why) => bail!(
            "{why}: vLLM counts no speculation; start it with --speculative-config \
             '{{\"method\": \"dflash\", \"model\": DRAFTER, \"num_speculative_tokens\": BLOCK - 1}}' and without \
             --disable-log-stats"
        ),
    }
}

/// What happened since.
///
/// # Errors
/// When the server was restarted or nothing was drafted.
pub(super) fn reading(client: &Client, before: &Snapshot, answers: &[Answer]) -> Result<Reading> {
    let between = between(NAMES, before, &settled(client, NAMES)?)?;
    let (counts, mut warnings) = (between.counts, between.warnings);
    ensure!(
        counts.rounds > 0,
        "vLLM counted no draft while it answered: is the drafter loaded, and are there more than one or two new tokens?"
    );
    let written: u64 = answers.iter().map(|answer| answer.completion_tokens).sum();
    warnings.extend(foreign(between.generated, written));
    let after_prefill: u64 = answers
        .iter()
        .map(|answer| answer.completion_tokens.saturating_sub(1))
        .sum();
    Ok(Reading {
        tokens_per_verify: Some(after_prefill as f64 / counts.rounds as f64),
        theirs: Theirs {
            name: "Mean acceptance length".into(),
            formula: "1 + accepted / drafts".into(),
            acceptance_length: counts.acceptance_length(),
            draft_acceptance_rate: counts.draft_acceptance_rate(),
            difference: "none: the same formula over the same rounds".into(),
            ..Theirs::default()
        },
        counts: Some(counts),
        texts: Vec::new(),
        exact: true,
        basis: "vLLM's counters, after minus before; cut rounds are counted in full".into(),
        warnings,
    })
}
