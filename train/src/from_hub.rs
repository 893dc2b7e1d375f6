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

    fn config(settings: &[&str]) -> RunConfig {
        let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
        parse(include_str!("../../configs/demo.toml"), &settings).unwrap()
    }

    #[test]
    fn a_cached_folder_is_on_record_by_its_commit_and_a_path_as_it_is() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let written = to_toml(&config(&["target.path=models/t"])).unwrap();
        assert!(
            written.contains("path = \"models/t\"") && !written.contains("init_from"),
            "{written}"
        );
        let cached = config(&[
            &format!("target.path=/cache/models--org--target/snapshots/{commit}"),
            &format!("drafter.init_from=/cache/models--org--drafter/snapshots/{commit}/sub"),
        ]);
        let again = parse(&to_toml(&cached).unwrap(), &[]).unwrap();
        assert_eq!(again.target.path, PathBuf::from(format!("hf://org/target@{commit}")));
        let start = again.drafter.init_from.unwrap();
        assert_eq!(start, PathBuf::from(format!("hf://org/drafter@{commit}/sub")));
    }

    #[test]
    fn a_reference_that_is_none_is_refused_by_its_key() {
        for (key, setting) in [
            ("target.path", "target.path=hf://name"),
            ("drafter.init_from", "drafter.init_from=hf://org/name@"),
        ] {
            let error = format!("{:#}", fetch(&mut config(&[setting]), true).unwrap_err());
            assert!(
                error.starts_with(key) && error.contains("expected hf://org/name"),
                "{error}"
            );
        }
    }
}
