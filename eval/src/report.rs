//! What a run measured, as JSON. Every number's definition travels with it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::acceptance::Counts;
use crate::speculate::{Finish, TimeSplit};

/// How the numbers of a report are defined; written into every report.
pub const DEFINITIONS: &[(&str, &str)] = &[
    (
        "round",
        "one draft and its verification; K_r tokens drafted, a_r leading ones accepted, a_r + 1 emitted",
    ),
    (
        "acceptance_length",
        "1 + sum a_r / rounds, over all counted rounds (micro); includes the correction or bonus token",
    ),
    (
        "acceptance_length_macro",
        "mean over prompts of each prompt's acceptance length",
    ),
    (
        "acceptance_length_ci95",
        "95 % percentile bootstrap over prompts of acceptance_length, seeded",
    ),
    (
        "draft_acceptance_rate",
        "sum a_r / sum K_r; depends on K, not comparable across block sizes",
    ),
    (
        "accept_at_pos",
        "share of counted rounds with a_r >= i, i = 1..K (joint); sums to mean_accepted_drafts",
    ),
    (
        "accept_cond",
        "share with a_r >= i of the counted rounds with a_r >= i - 1",
    ),
    ("histogram", "counted rounds by a_r, 0..K"),
    (
        "truncated",
        "rounds narrowed by the budget or cut by a stop token; counted apart unless include_truncated",
    ),
    (
        "tokens_per_verify_e2e",
        "tokens emitted after the prefill's / all rounds, truncated ones included",
    ),
    (
        "tokens_per_s",
        "tokens after the prefill's / seconds after the prefill; the drafter's context injection is prefill",
    ),
    (
        "speedup",
        "spec_tokens_per_s / plain_tokens_per_s: the ratio of decoding seconds when the texts are identical",
    ),
    ("speedup_with_prefill", "the same with the prefill's token and seconds"),
    (
        "identical",
        "whether every prompt's speculative text equals its plain text, token for token",
    ),
];

/// Under which circumstances a report was made.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Setting {
    /// Target folder.
    pub target: String,
    /// Drafter folder.
    pub drafter: String,
    /// Whether the drafter's selector was left out on purpose.
    pub without_selector: bool,
    /// Hash of the target's config and weights, hexadecimal.
    pub target_hash: String,
    /// Hash of the drafter's config and weights, hexadecimal.
    pub drafter_hash: String,
    /// Compute type of the target, `f32` or `bf16`.
    pub dtype: String,
    /// `cpu`, `metal` or `cuda`.
    pub device: String,
    /// CPU threads.
    pub threads: usize,
    /// Slots of a block as trained, anchor included.
    pub block_size: usize,
    /// Slots of a block as used here.
    pub block_size_used: usize,
    /// The drafter's mask token.
    pub mask_token_id: u32,
    /// Target layers that the drafter reads.
    pub taps: Vec<usize>,
    /// File of the prompts.
    pub prompts_file: String,
    /// SHA-256 of that file, hexadecimal.
    pub prompts_sha256: String,
    /// `on`, `off` or `template default`.
    pub thinking: String,
    /// SHA-256 of the chat template, hexadecimal.
    pub template_sha256: String,
    /// The last characters of the first rendered prompt: shows what the template did about thinking.
    pub prompt_tail: String,
    /// Most new tokens a prompt.
    pub max_new: usize,
    /// Tokens that end a text.
    pub stop_ids: Vec<u32>,
    /// How tokens were chosen.
    pub sampling: String,
    /// Version of this program.
    pub version: String,
}

/// Result of an acceptance run. Numbers over no round at all are null.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Always `acceptance`.
    pub kind: String,
    /// `generation` or `replay`.
    pub mode: String,
    /// 1 + mean accepted drafts, micro.
    pub acceptance_length: Option<f64>,
    /// Mean over prompts of each one's acceptance length.
    pub acceptance_length_macro: Option<f64>,
    /// 95 % bootstrap interval over prompts of the micro value.
    pub acceptance_length_ci95: Option<[f64; 2]>,
    /// Sum of a_r / rounds.
    pub mean_accepted_drafts: Option<f64>,
    /// Sum of a_r / sum of K_r.
    pub draft_acceptance_rate: Option<f64>,
    /// Counted rounds.
    pub rounds: u64,
    /// Tokens drafted in them.
    pub drafted: u64,
    /// Drafts accepted in them.
    pub accepted: u64,
    /// Counted rounds by accepted drafts, 0..=K.
    pub histogram: Vec<u64>,
    /// Joint acceptance by position, 1..=K.
    pub accept_at_pos: Vec<Option<f64>>,
    /// Conditional acceptance by position, 1..=K.
    pub accept_cond: Vec<Option<f64>>,
    /// Whether truncated rounds are among the counted.
    pub include_truncated: bool,
    /// Rounds narrowed or cut.
    pub truncated_rounds: u64,
    /// Their counts.
    pub truncated: Counts,
    /// Tokens emitted after the prefill's / all rounds.
    pub tokens_per_verify_e2e: Option<f64>,
    /// Plain decoding, tokens/s without prefill.
    pub plain_tokens_per_s: Option<f64>,
    /// Speculative decoding, tokens/s without prefill.
    pub spec_tokens_per_s: Option<f64>,
    /// Their ratio.
    pub speedup: Option<f64>,
    /// The ratio with prefill.
    pub speedup_with_prefill: Option<f64>,
    /// Seconds of all speculative decoding by part.
    pub spec_seconds: Seconds,
    /// Seconds of all plain decoding.
    pub plain_seconds: Seconds,
    /// Whether all texts are identical.
    pub identical: bool,
    /// Prompts, 0-based, whose texts differ, with the index of the first differing token.
    pub differing: Vec<(usize, usize)>,
    /// Prompts measured.
    pub prompts: usize,
    /// Prompts whose text repeats itself so much that its acceptance says little.
    pub degenerate_prompts: usize,
    /// Seed of the bootstrap.
    pub seed: u64,
    /// Circumstances.
    pub setting: Setting,
    /// Meaning of the numbers above.
    pub definitions: BTreeMap<String, String>,
    /// Every prompt's own result.
    pub per_prompt: Vec<PromptResult>,
}

/// One prompt's result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PromptResult {
    /// 0-based index in the prompt file.
    pub prompt: usize,
    /// Tokens of the rendered prompt.
    pub prompt_tokens: usize,
    /// Tokens generated, a stop token included.
    pub new_tokens: usize,
    /// Why the text ended.
    pub finish: Finish,
    /// Acceptance length over the counted rounds.
    pub acceptance_length: Option<f64>,
    /// Accepted drafts of every round, truncated ones included.
    pub accepted: Vec<usize>,
    /// Rounds of these that are truncated, by index.
    pub truncated: Vec<usize>,
    /// Seconds of speculative decoding without prefill.
    pub spec_seconds: f64,
    /// Seconds of plain decoding without prefill.
    pub plain_seconds: f64,
    /// Whether both texts are identical.
    pub identical: bool,
    /// Longest run of one repeated token.
    pub longest_run: usize,
    /// Distinct tokens / tokens.
    pub distinct_ratio: f64,
}

/// Wall-clock seconds by part.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Seconds {
    /// Prompts.
    pub prefill: f64,
    /// Everything after them; the parts below sum to it.
    pub decode: f64,
    /// Drafter.
    pub draft: f64,
    /// Target passes.
    pub verify: f64,
    /// Cache updates.
    pub commit: f64,
    /// The rest.
    pub other: f64,
}

impl Seconds {
    /// Adds one generation's time.
    pub fn add(&mut self, time: &TimeSplit) {
        let [prefill, decode, draft, verify, commit] =
            [time.prefill, time.decode, time.draft, time.verify, time.commit].map(|part| part.as_secs_f64());
        self.prefill += prefill;
        self.decode += decode;
        self.draft += draft;
        self.verify += verify;
        self.commit += commit;
        self.other += (decode - draft - verify - commit).max(0.);
    }
}

/// The definitions as a map, for a report.
pub fn definitions() -> BTreeMap<String, String> {
    DEFINITIONS
        .iter()
        .map(|&(name, text)| (name.into(), text.into()))
        .collect()
}

/// Refuses a path that a report could not be written to, before hours of work; creates its parent folder.
///
/// # Errors
/// When the path is a folder or its parent cannot be created.
pub fn prepare_json_path(path: &Path) -> Result<()> {
    ensure!(
        !path.is_dir(),
        "--json {}: is a folder, expected a file",
        path.display()
    );
    refuse_special(path).with_context(|| format!("--json {}", path.display()))?;
    let parent = parent_of(path);
    fs::create_dir_all(parent).with_context(|| format!("--json {}: create {}", path.display(), parent.display()))
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

/// Writes `report` to `path`: all of it or nothing (beside, synced, renamed).
///
/// # Errors
/// When the folder is not writable.
pub fn write_json<T: Serialize>(path: &Path, report: &T) -> Result<()> {
    refuse_special(path).with_context(|| path.display().to_string())?;
    let mut text = serde_json::to_vec_pretty(report)?;
    text.push(b'\n');
    let name = path
        .file_name()
        .with_context(|| format!("{}: no file name", path.display()))?;
    let beside = path.with_file_name(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id()));
    let write = || -> std::io::Result<()> {
        let mut file = File::create(&beside)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&beside, path)
    };
    write().map_err(|error| {
        let _ = fs::remove_file(&beside);
        anyhow::Error::new(error).context(format!("write {}", path.display()))
    })
}

/// Longest run of one token, and distinct tokens / tokens (1 for an empty text).
pub fn repetition(tokens: &[u32]) -> (usize, f64) {
    let longest = tokens.chunk_by(|a, b| a == b).map(<[u32]>::len).max().unwrap_or(0);
    let distinct = tokens.iter().collect::<std::collections::HashSet<_>>().len();
    let ratio = if tokens.is_empty() {
        1.
    } else {
        distinct as f64 / tokens.len() as f64
    };
    (longest, ratio)
}

/// Whether a text of `length` tokens is mostly repetition: a run of 16, or one distinct token in ten from 64 on.
pub fn is_degenerate(length: usize, longest_run: usize, distinct_ratio: f64) -> bool {
    longest_run >= 16 || (length >= 64 && distinct_ratio < 0.1)
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
    fn a_text_of_one_token_is_degenerate_and_prose_is_not() {
        let (run, ratio) = repetition(&[7; 488]);
        assert_eq!(run, 488);
        assert!(is_degenerate(488, run, ratio));
        let loops: Vec<u32> = (0..200).map(|i| i % 5).collect();
        let (run, ratio) = repetition(&loops);
        assert_eq!(run, 1);
        assert!(is_degenerate(200, run, ratio));
        let prose: Vec<u32> = (0..200).map(|i| i * i % 97).collect();
        let (run, ratio) = repetition(&prose);
        assert!(!is_degenerate(200, run, ratio), "{run} {ratio}");
    }

    #[test]
    fn a_report_is_written_whole_and_replaces_an_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er/out.json");
        prepare_json_path(&path).unwrap();
        write_json(&path, &vec![1, 2, 3]).unwrap();
        write_json(&path, &vec![4]).unwrap();
        let read: Vec<u32> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(read, [4]);
        let left = fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "the file beside it must be gone");
        assert!(prepare_json_path(folder.path()).is_err());
        #[cfg(unix)]
        {
            let socket = folder.path().join("socket");
            let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
            let link = folder.path().join("link.json");
            std::os::unix::fs::symlink(&path, &link).unwrap();
            for special in [&socket, &link] {
                assert!(prepare_json_path(special).is_err() && write_json(special, &1).is_err());
                assert!(
                    !fs::symlink_metadata(special).unwrap().is_file(),
                    "it must stay what it was"
                );
            }
        }
        assert!(prepare_json_path(&path.join("under-a-file.json")).is_err());
    }
}
