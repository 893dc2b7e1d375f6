//! The series of a chart: bars, lines, and the strip of counts below.

use std::fmt::Write;

use super::markup::{count, escaped};
use super::svg::{DIGIT, Frame, LEFT, PLOT, Series, TOP, text};
use crate::report::derived::finite;

/// Bars from the axis. Labels stand in them when there are lines (`above`, their values), else on top of them.
pub(super) fn bars(out: &mut String, frame: &Frame, series: &Series, slots: &[String], above: &[&[Option<f64>]]) {
    let lines = !above.is_empty();
    let width = (frame.slot * 0.74).min(64.);
    let letters = series
        .labels
        .iter()
        .map(|label| label.chars().count())
        .max()
        .unwrap_or(1);
    let inside = width >= letters as f64 * DIGIT;
    let mut labels = String::new();
    for (i, value) in series.values.iter().enumerate() {
        let Some(value) = value.and_then(finite) else { continue };
        let (x, y, base) = (frame.x(i), frame.y(value), TOP + PLOT);
        let label = series.labels.get(i).map_or("", String::as_str);
        let slot = slots.get(i).map_or("", String::as_str);
        let _ = writeln!(
            out,
            "<rect class=\"f{}\" x=\"{:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{:.1}\"><title>{}: {} {}</title></rect>",
            series.colour,
            x - width / 2.,
            base - y,
            escaped(slot),
            escaped(series.name),
            escaped(label)
        );
        let high = base - y >= 24.;
        if label.is_empty() {
        } else if lines && inside {
            // a short bar's label stands on it, if the line is far enough above
            let line_above = above.iter().all(|&other| {
                y - frame.y(other.get(i).copied().flatten().and_then(finite).unwrap_or(frame.high)) > 40.
            });
            if high {
                text(&mut labels, "on", x, base - 8., label);
            } else if line_above {
                text(&mut labels, "", x, y - 5., label);
            }
        } else if !lines && i % frame.step(letters) == 0 {
            // labels of narrow bars stand before their neighbours, and none before the axis' own
            let half = label.chars().count() as f64 * DIGIT / 2.;
            text(&mut labels, "halo", x.max(LEFT + half), y - 6., label);
        }
    }
    // after all bars: a later one would cover them
    out.push_str(&labels);
}

/// Points joined by a line, with a gap where there is no value.
pub(super) fn line(out: &mut String, frame: &Frame, series: &Series, slots: &[String], labelled: bool) {
    let colour = series.colour;
    let (mut path, mut pen_up) = (String::new(), true);
    for (i, value) in series.values.iter().enumerate() {
        match value.and_then(finite) {
            Some(value) => {
                let _ = write!(
                    path,
                    "{}{:.1} {:.1}",
                    if pen_up { "M" } else { "L" },
                    frame.x(i),
                    frame.y(value)
                );
                pen_up = false;
            }
            None => pen_up = true,
        }
    }
    if !path.is_empty() {
        let _ = writeln!(out, "<path class=\"l{colour}\" d=\"{path}\"/>");
    }
    let (radius, tiny) = if frame.slot < 14. { (1.5, " tiny") } else { (4., "") };
    let letters = series
        .labels
        .iter()
        .map(|label| label.chars().count())
        .max()
        .unwrap_or(1);
    for (i, value) in series.values.iter().enumerate() {
        let Some(value) = value.and_then(finite) else { continue };
        let label = series.labels.get(i).map_or("", String::as_str);
        let slot = slots.get(i).map_or("", String::as_str);
        let hollow = series.hollow.get(i).copied().unwrap_or(false);
        let _ = writeln!(
            out,
            "<circle class=\"p{colour}{}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"{radius}\"><title>{}: {} {}</title></circle>",
            if hollow { " hollow" } else { tiny },
            frame.x(i),
            frame.y(value),
            escaped(slot),
            escaped(series.name),
            escaped(label)
        );
        if labelled && !label.is_empty() && i % frame.step(letters) == 0 {
            text(out, "halo", frame.x(i), frame.y(value) - 9., label);
        }
    }
}

/// Counts as small bars, each with its number where it fits.
pub(super) fn strip(out: &mut String, frame: &Frame, name: &str, counts: &[u64]) {
    let (top, height) = (TOP + PLOT + 46., 26.);
    let most = counts.iter().copied().max().unwrap_or(0).max(1) as f64;
    let width = (frame.slot * 0.74).min(64.);
    let labels: Vec<String> = counts.iter().map(|&value| count(value)).collect();
    let every = frame.step(labels.iter().map(String::len).max().unwrap_or(1));
    let _ = write!(
        out,
        "<text class=\"name\" x=\"0\" y=\"{:.1}\">{}</text>",
        top + height,
        escaped(name)
    );
    for (i, (&count, label)) in counts.iter().zip(&labels).enumerate() {
        let tall = height * count as f64 / most;
        let _ = writeln!(
            out,
            "<rect class=\"f4\" x=\"{:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{tall:.1}\"/>",
            frame.x(i) - width / 2.,
            top + height - tall
        );
        if i % every == 0 {
            text(out, "", frame.x(i), top + height - tall - 4., label);
        }
    }
}
