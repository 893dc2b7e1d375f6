//! Every run file in `configs/` loads, and every key of the schema reaches code.

use std::path::{Path, PathBuf};

use dflash_train::config_file;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

#[test]
fn every_run_file_in_the_repository_loads() {
    let mut loaded = 0;
    for entry in std::fs::read_dir(repository().join("configs")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            config_file::load(&path, &[]).unwrap_or_else(|error| panic!("{error:#}"));
            loaded += 1;
        }
    }
    assert!(loaded > 0);
}

/// A key that no file reads would be accepted and do nothing.
#[test]
fn every_key_of_the_schema_reaches_code() {
    let source = repository().join("train/src");
    let schema = std::fs::read_to_string(source.join("config.rs")).unwrap();
    let fields: Vec<&str> = schema
        .lines()
        .filter_map(|line| line.strip_prefix("    pub ")?.split_once(':'))
        .map(|(name, _)| name)
        .collect();
    assert!(fields.len() > 50, "{}", fields.len());
    let code = code(&source);
    let unread: Vec<&str> = fields
        .into_iter()
        .filter(|field| {
            let mut rest = code.as_str();
            loop {
                let Some(at) = rest.find(&format!(".{field}")) else {
                    return true;
                };
                rest = &rest[at + 1 + field.len()..];
                if !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_') {
                    return false;
                }
            }
        })
        .collect();
    assert!(unread.is_empty(), "no code reads {unread:?}");
}

/// The text of all files of a folder and the folders in it, but for those that define and fill the schema.
fn code(folder: &Path) -> String {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .filter(|path| {
            !["config.rs", "config_defaults.rs", "config_file.rs"]
                .iter()
                .any(|name| path.ends_with(name))
        })
        .map(|path| {
            if path.is_dir() {
                code(&path)
            } else {
                std::fs::read_to_string(path).unwrap() + "\n"
            }
        })
        .collect()
}
