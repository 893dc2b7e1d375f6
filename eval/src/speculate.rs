//! Decoding, speculative and plain, over one prefill, one choice and one stop rule.
//!
//! A round verifies the block `[last token, d_1 .. d_K]` in one target pass. Row j - 1 judges draft j
//! ([`Chooser::judge`]); the first a drafts that stand are accepted, and the row after them adds one more token: a
//! correction, or when all stand a bonus. As many rows are committed as tokens are emitted, so between rounds the caches
//! hold the whole text but its last token, whatever the drafts were. A round that drafts nothing is a plain step.
//!
//! The budget narrows a block beforehand (K <= tokens left - 1), so that a round never emits more than may be
//! emitted and whether it was narrowed does not depend on how well it went. A stop token inside a block cuts what
//! follows it. Both kinds of round are flagged [`Round::truncated`].

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use dflash_model::{DraftSession, LogitRows, ProposalSlot, Session};

use crate::chooser::Chooser;
use crate::text::Text;
pub use crate::text::{Finish, Limits};
use crate::verify::{Owed, Rows};
use crate::width::Width;

/// Tokens of a prompt that go through the target in one pass: bounds the memory of long prompts.
const PREFILL_ROWS: usize = 2048;

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

/// What decides while a text is written.
pub struct Decision<'d> {
    /// When to stop.
    pub limits: &'d Limits,
    /// Which token follows; one per text.
    pub chooser: &'d mut Chooser,
    /// How far to draft; may learn from one text to the next. Plain decoding ignores it.
    pub width: &'d mut Width,
}

/// Continues `prompt`, drafting with `draft`.
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
    decision: Decision<'_>,
    observer: &mut dyn FnMut(Emitted<'_>),
) -> Result<Generation> {
    let Decision { limits, chooser, width } = decision;
    let (seen, drafted) = (session.len(), draft.len());
    ensure!(
        seen == drafted,
        "the target has seen {seen} tokens and the drafter {drafted}: they must start together"
    );
    ensure!(width.most() >= 1, "draft width 0: expected at least 1 token a round");
    let mut text = Text::new(seen, prompt, limits)?;
    let mut time = TimeSplit::default();
    let mut clock = Clock::start();
    let logits = prefill(session, prompt, &mut |taps| Ok(draft.extend(taps)?))?;
    chooser.begin(prompt);
    text.push(first_choice(chooser, &logits)?);
    time.prefill = clock.lap();
    observer(text.news(1, 0));

    let start = Instant::now();
    let mut rounds = Vec::new();
    // taps of committed tokens that the drafter has not been given yet: plain steps leave them for later
    let mut owed = Owed::default();
    while text.finish.is_none() {
        clock.lap();
        let (began, anchor, written) = (Instant::now(), text.last(), text.tokens.len());
        let position = session.len();
        let (chosen, asked) = (width.next(), width.next().min(text.room() - 1));
        let drafts = if asked > 0 {
            owed.pay(draft)?;
            propose(draft, anchor, asked, chooser)?
        } else {
            Vec::new()
        };
        time.draft += clock.lap();

        let mut rows = Rows::verify(session, anchor, &drafts, limits.exact_verify)?;
        let mut accepted = 0;
        for row in 0..=drafts.len() {
            let choice = chooser.judge(drafts.get(row), rows.logits(row)?)?;
            text.push(choice.token);
            accepted += usize::from(choice.accepted);
            if !choice.accepted || text.finish.is_some() {
                break;
            }
        }
        time.verify += clock.lap();

        let emitted = text.tokens.len() - written;
        owed.add(rows.commit(emitted).context("commit")?);
        ensure!(
            session.len() == position + emitted,
            "the target holds {} tokens after the commit, expected {}",
            session.len(),
            position + emitted
        );
        time.commit += clock.lap();

        let round = Round {
            anchor: position,
            drafted: drafts.len(),
            accepted,
            emitted,
            truncated: asked < chosen || emitted == accepted,
        };
        width.learn(&round, began.elapsed().as_secs_f64());
        rounds.push(round);
        observer(text.news(emitted, accepted));
    }
    owed.pay(draft)?;
    time.draft += clock.lap();
    time.decode = start.elapsed();
    Ok(text.finished(rounds, time))
}

/// Continues `prompt`, one target pass a token.
///
/// # Errors
/// As [`speculate`], but for the drafter.
pub fn plain(
    session: &mut dyn Session,
    prompt: &[u32],
    limits: &Limits,
    chooser: &mut Chooser,
    observer: &mut dyn FnMut(Emitted<'_>),
) -> Result<Generation> {
    let mut text = Text::new(session.len(), prompt, limits)?;
    let mut time = TimeSplit::default();
    let mut clock = Clock::start();
    let logits = prefill(session, prompt, &mut |_| Ok(()))?;
    chooser.begin(prompt);
    text.push(first_choice(chooser, &logits)?);
    time.prefill = clock.lap();
    observer(text.news(1, 0));

    let start = Instant::now();
    while text.finish.is_none() {
        let forward = session.forward(&[text.last()], LogitRows::Last)?;
        let logits = forward.logits.context("the target returned no logits")?;
        text.push(first_choice(chooser, &logits)?);
        observer(text.news(1, 0));
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

fn first_choice(chooser: &mut Chooser, logits: &Tensor) -> Result<u32> {
    let row = logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(chooser.judge(None, &row)?.token)
}

fn propose(
    draft: &mut dyn DraftSession,
    anchor: u32,
    width: usize,
    chooser: &mut Chooser,
) -> Result<Vec<ProposalSlot>> {
    let proposal = chooser
        .drafting(|sampling| draft.propose(anchor, width, sampling))
        .context("draft")?;
    ensure!(
        proposal.slots.len() <= width,
        "the drafter proposed {} tokens where at most {width} were asked for",
        proposal.slots.len()
    );
    Ok(proposal.slots)
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
