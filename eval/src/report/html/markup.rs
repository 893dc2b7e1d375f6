//! The words of the page: escaping that survives hostile text, numbers, tables.

use std::fmt::Write;

use crate::report::derived::finite;

/// What stands where there is no value.
pub(super) const NONE: &str = "-";

/// `text` for an element or a quoted attribute. Characters that XML forbids, that a browser would swallow, or that
/// reorder what is around them, are shown instead of obeyed.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        push_escaped(&mut out, c);
    }
    out
}

/// One character, as [`escaped`].
pub(super) fn push_escaped(out: &mut String, c: char) {
    match c {
        '&' => out.push_str("&amp;"),
        '<' => out.push_str("&lt;"),
        '>' => out.push_str("&gt;"),
        '"' => out.push_str("&quot;"),
        '\'' => out.push_str("&#39;"),
        '\n' | '\t' => out.push(c),
        '\0'..='\u{1F}' => out.extend(char::from_u32(0x2400 + c as u32)),
        '\u{7F}' => out.push('\u{2421}'),
        // C1 controls, marks without width, direction overrides, line separators, noncharacters
        '\u{80}'..='\u{9F}'
        | '\u{200B}'
        | '\u{200E}'..='\u{200F}'
        | '\u{2028}'..='\u{202E}'
        | '\u{2060}'..='\u{206F}'
        | '\u{FEFF}'
        | '\u{FFFE}'..='\u{FFFF}' => {
            let _ = write!(out, "[U+{:04X}]", c as u32);
        }
        _ => out.push(c),
    }
}

/// The first `most` characters of `text`, and a note of what was left out.
pub(super) fn clipped(text: &str, most: usize) -> String {
    let count = text.chars().count();
    if count <= most {
        return text.into();
    }
    let first: String = text.chars().take(most).collect();
    format!("{first}… (first {most} of {count} characters)")
}

/// A cell's worth of `text`: its end, which tells more of a path than its beginning.
pub(super) fn short(text: &str, most: usize) -> String {
    let count = text.chars().count();
    if count <= most {
        return text.into();
    }
    let last: String = text.chars().skip(count - most).collect();
    format!("…{last}")
}

/// `value` with so many decimals, or [`NONE`].
pub(super) fn number(value: Option<f64>, digits: usize) -> String {
    value
        .and_then(finite)
        .map_or(NONE.into(), |value| format!("{value:.digits$}"))
}

/// A share in per cent, or [`NONE`].
pub(super) fn percent(value: Option<f64>, digits: usize) -> String {
    match value.and_then(finite) {
        Some(value) => format!("{:.digits$}\u{A0}%", 100. * value),
        None => NONE.into(),
    }
}

/// A rate or a time with three figures or all its whole ones.
pub(super) fn figures(value: Option<f64>) -> String {
    match value.and_then(finite) {
        Some(value) if value.abs() >= 1000. => count(value.round() as u64),
        Some(value) => {
            let digits = if value.abs() >= 100. {
                0
            } else if value.abs() >= 10. {
                1
            } else {
                2
            };
            format!("{value:.digits$}")
        }
        None => NONE.into(),
    }
}

/// `12,345`.
pub(super) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `1 prompt`, `2 prompts`.
pub(super) fn counted(value: u64, word: &str) -> String {
    format!("{} {word}{}", count(value), if value == 1 { "" } else { "s" })
}

/// A column of a table: its name, and whether it holds numbers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column(pub(super) &'static str, pub(super) bool);

/// A table that scrolls sideways where it is too wide. Cells are plain text; the first of each row names it.
pub(super) fn table(label: &str, columns: &[Column], rows: &[Vec<String>]) -> String {
    let mut out = format!(
        "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"{}\"><table>\n<thead><tr>",
        escaped(label)
    );
    let class = |numeric: bool| if numeric { " class=\"n\"" } else { "" };
    for &Column(name, numeric) in columns {
        let _ = write!(out, "<th scope=\"col\"{}>{}</th>", class(numeric), escaped(name));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for row in rows {
        out.push_str("<tr>");
        for (i, (cell, &Column(_, numeric))) in row.iter().zip(columns).enumerate() {
            let (open, close) = if i == 0 {
                ("th scope=\"row\"", "th")
            } else {
                ("td", "td")
            };
            let _ = write!(out, "<{open}{}>{}</{close}>", class(numeric), escaped(cell));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
    out
}
