//! Generation mode: every prompt decoded plainly and speculatively, counted and timed.
//!
//! The two decoders take turns prompt by prompt, and swap who goes first, so that a machine that warms up or slows
//! down does so for both.

use anyhow::{Context, Result, ensure};
use dflash_model::{Drafting, Target, with_threads_awake};

use crate::chooser::Chooser;
use crate::costs::round_costs;
use crate::measure::{Measured, Sum};
use crate::prompts::Prompts;
use crate::report::{Report, Setting};
use crate::sampling::SamplingConfig;
use crate::speculate::{Decision, Generation, Limits, plain, speculate};
use crate::width::{AutoWidth, Width};

/// New tokens of the untimed warm-up.
const WARM_UP_TOKENS: usize = 8;

/// Slots of a block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Block {
    /// As many as the drafter was trained with.
    #[default]
    Own,
    /// So many, anchor included, 2..=B.
    Slots(usize),
    /// What pays most, chosen round by round.
    Auto,
}

/// What to measure.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Most new tokens a prompt, >= 1.
    pub max_new: usize,
    /// Tokens that end a text.
    pub stop_ids: Vec<u32>,
    /// Slots of a block.
    pub block: Block,
    /// How tokens are chosen.
    pub sampling: SamplingConfig,
    /// Whether blocks are verified row by row.
    pub exact_verify: bool,
    /// Whether truncated rounds enter the acceptance numbers.
    pub include_truncated: bool,
    /// Whether the cost of every width is measured afterwards (some seconds).
    pub costs: bool,
    /// Seed of sampling and of the bootstrap.
    pub seed: u64,
    /// Circumstances, copied into the report.
    pub setting: Setting,
}

impl Options {
    /// Plain defaults: full blocks, greedy, truncated rounds apart, seed 0, no circumstances.
    pub fn new(max_new: usize, stop_ids: Vec<u32>) -> Self {
        Self {
            max_new,
            stop_ids,
            block: Block::Own,
            sampling: SamplingConfig::default(),
            exact_verify: false,
            include_truncated: false,
            costs: false,
            seed: 0,
            setting: Setting::default(),
        }
    }

    /// The limits that these options set for one target.
    pub fn limits(&self, target: &dyn Target) -> Limits {
        Limits {
            exact_verify: self.exact_verify,
            ..Limits::new(self.max_new, target.info().max_positions, self.stop_ids.clone())
        }
    }

    /// How far to draft with one drafter.
    ///
    /// # Errors
    /// When `block` is not in 2..=B.
    pub fn width(&self, drafting: &dyn Drafting) -> Result<Width> {
        let trained = drafting.block_size();
        match self.block {
            Block::Own => Ok(Width::Fixed(trained - 1)),
            Block::Auto => Ok(Width::Auto(AutoWidth::new(trained - 1))),
            Block::Slots(slots) => {
                ensure!(
                    (2..=trained).contains(&slots),
                    "block {slots}: expected 2..={trained} (slots, anchor included)"
                );
                Ok(Width::Fixed(slots - 1))
            }
        }
    }

    /// The rule of one text; every text, and either way of decoding it, draws from streams of its own.
    pub fn chooser(&self, text: usize, speculative: bool) -> Chooser {
        let stream = 2 * text as u64 + u64::from(speculative);
        Chooser::new(self.sampling, dflash_model::init::word(self.seed, stream))
    }
}

/// How far an evaluation has come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Prompts done.
    pub done: usize,
    /// Prompts to do.
    pub total: usize,
    /// Acceptance length so far.
    pub acceptance_length: Option<f64>,
}

/// Measures `drafting` on `target` over `prompts`. An error of `progress` stops it and is returned as it is.
///
/// # Errors
/// On no prompts, and on what decoding reports, with the prompt named.
pub fn evaluate(
    target: &dyn Target,
    drafting: &dyn Drafting,
    prompts: &dyn Prompts,
    options: &Options,
    progress: &mut dyn FnMut(Progress) -> Result<()>,
) -> Result<Report> {
    ensure!(!prompts.is_empty(), "no prompts to evaluate");
    options.sampling.check()?;
    let limits = options.limits(target);
    let mut width = options.width(drafting)?;
    warm_up(target, drafting, prompts, options)?;

    let mut sum = Sum::new(width.most(), options.include_truncated);
    for index in 0..prompts.len() {
        let about = prompts.about(index);
        let mut answers = Vec::new();
        while let Some(prompt) = prompts.turn(index, &answers).with_context(|| about.id.clone())? {
            let text = sum.results();
            let plainly = || decode_plainly_by(target, drafting.taps(), &prompt, &limits, options.chooser(text, false));
            let mut drafted = || {
                let decision = Decision {
                    limits: &limits,
                    chooser: &mut options.chooser(text, true),
                    width: &mut width,
                };
                decode_speculatively_by(target, drafting, &prompt, decision)
            };
            let mut pair = || -> Result<(Generation, Generation)> {
                if text.is_multiple_of(2) {
                    let reference = plainly()?;
                    Ok((reference, drafted()?))
                } else {
                    let text = drafted()?;
                    Ok((plainly()?, text))
                }
            };
            let (plain, speculative) = pair().with_context(|| about.id.clone())?;
            let measured = Measured {
                prompt: index,
                about: &about,
                turn: answers.len(),
                prompt_tokens: prompt.len(),
                plain: &plain,
                speculative: &speculative,
            };
            sum.add(&measured);
            answers.push(plain.tokens);
        }
        progress(Progress {
            done: index + 1,
            total: prompts.len(),
            acceptance_length: sum.acceptance_length(),
        })?;
    }
    let costs = if options.costs {
        round_costs(target, drafting, prompts, options)?
    } else {
        Vec::new()
    };
    sum.report(options, prompts, costs)
}

fn warm_up(target: &dyn Target, drafting: &dyn Drafting, prompts: &dyn Prompts, options: &Options) -> Result<()> {
    let Some(first) = prompts.turn(0, &[])? else {
        return Ok(());
    };
    let mut limits = options.limits(target);
    limits.max_new = limits.max_new.min(WARM_UP_TOKENS);
    decode_plainly(target, drafting.taps(), &first, &limits).context("warm-up")?;
    let width = drafting.block_size() - 1;
    decode_speculatively(target, drafting, &first, &limits, width).context("warm-up")?;
    Ok(())
}

/// One prompt, greedily, one target pass a token, in a fresh session.
///
/// # Errors
/// As [`plain`].
pub fn decode_plainly(target: &dyn Target, taps: &[usize], prompt: &[u32], limits: &Limits) -> Result<Generation> {
    decode_plainly_by(target, taps, prompt, limits, Chooser::greedy())
}

/// As [`decode_plainly`], by another rule.
///
/// # Errors
/// As [`plain`].
pub fn decode_plainly_by(
    target: &dyn Target,
    taps: &[usize],
    prompt: &[u32],
    limits: &Limits,
    mut chooser: Chooser,
) -> Result<Generation> {
    // Inside the pool once a text: from outside, every parallel operation would switch threads twice.
    with_threads_awake(|| {
        let mut session = target.session(taps)?;
        plain(session.as_mut(), prompt, limits, &mut chooser, &mut |_| ()).context("plain decoding")
    })
}

/// One prompt, greedily, `width` tokens drafted a round and verified, in fresh sessions.
///
/// # Errors
/// As [`speculate`].
pub fn decode_speculatively(
    target: &dyn Target,
    drafting: &dyn Drafting,
    prompt: &[u32],
    limits: &Limits,
    width: usize,
) -> Result<Generation> {
    let decision = Decision {
        limits,
        chooser: &mut Chooser::greedy(),
        width: &mut Width::Fixed(width),
    };
    decode_speculatively_by(target, drafting, prompt, decision)
}

/// As [`decode_speculatively`], by another rule or width.
///
/// # Errors
/// As [`speculate`].
pub fn decode_speculatively_by(
    target: &dyn Target,
    drafting: &dyn Drafting,
    prompt: &[u32],
    decision: Decision<'_>,
) -> Result<Generation> {
    with_threads_awake(|| {
        let mut session = target.session(drafting.taps())?;
        let mut draft = drafting.session()?;
        speculate(session.as_mut(), draft.as_mut(), prompt, decision, &mut |_| ()).context("speculative decoding")
    })
}

/// Index of the first token in which two texts differ; a missing token differs from any.
pub fn first_difference(a: &[u32], b: &[u32]) -> Option<usize> {
    let common = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    (common < a.len().max(b.len())).then_some(common)
}
