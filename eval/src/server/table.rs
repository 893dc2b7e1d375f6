//! A server's report for a terminal: plain text, at most 80 columns.

use std::fmt::Write;

use crate::server::report::ServerReport;
use crate::table::wrapped;

/// The report.
pub fn table(report: &ServerReport) -> String {
    let (ours, theirs) = (&report.ours, &report.theirs);
    let version = report.version.as_deref().unwrap_or("of unknown version");
    let mut out = wrapped(&format!("{} {version} at {}", report.engine.name(), report.url));
    out.push_str(&wrapped(&format!("model {}", report.model)));
    let exactness = match (ours.acceptance_length, ours.exact) {
        (None, _) => "not known, see the warnings",
        (Some(_), true) => "ours: 1 + accepted / rounds",
        (Some(_), false) => "ours, APPROXIMATE: rounds are derived",
    };
    line(&mut out, "acceptance length", ours.acceptance_length, exactness);
    if let Some([low, high]) = ours.acceptance_length_ci95 {
        let _ = writeln!(out, "{:<18}{:>9}  {low:.3} .. {high:.3} over answers", "  95 %", "");
        let note = "mean of the answers' own";
        line(&mut out, "  macro", ours.acceptance_length_macro, note);
    }
    line(&mut out, "  theirs", theirs.acceptance_length, &theirs.name);
    if theirs.pooled.is_some() {
        line(
            &mut out,
            "  theirs, pooled",
            theirs.pooled,
            "over the sums of all answers",
        );
    }
    if theirs.since_start.is_some() {
        let note = "their average since the server started";
        line(&mut out, "  theirs, ever", theirs.since_start, note);
    }
    let note = "after cuts, without each answer's first";
    line(&mut out, "tokens per verify", ours.tokens_per_verify_e2e, note);
    let note = match (ours.drafted, ours.accepted) {
        (Some(drafted), Some(accepted)) => format!("{accepted} accepted of {drafted} drafted"),
        _ => "accepted / drafted".into(),
    };
    line(&mut out, "draft acceptance", ours.draft_acceptance_rate, &note);
    let rounds = ours.rounds.map_or("-".into(), |rounds| rounds.to_string());
    let _ = writeln!(out, "{:<18}{rounds:>9}  in {} answers", "rounds", report.prompts);
    positions(&mut out, report);
    let note = format!(
        "at concurrency {}; prefill and network included",
        report.setting.concurrency
    );
    line(&mut out, "tokens/s", Some(report.tokens_per_s), &note);
    let _ = writeln!(
        out,
        "{:<18}{:>9}  in {:.1} s",
        "completion tokens", report.completion_tokens, report.wall_seconds
    );
    out.push_str(&wrapped(&format!("ours: {}", ours.basis)));
    out.push_str(&wrapped(&format!("theirs: {} = {}", theirs.name, theirs.formula)));
    out.push_str(&wrapped(&format!("difference: {}", theirs.difference)));
    for warning in &report.warnings {
        out.push_str(&wrapped(&format!("warning: {warning}")));
    }
    out
}

fn positions(out: &mut String, report: &ServerReport) {
    let ours = &report.ours;
    if ours.histogram.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "drafts    joint  conditional    rounds that accepted exactly this many"
    );
    for (accepted, rounds) in ours.histogram.iter().enumerate() {
        let at = |values: &[Option<f64>]| match accepted.checked_sub(1) {
            Some(index) => number(values.get(index).copied().flatten()),
            None => String::new(),
        };
        let _ = writeln!(
            out,
            "{accepted:>6}{:>9}{:>13}{rounds:>10}",
            at(&ours.accept_at_pos),
            at(&ours.accept_cond)
        );
    }
}

fn line(out: &mut String, name: &str, value: Option<f64>, note: &str) {
    let _ = writeln!(out, "{name:<18}{:>9}  {note}", number(value));
}

fn number(value: Option<f64>) -> String {
    value.map_or("-".into(), |value| format!("{value:.3}"))
}
