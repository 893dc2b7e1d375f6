//! llama.cpp's server: global counters where it has them, else what can be told from each answer's `timings`.
//!
//! Newer builds (b10597 is one) expose `llamacpp:spec_decode_num_drafts_total`, `..._num_draft_tokens_total`,
//! `..._num_accepted_tokens_total` and the one by position when started with `--metrics`
//! (`tools/server/server-task.cpp`): exact, and the formula of the log's "mean len", 1 + accepted / verification steps.
//!
//! An answer's `timings` (`result_timings::to_json`, same file) has `predicted_n`, and `draft_n` and `draft_n_accepted` when
//! anything was drafted. The acceptance rate follows exactly; the number of rounds is not there. The prefill writes one
//! token and a round a_r + 1, so without cuts rounds = `predicted_n` - 1 - `draft_n_accepted`. Two things bend this: drafts
//! accepted beyond a stop or the limit are counted but not written (too few rounds, the length comes out too high, by at most
//! one block a text), and steps without a draft count as rounds (the length comes out too low). So it is an approximation.
//!
//! Trap: some builds, on targets whose state cannot be rolled back (hybrid ones such as Qwen3.5), count only rounds that were
//! accepted whole; the rate is then 100 % whatever the drafter.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::acceptance::{Counts, pooled};
use crate::server::chat::Answer;
use crate::server::client::Client;
use crate::server::counters::{Found, Names, Snapshot, between, read, settled};
use crate::server::reading::{Reading, Theirs};

const NAMES: Names = Names {
    prefix: "llamacpp:",
    generated: "llamacpp:tokens_predicted",
};
const OFF: &str = "llama.cpp drafted nothing; start it with --spec-type draft-dflash -md DRAFTER.gguf";
/// Rounds all of them accepted whole that are past coincidence.
const SUSPICIOUS: u64 = 20;

/// The counters before a run, or why there are none.
///
/// # Errors
/// When the server does not answer, or with something that is no count.
pub(super) fn before(client: &Client) -> Result<std::result::Result<Snapshot, String>> {
    Ok(match read(client, NAMES)? {
        Found::Counters(snapshot) => Ok(*snapshot),
        Found::Absent(why) => Err(why),
    })
}

/// What happened since.
///
/// # Errors
/// When the server was restarted or nothing was drafted.
pub(super) fn reading(
    client: &Client,
    before: &std::result::Result<Snapshot, String>,
    answers: &[Answer],
) -> Result<Reading> {
    let timings: Vec<Timings> = answers
        .iter()
        .map(Timings::of)
        .enumerate()
        .map(|(index, timings)| timings.with_context(|| format!("answer {}", index + 1)))
        .collect::<Result<_>>()?;
    let drafted: u64 = timings.iter().map(|timings| timings.drafted).sum();
    ensure!(drafted > 0, OFF);
    let accepted: u64 = timings.iter().map(|timings| timings.accepted).sum();
    let mut warnings = Vec::new();
    if accepted == drafted && drafted > SUSPICIOUS {
        warnings.push(format!(
            "all of {drafted} drafts were accepted: builds that cannot roll a hybrid target back count only such rounds"
        ));
    }
    let mut reading = match before {
        Ok(before) => {
            let between = between(NAMES, before, &settled(client, NAMES)?)?;
            ensure!(between.counts.rounds > 0, OFF);
            warnings.extend(between.warnings);
            let counted = between.counts.drafted;
            if counted != drafted {
                warnings.push(format!(
                    "the counters hold {counted} drafted tokens, the answers {drafted}: others used the server, too"
                ));
            }
            exact(between.counts, &timings)
        }
        Err(why) => {
            warnings.push(format!(
                "rounds are derived, not counted, because {why}; a newer build started with --metrics counts them"
            ));
            approximate(&timings)
        }
    };
    warnings.append(&mut reading.warnings);
    reading.warnings = warnings;
    Ok(reading)
}

fn exact(counts: Counts, timings: &[Timings]) -> Reading {
    Reading {
        tokens_per_verify: Some(after_prefill(timings) as f64 / counts.rounds as f64),
        theirs: Theirs {
            name: "mean len".into(),
            formula: "1 + accepted / verification steps".into(),
            acceptance_length: counts.acceptance_length(),
            draft_acceptance_rate: counts.draft_acceptance_rate(),
            difference: "none: the same formula over the same rounds".into(),
            ..Theirs::default()
        },
        counts: Some(counts),
        texts: Vec::new(),
        exact: true,
        basis: "llama.cpp's counters, after minus before; cut rounds are counted in full".into(),
        warnings: Vec::new(),
    }
}

fn approximate(timings: &[Timings]) -> Reading {
    let texts: Vec<Counts> = timings.iter().map(Timings::counts).collect();
    let counts = pooled(&texts);
    Reading {
        tokens_per_verify: None,
        theirs: Theirs {
            name: "draft acceptance".into(),
            formula: "draft_n_accepted / draft_n".into(),
            draft_acceptance_rate: counts.draft_acceptance_rate(),
            difference: "the rate is exact; llama.cpp prints its length only in its log".into(),
            ..Theirs::default()
        },
        counts: Some(counts),
        texts,
        exact: false,
        basis: "timings of the answers: rounds = predicted_n - 1 - draft_n_accepted".into(),
        warnings: Vec::new(),
    }
}

fn after_prefill(timings: &[Timings]) -> u64 {
    timings.iter().map(|timings| timings.predicted.saturating_sub(1)).sum()
}

/// What an answer says of its own text.
struct Timings {
    predicted: u64,
    drafted: u64,
    accepted: u64,
}

impl Timings {
    fn of(answer: &Answer) -> Result<Self> {
        let timings = &answer.body["timings"];
        ensure!(timings.is_object(), "no timings: is this llama.cpp's own server?");
        let count = |field: &str| match &timings[field] {
            // left out when nothing was drafted
            Value::Null => Ok(0),
            value => value
                .as_u64()
                .with_context(|| format!("timings.{field}: expected a count, got {value}")),
        };
        let (predicted, drafted, accepted) = (count("predicted_n")?, count("draft_n")?, count("draft_n_accepted")?);
        ensure!(accepted <= drafted, "timings: {accepted} accepted of {drafted} drafts");
        Ok(Self {
            predicted,
            drafted,
            accepted,
        })
    }

    fn counts(&self) -> Counts {
        let written = self.predicted.saturating_sub(1);
        Counts {
            // a text of one round that was cut hard would have none
            rounds: written.saturating_sub(self.accepted).max(u64::from(self.drafted > 0)),
            drafted: self.drafted,
            accepted: self.accepted,
            histogram: Vec::new(),
        }
    }
}
