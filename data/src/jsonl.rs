//! Rows of JSONL files: numbered lines that must be text and JSON, with errors that name the line once.

use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;

/// All rows of a JSONL file with their 1-based line numbers. Blank lines are skipped.
///
/// # Errors
/// When the file cannot be read or has no row, and with `PATH:LINE` when a line is not UTF-8 or not JSON.
pub(crate) fn read_rows(path: &Path) -> Result<Vec<(usize, Value)>> {
    let bytes = std::fs::read(path).with_context(|| format!("{}: cannot read", path.display()))?;
    let rows = rows_of(&bytes, path)?;
    ensure!(!rows.is_empty(), "{}: no rows", path.display());
    Ok(rows)
}

/// The rows of [`read_rows`] in bytes that were read from `path`; possibly none.
pub(crate) fn rows_of(bytes: &[u8], path: &Path) -> Result<Vec<(usize, Value)>> {
    let mut rows = Vec::new();
    for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
        let number = index + 1;
        let row = row_of(line).with_context(|| format!("{}:{number}", path.display()))?;
        rows.extend(row.map(|row| (number, row)));
    }
    Ok(rows)
}

fn row_of(line: &[u8]) -> Result<Option<Value>> {
    let line = std::str::from_utf8(line).map_err(|error| {
        anyhow!(
            "not UTF-8: expected text, found byte 0x{:02x} at byte {} of the line",
            line[error.valid_up_to()],
            error.valid_up_to() + 1
        )
    })?;
    // some editors open a file with a byte order mark
    let line = line.trim_start_matches('\u{feff}').trim();
    if line.is_empty() {
        return Ok(None);
    }
    let row = serde_json::from_str(line).map_err(|error| anyhow!("not JSON: {}", without_line(&error)))?;
    Ok(Some(row))
}

/// serde's message with its column but without its line: it sees a single line and always says 1.
fn without_line(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    match text.strip_suffix(&place) {
        Some(what) => format!("{what} at column {}", error.column()),
        None => text,
    }
}

/// What a JSON value is, with its article, for messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(bytes: &[u8]) -> String {
        format!("{:#}", rows_of(bytes, Path::new("rows.jsonl")).unwrap_err())
    }

    #[test]
    fn lines_keep_their_numbers_and_blank_ones_are_skipped() {
        let rows = rows_of("\u{feff}{\"a\": 1}\r\n\n  \n[2]".as_bytes(), Path::new("x")).unwrap();
        assert_eq!(rows, [(1, serde_json::json!({"a": 1})), (4, serde_json::json!([2]))]);
    }

    #[test]
    fn a_line_that_is_no_text_is_named_with_its_byte() {
        let error = error_of(b"{}\n{\"a\": \"\xff\"}\n");
        assert!(error.contains("rows.jsonl:2: not UTF-8"), "{error}");
        assert!(error.contains("0xff at byte 8"), "{error}");
    }

    #[test]
    fn a_broken_line_is_named_once_by_its_own_number() {
        for bytes in [&b"{}\n{}\n{\"a\": }\n"[..], b"{}\n{}\n{\"a\":"] {
            let error = error_of(bytes);
            assert!(error.contains("rows.jsonl:3: not JSON"), "{error}");
            assert!(error.contains("column") && !error.contains("line 1"), "{error}");
        }
    }
}
