//! Greedy decoding, speculative and plain, over one prefill, one argmax and one stop rule.
//!
//! A round verifies the block `[last token, d_1 .. d_K]` in one target pass. With `y_j` the target's choice after
//! row j, the first a drafts that satisfy `d_j = y_{j-1}` are accepted and the round emits `y_0 .. y_a`: a accepted
//! drafts and one correction (or, when all agree, a bonus). As many rows are committed as tokens are emitted, so
//! between rounds the caches hold the whole text but its last token, whatever the drafts were.
//!
//! The budget narrows a block beforehand (K <= tokens left - 1), so that a round never emits more than may be
//! emitted and whether it was narrowed does not depend on how well it went. A stop token inside a block cuts what
//! follows it. Both kinds of round are flagged [`Round::truncated`].

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use dflash_model::{DraftSession, LogitRows, Sampling, Session};
use serde::{Deserialize, Serialize};

use crate::argmax::argmax_rows;

/// Tokens of a prompt that go through the target in one pass: bounds the memory of long prompts.
const PREFILL_ROWS: usize = 2048;

/// When to stop, and how far to draft.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens to generate (>= 1), the first one after the prompt included.
    pub max_new: usize,
    /// Most tokens of prompt and text together: the target's `max_positions`.
    pub max_positions: usize,
    /// Tokens that end the text; the one that does is its last token.
    pub stop_ids: Vec<u32>,
    /// Most drafted tokens a round, 1..=B - 1. Plain decoding ignores it.
    pub width: usize,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// A stop token.
    Stop,
    /// `max_new` tokens.
    Budget,
    /// The target's positions are used up.
    Context,
}

/// One draft and its verification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// Position of the anchor, the last token known before the round.
    pub anchor: usize,
    /// Tokens drafted, K_r.
    pub drafted: usize,
    /// Leading drafts that the target agreed with, a_r; drafts after a stop token do not count.
    pub accepted: usize,
    /// Tokens that the round added to the text: a_r + 1, or fewer when a stop token cut it.
    pub emitted: usize,
    /// Whether the budget narrowed the block or a stop token cut what it emitted.
    pub truncated: bool,
}

/// Wall-clock time of one generation, by part.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TimeSplit {
    /// The prompt through the target and, for speculative decoding, into the drafter's context.
    pub prefill: Duration,
    /// Everything after the prefill; the three below are parts of it.
    pub decode: Duration,
    /// Drafter: proposals and context updates.
    pub draft: Duration,
    /// Target passes and the choices read from them.
    pub verify: Duration,
    /// Cache updates after verification.
    pub commit: Duration,
}

/// A finished text and how it came about.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The new tokens, a stop token included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// The rounds in order; none for plain decoding.
    pub rounds: Vec<Round>,
    /// Where the time went.
    pub time: TimeSplit,
}

/// What an observer sees after the prefill and after every round (or plain step).
#[derive(Debug, Clone, Copy)]
pub struct Emitted<'t> {
    /// The new tokens.
    pub tokens: &'t [u32],
    /// How many of them, from the front, were drafted; the rest came from the target itself.
    pub accepted: usize,
}

/// Continues `prompt` greedily, drafting with `draft`.
///
/// Both sessions must have seen the same tokens (usually none). Afterwards both hold prompt and text but for the
/// last token, so that a further turn may follow whose prompt starts with that token.
///
/// # Errors
/// On limits or a prompt that leave no room, on a proposal wider than asked, on NaN logits, and on whatever the
/// target or the drafter report.
pub fn speculate(
    session: &mut dyn Session,
    draft: &mut dyn DraftSession,
    prompt: &[u32],
    limits: &Limits,
    observer: &mut dyn FnMut(Emitted<'_>),
) -> Result<Generation> {
    let (seen, drafted) = (session.len(), draft.len());
    ensure!(
        seen == drafted,
        "the target has seen {seen} tokens and the drafter {drafted}: they must start together"
    );
    ensure!(limits.width >= 1, "draft width 0: expected at least 1 token a round");
    let mut text = Text::new(seen, prompt, limits)?;
    let mut time = TimeSplit::default();
    let mut clock = Clock::start();
    let logits = prefill(session, prompt, &mut |taps| Ok(draft.extend(taps)?))?;
    text.push(&argmax_rows(&logits)?);
    time.prefill = clock.lap();
    observer(Emitted {
        tokens: &text.tokens,
        accepted: 0,
    });

    let start = Instant::now();
    let mut rounds = Vec::new();
    while text.finish.is_none() {
        let (anchor, width) = (text.last(), limits.width.min(text.room() - 1));
        clock.lap();
        let drafts = propose(draft, anchor, width)?;
        time.draft += clock.lap();

        let block: Vec<u32> = std::iter::once(anchor).chain(drafts.iter().copied()).collect();
        let step = session.verify(&block).context("verify")?;
        let choices = argmax_rows(&step.logits).context("verify")?;
        ensure!(
            choices.len() == block.len(),
            "verify of {} tokens returned {} rows",
            block.len(),
            choices.len()
        );
        time.verify += clock.lap();

        let agreed = leading_run(&drafts, &choices);
        let emitted = text.push(&choices[..=agreed]);
        let taps = step.taps.narrow(0, 0, emitted)?;
        let kept = draft.len() + emitted;
        step.commit(emitted).context("commit")?;
        ensure!(
            session.len() == kept,
            "the target holds {} tokens after the commit, expected {kept}",
            session.len()
        );
        time.commit += clock.lap();

        rounds.push(Round {
            anchor: draft.len(),
            drafted: drafts.len(),
            accepted: agreed.min(emitted),
            emitted,
            truncated: width < limits.width || emitted <= agreed,
        });
        draft.extend(&taps).context("drafter context")?;
        time.draft += clock.lap();
        observer(Emitted {
            tokens: &text.tokens[text.tokens.len() - emitted..],
            accepted: agreed.min(emitted),
        });
    }
    time.decode = start.elapsed();
    Ok(text.finished(rounds, time))
}

/// Continues `prompt` greedily, one target pass a token.
///
/// # Errors
/// As [`speculate`], but for the drafter.
pub fn plain(
    session: &mut dyn Session,
    prompt: &[u32],
    limits: &Limits,
    observer: &mut dyn FnMut(Emitted<'_>),
) -> Result<Generation> {
    let mut text = Text::new(session.len(), prompt, limits)?;
    let mut time = TimeSplit::default();
    let mut clock = Clock::start();
    let logits = prefill(session, prompt, &mut |_| Ok(()))?;
    text.push(&argmax_rows(&logits)?);
    time.prefill = clock.lap();
    observer(Emitted {
        tokens: &text.tokens,
        accepted: 0,
    });

    let start = Instant::now();
    while text.finish.is_none() {
        let forward = session.forward(&[text.last()], LogitRows::Last)?;
        let logits = forward.logits.context("the target returned no logits")?;
        text.push(&argmax_rows(&logits)?);
        observer(Emitted {
            tokens: &text.tokens[text.tokens.len() - 1..],
            accepted: 0,
        });
    }
    time.decode = start.elapsed();
    time.verify = time.decode;
    Ok(text.finished(Vec::new(), time))
}

/// Feeds a prompt in bounded chunks, hands every chunk's taps on, and returns the logits of its last row, [1, V].
///
/// # Errors
/// On an empty prompt and on whatever the target or `taps` report.
pub fn prefill(
    session: &mut dyn Session,
    prompt: &[u32],
    taps: &mut dyn FnMut(&Tensor) -> Result<()>,
) -> Result<Tensor> {
    let mut logits = None;
    let mut chunks = prompt.chunks(PREFILL_ROWS).peekable();
    while let Some(chunk) = chunks.next() {
        let rows = if chunks.peek().is_some() {
            LogitRows::None
        } else {
            LogitRows::Last
        };
        let forward = session.forward(chunk, rows).context("prefill")?;
        taps(&forward.taps).context("drafter context")?;
        logits = forward.logits;
    }
    logits.context("an empty prompt, or a target that returned no logits for its last token")
}

/// How many leading drafts equal the target's choices.
pub fn leading_run(drafts: &[u32], choices: &[u32]) -> usize {
    drafts
        .iter()
        .zip(choices)
        .take_while(|(draft, choice)| draft == choice)
        .count()
}

fn propose(draft: &mut dyn DraftSession, anchor: u32, width: usize) -> Result<Vec<u32>> {
    if width == 0 {
        return Ok(Vec::new());
    }
    let drafts = draft
        .propose(anchor, width, &mut Sampling::Greedy)
        .context("draft")?
        .tokens();
    ensure!(
        drafts.len() <= width,
        "the drafter proposed {} tokens where at most {width} were asked for",
        drafts.len()
    );
    Ok(drafts)
}

/// The text under construction and the one rule that ends it.
struct Text<'l> {
    tokens: Vec<u32>,
    finish: Option<Finish>,
    budget: usize,
    limits: &'l Limits,
}

impl<'l> Text<'l> {
    fn new(seen: usize, prompt: &[u32], limits: &'l Limits) -> Result<Self> {
        ensure!(
            !prompt.is_empty(),
            "an empty prompt: the target needs at least one token"
        );
        ensure!(
            limits.max_new >= 1,
            "max_new 0: expected at least one token to generate"
        );
        let used = seen + prompt.len();
        ensure!(
            used < limits.max_positions,
            "{used} tokens of prompt leave no room in the target's {} positions",
            limits.max_positions
        );
        Ok(Self {
            tokens: Vec::new(),
            finish: None,
            budget: limits.max_new.min(limits.max_positions - used),
            limits,
        })
    }

    /// Tokens that may still be added, >= 1 while unfinished.
    fn room(&self) -> usize {
        self.budget - self.tokens.len()
    }

    /// The last token. The prefill always leaves one.
    fn last(&self) -> u32 {
        self.tokens[self.tokens.len() - 1]
    }

    /// Adds tokens up to the first stop token or the budget and returns how many were added.
    fn push(&mut self, tokens: &[u32]) -> usize {
        for (index, token) in tokens.iter().enumerate() {
            self.tokens.push(*token);
            self.finish = if self.limits.stop_ids.contains(token) {
                Some(Finish::Stop)
            } else if self.room() > 0 {
                None
            } else if self.budget == self.limits.max_new {
                Some(Finish::Budget)
            } else {
                Some(Finish::Context)
            };
            if self.finish.is_some() {
                return index + 1;
            }
        }
        tokens.len()
    }

    fn finished(self, rounds: Vec<Round>, time: TimeSplit) -> Generation {
        Generation {
            tokens: self.tokens,
            finish: self.finish.unwrap_or(Finish::Budget),
            rounds,
            time,
        }
    }
}

/// Time since the last look.
struct Clock(Instant);

impl Clock {
    fn start() -> Self {
        Self(Instant::now())
    }

    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let elapsed = now - self.0;
        self.0 = now;
        elapsed
    }
}
