//! The counters of speculation that vLLM and llama.cpp expose under one scheme of names, before and after a run.
//!
//! Both count a *draft* as one round, and a *draft token* as one drafted slot; the counter by position counts rounds that
//! accepted that position, which makes it the joint acceptance (vLLM: `vllm/v1/spec_decode/metrics.py`; llama.cpp:
//! `server_task_result_metrics` in `tools/server/server-task.cpp`).

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::acceptance::Counts;
use crate::server::client::Client;
use crate::server::prometheus::{Family, Labels, counter, growth, start_time};

/// Pause between two readings that should agree, and most of them.
const PAUSE: Duration = Duration::from_millis(100);
const READINGS: usize = 30;

/// Under which names an engine counts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Names {
    /// Before `spec_decode_...`.
    pub(super) prefix: &'static str,
    /// Counter of all tokens written.
    pub(super) generated: &'static str,
}

/// The counters at one time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Snapshot {
    drafts: Family,
    draft_tokens: Family,
    accepted: Family,
    per_position: Option<Family>,
    generated: Option<Family>,
    started: Option<String>,
}

/// What a server's metrics hold.
pub(super) enum Found {
    /// The counters.
    Counters(Box<Snapshot>),
    /// None of them, and why as far as can be seen.
    Absent(String),
}

/// What happened between two snapshots.
pub(super) struct Between {
    /// Rounds, drafts, accepted drafts; the histogram is empty when the positions do not add up.
    pub(super) counts: Counts,
    /// Tokens that the server wrote for anybody.
    pub(super) generated: Option<u64>,
    /// What does not add up.
    pub(super) warnings: Vec<String>,
}

/// Reads the counters.
///
/// # Errors
/// When the server does not answer, or with something that is no count.
pub(super) fn read(client: &Client, names: Names) -> Result<Found> {
    let reply = client.get("/metrics")?;
    if reply.status != 200 {
        return Ok(Found::Absent(format!(
            "/metrics: HTTP {}: {}",
            reply.status,
            client.beginning(&reply.body)
        )));
    }
    let find = |name: &str| counter(&reply.body, &full(names, name)).context("/metrics");
    let wanted = ["num_drafts", "num_draft_tokens", "num_accepted_tokens"];
    let [Some(drafts), Some(draft_tokens), Some(accepted)] = [find(wanted[0])?, find(wanted[1])?, find(wanted[2])?]
    else {
        return Ok(Found::Absent(format!("/metrics has no {}", full(names, wanted[0]))));
    };
    Ok(Found::Counters(Box::new(Snapshot {
        drafts,
        draft_tokens,
        accepted,
        per_position: find("num_accepted_tokens_per_pos")?,
        generated: counter(&reply.body, names.generated).context("/metrics")?,
        started: start_time(&reply.body).map(str::to_owned),
    })))
}

/// Reads the counters until two readings agree: an answer may arrive before it is counted.
///
/// # Errors
/// As [`read`]; also when the counters vanished or do not come to rest.
pub(super) fn settled(client: &Client, names: Names) -> Result<Snapshot> {
    let mut last: Option<Snapshot> = None;
    for _ in 0..READINGS {
        let now = match read(client, names)? {
            Found::Counters(now) => *now,
            Found::Absent(why) => anyhow::bail!("the counters are gone: {why}"),
        };
        if last.as_ref() == Some(&now) {
            return Ok(now);
        }
        last = Some(now);
        std::thread::sleep(PAUSE);
    }
    anyhow::bail!("the counters do not come to rest: somebody else uses the server; measure on one that is idle")
}

/// What happened between two snapshots.
///
/// # Errors
/// When the server was restarted in between, or the counts contradict each other.
pub(super) fn between(names: Names, before: &Snapshot, after: &Snapshot) -> Result<Between> {
    if let (Some(old), Some(new)) = (&before.started, &after.started) {
        ensure!(
            old == new,
            "the server was restarted while we measured (process_start_time_seconds {old}, then {new})"
        );
    }
    let total = |name: &str, before: &Family, after: &Family| {
        let grown = growth(&full(names, name), before, after)?;
        anyhow::Ok(grown.iter().map(|(_, by)| by).sum::<u64>())
    };
    let mut counts = Counts {
        rounds: total("num_drafts", &before.drafts, &after.drafts)?,
        drafted: total("num_draft_tokens", &before.draft_tokens, &after.draft_tokens)?,
        accepted: total("num_accepted_tokens", &before.accepted, &after.accepted)?,
        histogram: Vec::new(),
    };
    ensure!(
        counts.accepted <= counts.drafted,
        "the counters contradict each other: {} drafted, {} accepted",
        counts.drafted,
        counts.accepted
    );
    let mut warnings = Vec::new();
    if let Some(now) = &after.per_position {
        let none = Family::new();
        let old = before.per_position.as_ref().unwrap_or(&none);
        match histogram(&growth(&full(names, "num_accepted_tokens_per_pos"), old, now)?, &counts) {
            Ok(histogram) => counts.histogram = histogram,
            Err(error) => warnings.push(format!("acceptance by position left out: {error:#}")),
        }
    }
    let generated = match (&before.generated, &after.generated) {
        (Some(before), Some(after)) => {
            let grown = growth(names.generated, before, after)?;
            Some(grown.iter().map(|(_, by)| by).sum())
        }
        _ => None,
    };
    Ok(Between {
        counts,
        generated,
        warnings,
    })
}

/// Rounds by accepted drafts, out of rounds that accepted each position.
fn histogram(grown: &[(&Labels, u64)], counts: &Counts) -> Result<Vec<u64>> {
    let mut reached: Vec<u64> = Vec::new();
    for (labels, by) in grown {
        let position = labels.iter().find(|(name, _)| name == "position");
        let position: usize = position
            .and_then(|(_, value)| value.parse().ok())
            .filter(|&position| position < 4096)
            .context("a series without a position")?;
        if reached.len() <= position {
            reached.resize(position + 1, 0);
        }
        reached[position] += by;
    }
    reached.insert(0, counts.rounds);
    ensure!(
        reached.is_sorted_by(|a, b| a >= b),
        "a later position was accepted more often"
    );
    ensure!(
        reached[1..].iter().sum::<u64>() == counts.accepted,
        "the positions do not add up to {} accepted drafts",
        counts.accepted
    );
    reached.push(0);
    Ok(reached.windows(2).map(|pair| pair[0] - pair[1]).collect())
}

fn full(names: Names, name: &str) -> String {
    format!("{}spec_decode_{name}", names.prefix)
}
