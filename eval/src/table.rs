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
        "rounds            {:>9}  {} drafted, {} accepted",
        report.rounds, report.drafted, report.accepted
    );
    let counted = if report.include_truncated {
        "among them"
    } else {
        "apart"
    };
    let _ = writeln!(
        out,
        "  truncated       {:>9}  {counted}: narrowed by the budget or cut by a stop",
        report.truncated_rounds
    );
    positions(&mut out, report);
    speed(&mut out, report);
    let identical = report.prompts - report.differing.len();
    let _ = writeln!(
        out,
        "texts             {:>9}  {identical} of {} token-identical to plain decoding",
        if report.identical { "identical" } else { "DIFFERENT" },
        report.prompts
    );
    if report.degenerate_prompts > 0 {
        let _ = writeln!(
            out,
            "warning: {} of {} texts mostly repeat themselves: read on with care",
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
        (true, false) => "the texts are equal, but a drafter was not exercised",
        (false, _) => "speculative decoding changed a text",
    };
    let _ = writeln!(
        out,
        "{verdict} ({} prompts, {}): {what}",
        report.prompts, report.setting.dtype
    );
    if !report.identical && report.setting.dtype != "f32" {
        let _ = writeln!(
            out,
            "only f32 must be identical; elsewhere a small margin marks a near-tie"
        );
    }
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
            "{name}: prompt {}, token {}: plain {}, spec {}, margin {:.1e}",
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Options, evaluate};
    use crate::lossless::{Kind, lossless as check};
    use crate::scripted::{Script, Scripted};
    use crate::scripted_target::{Fault, ScriptedTarget};

    fn assert_fits(table: &str) {
        for row in table.lines() {
            assert!(row.chars().count() <= WIDTH, "{} columns: {row}", row.chars().count());
        }
    }

    #[test]
    fn the_largest_acceptance_report_fits_the_width() {
        let target = ScriptedTarget::new(1, 23, 4096).unwrap();
        let drafter = Scripted::new(Script::Random { seed: 1 }, Vec::new(), 16, &[1], 23).unwrap();
        let options = Options::new(40, vec![u32::MAX]);
        let mut report = evaluate(&target, &drafter, &[vec![1], vec![2]], &options, &mut |_| ()).unwrap();
        report.histogram.fill(98_765_432);
        (report.rounds, report.drafted, report.accepted) = (98_765_432, 1_500_000_000, 1_234_567_890);
        (report.truncated_rounds, report.prompts, report.degenerate_prompts) = (123_456, 10_000, 10_000);
        (report.plain_tokens_per_s, report.spec_tokens_per_s) = (Some(12_345.678), Some(98_765.432));
        report.spec_seconds.draft = report.spec_seconds.decode;
        for include_truncated in [false, true] {
            report.include_truncated = include_truncated;
            let table = acceptance(&report);
            assert_fits(&table);
            assert!(
                table.contains("98765432  1500000000 drafted, 1234567890 accepted"),
                "{table}"
            );
        }
    }

    #[test]
    fn a_losslessness_report_fits_the_width_and_counts_what_it_leaves_out() {
        let target = ScriptedTarget::new(1, 23, 4096).unwrap().with_fault(Fault::StaleState);
        let drafter = Scripted::new(Script::Wrong, vec![0; 500], 16, &[1], 23).unwrap();
        let prompts: Vec<Vec<u32>> = (0..9).map(|i| vec![i]).collect();
        let options = Options::new(20, vec![u32::MAX]);
        let mut report = check(&target, &drafter, &prompts, &Kind::ALL, &options, &mut |_| ()).unwrap();
        report.setting.dtype = "bf16".into();
        for drafter in &mut report.drafters {
            (drafter.prompts, drafter.identical_prompts, drafter.drafted) = (9999, 9999, 98_765_432);
            for difference in &mut drafter.differences {
                (difference.prompt, difference.position) = (9999, 32_768);
                (difference.plain_token, difference.spec_token) = (Some(248_319), Some(248_318));
            }
        }
        let table = lossless(&report);
        assert_fits(&table);
        assert!(table.contains("wrong: 4 more differences"), "{table}");
        assert!(table.contains("near-tie"), "{table}");
    }
}
