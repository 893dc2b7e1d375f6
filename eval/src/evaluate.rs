//! Acceptance in generation mode: every prompt decoded plainly and speculatively, counted and timed.
//!
//! The two decoders take turns prompt by prompt, and swap who goes first, so that a machine that warms up or slows
//! down does so for both.

use anyhow::{Context, Result, ensure};
use dflash_model::{Drafting, Target, with_threads_awake};

use crate::acceptance::{Counts, Tally, bootstrap_interval, macro_acceptance_length};
use crate::report::{PromptResult, Report, Seconds, Setting, definitions, is_degenerate, repetition};
use crate::speculate::{Generation, Limits, plain, speculate};

/// New tokens of the untimed warm-up.
const WARM_UP_TOKENS: usize = 8;

/// What to measure.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Most new tokens a prompt, >= 1.
    pub max_new: usize,
    /// Tokens that end a text.
    pub stop_ids: Vec<u32>,
    /// Slots of a block, anchor included, 2..=B; the drafter's own B when absent.
    pub block: Option<usize>,
    /// Whether truncated rounds enter the acceptance numbers.
    pub include_truncated: bool,
    /// Seed of the bootstrap.
    pub seed: u64,
    /// Circumstances, copied into the report.
    pub setting: Setting,
}

impl Options {
    /// Plain defaults: full blocks, truncated rounds apart, seed 0, no circumstances.
    pub fn new(max_new: usize, stop_ids: Vec<u32>) -> Self {
        Self {
            max_new,
            stop_ids,
            block: None,
            include_truncated: false,
            seed: 0,
            setting: Setting::default(),
        }
    }

    /// The limits that these options set for one target and drafter.
    ///
    /// # Errors
    /// When `block` is not in 2..=B.
    pub fn limits(&self, target: &dyn Target, drafting: &dyn Drafting) -> Result<Limits> {
        let trained = drafting.block_size();
        let block = self.block.unwrap_or(trained);
        ensure!(
            (2..=trained).contains(&block),
            "block {block}: expected 2..={trained} (slots, anchor included)"
        );
        Ok(Limits {
            max_new: self.max_new,
            max_positions: target.info().max_positions,
            stop_ids: self.stop_ids.clone(),
            width: block - 1,
        })
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

/// Measures `drafting` on `target` over `prompts` (token ids, each at least one).
///
/// # Errors
/// On no prompts, and on what decoding reports, with the prompt named (0-based).
pub fn evaluate(
    target: &dyn Target,
    drafting: &dyn Drafting,
    prompts: &[Vec<u32>],
    options: &Options,
    progress: &mut dyn FnMut(Progress),
) -> Result<Report> {
    let limits = options.limits(target, drafting)?;
    let Some(first) = prompts.first() else {
        anyhow::bail!("no prompts to evaluate")
    };
    let warm_up = Limits {
        max_new: WARM_UP_TOKENS.min(limits.max_new),
        ..limits.clone()
    };
    decode_plainly(target, drafting.taps(), first, &warm_up).context("warm-up")?;
    decode_speculatively(target, drafting, first, &warm_up).context("warm-up")?;

    let mut sum = Sum::new(limits.width);
    for (index, prompt) in prompts.iter().enumerate() {
        let pair = || -> Result<(Generation, Generation)> {
            if index % 2 == 0 {
                let reference = decode_plainly(target, drafting.taps(), prompt, &limits)?;
                Ok((reference, decode_speculatively(target, drafting, prompt, &limits)?))
            } else {
                let text = decode_speculatively(target, drafting, prompt, &limits)?;
                Ok((decode_plainly(target, drafting.taps(), prompt, &limits)?, text))
            }
        };
        let (reference, text) = pair().with_context(|| format!("prompt {index}"))?;
        sum.add(prompt.len(), &reference, &text, options.include_truncated);
        progress(Progress {
            done: index + 1,
            total: prompts.len(),
            acceptance_length: sum.tally.counted(options.include_truncated).acceptance_length(),
        });
    }
    Ok(sum.report(options))
}

/// One prompt, one target pass a token, in a fresh session.
///
/// # Errors
/// As [`plain`].
pub fn decode_plainly(target: &dyn Target, taps: &[usize], prompt: &[u32], limits: &Limits) -> Result<Generation> {
    // Inside the pool once a text: from outside, every parallel operation would switch threads twice.
    with_threads_awake(|| {
        let mut session = target.session(taps)?;
        plain(session.as_mut(), prompt, limits, &mut |_| ()).context("plain decoding")
    })
}

/// One prompt, drafted and verified, in fresh sessions.
///
/// # Errors
/// As [`speculate`].
pub fn decode_speculatively(
    target: &dyn Target,
    drafting: &dyn Drafting,
    prompt: &[u32],
    limits: &Limits,
) -> Result<Generation> {
    with_threads_awake(|| {
        let mut session = target.session(drafting.taps())?;
        let mut draft = drafting.session()?;
        speculate(session.as_mut(), draft.as_mut(), prompt, limits, &mut |_| ()).context("speculative decoding")
    })
}

/// Index of the first token in which two texts differ; a missing token differs from any.
pub fn first_difference(a: &[u32], b: &[u32]) -> Option<usize> {
    let common = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    (common < a.len().max(b.len())).then_some(common)
}

/// Sums over prompts; nothing is divided before the end.
struct Sum {
    tally: Tally,
    texts: Vec<Counts>,
    plain: Seconds,
    spec: Seconds,
    plain_tokens: usize,
    spec_tokens: usize,
    differing: Vec<(usize, usize)>,
    degenerate: usize,
    per_prompt: Vec<PromptResult>,
}

impl Sum {
    fn new(width: usize) -> Self {
        Self {
            tally: Tally::new(width),
            texts: Vec::new(),
            plain: Seconds::default(),
            spec: Seconds::default(),
            plain_tokens: 0,
            spec_tokens: 0,
            differing: Vec::new(),
            degenerate: 0,
            per_prompt: Vec::new(),
        }
    }

    fn add(&mut self, prompt_tokens: usize, reference: &Generation, text: &Generation, include_truncated: bool) {
        let prompt = self.per_prompt.len();
        let tally = Tally::of_text(&text.rounds, self.tally.full.histogram.len() - 1);
        let counts = tally.counted(include_truncated);
        self.tally.merge(&tally);
        self.plain.add(&reference.time);
        self.spec.add(&text.time);
        self.plain_tokens += reference.tokens.len();
        self.spec_tokens += text.tokens.len();
        let difference = first_difference(&reference.tokens, &text.tokens);
        self.differing.extend(difference.map(|position| (prompt, position)));
        let (longest_run, distinct_ratio) = repetition(&text.tokens);
        self.degenerate += usize::from(is_degenerate(text.tokens.len(), longest_run, distinct_ratio));
        self.per_prompt.push(PromptResult {
            prompt,
            prompt_tokens,
            new_tokens: text.tokens.len(),
            finish: text.finish,
            acceptance_length: counts.acceptance_length(),
            accepted: text.rounds.iter().map(|round| round.accepted).collect(),
            truncated: (0..text.rounds.len()).filter(|&i| text.rounds[i].truncated).collect(),
            spec_seconds: text.time.decode.as_secs_f64(),
            plain_seconds: reference.time.decode.as_secs_f64(),
            identical: difference.is_none(),
            longest_run,
            distinct_ratio,
        });
        self.texts.push(counts);
    }

    fn report(self, options: &Options) -> Report {
        let counts = self.tally.counted(options.include_truncated);
        let prompts = self.per_prompt.len();
        let plain_rate = rate(self.plain_tokens - prompts, self.plain.decode);
        let spec_rate = rate(self.spec_tokens - prompts, self.spec.decode);
        let plain_rate_whole = rate(self.plain_tokens, self.plain.decode + self.plain.prefill);
        let spec_rate_whole = rate(self.spec_tokens, self.spec.decode + self.spec.prefill);
        Report {
            kind: "acceptance".into(),
            mode: "generation".into(),
            acceptance_length: counts.acceptance_length(),
            acceptance_length_macro: macro_acceptance_length(&self.texts),
            acceptance_length_ci95: bootstrap_interval(&self.texts, options.seed),
            mean_accepted_drafts: counts.mean_accepted_drafts(),
            draft_acceptance_rate: counts.draft_acceptance_rate(),
            rounds: counts.rounds,
            drafted: counts.drafted,
            accepted: counts.accepted,
            accept_at_pos: counts.accept_at_pos(),
            accept_cond: counts.accept_cond(),
            histogram: counts.histogram,
            include_truncated: options.include_truncated,
            truncated_rounds: self.tally.truncated.rounds,
            tokens_per_verify_e2e: self.tally.tokens_per_verify_e2e(),
            truncated: self.tally.truncated,
            plain_tokens_per_s: plain_rate,
            spec_tokens_per_s: spec_rate,
            speedup: quotient(spec_rate, plain_rate),
            speedup_with_prefill: quotient(spec_rate_whole, plain_rate_whole),
            spec_seconds: self.spec,
            plain_seconds: self.plain,
            identical: self.differing.is_empty(),
            differing: self.differing,
            prompts,
            degenerate_prompts: self.degenerate,
            seed: options.seed,
            setting: options.setting.clone(),
            definitions: definitions(),
            per_prompt: self.per_prompt,
        }
    }
}

fn rate(tokens: usize, seconds: f64) -> Option<f64> {
    (tokens > 0 && seconds > 0.).then(|| tokens as f64 / seconds)
}

fn quotient(part: Option<f64>, whole: Option<f64>) -> Option<f64> {
    Some(part? / whole?)
}
