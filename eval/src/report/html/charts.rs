//! Which charts a page shows: each with a sentence, a picture, and its values as a table. Here those of acceptance.

use super::costs;
use super::markup::{Column, count, counted, escaped, number, percent, table};
use super::svg::{Chart, Kind, Series};
use crate::report::Report;
use crate::report::derived::share;

/// Rounds of a bin of context below which its value says little.
const FEW_ROUNDS: u64 = 30;
/// Most bins that gaps between bins may be filled up to.
const MOST_BINS: usize = 64;

/// All charts of a report, those without data left out.
pub(super) fn charts(report: &Report) -> String {
    let found = [
        positions(report),
        histogram(report),
        context(report),
        costs::time_split(report),
        costs::projection(report),
        costs::widths(report),
    ];
    let figures: Vec<String> = found.into_iter().flatten().collect();
    if figures.is_empty() {
        return String::new();
    }
    format!(
        "<section><h2>Acceptance and cost</h2>\n<div class=\"charts\">\n{}</div></section>\n",
        figures.concat()
    )
}

/// A chart without values yet.
pub(super) fn blank(id: &'static str, title: &str, description: String, x: &'static str, y: &'static str) -> Chart {
    Chart {
        id,
        title: title.into(),
        description,
        x,
        y,
        from: 0.,
        to: None,
        percent: false,
        slots: Vec::new(),
        series: Vec::new(),
        reference: None,
        marks: Vec::new(),
        strip: None,
    }
}

pub(super) fn figure(title: &str, caption: &str, key: &str, picture: &str, values: &str) -> String {
    format!(
        "<figure><figcaption><h3>{}</h3><p>{}</p>{key}</figcaption>\n{picture}{values}</figure>\n",
        escaped(title),
        escaped(caption)
    )
}

/// The values of a chart, folded away unless `open`.
pub(super) fn values(title: &str, columns: &[Column], rows: &[Vec<String>], open: bool) -> String {
    format!(
        "<details{}><summary>Values</summary>{}</details>\n",
        if open { " open=\"open\"" } else { "" },
        table(&format!("Values of: {title}"), columns, rows)
    )
}

fn positions(report: &Report) -> Option<String> {
    let width = report.accept_at_pos.len();
    if width == 0 || report.rounds == 0 {
        return None;
    }
    let title = "Acceptance by position";
    let at = |values: &[Option<f64>], i: usize| values.get(i).copied().flatten();
    let series = |name, kind, colour, values: &[Option<f64>], skip: usize| Series {
        name,
        kind,
        colour,
        values: (0..width).map(|i| at(values, i)).collect(),
        labels: (0..width)
            .map(|i| match at(values, i) {
                Some(value) if i >= skip => format!("{:.0}", 100. * value),
                _ => String::new(),
            })
            .collect(),
        hollow: Vec::new(),
    };
    let ends = format!(
        "Joint acceptance falls from {} at position 1 to {} at position {width}.",
        percent(at(&report.accept_at_pos, 0), 0),
        percent(at(&report.accept_at_pos, width - 1), 0)
    );
    let mut chart = blank("positions", title, ends, "position in the block", "share of rounds, %");
    (chart.to, chart.percent) = (Some(1.), true);
    chart.slots = (1..=width).map(|i| i.to_string()).collect();
    chart.series = vec![
        series("joint", Kind::Bars, 1, &report.accept_at_pos, 0),
        // the first position has nothing before it: both values are one
        series("conditional", Kind::Line, 2, &report.accept_cond, 1),
    ];
    let rows: Vec<_> = (0..width)
        .map(|i| {
            vec![
                (i + 1).to_string(),
                percent(at(&report.accept_at_pos, i), 1),
                percent(at(&report.accept_cond, i), 1),
            ]
        })
        .collect();
    let columns = [
        Column("position", true),
        Column("joint", true),
        Column("conditional", true),
    ];
    let key = "<p class=\"key\"><span><span class=\"bar b1\"></span>joint: this draft and all before it stand</span> \
               <span><span class=\"dot d2\"></span>conditional: it stands once those before it do</span></p>";
    Some(figure(
        title,
        &format!(
            "How often a draft is accepted, over {}.",
            counted(report.rounds, "counted round")
        ),
        key,
        &chart.draw(),
        &values(title, &columns, &rows, false),
    ))
}

fn histogram(report: &Report) -> Option<String> {
    if report.rounds == 0 || report.histogram.is_empty() {
        return None;
    }
    let title = "Accepted drafts a round";
    let whole = report.histogram.len() - 1;
    let part = |accepted: usize| share(report.histogram[accepted] as f64, report.rounds as f64);
    let caption = format!(
        "{} of rounds accept nothing, {} accept all {whole}; the mean is {}.",
        percent(part(0), 0),
        percent(part(whole), 0),
        number(report.mean_accepted_drafts, 2)
    );
    let mut chart = blank("histogram", title, caption.clone(), "accepted drafts", "counted rounds");
    chart.slots = (0..=whole).map(|i| i.to_string()).collect();
    chart.series = vec![Series {
        name: "rounds",
        kind: Kind::Bars,
        colour: 1,
        values: report.histogram.iter().map(|&rounds| Some(rounds as f64)).collect(),
        labels: report.histogram.iter().map(|&rounds| count(rounds)).collect(),
        hollow: Vec::new(),
    }];
    let rows: Vec<_> = (0..=whole)
        .map(|i| vec![i.to_string(), count(report.histogram[i]), percent(part(i), 1)])
        .collect();
    let columns = [Column("accepted", true), Column("rounds", true), Column("share", true)];
    Some(figure(
        title,
        &caption,
        "",
        &chart.draw(),
        &values(title, &columns, &rows, false),
    ))
}

fn context(report: &Report) -> Option<String> {
    let (first, last) = (report.by_context.first()?, report.by_context.last()?);
    let title = "Acceptance length along the context";
    let size = first.to.saturating_sub(first.from).max(1);
    let span = last.from.saturating_sub(first.from) / size + 1;
    // equal bins, those without rounds too, so that distance on the axis is distance in the text
    let starts: Vec<usize> = if span <= MOST_BINS {
        (0..span).map(|i| first.from.saturating_add(i * size)).collect()
    } else {
        report.by_context.iter().map(|bin| bin.from).collect()
    };
    let bins: Vec<_> = starts
        .iter()
        .map(|&from| report.by_context.iter().find(|bin| bin.from == from))
        .collect();
    let rounds: Vec<u64> = bins.iter().map(|bin| bin.map_or(0, |bin| bin.rounds)).collect();
    let lengths: Vec<Option<f64>> = bins
        .iter()
        .map(|bin| {
            bin.and_then(|bin| share(bin.accepted as f64, bin.rounds as f64))
                .map(|mean| 1. + mean)
        })
        .collect();
    let few = bins.iter().flatten().any(|bin| bin.rounds < FEW_ROUNDS);
    let caption = format!(
        "Tokens a round by the position at which the round begins, in bins of {size}.{}",
        if few {
            format!(" Hollow: fewer than {FEW_ROUNDS} rounds.")
        } else {
            String::new()
        }
    );
    let mut chart = blank(
        "context",
        title,
        caption.clone(),
        "position, tokens",
        "acceptance length, tokens a round",
    );
    chart.from = 1.;
    chart.slots = starts.iter().map(usize::to_string).collect();
    chart.series = vec![Series {
        name: "acceptance length",
        kind: Kind::Line,
        colour: 1,
        labels: lengths
            .iter()
            .map(|&length| length.map_or(String::new(), |length| format!("{length:.2}")))
            .collect(),
        values: lengths.clone(),
        hollow: rounds.iter().map(|&rounds| rounds < FEW_ROUNDS).collect(),
    }];
    chart.strip = Some(("rounds", rounds.clone()));
    let rows: Vec<_> = (0..starts.len())
        .map(|i| {
            vec![
                format!("{}–{}", starts[i], starts[i].saturating_add(size - 1)),
                number(lengths[i], 3),
                count(rounds[i]),
            ]
        })
        .collect();
    let columns = [
        Column("positions", true),
        Column("acceptance length", true),
        Column("rounds", true),
    ];
    Some(figure(
        title,
        &caption,
        "",
        &chart.draw(),
        &values(title, &columns, &rows, false),
    ))
}
