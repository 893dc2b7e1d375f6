//! SGLang: counts of each answer, in `meta_info`.
//!
//! `python/sglang/srt/managers/tokenizer_manager.py` adds to every answer `spec_verify_ct` (rounds), `spec_accept_length` =
//! completion tokens / rounds, and, where the scheduler counts it, a histogram whose index is the drafts a round had accepted,
//! bonus not included: `spec_correct_drafts_histogram`, formerly `spec_accept_histogram`, which stays as an alias.
//! Accepted and drafted tokens are `spec_num_correct_drafts` and `spec_num_proposed_drafts`, earlier `spec_accepted_drafts`
//! and `spec_proposed_drafts`, before that `spec_accept_token_num` and `spec_draft_token_num`. A chat answer carries
//! `choices[0].meta_info` only when the request says `return_meta_info` (`entrypoints/openai/serving_chat.py`; off by default).
//!
//! Their length counts the token that the prefill wrote although no round did, and leaves out what a stop or the limit cut:
//! `theirs = ours + texts / rounds - cut tokens / rounds`, which holds exactly where the histogram is there.
//! `/server_info` has `internal_states[..].avg_spec_accept_length`, an average since the server started: it cannot be told
//! apart from what others asked, so it is shown and not counted on.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::acceptance::{Counts, pooled};
use crate::server::chat::Answer;
use crate::server::reading::{Reading, Theirs};

const OFF: &str = "SGLang does not speculate; start it with --speculative-algorithm DFLASH --speculative-draft-model-path \
                   DRAFTER --speculative-num-draft-tokens BLOCK";

/// Refuses a server that says it does not speculate.
///
/// # Errors
/// Names the flags that switch it on.
pub(super) fn check(info: &Value) -> Result<()> {
    let off = info
        .get("speculative_algorithm")
        .is_some_and(|name| name.is_null() || name == "NONE" || name == "");
    ensure!(!off, OFF);
    Ok(())
}

/// The server's average since it started, over its engines.
pub(super) fn average(info: &Value) -> Option<f64> {
    let lengths: Vec<f64> = info["internal_states"]
        .as_array()?
        .iter()
        .filter_map(|state| state["avg_spec_accept_length"].as_f64())
        .collect();
    (!lengths.is_empty()).then(|| lengths.iter().sum::<f64>() / lengths.len() as f64)
}

/// What the answers hold; `average` is the server's own.
///
/// # Errors
/// When an answer contradicts itself, or none tells of speculation.
pub(super) fn reading(answers: &[Answer], average: Option<f64>) -> Result<Reading> {
    let metas: Vec<Meta> = answers
        .iter()
        .map(Meta::of)
        .enumerate()
        .map(|(index, meta)| meta.with_context(|| format!("answer {}", index + 1)))
        .collect::<Result<_>>()?;
    let rounds: u64 = metas.iter().map(|meta| meta.rounds).sum();
    if metas.iter().all(|meta| !meta.present) {
        let average = average.context(
            "no answer has meta_info with spec_verify_ct, and /server_info no average: either nothing was speculated \
             (--speculative-algorithm DFLASH) or this SGLang is too old for return_meta_info in chat answers",
        )?;
        return Ok(only_average(average));
    }
    ensure!(rounds > 0, "spec_verify_ct is 0 in every answer: nothing was drafted");
    let written: u64 = metas.iter().map(|meta| meta.written).sum();
    let begun = metas.iter().filter(|meta| meta.written > 0).count() as u64;
    let mut theirs = Theirs {
        name: "spec_accept_length".into(),
        formula: "completion tokens / verify_ct, mean over answers".into(),
        acceptance_length: mean(&metas),
        pooled: Some(written as f64 / rounds as f64),
        since_start: average,
        ..Theirs::default()
    };
    let after_prefill = (written - begun) as f64 / rounds as f64;
    let texts: Option<Vec<Counts>> = metas.iter().map(|meta| meta.counts.clone()).collect();
    let Some(texts) = texts else {
        theirs.difference = "theirs counts the prefill's token; ours needs counts that these answers lack".into();
        return Ok(Reading {
            tokens_per_verify: Some(after_prefill),
            theirs,
            counts: None,
            texts: Vec::new(),
            exact: false,
            basis: "verify_ct alone: tokens_per_verify_e2e = (completion tokens - answers) / verify_ct".into(),
            warnings: vec!["no histogram and no count of accepted drafts: acceptance length unknown".into()],
        });
    };
    let counts = pooled(&texts);
    theirs.draft_acceptance_rate = (counts.drafted > 0).then(|| counts.draft_acceptance_rate()).flatten();
    let promised = counts.accepted + counts.rounds + begun;
    let prefill = begun as f64 / counts.rounds as f64;
    let mut warnings = Vec::new();
    if promised >= written {
        let cut = (promised - written) as f64 / counts.rounds as f64;
        theirs.prefill_share = Some(prefill);
        theirs.cut_share = Some(cut);
        theirs.difference = format!(
            "pooled theirs = ours + {prefill:.3} (the prefill's token) - {cut:.3} (cut at a stop or the limit)"
        );
    } else {
        theirs.difference = "the answers have more tokens than their rounds: some steps were not counted".into();
    }
    let most = counts.histogram.len().saturating_sub(1) as u64;
    if most > 0 && promised.saturating_sub(written) > most * begun {
        warnings.push(
            "the histogram accounts for more tokens than a cut round a text can explain: does this build count the bonus \
             token in it?"
                .into(),
        );
    }
    let basis = if counts.histogram.is_empty() {
        "accepted drafts and verify_ct of each answer; cut rounds are counted as SGLang does"
    } else {
        "histogram of accepted drafts in each answer; cut rounds are counted as SGLang does"
    };
    Ok(Reading {
        tokens_per_verify: Some(after_prefill),
        theirs,
        counts: Some(counts),
        texts,
        exact: true,
        basis: basis.into(),
        warnings,
    })
}

fn only_average(average: f64) -> Reading {
    Reading {
        tokens_per_verify: None,
        theirs: Theirs {
            name: "avg_spec_accept_length".into(),
            formula: "accepted / rounds as the scheduler averages them".into(),
            since_start: Some(average),
            difference: "an average over everything since the server started, not over these prompts".into(),
            ..Theirs::default()
        },
        counts: None,
        texts: Vec::new(),
        exact: false,
        basis: "nothing of these prompts: chat answers without meta_info".into(),
        warnings: vec![
            "this SGLang leaves return_meta_info aside: only its average since the start is known; take a newer one"
                .into(),
        ],
    }
}

fn mean(metas: &[Meta]) -> Option<f64> {
    let lengths: Vec<f64> = metas
        .iter()
        .filter(|meta| meta.rounds > 0)
        .map(|meta| meta.length.unwrap_or(meta.written as f64 / meta.rounds as f64))
        .collect();
    (!lengths.is_empty()).then(|| lengths.iter().sum::<f64>() / lengths.len() as f64)
}

/// What an answer says of its own text.
struct Meta {
    /// Whether it says anything of speculation.
    present: bool,
    rounds: u64,
    written: u64,
    length: Option<f64>,
    counts: Option<Counts>,
}

impl Meta {
    fn of(answer: &Answer) -> Result<Self> {
        let body = &answer.body;
        let places = [&body["choices"][0]["meta_info"], &body["meta_info"], &body["sglext"]];
        let meta = places
            .into_iter()
            .find(|place| place.get("spec_verify_ct").is_some())
            .unwrap_or(&Value::Null);
        let rounds = count(meta, &["spec_verify_ct"])?;
        let accepted = count(
            meta,
            &[
                "spec_num_correct_drafts",
                "spec_accepted_drafts",
                "spec_accept_token_num",
            ],
        )?;
        let drafted = count(
            meta,
            &[
                "spec_num_proposed_drafts",
                "spec_proposed_drafts",
                "spec_draft_token_num",
            ],
        )?;
        let length = &meta["spec_accept_length"];
        Ok(Self {
            // a text that the prefill finished has rounds of no kind, and says so by saying nothing
            present: rounds.is_some(),
            rounds: rounds.unwrap_or(0),
            written: answer.completion_tokens,
            length: length.as_f64().filter(|length| length.is_finite()),
            counts: counts(meta, rounds.unwrap_or(0), accepted, drafted)?,
        })
    }
}

/// Our counts out of an answer; nothing when it lacks them.
fn counts(meta: &Value, rounds: u64, accepted: Option<u64>, drafted: Option<u64>) -> Result<Option<Counts>> {
    let names = ["spec_correct_drafts_histogram", "spec_accept_histogram"];
    let list = names
        .iter()
        .find_map(|&name| meta[name].as_array().map(|list| (name, list)));
    let histogram: Vec<u64> = match list {
        None => Vec::new(),
        Some((name, list)) => list
            .iter()
            .map(|value| {
                value
                    .as_u64()
                    .with_context(|| format!("{name}: expected counts, got {value}"))
            })
            .collect::<Result<_>>()?,
    };
    let drafted = drafted.unwrap_or(0);
    if histogram.is_empty() {
        let none = (rounds == 0).then_some(0);
        return Ok(accepted.or(none).map(|accepted| Counts {
            rounds,
            drafted,
            accepted,
            histogram,
        }));
    }
    let sum: u64 = histogram.iter().sum();
    ensure!(sum == rounds, "{sum} rounds in the histogram, spec_verify_ct {rounds}");
    let weighted = histogram
        .iter()
        .zip(0..)
        .map(|(count, drafts): (&u64, u64)| count * drafts)
        .sum();
    ensure!(
        accepted.is_none_or(|accepted| accepted == weighted),
        "the histogram has {weighted} accepted drafts, the counter {}: does this build count the bonus token?",
        accepted.unwrap_or(0)
    );
    Ok(Some(Counts {
        rounds,
        drafted,
        accepted: weighted,
        histogram,
    }))
}

/// The first of several names that is there.
fn count(meta: &Value, names: &[&str]) -> Result<Option<u64>> {
    let Some((name, value)) = names.iter().find_map(|name| meta.get(*name).map(|value| (name, value))) else {
        return Ok(None);
    };
    value
        .as_u64()
        .map(Some)
        .with_context(|| format!("{name}: expected a count, got {value}"))
}
