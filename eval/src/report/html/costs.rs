//! Charts of what a round costs and what a width pays.

use std::fmt::Write;

use super::charts::{blank, figure, values};
use super::markup::{Column, NONE, count, counted, figures, number, percent};
use super::svg::{Kind, Series, stacked};
use crate::report::Report;
use crate::report::derived::share;

pub(super) fn time_split(report: &Report) -> Option<String> {
    let (seconds, rounds) = (&report.spec_seconds, report.all_rounds());
    let parts = [
        ("draft", 1, seconds.draft),
        ("verify", 2, seconds.verify),
        ("commit", 3, seconds.commit),
        ("other", 4, seconds.other),
    ];
    let whole: f64 = parts.iter().map(|part| part.2).sum();
    share(1., whole)?;
    let title = "Where a round's time goes";
    let each = |seconds: f64, of: u64| figures(share(1000. * seconds, of as f64));
    let caption = format!(
        "A round takes {}\u{A0}ms and yields {} tokens; a plain step takes {}\u{A0}ms. Means over all rounds, without prefill.",
        each(whole, rounds),
        number(report.tokens_per_verify_e2e, 2),
        each(report.plain_seconds.decode, report.decoded_tokens())
    );
    let split: Vec<String> = parts
        .iter()
        .map(|part| format!("{} {}", part.0, percent(share(part.2, whole), 1)))
        .collect();
    let picture = stacked("time", title, &split.join(", "), &parts);
    let mut rows = String::new();
    for (name, colour, part) in parts {
        let _ = writeln!(
            rows,
            "<tr><th scope=\"row\"><span class=\"bar b{colour}\"></span>{name}</th><td class=\"n\">{}\u{A0}ms</td>\
             <td class=\"n\">{}</td><td>{}</td></tr>",
            each(part, rounds),
            percent(share(part, whole), 1),
            match name {
                "draft" => "the drafter proposes a block",
                "verify" => "the target reads the block in one pass",
                "commit" => "caches keep the accepted rows",
                _ => "the loop itself",
            }
        );
    }
    let legend = format!("<table class=\"legend\"><tbody>\n{rows}</tbody></table>\n");
    Some(figure(title, &caption, "", &picture, &legend))
}

pub(super) fn projection(report: &Report) -> Option<String> {
    let projected = report.projected_speedups();
    let best = projected
        .iter()
        .enumerate()
        .filter_map(|(i, &(_, value))| Some((i, value?)))
        .max_by(|a, b| a.1.total_cmp(&b.1))?;
    let title = "Projected speed-up by width";
    let used = report.width_used();
    let used_slot = projected
        .iter()
        .position(|&(width, value)| Some(width) == used && value.is_some());
    let auto = report.setting.width_policy == "auto";
    let word = if auto { "most used" } else { "used" };
    let times = |slot: usize| format!("{}×", number(projected[slot].1, 2));
    let mut caption = format!(
        "What a fixed number of drafted tokens would give at this acceptance, from costs measured at a context of {} \
         tokens; best: {} at width {}.",
        report.costs.first().map_or(0, |cost| cost.context),
        times(best.0),
        projected[best.0].0
    );
    if auto {
        caption.push_str(
            " Widths were chosen round by round, so wide blocks are rare and their promise is a lower bound.",
        );
    }
    let mut chart = blank(
        "projection",
        title,
        caption.clone(),
        "width, drafted tokens",
        "speed-up, × plain decoding",
    );
    chart.slots = projected.iter().map(|(width, _)| width.to_string()).collect();
    chart.series = vec![Series {
        name: "projected speed-up",
        kind: Kind::Line,
        colour: 1,
        values: projected.iter().map(|&(_, value)| value).collect(),
        labels: (0..projected.len()).map(times).collect(),
        hollow: Vec::new(),
    }];
    chart.reference = Some((1., "plain decoding"));
    chart.marks = match used_slot {
        Some(slot) if slot == best.0 => vec![(slot, format!("best and {word}: {}", times(slot)))],
        Some(slot) => vec![
            (best.0, format!("best: {}", times(best.0))),
            (slot, format!("{word}: {}", times(slot))),
        ],
        None => vec![(best.0, format!("best: {}", times(best.0)))],
    };
    let rows: Vec<_> = report
        .costs
        .iter()
        .zip(&projected)
        .map(|(cost, &(width, value))| {
            let ms = |seconds: f64| number(Some(1000. * seconds), 3);
            vec![
                width.to_string(),
                number(value, 3),
                ms(cost.draft),
                ms(cost.verify),
                ms(cost.commit),
                ms(cost.total()),
            ]
        })
        .collect();
    let columns = [
        Column("width", true),
        Column("speed-up", true),
        Column("draft, ms", true),
        Column("verify, ms", true),
        Column("commit, ms", true),
        Column("round, ms", true),
    ];
    Some(figure(
        title,
        &caption,
        "",
        &chart.draw(),
        &values(title, &columns, &rows, !auto && rows.len() <= 16),
    ))
}

/// Only where the width was chosen: a fixed one is used but for the last rounds of a text.
pub(super) fn widths(report: &Report) -> Option<String> {
    let all = report
        .widths
        .iter()
        .fold(0, |all: u64, used| all.saturating_add(used.rounds));
    if report.setting.width_policy != "auto" || all == 0 {
        return None;
    }
    let title = "Widths chosen";
    let widest = report.widths.iter().map(|used| used.width).max().unwrap_or(0).min(1024);
    let of = |width: usize| report.widths.iter().find(|used| used.width == width);
    let rounds: Vec<u64> = (0..=widest)
        .map(|width| of(width).map_or(0, |used| used.rounds))
        .collect();
    let caption = format!(
        "Drafted tokens by round, {}, truncated ones included; width 0 is a plain step.",
        counted(all, "round")
    );
    let mut chart = blank("widths", title, caption.clone(), "width, drafted tokens", "rounds");
    chart.slots = (0..=widest).map(|width| width.to_string()).collect();
    chart.series = vec![Series {
        name: "rounds",
        kind: Kind::Bars,
        colour: 1,
        values: rounds.iter().map(|&rounds| Some(rounds as f64)).collect(),
        labels: rounds.iter().map(|&rounds| count(rounds)).collect(),
        hollow: Vec::new(),
    }];
    let rows: Vec<_> = (0..=widest)
        .map(|width| {
            let accepted = of(width).and_then(|used| share(used.accepted as f64, used.rounds as f64));
            vec![
                width.to_string(),
                count(rounds[width]),
                percent(share(rounds[width] as f64, all as f64), 1),
                accepted.map_or(NONE.into(), |mean| number(Some(mean), 2)),
            ]
        })
        .collect();
    let columns = [
        Column("width", true),
        Column("rounds", true),
        Column("share", true),
        Column("accepted a round", true),
    ];
    Some(figure(
        title,
        &caption,
        "",
        &chart.draw(),
        &values(title, &columns, &rows, false),
    ))
}
