//! Reports for a terminal: plain text, at most 80 columns, no colour.

mod modes;

use std::fmt::Write;

pub use modes::{compared, replayed, speed, sweep};

use crate::lossless::{DrafterResult, LosslessReport, Verdict};
use crate::report::{Report, Seconds, WidthUse};

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
    let _ = writeln!(
        out,
        "  truncated       {:>9}  {}: narrowed by the budget or cut by a stop",
        report.truncated_rounds,
        counted(report.include_truncated)
    );
    positions(&mut out, report);
    rates(&mut out, report);
    texts(&mut out, report);
    groups(&mut out, report);
    for warning in &report.warnings {
        out.push_str(&wrapped(&format!("warning: {warning}")));
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
            match (drafter.passed(), drafter.near_ties) {
                (true, 0) => "pass".into(),
                (true, ties) => format!("pass, {ties} near-ties"),
                (false, _) => "FAIL".to_owned(),
            }
        );
    }
    out.push_str("rounds cut short are in the counts, but not in the length\n");
    for drafter in &report.drafters {
        reasons(&mut out, drafter);
    }
    let verdict = if report.passed { "PASS" } else { "FAIL" };
    let what = match (report.identical, report.passed) {
        (true, true) => "every text equals plain decoding, token for token",
        (true, false) => "the texts are equal, but a drafter was not exercised",
        (false, true) => "every text equals plain decoding but for near-ties",
        (false, false) => "speculative decoding changed a text",
    };
    let _ = writeln!(
        out,
        "{verdict} ({} prompts, {}): {what}",
        report.prompts, report.setting.dtype
    );
    if !report.identical {
        let _ = writeln!(
            out,
            "near-tie: top-two margin of plain decoding at most {}, and the runner-up chosen",
            report.tolerance
        );
    }
    out
}

/// Where truncated rounds stand beside the counted ones.
fn counted(truncated: bool) -> &'static str {
    if truncated { "among them" } else { "apart" }
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
            "{name}: text {}, token {}: plain {}, spec {}, margin {:.1e}, {}",
            difference.prompt + 1,
            difference.position + 1,
            token(difference.plain_token),
            token(difference.spec_token),
            difference.top_two_margin,
            if difference.verdict == Verdict::NearTie {
                "near-tie"
            } else {
                "FAIL"
            }
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

fn rates(out: &mut String, report: &Report) {
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

/// Whether the texts are plain decoding's; sampled ones need not be.
fn texts(out: &mut String, report: &Report) {
    let identical = report.prompts - report.differing.len();
    let (word, note) = match report.identical {
        None => ("sampled", "token by token they may differ from plain decoding".into()),
        Some(same) => (
            if same { "identical" } else { "DIFFERENT" },
            format!("{identical} of {} token-identical to plain decoding", report.prompts),
        ),
    };
    let _ = writeln!(out, "texts             {word:>9}  {note}");
    if report.setting.width_policy == "auto" {
        let total: u64 = report.widths.iter().map(|used| used.rounds).sum();
        let share = |used: &WidthUse| {
            format!(
                "{}: {:.0} %",
                used.width,
                100. * used.rounds as f64 / total.max(1) as f64
            )
        };
        let shares: Vec<String> = report.widths.iter().map(share).collect();
        out.push_str(&wrapped(&format!(
            "widths chosen (drafted tokens: rounds)  {}",
            shares.join(", ")
        )));
    }
}

fn groups(out: &mut String, report: &Report) {
    if report.groups.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "group                       prompts    rounds  acc. length     95 %  speed-up"
    );
    for group in &report.groups {
        let interval = group
            .acceptance_length_ci95
            .map_or("-".into(), |[low, high]| format!("{low:.2}..{high:.2}"));
        let name: String = group.name.chars().take(27).collect();
        let _ = writeln!(
            out,
            "{name:<27}{:>8}{:>10}{:>9}{interval:>13}{:>10}",
            group.prompts,
            group.rounds,
            number(group.acceptance_length, 3),
            number(group.speedup, 2)
        );
    }
}

/// The end of a path, if it is too long for its column.
fn shorten(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.into();
    }
    "..".chars().chain(text.chars().skip(length + 2 - width)).collect()
}

/// A sentence broken to the width at its spaces.
pub fn wrapped(text: &str) -> String {
    let (mut out, mut column) = (String::new(), 0);
    for word in text.split(' ') {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > WIDTH {
            out.push_str("\n  ");
            column = 2;
        } else if column > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += length;
    }
    out.push('\n');
    out
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
        let mut report = evaluate(&target, &drafter, &vec![vec![1], vec![2]], &options, &mut |_| Ok(())).unwrap();
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
        let mut report = check(&target, &drafter, &prompts, &Kind::ALL, 0., &options, &mut |_| Ok(())).unwrap();
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
