//! What a round costs by its width: measured, not modelled.
//!
//! The same drafter and target calls as the loop's, repeated on one context; the fastest repetition counts, because
//! everything that disturbs a measurement only makes it slower.

use std::time::Instant;

use anyhow::{Result, ensure};
use dflash_model::{DraftSession, Drafting, LogitRows, Sampling, Session, Target, with_threads_awake};

use crate::evaluate::Options;
use crate::prompts::Prompts;
use crate::report::WidthCost;

/// Repetitions of every width; more while they are short.
const REPEATS: usize = 5;
/// Seconds after which no further repetition of a width starts.
const ENOUGH: f64 = 0.2;
/// Most repetitions.
const MOST_REPEATS: usize = 40;
/// Commits of every width.
const COMMITS: usize = 2;

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
    let widths: Vec<usize> = (0..=options.width(drafting)?.most()).collect();
    if prompt.len() + room_for(&widths) > target.info().max_positions {
        return Ok(Vec::new());
    }
    costs_after(target, Some(drafting), &prompt, &widths)
}

/// Costs of some widths after `context`, a prompt of at least one token. Without a drafter, verification only: the
/// block repeats the last token.
///
/// # Errors
/// When the context leaves no room for the widest block, and on what target and drafter report.
pub fn costs_after(
    target: &dyn Target,
    drafting: Option<&dyn Drafting>,
    context: &[u32],
    widths: &[usize],
) -> Result<Vec<WidthCost>> {
    let (room, needed) = (target.info().max_positions, room_for(widths));
    ensure!(
        context.len() + needed <= room,
        "{} tokens of context: measuring needs {needed} positions after them, the target has {room}",
        context.len()
    );
    with_threads_awake(|| {
        let mut session = target.session(drafting.map_or(&[][..], |drafting| drafting.taps()))?;
        let mut draft = drafting.map(Drafting::session).transpose()?;
        crate::speculate::prefill(session.as_mut(), context, &mut |taps| {
            draft.as_mut().map_or(Ok(()), |draft| Ok(draft.extend(taps)?))
        })?;
        widths
            .iter()
            .map(|&width| cost(session.as_mut(), draft.as_deref_mut(), context, width))
            .collect()
    })
}

fn cost(
    session: &mut dyn Session,
    mut draft: Option<&mut (dyn DraftSession + '_)>,
    context: &[u32],
    width: usize,
) -> Result<WidthCost> {
    let anchor = context[context.len() - 1];
    let (mut drafts, mut draft_seconds) = (vec![anchor; width], 0.);
    if let (Some(draft), 1..) = (&mut draft, width) {
        let mut propose = || draft.propose(anchor, width, &mut Sampling::Greedy);
        drafts = propose()?.tokens();
        draft_seconds = repeated(REPEATS, || propose().map(drop))?.fastest;
    }
    let block = [&[anchor], drafts.as_slice()].concat();
    let verify = if width == 0 {
        // a plain step keeps its row, so the context grows by one a repetition: no other way to time it
        let mut taps = Vec::new();
        let seconds = repeated(REPEATS, || {
            taps.push(session.forward(&block, LogitRows::Last)?.taps);
            Ok(())
        })?;
        if let Some(draft) = &mut draft {
            taps.iter().try_for_each(|taps| draft.extend(taps))?;
        }
        seconds
    } else {
        // a pass that is dropped leaves the session as it was
        repeated(REPEATS, || session.verify(&block).map(drop))?
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
        verify: verify.fastest,
        verify_median: Some(verify.median),
        commit,
    })
}

/// Seconds of keeping half of a block and feeding the drafter its taps (they stay each time, so few repetitions).
fn commit_seconds(
    session: &mut dyn Session,
    mut draft: Option<&mut (dyn DraftSession + '_)>,
    block: &[u32],
) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..COMMITS {
        let kept = block.len().div_ceil(2);
        let step = session.verify(block)?;
        let start = Instant::now();
        let taps = step.taps.narrow(0, 0, kept)?;
        step.commit(kept)?;
        if let Some(draft) = &mut draft {
            draft.extend(&taps)?;
        }
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Positions after the context that measuring some widths may use up: plain steps and commits stay.
pub(crate) fn room_for(widths: &[usize]) -> usize {
    MOST_REPEATS + widths.iter().map(|width| COMMITS * (width + 2)).sum::<usize>()
}

/// Seconds of one call among several.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seconds {
    /// The fastest: what the work itself takes, since everything that disturbs it only makes it slower.
    pub fastest: f64,
    /// The median: what a peer's median is held to.
    pub median: f64,
}

/// Times at least `at_least` calls, more while they are short.
///
/// # Errors
/// As `work`.
pub fn repeated(at_least: usize, mut work: impl FnMut() -> candle_core::Result<()>) -> Result<Seconds> {
    ensure!(at_least >= 1, "0 repetitions: expected at least 1");
    let (start, mut seconds) = (Instant::now(), Vec::new());
    while seconds.len() < at_least || (seconds.len() < MOST_REPEATS && start.elapsed().as_secs_f64() <= ENOUGH) {
        let begin = Instant::now();
        work()?;
        seconds.push(begin.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    let middle = seconds.len() / 2;
    Ok(Seconds {
        fastest: seconds[0],
        median: f64::midpoint(seconds[middle], seconds[(seconds.len() - 1) / 2]),
    })
}
