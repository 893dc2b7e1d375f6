//! What a round costs by its width: measured, not modelled.
//!
//! The same drafter and target calls as the loop's, repeated on one context; the fastest repetition counts, because
//! everything that disturbs a measurement only makes it slower.

use std::time::Instant;

use anyhow::{Result, ensure};
use dflash_model::{DraftSession, Drafting, LogitRows, Sampling, Session, Target};

use crate::evaluate::Options;
use crate::prompts::Prompts;
use crate::report::WidthCost;

/// Repetitions of every width; more while they are short.
const REPEATS: usize = 5;
/// Seconds after which no further repetition of a width starts.
const ENOUGH: f64 = 0.2;
/// Most repetitions.
const MOST_REPEATS: usize = 40;

/// Positions after the context that measuring may use up: steps and commits stay.
const ROOM: usize = 256;

/// Costs of widths 0..=B - 1 after the first prompt; none when it leaves no room to measure in.
///
/// # Errors
/// On what target and drafter report.
pub fn round_costs(
    target: &dyn Target,
    drafting: &dyn Drafting,
    prompts: &dyn Prompts,
    options: &Options,
) -> Result<Vec<WidthCost>> {
    let Some(prompt) = prompts.turn(0, &[])? else {
        return Ok(Vec::new());
    };
    if prompt.len() + ROOM > target.info().max_positions {
        return Ok(Vec::new());
    }
    let most = options.width(drafting)?.most();
    costs_after(target, drafting, &prompt, &(0..=most).collect::<Vec<_>>())
}

/// Costs of some widths after `context`, a prompt of at least one token.
///
/// # Errors
/// When the context leaves no room for the widest block, and on what target and drafter report.
pub fn costs_after(
    target: &dyn Target,
    drafting: &dyn Drafting,
    context: &[u32],
    widths: &[usize],
) -> Result<Vec<WidthCost>> {
    let room = target.info().max_positions;
    ensure!(
        context.len() + ROOM <= room,
        "{} tokens of context: measuring needs {ROOM} positions after them, the target has {room}",
        context.len()
    );
    rayon::scope(|_| {
        let mut session = target.session(drafting.taps())?;
        let mut draft = drafting.session()?;
        crate::speculate::prefill(session.as_mut(), context, &mut |taps| Ok(draft.extend(taps)?))?;
        widths
            .iter()
            .map(|&width| cost(session.as_mut(), draft.as_mut(), context, width))
            .collect()
    })
}

fn cost(session: &mut dyn Session, draft: &mut dyn DraftSession, context: &[u32], width: usize) -> Result<WidthCost> {
    let anchor = context[context.len() - 1];
    let propose = |draft: &mut dyn DraftSession| match width {
        0 => Ok(Vec::new()),
        _ => draft
            .propose(anchor, width, &mut Sampling::Greedy)
            .map(|proposal| proposal.tokens()),
    };
    let drafts = propose(draft)?;
    let draft_seconds = fastest(|| propose(draft).map(drop))?;
    let block: Vec<u32> = std::iter::once(anchor).chain(drafts).collect();
    // a verify pass that is dropped leaves the session as it was; committing 0 rows does too
    let verify = if width == 0 {
        // a plain step keeps its row, so the context grows by one a repetition: no other way to time it
        fastest(|| session.forward(&block, LogitRows::Last).map(drop))?
    } else {
        fastest(|| session.verify(&block).map(drop))?
    };
    let commit = if width == 0 {
        0.
    } else {
        commit_seconds(session, draft, &block)?
    };
    Ok(WidthCost {
        width,
        context: context.len(),
        draft: draft_seconds,
        verify,
        commit,
    })
}

/// Seconds of keeping half of a block and feeding the drafter its taps (it stays each time, so few repetitions).
fn commit_seconds(session: &mut dyn Session, draft: &mut dyn DraftSession, block: &[u32]) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..2 {
        let kept = block.len().div_ceil(2);
        let step = session.verify(block)?;
        let start = Instant::now();
        let taps = step.taps.narrow(0, 0, kept)?;
        step.commit(kept)?;
        draft.extend(&taps)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Seconds of the fastest of several calls.
///
/// # Errors
/// As `work`.
pub fn fastest(mut work: impl FnMut() -> candle_core::Result<()>) -> Result<f64> {
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    for repeat in 0..MOST_REPEATS {
        if repeat >= REPEATS && start.elapsed().as_secs_f64() > ENOUGH {
            break;
        }
        let begin = Instant::now();
        work()?;
        best = best.min(begin.elapsed().as_secs_f64());
    }
    Ok(best)
}
