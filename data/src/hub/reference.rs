//! `hf://org/name@revision/folder`: a model on the hub, written where a folder's path may stand.
//!
//! A revision is a branch, a tag or a commit, `main` when there is none; a slash in it is written `%2F`, except in
//! `refs/pr/N` and `refs/convert/NAME`. Whatever does not begin with `hf://` is a path.

use std::fmt;
use std::path::{Component, Path};

use anyhow::{Context, Result, ensure};

use super::intact::is_hex;

/// How a reference begins.
pub const SCHEME: &str = "hf://";

const FORM: &str = "expected hf://org/name, hf://org/name@revision or hf://org/name@revision/folder";

/// A model, or a folder or file in it, at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// `org/name`.
    pub repository: String,
    /// Branch, tag or commit, if one is named.
    pub revision: Option<String>,
    /// Folder or file in it.
    pub inner: Option<String>,
}

impl Reference {
    /// The reference that `path` is; none for a path of this machine.
    ///
    /// # Errors
    /// When it begins like a reference and is none.
    pub fn parse(path: &Path) -> Result<Option<Self>> {
        let Some(text) = path.to_str().filter(|text| text.starts_with(SCHEME)) else {
            return Ok(None);
        };
        let parsed = Self::of(&text[SCHEME.len()..]);
        parsed
            .map(Some)
            .with_context(|| format!("{}: {FORM}", text.escape_debug()))
    }

    fn of(text: &str) -> Result<Self> {
        let (owner, rest) = text.split_once('/').context("there is no name")?;
        ensure!(
            !matches!(owner, "datasets" | "spaces" | "buckets"),
            "{owner} are no models"
        );
        let (name, marked, rest) = match rest.find(['@', '/']) {
            None => (rest, false, ""),
            Some(end) => (&rest[..end], rest[end..].starts_with('@'), &rest[end + 1..]),
        };
        for part in [owner, name] {
            ensure!(is_name(part), "{part:?} is no name");
        }
        let (revision, inner) = if marked { split_revision(rest) } else { ("", rest) };
        ensure!(!marked || !revision.is_empty(), "the revision is empty");
        let revision = revision.replace("%2F", "/").replace("%2f", "/");
        if marked {
            check_revision(&revision)?;
        }
        let inner = inner.trim_end_matches('/');
        ensure!(
            !inner.contains(['*', '?', '[', ']', '{', '}', '\\'])
                && !inner.contains(char::is_control)
                && inner
                    .split('/')
                    .all(|part| inner.is_empty() || !matches!(part, "" | "." | "..")),
            "{inner:?} is no folder"
        );
        Ok(Self {
            repository: format!("{owner}/{name}"),
            revision: (!revision.is_empty()).then_some(revision),
            inner: (!inner.is_empty()).then(|| inner.to_owned()),
        })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.repository)?;
        if let Some(revision) = &self.revision {
            let plain = split_revision(revision) == (revision, "");
            let revision = if plain {
                revision.clone()
            } else {
                revision.replace('/', "%2F")
            };
            write!(f, "@{revision}")?;
        }
        self.inner.as_ref().map_or(Ok(()), |inner| write!(f, "/{inner}"))
    }
}

/// The name to put on record for a folder: `hf://org/name@commit` for one in the hub's cache, else its path.
pub fn on_record(path: &Path) -> String {
    match cached(path) {
        Some(reference) => reference.to_string(),
        None => path.display().to_string(),
    }
}

/// The target that a drafter's card names for a target folder, and its commit: the repository for one in the hub's cache,
/// else the path, without.
pub fn base_model(path: &Path) -> (String, Option<String>) {
    match cached(path) {
        Some(reference) if reference.inner.is_none() => (reference.repository, reference.revision),
        _ => (path.display().to_string(), None),
    }
}

/// What a path in the hub's cache, `models--org--name/snapshots/COMMIT/..`, is a copy of.
pub fn cached(path: &Path) -> Option<Reference> {
    let parts: Vec<&str> = path
        .components()
        .filter_map(|part| match part {
            Component::Normal(part) => part.to_str(),
            _ => None,
        })
        .collect();
    let place = parts.iter().rposition(|part| *part == "snapshots")?;
    let (owner, name) = parts
        .get(place.checked_sub(1)?)?
        .strip_prefix("models--")?
        .split_once("--")?;
    let commit = *parts.get(place + 1)?;
    let inner = parts[place + 2..].join("/");
    (is_name(owner) && is_name(name) && is_commit(commit)).then(|| Reference {
        repository: format!("{owner}/{name}"),
        revision: Some(commit.to_owned()),
        inner: (!inner.is_empty()).then_some(inner),
    })
}

/// Whether a text is `org/name` as the hub takes it.
pub fn is_repository(text: &str) -> bool {
    text.split_once('/')
        .is_some_and(|(owner, name)| is_name(owner) && is_name(name))
}

/// Whether a revision is a commit, which never moves.
pub fn is_commit(revision: &str) -> bool {
    is_hex(revision, 40)
}

/// Checks that a text may be the name of a branch or a tag, or a commit: git's rules (`git check-ref-format`).
///
/// # Errors
/// Naming it.
pub fn check_revision(revision: &str) -> Result<()> {
    let barred = |c: char| c.is_whitespace() || c.is_control() || "~^:?*[\\%".contains(c);
    let part = |part: &str| !part.is_empty() && !part.starts_with('.') && !has_end(part, "lock");
    ensure!(
        revision.len() <= 255
            && !revision.contains(barred)
            && !revision.contains("..")
            && !revision.contains("@{")
            && !revision.starts_with('-')
            && !revision.ends_with('.')
            && !matches!(revision, "@" | "HEAD")
            && revision.split('/').all(part),
        "{revision:?} is no revision, git has no such name"
    );
    Ok(())
}

/// The hub's rule for an owner or a name.
fn is_name(text: &str) -> bool {
    let inside = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let edge = |c: char| c == '-' || c == '.';
    !text.is_empty()
        && text.len() <= 96
        && text.chars().all(inside)
        && !text.starts_with(edge)
        && !text.ends_with(edge)
        && !text.contains("--")
        && !text.contains("..")
        && !has_end(text, "git")
        && !has_end(text, "ipynb")
}

/// Whether the last dot of a text is followed by `end`, as it stands.
fn has_end(text: &str, end: &str) -> bool {
    text.rsplit_once('.').is_some_and(|(_, found)| found == end)
}

/// The revision that `text` begins with, and what follows it.
fn split_revision(text: &str) -> (&str, &str) {
    let parts = match text.split('/').collect::<Vec<_>>()[..] {
        ["refs", "pr" | "convert", _, ..] => 3,
        _ => 1,
    };
    match text.match_indices('/').nth(parts - 1) {
        Some((end, _)) => (&text[..end], &text[end + 1..]),
        None => (text, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Option<(String, Option<String>, Option<String>)> {
        let reference = Reference::parse(Path::new(text)).unwrap()?;
        Some((reference.repository, reference.revision, reference.inner))
    }

    #[test]
    fn every_form_of_a_reference_is_read_and_written_as_it_was() {
        let some = |text: &str| Some(text.to_owned());
        for (text, revision, inner) in [
            ("hf://a/b", None, None),
            ("hf://a/b@main", some("main"), None),
            ("hf://a/b@v1.0/sub/file.gguf", some("v1.0"), some("sub/file.gguf")),
            ("hf://a/b/sub", None, some("sub")),
            ("hf://a/b@refs/pr/7/sub", some("refs/pr/7"), some("sub")),
            ("hf://a/b@feature%2Fx", some("feature/x"), None),
        ] {
            assert_eq!(parsed(text), Some(("a/b".to_owned(), revision, inner)), "{text}");
            let reference = Reference::parse(Path::new(text)).unwrap().unwrap();
            assert_eq!(reference.to_string(), text);
        }
        assert_eq!(parsed("hf://a/b/sub/"), parsed("hf://a/b/sub"));
    }

    #[test]
    fn a_path_is_no_reference_whatever_stands_in_it() {
        for path in [
            "./hf://a/b",
            "/runs/hf:/a",
            "hf:/a/b",
            "hf:",
            "runs/hf://x",
            "HF://a/b",
            "a/b",
        ] {
            assert_eq!(parsed(path), None, "{path}");
        }
    }

    #[test]
    fn what_begins_like_a_reference_and_is_none_is_refused_with_the_form() {
        for text in [
            "hf://",
            "hf://a",
            "hf://a/",
            "hf://a/b@",
            "hf://a/b@/sub",
            "hf://a/b@x y",
            "hf://a/b@..",
            "hf://a/b@x..y",
            "hf://a/b@x@{1",
            "hf://a/b@.x",
            "hf://a/b@x.lock",
            "hf://a/b@x.",
            "hf://a/b@-x",
            "hf://a/b@@",
            "hf://a/b@HEAD",
            "hf://a/b@x%2F%2Fy",
            "hf://a/b@%2Fx",
            "hf://a/b@x%2F",
            "hf://a/b@x%2F.y",
            "hf://a/b@x\u{7}",
            "hf://a/b.git",
            "hf://a/b.ipynb",
            "hf://a/b..c",
            "hf://a/b/x\u{1b}",
            "hf://a/b/../c",
            "hf://a/b/x//y",
            "hf://a/b/*.gguf",
            "hf://-a/b",
            "hf://a/b--c",
            "hf://datasets/a/b",
        ] {
            let error = format!("{:#}", Reference::parse(Path::new(text)).unwrap_err());
            assert!(
                error.contains("hf://") && error.contains("expected hf://org/name"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_folder_of_the_cache_is_on_record_as_what_it_is_a_copy_of() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let folder = format!("/cache/models--a--b/snapshots/{commit}");
        assert_eq!(on_record(Path::new(&folder)), format!("hf://a/b@{commit}"));
        assert_eq!(
            on_record(Path::new(&format!("{folder}/sub"))),
            format!("hf://a/b@{commit}/sub")
        );
        let again = Reference::parse(Path::new(&on_record(Path::new(&folder)))).unwrap();
        assert_eq!(again.unwrap().revision.as_deref(), Some(commit));
        assert_eq!(
            base_model(Path::new(&folder)),
            ("a/b".to_owned(), Some(commit.to_owned()))
        );
        assert_eq!(base_model(Path::new("/runs/target")), ("/runs/target".to_owned(), None));
        for path in [
            "runs/demo",
            "/cache/models--a--b/snapshots/main",
            "snapshots",
            "/cache/datasets--a--b/snapshots/0123456789abcdef0123456789abcdef01234567",
        ] {
            assert_eq!(on_record(Path::new(path)), path);
        }
    }
}
