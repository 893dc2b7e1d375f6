//! House rules that no compiler checks, over the whole repository: file heads, file length, where backend features may
//! be named, which crate may depend on which, and that the README's file tree is the tree.
//!
//! Standard library only, so that `scripts/check.sh` can build it with bare rustc before anything else.

#![expect(clippy::unwrap_used, reason = "the helpers of a test may panic as the test may")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The workspace's crates, lowest first, each with the ones that it may use.
const ROOMS: [(&str, &[&str]); 5] = [
    ("model", &[]),
    ("data", &["model"]),
    ("eval", &["model", "data"]),
    ("train", &["model", "data", "eval"]),
    ("export", &["model", "data", "eval"]),
];

/// Longest source file, in lines.
const MOST_LINES: usize = 500;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Files below `folder` with one of `extensions`, as paths relative to the root, sorted; hidden folders are left out.
fn files(folder: &str, extensions: &[&str]) -> BTreeSet<String> {
    let (root, mut found) = (root(), BTreeSet::new());
    let mut pending = vec![root.join(folder)];
    while let Some(folder) = pending.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if name.starts_with('.') {
                continue;
            }
            if path.is_dir() {
                pending.push(path);
            } else if path
                .extension()
                .is_some_and(|found| extensions.iter().any(|wanted| found == *wanted))
            {
                found.insert(path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    found
}

fn rust_files() -> BTreeSet<String> {
    ROOMS.iter().flat_map(|(room, _)| files(room, &["rs"])).collect()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Every path that `broken` returns a complaint for, in one failure.
fn refuse(paths: impl IntoIterator<Item = String>, broken: impl Fn(&str) -> Option<String>) {
    let complaints: Vec<_> = paths
        .into_iter()
        .filter_map(|path| broken(&path).map(|why| format!("{path}: {why}")))
        .collect();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn there_are_files_to_check() {
    for (room, _) in ROOMS {
        assert!(
            !files(room, &["rs"]).is_empty(),
            "{room}/ holds no .rs file: the rules below would check nothing"
        );
    }
}

#[test]
fn every_source_file_opens_with_what_it_is() {
    refuse(rust_files(), |path| {
        let first = read(path).lines().next().unwrap_or_default().to_owned();
        (!first.starts_with("//! ")).then(|| format!("expected a //! line first, found {first:?}"))
    });
}

#[test]
fn no_source_file_is_too_long_to_read_at_once() {
    refuse(rust_files(), |path| {
        let lines = read(path).lines().count();
        (lines > MOST_LINES).then(|| format!("{lines} lines, {MOST_LINES} at most"))
    });
}

#[test]
fn backend_features_are_named_in_one_file() {
    // in two halves, else this file would find itself
    let forms = [concat!("cfg(fea", "ture"), concat!("cfg!(fea", "ture")];
    refuse(rust_files(), |path| {
        let named = forms.iter().any(|form| read(path).contains(form));
        (named && path != "model/src/device.rs").then(|| "only model/src/device.rs may ask for a feature".into())
    });
    assert!(
        forms.iter().any(|form| read("model/src/device.rs").contains(form)),
        "device.rs names none: is it moved?"
    );
}

#[test]
fn crates_depend_downwards_only() {
    for (room, below) in ROOMS {
        let manifest = format!("{room}/Cargo.toml");
        for line in read(&manifest).lines() {
            let Some(name) = line.trim().strip_prefix("dflash-") else {
                continue;
            };
            let used: String = name.chars().take_while(char::is_ascii_alphabetic).collect();
            assert!(
                below.contains(&used.as_str()),
                "{manifest}: {room} may use {below:?}, found a dependency on {used:?}"
            );
        }
    }
}

/// Paths of the fenced block below the README's `## Files`: files, and folders that end in `/`.
///
/// A line is an indentation of two spaces a level, a name, then its gloss, which a folder may leave out. A folder without
/// lines of its own stands for everything below it.
fn readme_tree() -> Vec<String> {
    let readme = read("README.md");
    let (_, after) = readme
        .split_once("\n## Files\n")
        .expect("README.md has no '## Files' heading");
    let block = after
        .split("```")
        .nth(1)
        .expect("README.md: no fenced block below '## Files'");
    let (mut folders, mut paths) = (Vec::<String>::new(), Vec::new());
    for line in block.lines().skip(1).filter(|line| !line.trim().is_empty()) {
        let level = (line.len() - line.trim_start().len()) / 2;
        let name = line.split_whitespace().next().unwrap();
        assert!(
            level <= folders.len(),
            "README.md: {line:?} is indented below no folder"
        );
        assert!(
            name.ends_with('/') || line.split_whitespace().count() > 1,
            "README.md: {line:?} has no gloss"
        );
        folders.truncate(level);
        paths.push(format!("{}{name}", folders.concat()));
        if name.ends_with('/') {
            folders.push(name.to_owned());
        }
    }
    paths
}

#[test]
fn the_readme_tree_names_only_what_exists() {
    refuse(readme_tree(), |path| {
        (!root().join(path).exists()).then(|| "named in README.md, not there".into())
    });
}

#[test]
fn the_readme_tree_names_every_source_file() {
    let tree = readme_tree();
    let closed: Vec<_> = tree
        .iter()
        .filter(|path| path.ends_with('/') && !tree.iter().any(|other| other != *path && other.starts_with(*path)))
        .collect();
    let mut sources = rust_files();
    sources.extend(files("scripts", &["sh", "py"]));
    sources.extend(files("configs", &["toml"]));
    refuse(sources, |path| {
        let named = tree.iter().any(|entry| entry == path) || closed.iter().any(|folder| path.starts_with(*folder));
        (!named).then(|| "not in README.md's tree".into())
    });
}
