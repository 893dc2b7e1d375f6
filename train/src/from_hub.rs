//! Folders that a run file names on the hub, `hf://org/name@revision`: fetched once, at the start, and used as folders of
//! this machine from then on. On record they are `hf://org/name@commit`, so the run can be repeated anywhere.

use std::path::{Path, PathBuf};

use anyhow::Result;
use dflash_data::hub::on_record;
use dflash_eval::folder::settle;
use serde::{Serialize as _, Serializer};

use crate::config::RunConfig;

/// Puts folders of the hub's cache in the place of references, fetched with progress unless `quiet`.
///
/// # Errors
/// Names the key; when the reference is none, or the hub or its cache do not have it.
pub fn fetch(config: &mut RunConfig, quiet: bool) -> Result<()> {
    settle("target.path", &mut config.target.path, quiet)?;
    let start = config.drafter.init_from.as_mut();
    start.map_or(Ok(()), |start| settle("drafter.init_from", start, quiet))
}

/// Writes a path as it goes on record.
pub(crate) fn path<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&on_record(path))
}

/// As [`path`], of one that may be absent.
// the derive passes a reference to the field
#[expect(clippy::ref_option, reason = "serde's signature")]
pub(crate) fn optional<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_deref().map(on_record).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config_file::{parse, to_toml};

    #[test]
    fn a_cached_folder_is_on_record_by_its_commit_and_a_path_as_it_is() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let text = "run_dir = \"runs/x\"\n[target]\npath = \"models/t\"\n";
        let mut config = parse(text, &[]).unwrap();
        let written = to_toml(&config).unwrap();
        assert!(
            written.contains("path = \"models/t\"") && !written.contains("init_from"),
            "{written}"
        );

        config.target.path = format!("/cache/models--org--target/snapshots/{commit}").into();
        config.drafter.init_from = Some(format!("/cache/models--org--drafter/snapshots/{commit}/sub").into());
        let written = to_toml(&config).unwrap();
        let again = parse(&written, &[]).unwrap();
        assert_eq!(again.target.path, PathBuf::from(format!("hf://org/target@{commit}")));
        let start = again.drafter.init_from.unwrap();
        assert_eq!(start, PathBuf::from(format!("hf://org/drafter@{commit}/sub")));
    }

    #[test]
    fn a_reference_that_is_none_is_refused_by_its_key() {
        for (key, text) in [
            ("target.path", "run_dir = \"x\"\n[target]\npath = \"hf://name\"\n"),
            (
                "drafter.init_from",
                "run_dir = \"x\"\n[target]\npath = \"t\"\n[drafter]\ninit_from = \"hf://org/name@\"\n",
            ),
        ] {
            let mut config = parse(text, &[]).unwrap();
            let error = format!("{:#}", fetch(&mut config, true).unwrap_err());
            assert!(
                error.starts_with(key) && error.contains("expected hf://org/name"),
                "{error}"
            );
        }
    }
}
