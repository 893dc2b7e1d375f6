//! Charts as inline SVG: bars and lines over equal slots, and one stacked bar. Colours are classes of the style sheet.
//!
//! Sizes are in units of a 480-wide picture. The style sheet makes labels larger on a phone, where the picture shrinks, so
//! labels keep the distance that those larger letters need.

use std::fmt::Write;

use super::markup::escaped;
use super::series::{bars, line, strip};
use crate::report::derived::finite;

const WIDTH: f64 = 480.;
pub(super) const LEFT: f64 = 48.;
const RIGHT: f64 = 10.;
pub(super) const TOP: f64 = 30.;
/// Height of the plot itself.
pub(super) const PLOT: f64 = 190.;
/// Below the plot: tick labels and the name of the axis.
const BELOW: f64 = 46.;
/// Height of the strip of counts below the plot, gap included.
const STRIP: f64 = 62.;
/// Room above the largest value, as a share of the axis: its label stands there.
const HEADROOM: f64 = 0.06;
/// Widest digit of a label.
pub(super) const DIGIT: f64 = 8.6;

/// How the values of one series are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Bars from the axis; labels stand in them, or on them where there is no line.
    Bars,
    /// Points joined by a line; labels above.
    Line,
}

/// Values over the slots.
pub(super) struct Series {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// Number of its colour in the style sheet.
    pub(super) colour: usize,
    pub(super) values: Vec<Option<f64>>,
    /// What the picture shows of a value; empty shows nothing.
    pub(super) labels: Vec<String>,
    /// Points drawn hollow: values of little weight.
    pub(super) hollow: Vec<bool>,
}

/// A chart over equal slots.
pub(super) struct Chart {
    /// Unique on the page.
    pub(super) id: &'static str,
    pub(super) title: String,
    pub(super) description: String,
    /// Names of the axes, with units.
    pub(super) x: &'static str,
    pub(super) y: &'static str,
    /// Lowest value of the y axis.
    pub(super) from: f64,
    /// Highest, where it is fixed.
    pub(super) to: Option<f64>,
    /// Whether y values are shares, shown in per cent.
    pub(super) percent: bool,
    pub(super) slots: Vec<String>,
    pub(super) series: Vec<Series>,
    /// A horizontal line with its name.
    pub(super) reference: Option<(f64, &'static str)>,
    /// Slots to point out on the last series: a word for each.
    pub(super) marks: Vec<(usize, String)>,
    /// Counts below the plot, with their name.
    pub(super) strip: Option<(&'static str, Vec<u64>)>,
}

/// Where things lie.
pub(super) struct Frame {
    low: f64,
    pub(super) high: f64,
    pub(super) slot: f64,
}

impl Frame {
    pub(super) fn x(&self, slot: usize) -> f64 {
        LEFT + self.slot * (slot as f64 + 0.5)
    }

    pub(super) fn y(&self, value: f64) -> f64 {
        TOP + PLOT * (1. - (value.clamp(self.low, self.high) - self.low) / (self.high - self.low))
    }

    /// Every how many slots a label of `letters` fits.
    pub(super) fn step(&self, letters: usize) -> usize {
        ((letters as f64 * DIGIT + 4.) / self.slot).ceil().max(1.) as usize
    }
}

impl Chart {
    /// The picture.
    pub(super) fn draw(&self) -> String {
        let values = || self.series.iter().flat_map(|series| series.values.iter().copied());
        let reference = self.reference.iter().map(|line| Some(line.0));
        let most = values()
            .chain(reference)
            .flatten()
            .filter_map(finite)
            .fold(self.from, f64::max);
        let (high, step) = scale(self.from, self.to.unwrap_or(most + (most - self.from) * HEADROOM));
        let frame = Frame {
            low: self.from,
            high,
            slot: (WIDTH - LEFT - RIGHT) / self.slots.len().max(1) as f64,
        };
        let height = TOP + PLOT + BELOW + if self.strip.is_some() { STRIP } else { 0. };
        let mut out = open(self.id, height, &self.title, &self.description);
        self.axes(&mut out, &frame, step, height);
        let lines: Vec<&[Option<f64>]> = self
            .series
            .iter()
            .filter(|series| series.kind == Kind::Line)
            .map(|series| series.values.as_slice())
            .collect();
        for series in &self.series {
            match series.kind {
                Kind::Bars => bars(&mut out, &frame, series, &self.slots, &lines),
                Kind::Line => line(&mut out, &frame, series, &self.slots, self.marks.is_empty()),
            }
        }
        self.mark(&mut out, &frame);
        if let Some((name, counts)) = &self.strip {
            strip(&mut out, &frame, name, counts);
        }
        out.push_str("</svg>\n");
        out
    }

    fn axes(&self, out: &mut String, frame: &Frame, step: f64, height: f64) {
        let _ = write!(out, "<text class=\"name\" x=\"0\" y=\"12\">{}</text>", escaped(self.y));
        let _ = write!(
            out,
            "<text class=\"name\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            height - 6.,
            escaped(self.x)
        );
        let ticks = ((frame.high - frame.low) / step).round() as usize;
        for tick in 0..=ticks {
            let value = frame.low + step * tick as f64;
            let y = frame.y(value);
            let label = if self.percent {
                format!("{:.0}", 100. * value)
            } else {
                tick_label(value, step)
            };
            let class = if tick == 0 { "axis" } else { "grid" };
            let _ = write!(
                out,
                "<path class=\"{class}\" d=\"M{LEFT} {y:.1}H{:.1}\"/><text x=\"{:.1}\" y=\"{:.1}\" \
                 text-anchor=\"end\">{label}</text>",
                WIDTH - RIGHT,
                LEFT - 7.,
                y + 4.
            );
        }
        let letters = self.slots.iter().map(|slot| slot.chars().count()).max().unwrap_or(1);
        let every = frame.step(letters);
        for (i, slot) in self.slots.iter().enumerate().step_by(every) {
            text(out, "", frame.x(i), TOP + PLOT + 18., slot);
        }
        if let Some((value, name)) = self.reference {
            let y = frame.y(value);
            let _ = write!(
                out,
                "<path class=\"reference\" d=\"M{LEFT} {y:.1}H{:.1}\"/><text class=\"name\" x=\"{:.1}\" \
                 y=\"{:.1}\">{}</text>",
                WIDTH - RIGHT,
                LEFT + 6.,
                y + 20.,
                escaped(name)
            );
        }
    }

    fn mark(&self, out: &mut String, frame: &Frame) {
        let Some(series) = self.series.last() else { return };
        let mut taken: Vec<(f64, f64, bool)> = Vec::new();
        for (slot, word) in &self.marks {
            let Some(value) = series.values.get(*slot).copied().flatten().and_then(finite) else {
                continue;
            };
            let (x, y) = (frame.x(*slot), frame.y(value));
            let half = word.chars().count() as f64 * DIGIT / 2.;
            let at = x.clamp(LEFT + half, (WIDTH - half).max(LEFT + half));
            // on the side that is away from the reference, unless the plot ends there or another word stands there
            let mut below = y + 26. < TOP + PLOT && self.reference.is_some_and(|line| value < line.0) || y - 14. < TOP;
            let beside = |side| {
                taken
                    .iter()
                    .any(|&(x, wide, of)| of == side && (at - x).abs() < half + wide)
            };
            if beside(below) && !beside(!below) {
                below = !below;
            }
            taken.push((at, half, below));
            let words_at = if below { y + 24. } else { y - 14. };
            let _ = write!(out, "<circle class=\"mark\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"7.5\"/>");
            text(out, "strong", at, words_at, word);
        }
    }
}

fn open(id: &str, height: f64, title: &str, description: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         aria-labelledby=\"{id}-t {id}-d\"><title id=\"{id}-t\">{}</title><desc id=\"{id}-d\">{}</desc>\n",
        escaped(title),
        escaped(description)
    )
}

pub(super) fn text(out: &mut String, class: &str, x: f64, y: f64, words: &str) {
    let class = if class.is_empty() {
        String::new()
    } else {
        format!(" class=\"{class}\"")
    };
    let _ = write!(
        out,
        "<text{class} x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{}</text>",
        escaped(words)
    );
}

/// One bar of parts that sum to the whole: name, colour and value of each.
pub(super) fn stacked(id: &str, title: &str, description: &str, parts: &[(&str, usize, f64)]) -> String {
    let height = 54.;
    let whole: f64 = parts.iter().filter_map(|part| finite(part.2)).sum();
    let mut out = open(id, height, title, description);
    let mut x = 0.;
    for &(name, colour, value) in parts {
        let share = crate::report::derived::share(value, whole).unwrap_or(0.).clamp(0., 1.);
        let width = WIDTH * share;
        let label = format!("{name} {:.0}\u{A0}%", 100. * share);
        let _ = writeln!(
            out,
            "<rect class=\"f{colour} part\" x=\"{x:.1}\" y=\"4\" width=\"{width:.1}\" height=\"46\"><title>{}</title></rect>",
            escaped(&label)
        );
        if width > label.chars().count() as f64 * DIGIT {
            text(&mut out, "on", x + width / 2., 31., &label);
        }
        x += width;
    }
    out.push_str("</svg>\n");
    out
}

/// The end of an axis from `low` that holds `high`, and the distance of its ticks: 1, 2 or 5 times a power of ten.
fn scale(low: f64, high: f64) -> (f64, f64) {
    let span = if high > low { high - low } else { 1. };
    let rough = span / 5.;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1., 2., 5., 10.]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= rough * 0.999)
        .unwrap_or(10. * power);
    (low + step * (span / step - 1e-9).ceil().max(1.), step)
}

fn tick_label(value: f64, step: f64) -> String {
    if step >= 1. {
        super::markup::count(value.round().max(0.) as u64)
    } else {
        format!("{value:.*}", (-step.log10()).ceil().clamp(0., 6.) as usize)
    }
}
