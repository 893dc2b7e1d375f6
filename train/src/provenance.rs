//! What a run was: `config.resolved.toml`, `command.txt` and `provenance.json` in the run folder.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::config::RunConfig;
use crate::config_file;
use crate::durable::replace_file;

/// Facts about the program and the machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Provenance {
    /// Version of this program.
    pub version: &'static str,
    /// Version of the tensor library that it was tested with.
    pub candle: &'static str,
    /// Commit of the repository around the current directory; absent outside of one.
    pub git_commit: Option<String>,
    /// Operating system.
    pub os: &'static str,
    /// Processor architecture.
    pub arch: &'static str,
    /// Processor name, where the system tells it.
    pub processor: Option<String>,
    /// Cores that the process may use.
    pub cores: usize,
    /// Worker threads in use.
    pub threads: usize,
    /// Whether the program was built with optimisation.
    pub optimised: bool,
}

/// Collects the facts.
pub fn collect() -> Provenance {
    Provenance {
        version: env!("CARGO_PKG_VERSION"),
        candle: "0.11.1",
        git_commit: std::env::current_dir().ok().and_then(|folder| git_commit(&folder)),
        os: std::env::consts::OS,
        arch: std::env::consts::ARCH,
        processor: processor(),
        cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        threads: rayon::current_num_threads(),
        optimised: !cfg!(debug_assertions),
    }
}

/// Writes the three files.
pub fn write(run_dir: &Path, config: &RunConfig) -> Result<()> {
    fs::create_dir_all(run_dir).with_context(|| format!("making {}", run_dir.display()))?;
    replace_file(
        &run_dir.join("config.resolved.toml"),
        config_file::to_toml(config)?.as_bytes(),
    )?;
    replace_file(&run_dir.join("command.txt"), command_line().as_bytes())?;
    let facts = serde_json::to_string_pretty(&collect())? + "\n";
    replace_file(&run_dir.join("provenance.json"), facts.as_bytes())
}

/// The commit that HEAD names in the repository around `folder`, read from its files without running git.
pub fn git_commit(folder: &Path) -> Option<String> {
    let dot_git = folder
        .ancestors()
        .map(|parent| parent.join(".git"))
        .find(|path| path.exists())?;
    let git_dir = if dot_git.is_file() {
        // a worktree: `.git` is a file that names the real folder
        let text = fs::read_to_string(&dot_git).ok()?;
        dot_git.parent()?.join(text.strip_prefix("gitdir:")?.trim())
    } else {
        dot_git
    };
    let head = fs::read_to_string(git_dir.join("HEAD")).ok()?;
    let Some(reference) = head.trim().strip_prefix("ref: ") else {
        return Some(head.trim().to_owned());
    };
    let common = match fs::read_to_string(git_dir.join("commondir")) {
        Ok(text) => git_dir.join(text.trim()),
        Err(_) => git_dir.clone(),
    };
    loose_reference(&[git_dir, common.clone()], reference).or_else(|| packed_reference(&common, reference))
}

fn loose_reference(folders: &[PathBuf], reference: &str) -> Option<String> {
    let mut texts = folders
        .iter()
        .filter_map(|folder| fs::read_to_string(folder.join(reference)).ok());
    texts.next().map(|text| text.trim().to_owned())
}

fn packed_reference(folder: &Path, reference: &str) -> Option<String> {
    let packed = fs::read_to_string(folder.join("packed-refs")).ok()?;
    packed.lines().find_map(|line| {
        let (commit, name) = line.split_once(' ')?;
        (name == reference).then(|| commit.to_owned())
    })
}

/// The command as typed, arguments with spaces quoted.
fn command_line() -> String {
    let words: Vec<String> = std::env::args()
        .map(|word| {
            if word.is_empty() || word.contains(|c: char| c.is_whitespace() || "'\"$\\".contains(c)) {
                format!("'{}'", word.replace('\'', "'\\''"))
            } else {
                word
            }
        })
        .collect();
    words.join(" ") + "\n"
}

fn processor() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commit_is_read_from_loose_packed_and_detached_heads() {
        let folder = tempfile::tempdir().unwrap();
        let git = folder.path().join(".git");
        fs::create_dir_all(git.join("refs/heads")).unwrap();
        fs::write(git.join("HEAD"), "ref: refs/heads/main\n").unwrap();
        assert_eq!(git_commit(folder.path()), None);
        fs::write(git.join("packed-refs"), "# pack-refs\nabc refs/heads/main\n").unwrap();
        assert_eq!(git_commit(folder.path()).as_deref(), Some("abc"));
        fs::write(git.join("refs/heads/main"), "def\n").unwrap();
        let inner = folder.path().join("a/b");
        fs::create_dir_all(&inner).unwrap();
        assert_eq!(git_commit(&inner).as_deref(), Some("def"));
        fs::write(git.join("HEAD"), "0123\n").unwrap();
        assert_eq!(git_commit(folder.path()).as_deref(), Some("0123"));
    }
}
