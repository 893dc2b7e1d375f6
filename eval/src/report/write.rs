//! Reports on disk: whole or not at all, and never in the place of a device or a link.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use dflash_data::files::write_whole;
use serde::Serialize;

/// How what these programs write for an option begins: a CSV's header, a page, reports and walks as JSON. A file that
/// begins otherwise is somebody's, perhaps an input named by mistake.
fn openings(option: &str) -> &'static [&'static str] {
    match option {
        "--csv" => &["prompt,id,domain,"],
        "--html" => &["<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>"],
        _ => &["{\n  \"kind\": ", "{\n  \"contexts\": ", "{\n  \"folder\": "],
    }
}

/// Refuses a path that a report could not be written to, before hours of work: `option` names it in the message.
///
/// # Errors
/// When the path is a folder, a special file or a file that is no earlier result, or its own folder does not exist or
/// cannot be written to.
pub fn prepare_output(option: &str, path: &Path) -> Result<()> {
    let named = || format!("{option} {}", path.display());
    ensure!(!path.is_dir(), "{}: is a folder, expected a file", named());
    refuse_special(path).with_context(named)?;
    refuse_foreign(option, path).with_context(named)?;
    let parent = parent_of(path);
    ensure!(
        parent.is_dir(),
        "{}: there is no folder {}; make it first",
        named(),
        parent.display()
    );
    // the only sure sign that a file can be written is a file that was
    let probe = parent.join(format!(".dflash-{}.probe", std::process::id()));
    File::create(&probe).with_context(|| format!("{}: cannot write to {}", named(), parent.display()))?;
    fs::remove_file(&probe).with_context(named)
}

/// A report is renamed into place, which would replace a device, a pipe or a link itself instead of writing to it.
fn refuse_special(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.is_file() => {
            bail!("expected a regular file or a new name, found a device, pipe, link or folder")
        }
        _ => Ok(()),
    }
}

/// Refuses to replace a file that is neither empty nor an earlier result of `option`.
fn refuse_foreign(option: &str, path: &Path) -> Result<()> {
    let mut start = String::new();
    if let Ok(file) = File::open(path) {
        let mut bytes = Vec::new();
        file.take(64).read_to_end(&mut bytes)?;
        start = String::from_utf8_lossy(&bytes).into_owned();
    }
    ensure!(
        start.is_empty() || openings(option).iter().any(|opening| start.starts_with(opening)),
        "the file exists and is no earlier report; name a new file, or remove this one first"
    );
    Ok(())
}

/// Writes `report` to `path` as JSON: all of it or nothing.
///
/// # Errors
/// As [`write_text`].
pub fn write_json<T: Serialize>(path: &Path, report: &T) -> Result<()> {
    let mut text = serde_json::to_string_pretty(report)?;
    text.push('\n');
    write_text(path, &text)
}

/// Writes `text` to `path`: all of it or nothing (beside, synced, renamed).
///
/// # Errors
/// When `path` is no regular file or its folder is not writable.
pub fn write_text(path: &Path, text: &str) -> Result<()> {
    refuse_special(path).with_context(|| path.display().to_string())?;
    write_whole(path, text.as_bytes()).with_context(|| format!("write {}", path.display()))
}

fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_written_whole_and_replaces_an_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.json");
        prepare_output("--json", &path).unwrap();
        write_json(&path, &vec![1, 2, 3]).unwrap();
        write_json(&path, &vec![4]).unwrap();
        let foreign = prepare_output("--json", &path).unwrap_err();
        assert!(format!("{foreign:#}").contains("no earlier report"), "{foreign:#}");
        let read: Vec<u32> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(read, [4]);
        let left = fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "the file beside it must be gone");
        assert!(prepare_output("--json", folder.path()).is_err());
        #[cfg(unix)]
        {
            let socket = folder.path().join("socket");
            let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
            let link = folder.path().join("link.json");
            std::os::unix::fs::symlink(&path, &link).unwrap();
            for special in [&socket, &link] {
                assert!(prepare_output("--json", special).is_err() && write_json(special, &1).is_err());
                assert!(
                    !fs::symlink_metadata(special).unwrap().is_file(),
                    "it must stay what it was"
                );
            }
        }
        let missing = prepare_output("--json", &folder.path().join("deep/out.json"))
            .unwrap_err()
            .to_string();
        assert!(missing.contains("--json") && missing.contains("no folder"), "{missing}");
        assert!(prepare_output("--json", &path.join("under-a-file.json")).is_err());
    }
}
