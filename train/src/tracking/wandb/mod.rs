//! A Weights & Biases offline run, which the user's own `wandb sync` uploads: nothing here goes to the network, and no
//! key is read.
//!
//! ```text
//! RUN_DIR/wandb/offline-run-YYYYMMDD_HHMMSS-ID/run-ID.wandb        all that is uploaded: log.rs, records.rs
//!                                              files/              the same for people: files.rs
//!                                              logs/               empty
//! ```
//!
//! **One run folder has one log, also after being resumed.** W&B itself begins a second offline folder of the same id;
//! `wandb sync` uploads that over the first one's lines, or, where the log asks for it and wandb is new, behind the
//! lines that the server has, steps moved. Neither can take back the steps that a kill made void. So the log is cut at
//! the step that the training goes on from, as `metrics.jsonl` is, and grows from there: one file, one id, every step
//! once. A mark `.synced` of an earlier upload is removed, so that the next one starts over from the first line.

mod files;
pub mod log;
pub mod records;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail};
use dflash_data::files::sha256_hex;
use serde_json::{Map, Value};

use self::files::Files;
use self::records::{Kind, RunFacts};
use super::appended::{Appended, make_folder};
use super::proto::Message;
use super::{Row, Tracker, clock};
use crate::config::RunConfig;
use crate::durable::{remove_file, replace_file, replace_folder, sweep};
use crate::{config_file, provenance};

/// Where a process takes a run up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// The training goes on after this step; 0 is the start.
    Step(u64),
    /// Nothing is trained any more.
    End,
}

/// The run's log, open at its end.
pub struct OfflineRun {
    id: String,
    log: Appended,
    /// Length of the log.
    position: usize,
    /// Records in the log.
    count: u64,
    /// Last step in the log.
    held: u64,
    /// Seconds of work of earlier processes.
    earlier: f64,
    opened: Instant,
    files: Files,
}

impl OfflineRun {
    /// Takes the run of `run_dir` up, or begins it.
    pub fn open(config: &RunConfig, from: From) -> Result<Self> {
        let wandb = config.run_dir.join("wandb");
        make_folder(&wandb)?;
        sweep(&wandb)?;
        let folder = match existing(&wandb)? {
            Some(folder) => folder,
            None => begin(&wandb)?,
        };
        let id = id_of(&folder)?.to_owned();
        let path = folder.join(format!("run-{id}.wandb"));
        let kept = Kept::read(&path, from).with_context(|| {
            format!(
                "{}: cannot go on with this log; move its folder away to begin another run",
                path.display()
            )
        })?;
        let facts = facts_of(config)?;
        let started = kept.started.unwrap_or_else(|| clock::since_epoch(SystemTime::now()));
        let (bytes, count) = write_again(config, &id, &facts, started, &kept);
        replace_file(&path, &bytes)?;
        remove_file(&folder.join(format!("run-{id}.wandb.synced")))?;
        let files = Files::write(&folder.join("files"), &facts.config, started, &kept)?;
        Ok(Self {
            log: Appended::open(&path)?,
            position: bytes.len(),
            count,
            held: kept.step,
            earlier: kept.runtime,
            opened: Instant::now(),
            files,
            id,
        })
    }

    fn runtime(&self) -> f64 {
        self.earlier + self.opened.elapsed().as_secs_f64()
    }

    /// Appends records in one call.
    fn append(&mut self, records: impl IntoIterator<Item = Message>) -> Result<()> {
        let mut bytes = Vec::new();
        for record in records {
            self.count += 1;
            let record = records::numbered(record, self.count, &self.id);
            log::append(&mut bytes, &mut self.position, &record);
        }
        self.log.write(&bytes)
    }
}

impl Tracker for OfflineRun {
    fn held(&self) -> u64 {
        self.held
    }

    fn row(&mut self, row: &Row) -> Result<()> {
        self.held = row.step;
        let (now, runtime) = (clock::since_epoch(SystemTime::now()), self.runtime());
        self.files.remember(row);
        self.append([records::history(row, now, runtime), records::latest(row, now, runtime)])
    }

    fn summary(&mut self, row: &Row) -> Result<()> {
        self.files.remember(row);
        self.append([records::summary(row.values.iter().cloned())])
    }

    fn say(&mut self, text: &str) -> Result<()> {
        let line = format!("{}\n", text.trim_end());
        self.files.say(&line)?;
        self.append([records::output(&line, clock::since_epoch(SystemTime::now()))])
    }

    fn finish(&mut self, exit_code: i32) -> Result<()> {
        let runtime = self.runtime();
        self.append([records::worked(runtime), records::exit(exit_code, runtime)])?;
        self.log.sync()?;
        self.files.finish()
    }
}

/// What stays of a log.
#[derive(Debug, Default)]
struct Kept {
    /// Records of steps, summaries and lines.
    records: Vec<Vec<u8>>,
    /// The run's start, since 1970.
    started: Option<Duration>,
    /// The last kept step; 0 without any.
    step: u64,
    /// Seconds of work up to it.
    runtime: f64,
    /// The latest summary, by name, as JSON.
    summary: BTreeMap<String, String>,
    /// Lines that were said.
    lines: Vec<String>,
}

impl Kept {
    /// All of the log up to its end or to the first step behind the one to go on from.
    fn read(path: &Path, from: From) -> Result<Self> {
        let bytes = fs::read(path).context("cannot read")?;
        let mut kept = Self::default();
        for record in log::records(&bytes)? {
            match records::kind(&record) {
                Kind::History { step, .. } if matches!(from, From::Step(after) if step > after) => break,
                Kind::History { step, runtime } => (kept.step, kept.runtime) = (step, runtime),
                Kind::Summary(values) => kept.summary.extend(values),
                Kind::Output(line) => kept.lines.push(line),
                Kind::Run(started) => {
                    kept.started = Some(started);
                    continue;
                }
                // header and environment are written anew; an end is none when the run goes on
                Kind::End | Kind::Other => continue,
            }
            kept.records.push(record);
        }
        if from == From::Step(0) {
            // what earlier attempts said belongs to steps that are gone
            kept = Self {
                started: kept.started,
                ..Self::default()
            };
        }
        Ok(kept)
    }
}

/// What the run file and the machine say, as W&B is told.
struct Facts {
    config: Map<String, Value>,
    provenance: provenance::Provenance,
}

fn facts_of(config: &RunConfig) -> Result<Facts> {
    let table: toml::Table = toml::from_str(&config_file::to_toml(config)?)?;
    let Value::Object(config) = serde_json::to_value(table)? else {
        bail!("the run file: expected a table")
    };
    Ok(Facts {
        config,
        provenance: provenance::collect(),
    })
}

/// The log's bytes with the present head, run and environment and the records that are kept; and their count.
fn write_again(config: &RunConfig, id: &str, facts: &Facts, started: Duration, kept: &Kept) -> (Vec<u8>, u64) {
    let names = config.wandb();
    let commit = facts.provenance.git_commit.as_deref();
    let run = records::run(&RunFacts {
        id,
        project: &names.project,
        entity: names.entity.as_deref(),
        name: names.name.as_deref().unwrap_or(id),
        tags: &names.tags,
        config: &facts.config,
        commit,
        started,
    });
    let os = format!("{}-{}", facts.provenance.os, facts.provenance.arch);
    let environment = records::environment(&os, started, facts.provenance.cores as u64, commit);
    let (mut bytes, mut position, mut count) = (log::HEAD.to_vec(), log::HEAD.len(), 0);
    for record in [records::header(), run, environment] {
        count += 1;
        log::append(&mut bytes, &mut position, &records::numbered(record, count, id));
    }
    for record in &kept.records {
        count += 1;
        log::append(&mut bytes, &mut position, record);
    }
    (bytes, count)
}

/// The run's folder, if there is one.
fn existing(wandb: &Path) -> Result<Option<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(wandb).with_context(|| wandb.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("offline-run-") {
            found.push(path);
        }
    }
    found.sort();
    if let [first, second, ..] = found.as_slice() {
        bail!(
            "{}: expected one run, got {} and {}; move one away",
            wandb.display(),
            first.display(),
            second.display()
        );
    }
    Ok(found.pop())
}

/// Makes the folder of a run with an empty log.
fn begin(wandb: &Path) -> Result<PathBuf> {
    let now = clock::since_epoch(SystemTime::now());
    let id = new_id(wandb, now);
    let folder = wandb.join(format!("offline-run-{}-{id}", clock::stamp(now)));
    replace_folder(&folder, &|partial| {
        for name in ["files", "logs"] {
            fs::create_dir(partial.join(name)).with_context(|| format!("making {name} in {}", partial.display()))?;
        }
        let path = partial.join(format!("run-{id}.wandb"));
        fs::write(&path, log::HEAD).with_context(|| format!("writing {}", path.display()))
    })?;
    Ok(folder)
}

/// Eight letters and digits that no other run is likely to have.
fn new_id(wandb: &Path, now: Duration) -> String {
    let seed = format!("{} {} {}", wandb.display(), now.as_nanos(), std::process::id());
    let hash = sha256_hex(seed.as_bytes());
    let mut number = u64::from_str_radix(&hash[..16], 16).unwrap_or_default();
    (0..8)
        .map(|_| {
            let digit = char::from_digit((number % 36) as u32, 36).unwrap_or('0');
            number /= 36;
            digit
        })
        .collect()
}

fn id_of(folder: &Path) -> Result<&str> {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let id = name.strip_prefix("offline-run-").and_then(|rest| rest.split_once('-'));
    let id = id.map(|(_, id)| id).filter(|id| !id.is_empty());
    id.with_context(|| format!("{}: expected offline-run-YYYYMMDD_HHMMSS-ID", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(run_dir: &Path) -> RunConfig {
        let text = format!(
            "run_dir = '{}'\n[target]\npath = 't'\n[data]\nprompts = 'p'\n",
            run_dir.display()
        );
        config_file::parse(&text, &[]).unwrap()
    }

    #[test]
    fn a_second_run_in_one_folder_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(folder.path());
        drop(OfflineRun::open(&config, From::Step(0)).unwrap());
        let other = folder.path().join("wandb/offline-run-20200101_000000-other");
        fs::create_dir(&other).unwrap();
        let error = OfflineRun::open(&config, From::Step(0)).err().unwrap().to_string();
        assert!(
            error.contains("expected one run") && error.contains("-other"),
            "{error}"
        );
    }

    #[test]
    fn a_damaged_log_is_refused_by_name_and_left_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(folder.path());
        let run = OfflineRun::open(&config, From::Step(0)).unwrap();
        let path = run.log.path().to_owned();
        let mut bytes = fs::read(&path).unwrap();
        bytes[20] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let error = format!("{:#}", OfflineRun::open(&config, From::Step(0)).err().unwrap());
        let named = error.starts_with(&path.display().to_string());
        assert!(named && error.contains("byte 7: expected checksum"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), bytes);
    }

    #[test]
    fn a_failed_write_ends_the_step_with_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = OfflineRun::open(&config(folder.path()), From::Step(0)).unwrap();
        run.log = Appended::that_fails(folder.path());
        let error = format!("{:#}", run.row(&Row::default()).unwrap_err());
        assert!(error.contains("read-only: cannot append"), "{error}");
    }
}
