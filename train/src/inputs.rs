//! Everything that a run file names, looked at before the first stage: a mistyped path must not be found out after
//! hours of training.

use std::path::Path;

use anyhow::{Result, bail, ensure};

use crate::evaluation;
use crate::materials::Materials;

/// Refuses a run file that names a file or folder which is not there or not of its kind.
///
/// # Errors
/// Naming the key, the path and what was expected.
pub fn check(materials: &Materials) -> Result<()> {
    let config = materials.config();
    let (data, evaluate) = (&config.data, &config.evaluate);
    for (key, path) in [
        ("data.prompts", &data.prompts),
        ("data.validation", &data.validation),
        ("evaluate.prompts", &evaluate.prompts),
    ] {
        if let Some(path) = path {
            file(key, path)?;
        }
    }
    if let Some(path) = &data.conversations {
        conversations(path, data.prompts.is_some(), config.generate.is_some())?;
    }
    folder_to_be("run_dir", &config.run_dir)?;
    if let Some(path) = &config.taps.dir {
        folder_to_be("taps.dir", path)?;
    }
    if let Some(path) = &evaluate.prompts {
        let prompts = evaluation::prompts(materials, path)?;
        ensure!(!prompts.is_empty(), "evaluate.prompts: {} is empty", path.display());
    }
    Ok(())
}

fn file(key: &str, path: &Path) -> Result<()> {
    ensure!(path.exists(), "{key}: {} does not exist", path.display());
    ensure!(!path.is_dir(), "{key}: {} is a folder, expected a file", path.display());
    Ok(())
}

/// A named file that is missing is made only when the run file speaks of making one.
fn conversations(path: &Path, has_prompts: bool, generates: bool) -> Result<()> {
    if path.exists() {
        return file("data.conversations", path);
    }
    let lacking = match (has_prompts, generates) {
        (true, true) => return folder_to_be("data.conversations", path.parent().unwrap_or(path)),
        (true, false) => "there is no section [generate]",
        (false, _) => "data.prompts names no prompts",
    };
    bail!(
        "data.conversations: {} does not exist, and {lacking} to make it",
        path.display()
    )
}

/// A folder that is there or can be made: the nearest existing part of the path is a folder.
fn folder_to_be(key: &str, path: &Path) -> Result<()> {
    let existing = path.ancestors().find(|place| place.exists());
    match existing {
        Some(place) if !place.is_dir() => bail!(
            "{key}: {} cannot be a folder, {} is a file",
            path.display(),
            place.display()
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_conversations_are_made_only_when_the_run_file_speaks_of_making_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("answers.jsonl");
        conversations(&path, true, true).unwrap();
        let error = conversations(&path, true, false).unwrap_err().to_string();
        assert!(
            error.contains("data.conversations") && error.contains("[generate]"),
            "{error}"
        );
        let error = conversations(&path, false, true).unwrap_err().to_string();
        assert!(error.contains("data.prompts"), "{error}");
        std::fs::write(&path, "").unwrap();
        conversations(&path, false, false).unwrap();
        assert!(conversations(folder.path(), true, true).is_err());
    }

    #[test]
    fn a_folder_below_a_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "").unwrap();
        folder_to_be("taps.dir", &folder.path().join("a/b")).unwrap();
        for bad in [path.clone(), path.join("a")] {
            let error = folder_to_be("taps.dir", &bad).unwrap_err().to_string();
            assert!(error.starts_with("taps.dir: "), "{error}");
        }
    }
}
