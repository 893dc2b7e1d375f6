//! Replay, speed, sweep and comparison for a terminal.

use std::fmt::Write;

use super::{counted, line, number, shorten, wrapped};
use crate::compare::CompareReport;
use crate::recorded::ReplayReport;
use crate::speed::SpeedReport;
use crate::sweep::SweepReport;

/// The result of a replay.
pub fn replayed(report: &ReplayReport) -> String {
    let mut out = String::from("replay: along recorded text, no decoding\n");
    let interval = match report.acceptance_length_ci95 {
        Some([low, high]) => format!("95 % {low:.3} .. {high:.3} over {} texts", report.texts),
        None => "no interval: fewer than two texts with full rounds".into(),
    };
    line(&mut out, "acceptance length", report.acceptance_length, &interval);
    line(
        &mut out,
        "  macro",
        report.acceptance_length_macro,
        "mean of the texts' own",
    );
    let _ = writeln!(
        out,
        "rounds            {:>9}  {} accepted; {} truncated rounds {}",
        report.rounds,
        report.accepted,
        report.truncated_rounds,
        counted(report.include_truncated)
    );
    let joint: Vec<String> = report.accept_at_pos.iter().map(|&p| number(p, 3)).collect();
    out.push_str(&wrapped(&format!("joint acceptance by position: {}", joint.join(" "))));
    if let Some(comparison) = &report.against_generation {
        let _ = writeln!(
            out,
            "against generation: {} of {} rounds equal, {} of {} texts",
            comparison.equal_rounds, comparison.rounds, comparison.equal_texts, report.texts
        );
    }
    out
}

/// The result of a timing run.
pub fn speed(report: &SpeedReport) -> String {
    let mut out = String::new();
    for at in &report.contexts {
        let _ = writeln!(
            out,
            "context {}: prefill {:.0} tokens/s, {}plain step {:.3} ms ({:.1} tokens/s)",
            at.context,
            at.prefill_tokens_per_s,
            at.capture_tokens_per_s
                .map_or_else(String::new, |rate| format!("capture {rate:.0}, ")),
            1e3 * at.step_seconds,
            1. / at.step_seconds
        );
        let _ = writeln!(out, " rows  verify ms  times a step  draft ms  commit ms  pays above");
        for cost in at.costs.iter().filter(|cost| cost.width > 0 || at.costs.len() == 1) {
            let draft = if report.drafter {
                format!("{:.3}", 1e3 * cost.draft)
            } else {
                "-".into()
            };
            let _ = writeln!(
                out,
                "{:>5}{:>11.3}{:>14.2}{draft:>10}{:>11.3}{:>12.2}",
                cost.width + 1,
                1e3 * cost.verify,
                cost.verify / at.step_seconds,
                1e3 * cost.commit,
                cost.total() / at.step_seconds
            );
        }
    }
    let _ = writeln!(
        out,
        "pays above: acceptance length from which a round beats plain decoding"
    );
    if let Some(peak) = report.peak_memory_mb {
        let _ = writeln!(out, "peak memory {peak} MB, {} threads", report.setting.threads);
    }
    out
}

/// The result of a sweep.
pub fn sweep(report: &SweepReport) -> String {
    let mut out = String::new();
    if let Some(chance) = report.scripted {
        let _ = writeln!(out, "scripted drafter: each draft right with chance {chance}");
    }
    let _ = writeln!(
        out,
        "context  block  rounds  acc. length   plain/s    spec/s  speed-up  draft  verify"
    );
    for cell in &report.cells {
        let share = |part: f64| 100. * part / cell.seconds.decode.max(f64::MIN_POSITIVE);
        let context = if cell.context == 0 {
            "own".into()
        } else {
            cell.context.to_string()
        };
        let _ = writeln!(
            out,
            "{context:>7}{:>7}{:>8}{:>13}{:>10.1}{:>10.1}{:>10.2}{:>5.0} %{:>6.0} %{}",
            cell.block,
            cell.rounds,
            number(cell.acceptance_length, 3),
            cell.plain_tokens_per_s,
            cell.spec_tokens_per_s,
            cell.speedup,
            share(cell.seconds.draft),
            share(cell.seconds.verify),
            if cell.identical { "" } else { "  DIFFERENT" }
        );
    }
    let mut contexts: Vec<usize> = report.cells.iter().map(|cell| cell.context).collect();
    contexts.sort_unstable();
    contexts.dedup();
    for context in contexts {
        let cells = report.cells.iter().filter(|cell| cell.context == context);
        if let Some(best) = cells.max_by(|a, b| a.speedup.total_cmp(&b.speedup)) {
            let after = match context {
                0 => "the prompts' own context".into(),
                tokens => format!("{tokens} tokens of context"),
            };
            let _ = writeln!(
                out,
                "best after {after}: block {} with {:.2} times plain decoding",
                best.block, best.speedup
            );
        }
    }
    if report.cells.iter().any(|cell| !cell.identical) {
        let _ = writeln!(out, "DIFFERENT: a text of that cell is not plain decoding's");
    }
    out
}

/// The result of a comparison.
pub fn compared(report: &CompareReport) -> String {
    let mut out = String::from("     acc. length             95 %   macro  speed-up  drafter\n");
    for (index, one) in report.reports.iter().enumerate() {
        let interval = one
            .acceptance_length_ci95
            .map_or("-".into(), |[low, high]| format!("{low:.3}..{high:.3}"));
        let _ = writeln!(
            out,
            "{:>3}{:>13}{interval:>17}{:>8}{:>10}  {}",
            index + 1,
            number(one.acceptance_length, 3),
            number(one.acceptance_length_macro, 3),
            number(one.speedup, 2),
            shorten(&one.setting.drafter, 27)
        );
    }
    for pair in &report.differences {
        let interval = match pair.ci95 {
            Some([low, high]) => format!("95 % {low:+.3} .. {high:+.3}, paired over prompts"),
            None => "no interval".into(),
        };
        let change = pair
            .acceptance_length
            .map_or("-".into(), |change| format!("{change:+.3}"));
        let [longer, equal, shorter] = pair.longer_equal_shorter;
        let _ = writeln!(out, "{} against 1: {change} ({interval})", pair.drafter + 1);
        let _ = writeln!(
            out,
            "  longer on {longer} prompts, equal on {equal}, shorter on {shorter}"
        );
    }
    out
}
