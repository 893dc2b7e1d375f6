//! A report's prompts as CSV: one row a text, for a spreadsheet or a data frame.
//!
//! Quoting follows RFC 4180, lines end in a line feed, numbers have all their digits and a point. A number that does not
//! exist is an empty field. Columns are only ever added at the end:
//! - `prompt`: 0-based index of the conversation; `id`: `file:line` or the data set's own; `domain`, `thinking`: empty
//!   where the prompts have none; `turn`: 0-based turn of the conversation
//! - `prompt_tokens`, `new_tokens`: tokens of the rendered prompt, and generated (a stop token included); `finish`: why the
//!   text ended
//! - `rounds`, `drafted`, `accepted`: counted rounds, and the tokens drafted and accepted in them;
//!   `truncated_rounds`: rounds narrowed or cut, which are among the counted only when the report includes them
//! - `acceptance_length`: 1 + accepted / rounds
//! - `spec_seconds`, `plain_seconds`: decoding without prefill; `spec_tokens_per_s`, `plain_tokens_per_s`: tokens after
//!   the prefill's over them. The plain rate is left out where the texts differ: a report does not hold the plain text
//! - `identical`: whether both texts are the same, `true` or `false` (sampled texts differ by right)
//! - `longest_run`: longest run of one repeated token; `distinct_ratio`: distinct tokens / tokens

use std::fmt::Display;

use super::derived::Rounds;
use super::{PromptResult, Report};

/// Names of the columns, in order.
pub const COLUMNS: [&str; 20] = [
    "prompt",
    "id",
    "domain",
    "thinking",
    "turn",
    "prompt_tokens",
    "new_tokens",
    "finish",
    "rounds",
    "truncated_rounds",
    "drafted",
    "accepted",
    "acceptance_length",
    "spec_seconds",
    "plain_seconds",
    "spec_tokens_per_s",
    "plain_tokens_per_s",
    "identical",
    "longest_run",
    "distinct_ratio",
];

/// The prompts of `report`: a header, then one row a text in the order of measuring.
pub fn csv(report: &Report) -> String {
    let mut out = COLUMNS.join(",");
    out.push('\n');
    for result in &report.per_prompt {
        let fields = row(result, report.include_truncated).map(|field| quoted(&field));
        out.push_str(&fields.join(","));
        out.push('\n');
    }
    out
}

fn row(result: &PromptResult, include_truncated: bool) -> [String; COLUMNS.len()] {
    let Rounds {
        counted,
        drafted,
        accepted,
    } = result.rounds(include_truncated);
    let optional = |name: &Option<String>| name.clone().unwrap_or_default();
    [
        text(result.prompt),
        result.id.clone(),
        optional(&result.domain),
        optional(&result.thinking),
        text(result.turn),
        text(result.prompt_tokens),
        text(result.new_tokens),
        result.finish.name().into(),
        text(counted),
        text(result.truncated.len()),
        text(drafted),
        text(accepted),
        number(result.acceptance_length),
        number(Some(result.spec_seconds)),
        number(Some(result.plain_seconds)),
        number(result.spec_tokens_per_s()),
        number(result.plain_tokens_per_s()),
        text(result.identical),
        text(result.longest_run),
        number(Some(result.distinct_ratio)),
    ]
}

fn text(value: impl Display) -> String {
    value.to_string()
}

fn number(value: Option<f64>) -> String {
    value.filter(|value| value.is_finite()).map(text).unwrap_or_default()
}

fn quoted(field: &str) -> String {
    if field.contains(['"', ',', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.into()
    }
}
