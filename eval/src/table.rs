//! Reports for a terminal: plain text, at most 80 columns, no colour.

use std::fmt::Write;

use crate::lossless::{DrafterResult, LosslessReport};
use crate::report::{Report, Seconds};

/// Columns that a line may have.
pub const WIDTH: usize = 80;
/// Columns of a histogram's longest bar.
const BAR: usize = 30;
/// Differences listed a drafter; the JSON has all.
const DIFFERENCES: usize = 5;

/// The result of an acceptance run.
pub fn acceptance(report: &Report) -> String {
    let mut out = String::new();
    let interval = match report.acceptance_length_ci95 {
        Some([low, high]) => format!("95 % {low:.3} .. {high:.3} over prompts"),
        None => "no interval: fewer than two prompts with full rounds".into(),
    };
    let counted = if report.include_truncated {
        "truncated included"
    } else {
        "truncated apart"
    };
    line(&mut out, "acceptance length", report.acceptance_length, &interval);
    line(
        &mut out,
        "  macro",
        report.acceptance_length_macro,
        "mean of the prompts' own",
    );
    line(
        &mut out,
        "tokens per verify",
        report.tokens_per_verify_e2e,
        "all rounds, after cuts",
    );
    line(
        &mut out,
        "draft acceptance",
        report.draft_acceptance_rate,
        "accepted / drafted",
    );
    let _ = writeln!(
        out,
        "rounds            {:>9}  {} drafted, {} accepted; {} truncated ({counted})",
        report.rounds, report.drafted, report.accepted, report.truncated_rounds
    );
    positions(&mut out, report);
    speed(&mut out, report);
    let identical = report.prompts - report.differing.len();
    let _ = writeln!(
        out,
        "texts             {:>9}  {identical} of {} prompts token-identical to plain decoding",
        if report.identical { "identical" } else { "DIFFERENT" },
        report.prompts
    );
    if report.degenerate_prompts > 0 {
        let _ = writeln!(
            out,
            "warning: {} of {} texts mostly repeat themselves; their acceptance says little",
            report.degenerate_prompts, report.prompts
        );
    }
    out
}

/// The result of a losslessness run.
pub fn lossless(report: &LosslessReport) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "drafter   identical    rounds   drafted  accepted  acc. length  verdict"
    );
    for drafter in &report.drafters {
        let _ = writeln!(
            out,
            "{:<8}{:>6} /{:>4}{:>10}{:>10}{:>10}{:>13}  {}",
            drafter.drafter.name(),
            drafter.identical_prompts,
            drafter.prompts,
            drafter.rounds,
            drafter.drafted,
            drafter.accepted,
            number(drafter.acceptance_length, 3),
            if drafter.passed() { "pass" } else { "FAIL" }
        );
    }
    for drafter in &report.drafters {
        reasons(&mut out, drafter);
    }
    let verdict = if report.passed { "PASS" } else { "FAIL" };
    let what = match (report.identical, report.passed) {
        (true, true) => "every text equals plain decoding, token for token",
        (true, false) => "the texts are equal, but the run did not exercise the drafter",
        (false, _) => "speculative decoding changed a text",
    };
    let _ = writeln!(
        out,
        "{verdict}: {what} ({} prompts, {})",
        report.prompts, report.setting.dtype
    );
    out
}

fn reasons(out: &mut String, drafter: &DrafterResult) {
    let name = drafter.drafter.name();
    if let Some(reason) = &drafter.unproven {
        let _ = writeln!(out, "{name}: {reason}");
    }
    for difference in drafter.differences.iter().take(DIFFERENCES) {
        let token = |token: Option<u32>| token.map_or("end".into(), |token| token.to_string());
        let _ = writeln!(
            out,
            "{name}: prompt {} differs at token {}: plain {}, speculative {}; margin {:.3e}",
            difference.prompt,
            difference.position,
            token(difference.plain_token),
            token(difference.spec_token),
            difference.top_two_margin
        );
    }
    if let Some(more @ 1..) = drafter.differences.len().checked_sub(DIFFERENCES) {
        let _ = writeln!(out, "{name}: {more} more differences");
    }
}

fn positions(out: &mut String, report: &Report) {
    let most = report.histogram.iter().max().copied().unwrap_or(0).max(1);
    let _ = writeln!(
        out,
        "drafts    joint  conditional    rounds that accepted exactly this many"
    );
    for (accepted, &rounds) in report.histogram.iter().enumerate() {
        let at = |values: &[Option<f64>]| match accepted.checked_sub(1) {
            Some(index) => number(values.get(index).copied().flatten(), 3),
            None => String::new(),
        };
        let bar = "#".repeat((rounds as usize * BAR).div_ceil(most as usize));
        let row = format!(
            "{accepted:>6}{:>9}{:>13}{rounds:>10}  {bar}",
            at(&report.accept_at_pos),
            at(&report.accept_cond)
        );
        let _ = writeln!(out, "{}", row.trim_end());
    }
}

fn speed(out: &mut String, report: &Report) {
    let with_prefill = format!("{} with prefill", number(report.speedup_with_prefill, 2));
    line(out, "plain tokens/s", report.plain_tokens_per_s, "without prefill");
    line(
        out,
        "speculative",
        report.spec_tokens_per_s,
        &split(&report.spec_seconds),
    );
    line(out, "speed-up", report.speedup, &with_prefill);
}

fn split(seconds: &Seconds) -> String {
    let share = |part: f64| 100. * part / seconds.decode.max(f64::MIN_POSITIVE);
    format!(
        "draft {:.0} %, verify {:.0} %, commit {:.0} %, other {:.0} %",
        share(seconds.draft),
        share(seconds.verify),
        share(seconds.commit),
        share(seconds.other)
    )
}

fn line(out: &mut String, name: &str, value: Option<f64>, note: &str) {
    let _ = writeln!(out, "{name:<18}{:>9}  {note}", number(value, 3));
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".into(), |value| format!("{value:.digits$}"))
}
