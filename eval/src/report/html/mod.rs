//! A report as one page: no script, no network, no font of its own; light, dark and on paper.
//!
//! The output is XHTML in its syntax and HTML5 in its words, so that any XML parser can check it. What a report may hold
//! without bound (prompts, texts, groups) is capped, and every cap is told on the page.

mod charts;
mod costs;
mod markup;
mod series;
mod svg;
mod tables;
mod texts;

use std::fmt::Write;

use self::markup::{NONE, clipped, counted, escaped, figures, number};
use self::tables::{cut, interval, times};
use super::Report;

const STYLE: &str = include_str!("style.css");
/// Warnings shown, and characters of each.
const MOST_WARNINGS: usize = 20;
const WARNING: usize = 600;
/// Characters of a folder's name in the heading.
const HEADING: usize = 80;

/// The page of `report`: a whole HTML document.
pub fn html(report: &Report) -> String {
    let (drafter, target) = (name(&report.setting.drafter), name(&report.setting.target));
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n\
         <title>{} on {}: acceptance</title>\n<style>\n{STYLE}</style></head>\n<body><main>\n",
        escaped(&drafter),
        escaped(&target)
    );
    let _ = writeln!(
        out,
        "<header><p class=\"kind\">Speculative decoding, {}</p>\n<h1>{} <span>drafts for</span> {}</h1>\n<p class=\"lede\">{}</p></header>",
        escaped(&report.mode),
        escaped(&drafter),
        escaped(&target),
        escaped(&circumstances(report))
    );
    tiles(&mut out, report);
    warnings(&mut out, report);
    out.push_str(&charts::charts(report));
    out.push_str(&tables::groups(report));
    out.push_str(&tables::prompts(report));
    out.push_str(&texts::texts(report));
    out.push_str(&tables::setting(report));
    out.push_str(&tables::definitions(report));
    let _ = writeln!(
        out,
        "<footer><p>dflash-eval {}. The JSON report holds every round of every prompt.</p></footer>\n</main></body></html>",
        escaped(&report.setting.version)
    );
    out
}

/// The last two parts of a folder's path: one alone is often just `final`.
fn name(folder: &str) -> String {
    let parts: Vec<&str> = folder
        .split(['/', '\\'])
        .filter(|part| !part.is_empty() && *part != ".")
        .collect();
    match parts[parts.len().saturating_sub(2)..].join("/") {
        none if none.is_empty() => "unnamed".into(),
        name => markup::short(&name, HEADING),
    }
}

fn circumstances(report: &Report) -> String {
    let setting = &report.setting;
    let mut facts = Vec::new();
    if !setting.device.is_empty() {
        facts.push(format!(
            "{} on {}, {}",
            setting.dtype,
            setting.device,
            counted(setting.threads as u64, "thread")
        ));
    }
    facts.push(if setting.sampling.is_greedy() {
        "greedy".into()
    } else {
        format!("sampled at temperature {}", setting.sampling.temperature)
    });
    if setting.block_size_used > 0 {
        let chosen = if setting.width_policy == "auto" {
            ", width chosen round by round"
        } else {
            ""
        };
        facts.push(format!("blocks of {}{chosen}", setting.block_size_used));
    }
    if setting.exact_verify {
        facts.push("verified row by row".into());
    }
    if setting.without_selector {
        facts.push("without the selector".into());
    }
    facts.push(counted(report.prompts as u64, "text"));
    if setting.max_new > 0 {
        facts.push(format!(
            "at most {} new tokens each",
            markup::count(setting.max_new as u64)
        ));
    }
    facts.join(" · ")
}

struct Tile {
    name: &'static str,
    value: String,
    unit: &'static str,
    notes: [String; 2],
    /// `good` or `bad` where the value is a verdict.
    class: &'static str,
}

fn tiles(out: &mut String, report: &Report) {
    let most = report.accept_at_pos.len() + 1;
    let acceptance = Tile {
        name: "Acceptance length",
        value: number(report.acceptance_length, 2),
        unit: "tokens a round",
        notes: [
            match interval(report.acceptance_length_ci95, 2) {
                none if none == NONE => "no 95 % interval: too few prompts".into(),
                ends => format!("95 % interval {ends}"),
            },
            format!("at most {most}, {}", counted(report.rounds, "counted round")),
        ],
        class: "",
    };
    let speedup = Tile {
        name: "Speed-up",
        value: times(report.speedup),
        unit: "",
        notes: [
            match report.speedup {
                Some(ratio) if ratio < 1. => "slower than plain decoding".into(),
                Some(_) => "over plain decoding".into(),
                None => "not measured".into(),
            },
            format!("{} with prefill", times(report.speedup_with_prefill)),
        ],
        class: "",
    };
    let rate = Tile {
        name: "Decoding rate",
        value: figures(report.spec_tokens_per_s),
        unit: "tokens/s",
        notes: [
            format!("plain decoding: {} tokens/s", figures(report.plain_tokens_per_s)),
            "both without prefill".into(),
        ],
        class: "",
    };
    for_each_tile(out, [acceptance, speedup, rate, lossless(report)]);
}

fn lossless(report: &Report) -> Tile {
    let value = format!("{} of {}", report.identical_texts(), report.prompts);
    let (value, note, class) = match report.identical {
        Some(true) => (value, "equal plain decoding, token for token", "good"),
        Some(false) => (value, "the others differ from plain decoding", "bad"),
        None => ("sampled".into(), "may differ from plain decoding by right", ""),
    };
    let first = match report.differing.first() {
        Some((text, token)) => format!("first: text {text} at token {token}, from 0"),
        None => String::new(),
    };
    Tile {
        name: "Identical texts",
        value,
        unit: "",
        notes: [note.into(), first],
        class,
    }
}

fn for_each_tile(out: &mut String, tiles: [Tile; 4]) {
    out.push_str("<section class=\"tiles\" aria-label=\"Headline numbers\">\n");
    for tile in tiles {
        let notes = tile.notes.map(|note| format!("<p>{}</p>", escaped(&note))).concat();
        let unit = match tile.unit {
            "" => String::new(),
            unit => format!(" <small>{unit}</small>"),
        };
        let _ = writeln!(
            out,
            "<div class=\"tile {}\"><h2>{}</h2><p class=\"value\">{}{unit}</p>{notes}</div>",
            tile.class,
            tile.name,
            escaped(&tile.value)
        );
    }
    out.push_str("</section>\n");
}

fn warnings(out: &mut String, report: &Report) {
    if report.warnings.is_empty() {
        return;
    }
    out.push_str("<aside class=\"warnings\"><h2>Before quoting these numbers</h2>\n<ul>\n");
    for warning in report.warnings.iter().take(MOST_WARNINGS) {
        let _ = writeln!(out, "<li>{}</li>", escaped(&clipped(warning, WARNING)));
    }
    let _ = writeln!(
        out,
        "</ul>{}</aside>",
        cut(MOST_WARNINGS, report.warnings.len(), "warnings")
    );
}
