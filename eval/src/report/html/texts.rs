//! Texts token by token: who wrote each, told by colour and by the line below it.

use std::fmt::Write;

use super::markup::{count, counted, escaped, number, push_escaped};
use super::tables::{cut, label, visible};
use crate::report::{Piece, PieceSource, Report, TextDetail};

/// Texts shown.
const MOST_TEXTS: usize = 5;
/// Tokens shown of each.
const MOST_TOKENS: usize = 400;
/// Characters shown of one token: a hostile vocabulary could hold longer ones than any page.
const MOST_CHARACTERS: usize = 40;

/// The texts of lowest acceptance; nothing where the report holds none.
pub(super) fn texts(report: &Report) -> String {
    if report.worst.is_empty() {
        return String::new();
    }
    let mut out = format!(
        "<section><h2>Texts of lowest acceptance</h2>\n<p class=\"lede\">{}Each token as its own; ↵ is a line end, → a \
         tab, · a space that could be missed.</p>\n",
        cut(MOST_TEXTS, report.worst.len(), "texts")
    );
    out.push_str("<p class=\"key\">");
    for (source, name) in [
        (PieceSource::Accepted, "accepted draft"),
        (PieceSource::Corrected, "target's, in place of a rejected draft"),
        (PieceSource::Bonus, "target's, after all drafts stood"),
        (PieceSource::Prefill, "from the prompt's own pass"),
    ] {
        let _ = write!(
            out,
            "<span><span class=\"tokens\"><i class=\"{}\">token</i></span>{name}</span> ",
            class(source)
        );
    }
    out.push_str("</p>\n");
    for detail in report.worst.iter().take(MOST_TEXTS) {
        article(&mut out, report, detail);
    }
    out.push_str("</section>\n");
    out
}

fn article(out: &mut String, report: &Report, detail: &TextDetail) {
    let result = report.per_prompt.get(detail.result);
    let title = result.map_or_else(|| format!("text {}", detail.result), label);
    let of = |source| detail.pieces.iter().filter(|piece| piece.source == source).count() as u64;
    let mut facts = vec![counted(detail.pieces.len() as u64, "token")];
    if let Some(result) = result {
        facts.push(format!("acceptance length {}", number(result.acceptance_length, 2)));
    }
    for (source, name) in [
        (PieceSource::Accepted, "accepted"),
        (PieceSource::Corrected, "corrected"),
        (PieceSource::Bonus, "bonus"),
    ] {
        facts.push(format!("{} {name}", count(of(source))));
    }
    let notice = cut(MOST_TOKENS, detail.pieces.len(), "tokens");
    let _ = writeln!(
        out,
        "<article><h3>{}</h3><p class=\"facts\">{}</p>",
        escaped(&title),
        escaped(&facts.join(" · "))
    );
    if !detail.prompt_tail.is_empty() {
        let _ = writeln!(
            out,
            "<details><summary>End of the prompt</summary><pre>{}</pre></details>",
            visible(&detail.prompt_tail)
        );
    }
    out.push_str("<div class=\"tokens\">");
    for piece in detail.pieces.iter().take(MOST_TOKENS) {
        token(out, piece);
    }
    out.push_str("</div>\n");
    if !notice.is_empty() {
        let _ = writeln!(out, "<p class=\"facts\">{}</p>", escaped(notice.trim()));
    }
    out.push_str("</article>\n");
}

fn class(source: PieceSource) -> char {
    match source {
        PieceSource::Prefill => 'p',
        PieceSource::Accepted => 'a',
        PieceSource::Corrected => 'c',
        PieceSource::Bonus => 'b',
    }
}

fn token(out: &mut String, piece: &Piece) {
    let _ = write!(out, "<i class=\"{}\">", class(piece.source));
    let characters: Vec<char> = piece.text.chars().collect();
    let shown = &characters[..characters.len().min(MOST_CHARACTERS)];
    for (i, &c) in shown.iter().enumerate() {
        // one space between words is seen by the gap that it is; at an end or in a run it is not
        let beside_a_word = |at: Option<usize>| at.and_then(|at| shown.get(at)).is_some_and(|c| !c.is_whitespace());
        match c {
            '\n' => out.push_str("↵\n"),
            '\t' => out.push_str("→\t"),
            ' ' if !beside_a_word(Some(i + 1)) || (i > 0 && !beside_a_word(Some(i - 1))) => out.push('·'),
            _ => push_escaped(out, c),
        }
    }
    if characters.is_empty() {
        // bytes of a character that a later token completes
        out.push('◌');
    } else if shown.len() < characters.len() {
        let _ = write!(out, "…+{}", characters.len() - shown.len());
    }
    out.push_str("</i>");
}
