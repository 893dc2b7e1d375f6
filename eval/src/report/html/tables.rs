//! The page's tables: groups, prompts, the setting, the definitions. What is cut off is said.

use std::fmt::Write;

use serde_json::Value;

use super::markup::{Column, NONE, clipped, count, escaped, figures, number, short, table};
use crate::report::{PromptResult, Report};

/// Prompts listed; the JSON and the CSV have all.
const MOST_PROMPTS: usize = 50;
/// Groups listed.
const MOST_GROUPS: usize = 80;
/// Definitions listed: those of this program's reports fit by far.
const MOST_DEFINITIONS: usize = 60;
/// Characters of a name in a table.
const NAME: usize = 60;
/// Characters of a value of the setting.
const VALUE: usize = 2000;

/// The notice of a list that is not shown whole, else nothing.
pub(super) fn cut(shown: usize, of: usize, what: &str) -> String {
    if shown < of {
        format!("First {} of {} {what}. ", count(shown as u64), count(of as u64))
    } else {
        String::new()
    }
}

/// Acceptance by domain and thinking mode; nothing where the prompts have neither.
pub(super) fn groups(report: &Report) -> String {
    if report.groups.is_empty() {
        return String::new();
    }
    let columns = [
        Column("group", false),
        Column("prompts", true),
        Column("rounds", true),
        Column("acceptance length", true),
        Column("95 % interval", true),
        Column("mean of prompts", true),
        Column("speed-up", true),
    ];
    let rows: Vec<_> = report
        .groups
        .iter()
        .take(MOST_GROUPS)
        .map(|group| {
            vec![
                short(&group.name, NAME),
                count(group.prompts as u64),
                count(group.rounds),
                number(group.acceptance_length, 3),
                interval(group.acceptance_length_ci95, 2),
                number(group.acceptance_length_macro, 3),
                times(group.speedup),
            ]
        })
        .collect();
    format!(
        "<section><h2>Groups</h2>\n<p class=\"lede\">{}Speed-up is left out where texts differ from plain decoding.</p>\n{}</section>\n",
        cut(rows.len(), report.groups.len(), "groups"),
        table("Acceptance by group", &columns, &rows)
    )
}

/// `2.39–2.83`.
pub(super) fn interval(interval: Option<[f64; 2]>, digits: usize) -> String {
    match interval.map(|ends| ends.map(|end| number(Some(end), digits))) {
        Some([low, high]) if low != NONE && high != NONE => format!("{low}–{high}"),
        _ => NONE.into(),
    }
}

/// `1.23×`.
pub(super) fn times(value: Option<f64>) -> String {
    match number(value, 2) {
        none if none == NONE => none,
        ratio => format!("{ratio}×"),
    }
}

/// The prompts of lowest acceptance; texts that differ from plain decoding's come before them.
pub(super) fn prompts(report: &Report) -> String {
    if report.per_prompt.is_empty() {
        return String::new();
    }
    let sampled = report.identical.is_none();
    let mut order: Vec<&PromptResult> = report.per_prompt.iter().collect();
    let length = |result: &PromptResult| result.acceptance_length.unwrap_or(f64::INFINITY);
    order.sort_by(|a, b| {
        let differing_first = a.identical.cmp(&b.identical);
        let by_length = length(a).total_cmp(&length(b));
        if sampled {
            by_length
        } else {
            differing_first.then(by_length)
        }
    });
    let any = |has: &dyn Fn(&PromptResult) -> bool| report.per_prompt.iter().any(has);
    // columns that say nothing are left out
    let (domain, thinking, turn) = (
        any(&|result| result.domain.is_some()),
        any(&|result| result.thinking.is_some()),
        any(&|result| result.turn > 0),
    );
    let shown: [(Column, bool); 13] = [
        (Column("prompt", false), true),
        (Column("domain", false), domain),
        (Column("thinking", false), thinking),
        (Column("turn", true), turn),
        (Column("prompt tokens", true), true),
        (Column("new tokens", true), true),
        (Column("end", false), true),
        (Column("rounds", true), true),
        (Column("acceptance length", true), true),
        (Column("tokens/s", true), true),
        (Column("speed-up", true), true),
        (Column("identical", false), !sampled),
        (Column("distinct", true), true),
    ];
    let name = |name: &Option<String>| name.as_deref().map_or(NONE.into(), |name| short(name, NAME));
    let rows: Vec<Vec<String>> = order
        .iter()
        .take(MOST_PROMPTS)
        .map(|result| {
            let cells = [
                label(result),
                name(&result.domain),
                name(&result.thinking),
                result.turn.to_string(),
                count(result.prompt_tokens as u64),
                count(result.new_tokens as u64),
                result.finish.name().into(),
                count(result.rounds(report.include_truncated).counted),
                number(result.acceptance_length, 2),
                figures(result.spec_tokens_per_s()),
                times(result.speedup()),
                if result.identical { "yes" } else { "NO" }.into(),
                number(Some(result.distinct_ratio), 2),
            ];
            cells
                .into_iter()
                .zip(&shown)
                .filter(|(_, column)| column.1)
                .map(|(cell, _)| cell)
                .collect()
        })
        .collect();
    let columns: Vec<Column> = shown.iter().filter(|column| column.1).map(|column| column.0).collect();
    format!(
        "<section><h2>Prompts</h2>\n<p class=\"lede\">{}{}Rounds are counted rounds; distinct: distinct tokens / tokens.</p>\n{}</section>\n",
        cut(rows.len(), order.len(), "prompts"),
        if report.identical == Some(false) {
            "Differing texts first, then lowest acceptance length. "
        } else {
            "Lowest acceptance length first. "
        },
        table("Prompts", &columns, &rows)
    )
}

/// What a prompt is called: its id, or its number where it has none.
pub(super) fn label(result: &PromptResult) -> String {
    if result.id.is_empty() {
        format!("prompt {}", result.prompt)
    } else {
        short(&result.id, NAME)
    }
}

/// Every field of the setting under its JSON name, so that a new one cannot be forgotten here.
pub(super) fn setting(report: &Report) -> String {
    let mut rows = String::new();
    let mut row = |name: &str, value: &Value| {
        let shown = match value {
            Value::String(text) if text.is_empty() => NONE.into(),
            Value::String(text) if name == "prompt_tail" => format!("<pre>{}</pre>", visible(text)),
            Value::String(text) => escaped(&clipped(text, VALUE)),
            Value::Bool(yes) => if *yes { "yes" } else { "no" }.into(),
            Value::Null => NONE.into(),
            Value::Array(items) => {
                let items: Vec<String> = items.iter().map(Value::to_string).collect();
                escaped(&clipped(&items.join(", "), VALUE))
            }
            Value::Object(_) => {
                let text = serde_json::to_string_pretty(value).unwrap_or_default();
                format!("<pre>{}</pre>", escaped(&clipped(&text, VALUE)))
            }
            Value::Number(number) => number.to_string(),
        };
        let _ = writeln!(rows, "<div><dt>{}</dt><dd>{shown}</dd></div>", escaped(name));
    };
    row("mode", &Value::from(report.mode.as_str()));
    row("seed", &Value::from(report.seed));
    row("include_truncated", &Value::from(report.include_truncated));
    if let Ok(Value::Object(fields)) = serde_json::to_value(&report.setting) {
        for (name, value) in &fields {
            match value {
                Value::Object(parts) if name == "sampling" => {
                    for (part, value) in parts {
                        row(&format!("{name}.{part}"), value);
                    }
                }
                _ => row(name, value),
            }
        }
    }
    format!("<section><h2>Setting</h2>\n<dl class=\"setting\">\n{rows}</dl></section>\n")
}

/// Text of a prompt with its line ends shown.
pub(super) fn visible(text: &str) -> String {
    escaped(&clipped(text, VALUE).replace('\t', "→\t").replace('\n', "↵\n"))
}

/// The meanings that the report carries.
pub(super) fn definitions(report: &Report) -> String {
    let mut rows = String::new();
    for (name, text) in report.definitions.iter().take(MOST_DEFINITIONS) {
        let _ = writeln!(
            rows,
            "<div><dt>{}</dt><dd>{}</dd></div>",
            escaped(&clipped(name, NAME)),
            escaped(&clipped(text, VALUE))
        );
    }
    let notice = cut(MOST_DEFINITIONS, report.definitions.len(), "definitions");
    format!(
        "<section><h2>Definitions</h2>\n<dl class=\"definitions\">\n{rows}</dl><p class=\"lede\">{notice}</p></section>\n"
    )
}
