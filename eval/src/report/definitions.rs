//! What every number of a report means; the text travels with the numbers.

use std::collections::BTreeMap;

/// How the numbers of a report are defined; written into every report.
pub const DEFINITIONS: &[(&str, &str)] = &[
    (
        "round",
        "one draft and its verification; K_r tokens drafted, a_r leading ones accepted, a_r + 1 emitted",
    ),
    (
        "acceptance_length",
        "1 + sum a_r / rounds, over all counted rounds (micro); includes the correction or bonus token",
    ),
    (
        "acceptance_length_macro",
        "mean over prompts of each prompt's acceptance length",
    ),
    (
        "acceptance_length_ci95",
        "95 % percentile bootstrap over prompts of acceptance_length, seeded",
    ),
    (
        "draft_acceptance_rate",
        "sum a_r / sum K_r; depends on K, not comparable across block sizes",
    ),
    (
        "accept_at_pos",
        "share of counted rounds with a_r >= i, i = 1..K (joint); sums to mean_accepted_drafts",
    ),
    (
        "accept_cond",
        "share with a_r >= i of the counted rounds with a_r >= i - 1",
    ),
    ("histogram", "counted rounds by a_r, 0..K"),
    (
        "truncated",
        "rounds narrowed by the budget or cut by a stop token; counted apart unless include_truncated",
    ),
    (
        "tokens_per_verify_e2e",
        "tokens emitted after the prefill's / all rounds, truncated ones included",
    ),
    (
        "tokens_per_s",
        "tokens after the prefill's / seconds after the prefill; the drafter's context injection is prefill",
    ),
    (
        "speedup",
        "spec_tokens_per_s / plain_tokens_per_s: the ratio of decoding seconds when the texts are identical",
    ),
    ("speedup_with_prefill", "the same with the prefill's token and seconds"),
    (
        "by_context",
        "counted rounds by the position of their anchor: prompt tokens and text before the round",
    ),
    (
        "costs",
        "fastest of several repetitions at one context (verify_median: the median one); width 0 is a plain step of the target",
    ),
    (
        "projected speedup",
        "(1 + sum of accept_at_pos up to w) / cost(w) * cost(0): what width w would give at this acceptance",
    ),
    (
        "identical",
        "whether every prompt's speculative text equals its plain text, token for token; null when sampled",
    ),
];

/// The definitions as a map, for a report.
pub fn definitions() -> BTreeMap<String, String> {
    DEFINITIONS
        .iter()
        .map(|&(name, text)| (name.into(), text.into()))
        .collect()
}
