//! Acceptance and speed over a grid of block sizes and context lengths.
//!
//! Longer contexts are made by putting other prompts' tokens before a prompt: text of the right kind, though no
//! conversation. With a script in place of the drafter's tokens each draft is right with a given chance, which shows the
//! speed that such acceptance would give on this machine, without a trained drafter.

use anyhow::{Context, Result, ensure};
use dflash_model::{Drafting, Target};
use serde::{Deserialize, Serialize};

use crate::acceptance::Tally;
use crate::evaluate::{Options, Progress, decode_plainly, decode_speculatively};
use crate::prompts::Prompts;
use crate::report::{Seconds, Setting};
use crate::scripted::{Script, Scripted, Shadow};

/// What drafts.
#[derive(Clone, Copy)]
pub enum Drafter<'d> {
    /// A drafter.
    Real(&'d dyn Drafting),
    /// A script of some chance per draft; with a drafter, its time is taken as well.
    Scripted {
        /// Chance that a draft is right, given the ones before.
        chance: f64,
        /// Whose proposals are timed and thrown away.
        shadow: Option<&'d dyn Drafting>,
    },
}

/// The grid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grid {
    /// Slots of a block, anchor included, each >= 2.
    pub blocks: Vec<usize>,
    /// Tokens of context; 0 leaves the prompts as they are.
    pub contexts: Vec<usize>,
}

/// Result of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SweepReport {
    /// Always `sweep`.
    pub kind: String,
    /// Chance per draft of a script; null when the drafter's own tokens were used.
    pub scripted: Option<f64>,
    /// One cell a block size and context length.
    pub cells: Vec<Cell>,
    /// Circumstances.
    pub setting: Setting,
}

/// One block size at one context length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Slots, anchor included.
    pub block: usize,
    /// Tokens of context asked for; 0: the prompts as they are.
    pub context: usize,
    /// Prompts decoded.
    pub prompts: usize,
    /// Counted rounds.
    pub rounds: u64,
    /// 1 + accepted / rounds.
    pub acceptance_length: Option<f64>,
    /// Plain decoding, tokens/s without prefill.
    pub plain_tokens_per_s: f64,
    /// Speculative decoding, the same.
    pub spec_tokens_per_s: f64,
    /// Their ratio.
    pub speedup: f64,
    /// Where the speculative time went.
    pub seconds: Seconds,
    /// Whether all texts equal plain decoding.
    pub identical: bool,
}

/// Decodes all prompts in every cell of the grid.
///
/// # Errors
/// On a grid that does not fit drafter or target, and on what decoding reports.
pub fn sweep(
    target: &dyn Target,
    drafter: Drafter<'_>,
    prompts: &dyn Prompts,
    grid: &Grid,
    options: &Options,
    progress: &mut dyn FnMut(Progress) -> Result<()>,
) -> Result<SweepReport> {
    ensure!(!prompts.is_empty(), "no prompts to sweep over");
    check(target, drafter, grid, options)?;
    let limits = options.limits(target);
    let taps = match drafter {
        Drafter::Real(real) | Drafter::Scripted { shadow: Some(real), .. } => real.taps().to_vec(),
        Drafter::Scripted { shadow: None, .. } => Vec::new(),
    };
    let vocab = target.info().vocab_size;
    // the first text pays for cold caches and is not counted
    let warm = crate::Limits {
        max_new: limits.max_new.min(8),
        ..limits.clone()
    };
    decode_plainly(target, &taps, &lengthened(prompts, 0, 0)?, &warm).context("warm-up")?;
    let total = grid.contexts.len() * prompts.len();
    let mut cells = Vec::new();
    for (row, &context) in grid.contexts.iter().enumerate() {
        let mut sums: Vec<Sum> = grid.blocks.iter().map(|&block| Sum::new(block)).collect();
        for index in 0..prompts.len() {
            let prompt = lengthened(prompts, index, context)?;
            let named = || format!("{} after {context} tokens", prompts.about(index).id);
            let plain = decode_plainly(target, &taps, &prompt, &limits).with_context(named)?;
            for (sum, &block) in sums.iter_mut().zip(&grid.blocks) {
                let text = match drafter {
                    Drafter::Real(real) => decode_speculatively(target, real, &prompt, &limits, block - 1),
                    Drafter::Scripted { chance, shadow } => {
                        let script = Script::Chance {
                            seed: options.seed + index as u64,
                            millionths: (chance * 1e6).round() as u32,
                        };
                        let truth = [prompt.as_slice(), &plain.tokens].concat();
                        let script = Scripted::new(script, truth, block, &taps, vocab)?;
                        match shadow {
                            Some(real) => {
                                decode_speculatively(target, &Shadow { script, real }, &prompt, &limits, block - 1)
                            }
                            None => decode_speculatively(target, &script, &prompt, &limits, block - 1),
                        }
                    }
                };
                sum.add(&plain, &text.with_context(named)?);
            }
            progress(Progress {
                done: row * prompts.len() + index + 1,
                total,
                acceptance_length: None,
            })?;
        }
        cells.extend(sums.into_iter().map(|sum| sum.cell(context, prompts.len())));
    }
    Ok(SweepReport {
        kind: "sweep".into(),
        scripted: match drafter {
            Drafter::Scripted { chance, .. } => Some(chance),
            Drafter::Real(_) => None,
        },
        cells,
        setting: options.setting.clone(),
    })
}

/// Refuses a grid that does not fit.
///
/// # Errors
/// Names the block, context or chance.
pub fn check(target: &dyn Target, drafter: Drafter<'_>, grid: &Grid, options: &Options) -> Result<()> {
    let most = match drafter {
        Drafter::Real(real) | Drafter::Scripted { shadow: Some(real), .. } => real.block_size(),
        Drafter::Scripted { shadow: None, .. } => usize::MAX,
    };
    let positions = target.info().max_positions;
    for &block in &grid.blocks {
        ensure!(
            (2..=most).contains(&block),
            "block {block}: expected 2..={most} (slots, anchor included)"
        );
    }
    for &context in &grid.contexts {
        ensure!(
            context + options.max_new < positions,
            "context {context} and {} new tokens: the target has {positions} positions",
            options.max_new
        );
    }
    if let Drafter::Scripted { chance, .. } = drafter {
        ensure!(
            (0. ..=1.).contains(&chance),
            "chance {chance} per draft: expected 0 to 1"
        );
    }
    Ok(())
}

/// A prompt with other prompts' tokens before it, `length` in all; as it is when it has as many already.
fn lengthened(prompts: &dyn Prompts, index: usize, length: usize) -> Result<Vec<u32>> {
    let first = |index: usize| prompts.turn(index, &[]).map(Option::unwrap_or_default);
    let mut whole = first(index)?;
    let mut before = 1;
    while whole.len() < length {
        let mut more = first((index + before) % prompts.len())?;
        ensure!(!more.is_empty(), "{}: an empty prompt", prompts.about(index).id);
        let surplus = (more.len() + whole.len()).saturating_sub(length);
        more.drain(..surplus);
        more.extend(&whole);
        whole = more;
        before += 1;
    }
    Ok(whole)
}

/// Sums of one cell.
struct Sum {
    block: usize,
    tally: Tally,
    plain: (usize, f64),
    spec: (usize, f64),
    seconds: Seconds,
    identical: bool,
}

impl Sum {
    fn new(block: usize) -> Self {
        Self {
            block,
            tally: Tally::new(block - 1),
            plain: (0, 0.),
            spec: (0, 0.),
            seconds: Seconds::default(),
            identical: true,
        }
    }

    fn add(&mut self, plain: &crate::Generation, text: &crate::Generation) {
        self.tally.merge(&Tally::of_text(&text.rounds, self.block - 1));
        for (sum, text) in [(&mut self.plain, plain), (&mut self.spec, text)] {
            *sum = (sum.0 + text.tokens.len() - 1, sum.1 + text.time.decode.as_secs_f64());
        }
        self.seconds.add(&text.time);
        self.identical &= plain.tokens == text.tokens;
    }

    fn cell(self, context: usize, prompts: usize) -> Cell {
        let rate = |(tokens, seconds): (usize, f64)| tokens as f64 / seconds.max(f64::MIN_POSITIVE);
        Cell {
            block: self.block,
            context,
            prompts,
            rounds: self.tally.full.rounds,
            acceptance_length: self.tally.full.acceptance_length(),
            plain_tokens_per_s: rate(self.plain),
            spec_tokens_per_s: rate(self.spec),
            speedup: rate(self.spec) / rate(self.plain),
            seconds: self.seconds,
            identical: self.identical,
        }
    }
}
