//! Whether the result of a stage is there, whole and of this run. A file of the right name is not enough: it may be
//! cut off, copied from another run, or older than the weights that it speaks of.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_core::Device;
use dflash_eval::Report;
use dflash_eval::report::Setting;
use dflash_model::folder::{read_config, read_tensors};
use serde_json::Value;

use crate::checkpoint;
use crate::evaluation;
use crate::materials::Materials;
use crate::source::Source;

/// How the result of a stage stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// Whole and of this run.
    Done,
    /// Not there, or not as far as it has to come.
    Missing,
    /// There, but not to be believed: why.
    Stale(String),
}

/// Whether the newest checkpoint is that of the last step and `final` holds the weights to be published.
///
/// # Errors
/// When the newest checkpoint cannot be read or is one of another run.
pub fn training(materials: &Materials, source: &Source) -> Result<Standing> {
    let config = materials.config();
    let Some(folder) = checkpoint::latest(&config.run_dir)? else {
        return Ok(Standing::Missing);
    };
    let progress = checkpoint::read_progress(&folder)?;
    progress
        .check_same_run(
            &checkpoint::contract(config, materials.start.as_ref())?,
            &source.identity,
        )
        .with_context(|| folder.display().to_string())?;
    if progress.step != source.order.total_steps() {
        return Ok(Standing::Missing);
    }
    let published = config.run_dir.join("final");
    if !published.exists() {
        return Ok(Standing::Missing);
    }
    let chosen = checkpoint::chosen(config, &progress, folder);
    Ok(match published_from(&published, &chosen) {
        Ok(true) => Standing::Done,
        Ok(false) => Standing::Stale(format!(
            "{} does not hold the weights of {}",
            published.display(),
            chosen.display()
        )),
        Err(error) => Standing::Stale(format!("{error:#}")),
    })
}

/// Whether `published` is a whole drafter and, where the checkpoint is still there, the one of it.
fn published_from(published: &Path, chosen: &Path) -> Result<bool> {
    whole_drafter(published)?;
    for name in ["config.json", "model.safetensors"] {
        let (ours, theirs) = (published.join(name), chosen.join(name));
        if chosen.exists() && !same_bytes(&ours, &theirs)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Refuses a folder that is not a drafter from which every weight can be read.
pub fn whole_drafter(folder: &Path) -> Result<()> {
    let config = read_config(folder)?;
    read_tensors(folder, &config, &Device::Cpu)?;
    Ok(())
}

fn same_bytes(a: &Path, b: &Path) -> Result<bool> {
    let open = |path: &Path| -> Result<BufReader<File>> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        Ok(BufReader::with_capacity(1 << 20, file))
    };
    let (mut left, mut right) = (open(a)?, open(b)?);
    let (mut ours, mut theirs) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    loop {
        let count = fill(&mut left, &mut ours).with_context(|| a.display().to_string())?;
        let other = fill(&mut right, &mut theirs).with_context(|| b.display().to_string())?;
        if ours[..count] != theirs[..other] {
            return Ok(false);
        }
        if count == 0 {
            return Ok(true);
        }
    }
}

/// Reads until the buffer is full or the file ends.
fn fill(from: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..])? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(filled)
}

/// Whether `evaluation.json` measures `final` as it is, under the settings of this run file.
///
/// # Errors
/// When `final` or the prompts cannot be read.
pub fn evaluation(materials: &Materials, prompts: &Path) -> Result<Standing> {
    let path = evaluation_path(materials);
    if !path.exists() {
        return Ok(Standing::Missing);
    }
    let report = std::fs::read(&path)
        .map_err(anyhow::Error::from)
        .and_then(|bytes| Ok(serde_json::from_slice::<Report>(&bytes)?));
    let report = match report {
        Ok(report) => report,
        Err(error) => {
            return Ok(Standing::Stale(format!(
                "{}: not a whole report: {error}",
                path.display()
            )));
        }
    };
    let expected = evaluation::setting(materials, prompts)?;
    let count = evaluation::prompts(materials, prompts)?.len();
    Ok(match difference(&report.setting, &expected)? {
        Some(difference) => Standing::Stale(format!("{}: {difference}", path.display())),
        None if report.prompts != count => Standing::Stale(format!(
            "{}: {} prompts were measured, the run file asks for {count}",
            path.display(),
            report.prompts
        )),
        None => Standing::Done,
    })
}

/// Place of the report of a run.
pub fn evaluation_path(materials: &Materials) -> PathBuf {
    materials.config().run_dir.join("evaluation.json")
}

/// The first circumstance in which a report differs from what this run would measure.
fn difference(found: &Setting, wanted: &Setting) -> Result<Option<String>> {
    // times depend on these two, acceptance does not
    let found = Setting {
        threads: wanted.threads,
        version: wanted.version.clone(),
        ..found.clone()
    };
    let (found, wanted) = (serde_json::to_value(found)?, serde_json::to_value(wanted)?);
    let (Value::Object(found), Value::Object(wanted)) = (found, wanted) else {
        return Ok(None);
    };
    let differs = wanted.iter().find(|(key, value)| found.get(*key) != Some(*value));
    Ok(differs.map(|(key, value)| {
        let was = found.get(key).unwrap_or(&Value::Null);
        format!("{key} was {was} and is {value} now")
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_the_same_only_byte_for_byte() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
        let long = vec![7_u8; (1 << 20) + 3];
        std::fs::write(&a, &long).unwrap();
        for (content, same) in [(long.clone(), true), (long[1..].to_vec(), false), (vec![], false)] {
            std::fs::write(&b, content).unwrap();
            assert_eq!(same_bytes(&a, &b).unwrap(), same);
        }
        assert!(same_bytes(&a, &folder.path().join("c")).is_err());
    }

    #[test]
    fn a_report_of_other_weights_or_settings_is_told_apart_but_not_one_of_other_threads() {
        let wanted = Setting {
            drafter_hash: "ab".to_owned(),
            max_new: 96,
            threads: 2,
            ..Setting::default()
        };
        let mut found = Setting {
            threads: 8,
            ..wanted.clone()
        };
        assert_eq!(difference(&found, &wanted).unwrap(), None);
        found.max_new = 64;
        let text = difference(&found, &wanted).unwrap().unwrap();
        assert_eq!(text, "max_new was 64 and is 96 now");
        found = Setting {
            drafter_hash: "cd".to_owned(),
            ..wanted.clone()
        };
        assert!(difference(&found, &wanted).unwrap().unwrap().contains("drafter_hash"));
    }
}
