//! A recipe's files, local ones or those of the hub, and their rows.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

use super::set::SourceFile;
use super::wording::missing;
use crate::files::sha256_of_file;
use crate::jsonl::{kind, read_rows};
use crate::parquet_file;

/// One row and where it stands.
pub(super) struct Row {
    /// `PATH:LINE` or `PATH: row N`, for messages.
    pub(super) place: String,
    pub(super) columns: Map<String, Value>,
}

/// A path pattern with at most one `*`, which stands for anything but `/`.
pub fn matches(pattern: &str, path: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == path,
        Some((before, after)) => path
            .strip_prefix(before)
            .and_then(|rest| rest.strip_suffix(after))
            .is_some_and(|middle| !middle.contains('/')),
    }
}

/// The paths that the first pattern with any match finds, sorted.
pub(super) fn first_match<'p>(patterns: &[&str], paths: &'p [String]) -> Vec<&'p str> {
    for pattern in patterns {
        let mut found: Vec<&str> = paths
            .iter()
            .map(String::as_str)
            .filter(|path| matches(pattern, path))
            .collect();
        if !found.is_empty() {
            found.sort_unstable();
            return found;
        }
    }
    Vec::new()
}

/// The files of a recipe in a local file or folder. In a folder they are looked for where the data set has them, then
/// under the same names in the folder itself; then all Parquet files in it are taken, sorted by name.
pub(super) fn local_files(path: &Path, patterns: &[&str]) -> Result<Vec<PathBuf>> {
    let kind = std::fs::metadata(path).with_context(|| format!("{}: cannot read", path.display()))?;
    if kind.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    ensure!(kind.is_dir(), "{}: expected a file or a folder", path.display());
    let found = files_below(path)?;
    let names: Vec<&str> = patterns
        .iter()
        .map(|pattern| pattern.rsplit('/').next().unwrap_or(pattern))
        .collect();
    let everything: [&[&str]; 3] = [patterns, &names, &["*.parquet"]];
    for patterns in everything {
        let files = first_match(patterns, &found);
        if !files.is_empty() {
            complete(&files).with_context(|| path.display().to_string())?;
            return Ok(files.into_iter().map(|file| path.join(file)).collect());
        }
    }
    bail!(
        "{}: expected {}, or Parquet files, found {}",
        path.display(),
        patterns.join(" or "),
        listed(&found)
    )
}

/// Paths of all files in a folder and one folder below, relative to it: as deep as any data set puts them.
pub(super) fn files_below(folder: &Path) -> Result<Vec<String>> {
    let list = |folder: &Path| -> Result<Vec<PathBuf>> {
        let cannot = || format!("{}: cannot list", folder.display());
        let entries = std::fs::read_dir(folder).with_context(cannot)?;
        entries.map(|entry| Ok(entry.with_context(cannot)?.path())).collect()
    };
    let mut files = Vec::new();
    for path in list(folder)? {
        if path.is_dir() {
            files.extend(list(&path)?);
        } else {
            files.push(path);
        }
    }
    let mut relative: Vec<String> = files
        .iter()
        .filter(|path| path.is_file())
        .filter_map(|path| Some(path.strip_prefix(folder).ok()?.to_str()?.replace('\\', "/")))
        .collect();
    relative.sort_unstable();
    Ok(relative)
}

/// Some of many names, for messages.
pub(crate) fn listed(names: &[String]) -> String {
    const MOST: usize = 12;
    match names.len() {
        0 => "nothing".to_owned(),
        1..=MOST => names.join(", "),
        more => format!("{} and {} more", names[..MOST].join(", "), more - MOST),
    }
}

/// A file named `...-00000-of-00003...` says how many there are: fewer are an error, not a smaller set.
pub(super) fn complete(files: &[&str]) -> Result<()> {
    for file in files {
        if let Some(expected) = parts(file) {
            ensure!(
                files.len() == expected,
                "{file}: expected {expected} files of this name, found {}",
                files.len()
            );
        }
    }
    Ok(())
}

fn parts(file: &str) -> Option<usize> {
    let (before, after) = file.rsplit_once("-of-")?;
    let number = |digits: &str| (digits.len() == 5).then(|| digits.parse::<usize>().ok()).flatten();
    number(before.get(before.len().checked_sub(5)?..)?)?;
    number(after.get(..5)?)
}

/// Reads one file. `columns` must be there; `also` are taken where they are.
pub(super) fn read_file(path: &Path, shown: &str, columns: &[&str], also: &[&str]) -> Result<(SourceFile, Vec<Row>)> {
    let rows = if parquet_file::is_parquet(path) {
        let wanted = [columns, also].concat();
        let table = parquet_file::read(path, Some(&wanted))?;
        for column in columns {
            if !table.columns.iter().any(|found| found == column) {
                bail!("{}: {}", path.display(), missing(column, &table.columns));
            }
        }
        let rows = table.rows.into_iter().enumerate();
        rows.map(|(index, columns)| Row {
            place: format!("{}: row {}", path.display(), index + 1),
            columns,
        })
        .collect()
    } else {
        json_rows(path)?
    };
    ensure!(!rows.is_empty(), "{}: no rows", path.display());
    let file = SourceFile {
        path: shown.to_owned(),
        sha256: sha256_of_file(path)?,
        rows: rows.len(),
    };
    Ok((file, rows))
}

/// JSONL, or one list of objects.
fn json_rows(path: &Path) -> Result<Vec<Row>> {
    let extension = path.extension().and_then(|extension| extension.to_str());
    let is_list = match extension {
        Some("jsonl" | "ndjson") => false,
        Some("json") => {
            let bytes = std::fs::read(path).with_context(|| format!("{}: cannot read", path.display()))?;
            bytes.trim_ascii_start().starts_with(b"[")
        }
        _ => bail!(
            "{}: expected a name that ends with .parquet, .jsonl or .json",
            path.display()
        ),
    };
    let rows: Vec<(String, Value)> = if is_list {
        let Value::Array(list) = crate::files::read_json(path)? else {
            bail!("{}: expected a list of objects", path.display())
        };
        let rows = list.into_iter().enumerate();
        rows.map(|(index, row)| (format!("{}: row {}", path.display(), index + 1), row))
            .collect()
    } else {
        let rows = read_rows(path)?.into_iter();
        rows.map(|(number, row)| (format!("{}:{number}", path.display()), row))
            .collect()
    };
    rows.into_iter()
        .map(|(place, row)| match row {
            Value::Object(columns) => Ok(Row { place, columns }),
            other => bail!("{place}: expected an object, found {}", kind(&other)),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_a_part_of_one_name() {
        for (pattern, path, expected) in [
            ("main/test-*.parquet", "main/test-00000-of-00001.parquet", true),
            ("main/test-*.parquet", "main/train-00000-of-00001.parquet", false),
            ("main/test-*.parquet", "main/test-x/y.parquet", false),
            ("test.jsonl", "test.jsonl", true),
            ("test.jsonl", "x/test.jsonl", false),
            ("ab*ba", "aba", false),
        ] {
            assert_eq!(matches(pattern, path), expected, "{pattern} {path}");
        }
    }

    #[test]
    fn a_missing_part_is_noticed() {
        assert_eq!(parts("data/train-00000-of-00002-a09b.parquet"), Some(2));
        assert_eq!(parts("data/out-of-order.parquet"), None);
        let one = ["t-00000-of-00002.parquet"];
        let error = complete(&one).unwrap_err().to_string();
        assert!(
            error.contains("expected 2 files") && error.contains("found 1"),
            "{error}"
        );
        complete(&["t-00000-of-00002.parquet", "t-00001-of-00002.parquet"]).unwrap();
    }
}
