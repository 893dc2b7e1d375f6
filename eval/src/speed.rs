//! How fast the parts are: prompts, plain steps, proposals, and verification by number of rows.

use anyhow::{Result, ensure};
use dflash_model::drafter_config::default_target_layer_ids;
use dflash_model::{Drafting, LogitRows, Target, with_threads_awake};
use serde::{Deserialize, Serialize};

use crate::costs::{costs_after, repeated, room_for};
use crate::random::below;
use crate::report::{Setting, WidthCost};

/// Fewest repetitions of a prompt pass and of a capture, which take seconds where a target is large.
const PROMPTS: usize = 3;

/// Result of a timing run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpeedReport {
    /// Always `speed`.
    pub kind: String,
    /// Whether a drafter took part.
    pub drafter: bool,
    /// One entry a context length.
    pub contexts: Vec<ContextSpeed>,
    /// Most memory the process held, MB; null where the system does not tell.
    pub peak_memory_mb: Option<u64>,
    /// Circumstances.
    pub setting: Setting,
}

/// Timings after one length of context; every figure is the fastest of several repetitions, unless it is called median.
/// Medians are absent in reports of earlier versions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContextSpeed {
    /// Tokens of context.
    pub context: usize,
    /// Prompt tokens a second, taps included.
    pub prefill_tokens_per_s: f64,
    /// The same, by the median repetition.
    #[serde(default)]
    pub prefill_median_tokens_per_s: Option<f64>,
    /// Tokens a second of a capture, which ends at its last tap and makes no logits; absent for a target too shallow for
    /// default taps, and in reports of earlier versions.
    #[serde(default)]
    pub capture_tokens_per_s: Option<f64>,
    /// The same, by the median repetition.
    #[serde(default)]
    pub capture_median_tokens_per_s: Option<f64>,
    /// Seconds of a plain step.
    pub step_seconds: f64,
    /// Seconds of the median plain step.
    #[serde(default)]
    pub step_median_seconds: Option<f64>,
    /// Rounds by width, 0 first.
    pub costs: Vec<WidthCost>,
}

/// Refuses what [`speed`] could not measure, before it measures anything.
///
/// # Errors
/// On a context that leaves no room, and on more rows than the drafter's block.
pub fn check(target: &dyn Target, drafting: Option<&dyn Drafting>, contexts: &[usize], rows: usize) -> Result<()> {
    ensure!(rows >= 1, "0 rows: expected at least 1");
    if let Some(drafting) = drafting {
        let most = drafting.block_size();
        ensure!(rows <= most, "{rows} rows: the drafter's block has {most}");
    }
    let (room, needed) = (target.info().max_positions, room_for(&widths(rows)));
    for &context in contexts {
        ensure!(context >= 1, "context 0: expected at least 1 token");
        ensure!(
            context.saturating_add(needed) <= room,
            "context {context}: measuring needs {needed} positions after it, the target has {room}"
        );
    }
    Ok(())
}

/// Drafts of blocks of 1 to `rows` rows.
fn widths(rows: usize) -> Vec<usize> {
    (0..rows).collect()
}

/// Times `target`, and `drafting` if there is one, for blocks of up to `rows` rows after each of `contexts` tokens.
///
/// The tokens are random: speed does not depend on which they are.
///
/// # Errors
/// As [`check`], and on what target and drafter report.
pub fn speed(
    target: &dyn Target,
    drafting: Option<&dyn Drafting>,
    contexts: &[usize],
    rows: usize,
    setting: &Setting,
    progress: &mut dyn FnMut(usize),
) -> Result<SpeedReport> {
    check(target, drafting, contexts, rows)?;
    let (vocab, widths) = (target.info().vocab_size, widths(rows));
    let taps = drafting.map_or_else(Vec::new, |drafting| drafting.taps().to_vec());
    // without a drafter a capture takes what a new one would tap
    let captured = match drafting {
        Some(drafting) => Some(drafting.taps().to_vec()),
        None => default_taps(target.info().num_layers),
    };
    let mut measured = Vec::new();
    for (done, &context) in contexts.iter().enumerate() {
        let rate = |seconds: f64| context as f64 / seconds;
        let tokens: Vec<u32> = (0..context as u64).map(|i| below(1, i, vocab) as u32).collect();
        let costs = costs_after(target, drafting, &tokens, &widths)?;
        let prefill = repeated(PROMPTS, || {
            with_threads_awake(|| target.session(&taps)?.forward(&tokens, LogitRows::Last).map(drop))
        })?;
        let capture = match &captured {
            None => None,
            Some(taps) => Some(repeated(PROMPTS, || {
                with_threads_awake(|| target.taps(&tokens, taps).map(drop))
            })?),
        };
        measured.push(ContextSpeed {
            context,
            prefill_tokens_per_s: rate(prefill.fastest),
            prefill_median_tokens_per_s: Some(rate(prefill.median)),
            capture_tokens_per_s: capture.map(|seconds| rate(seconds.fastest)),
            capture_median_tokens_per_s: capture.map(|seconds| rate(seconds.median)),
            step_seconds: costs[0].verify,
            step_median_seconds: costs[0].verify_median,
            costs,
        });
        progress(done + 1);
    }
    Ok(SpeedReport {
        kind: "speed".into(),
        drafter: drafting.is_some(),
        contexts: measured,
        peak_memory_mb: peak_memory().map(|bytes| bytes >> 20),
        setting: setting.clone(),
    })
}

/// Taps of a new drafter of five layers, where a target is deep enough for five.
fn default_taps(num_layers: usize) -> Option<Vec<usize>> {
    let taps = default_target_layer_ids(num_layers, 5);
    let sound = taps.windows(2).all(|pair| pair[0] < pair[1]) && taps.last().is_some_and(|&last| last + 1 < num_layers);
    sound.then_some(taps)
}

/// Largest resident memory of this process so far, in bytes; Linux only.
pub fn peak_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
