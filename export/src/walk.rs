//! Single drafted blocks on real contexts, written down so that another implementation can be held to them.
//!
//! A context is a prompt and the first few tokens of the target's greedy answer. The last of these is the anchor; the
//! target has seen everything before it, and the drafter walks B - 1 tokens from there.

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use dflash_eval::argmax::argmax_rows;
use dflash_eval::speculate::prefill;
use dflash_model::{Drafting, LogitRows, Sampling, Target};
use serde::Serialize;

/// Answer tokens of the first context; each further one has one more, so that anchors fall on different places.
const FIRST_ANSWER: usize = 5;

/// All walks of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Walks {
    /// One entry a prompt.
    pub contexts: Vec<Walk>,
}

/// One context and what was drafted from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Walk {
    /// Tokens strictly before the anchor: those whose taps the drafter sees.
    pub tokens: Vec<u32>,
    /// The last known token.
    pub anchor: u32,
    /// The B - 1 drafted tokens, greedy.
    pub walk: Vec<u32>,
}

/// Walks once from each prompt.
///
/// # Errors
/// When a prompt leaves the target no room for its answer and a block, and on what target and drafter report; the
/// prompt is named (0-based).
pub fn walks(
    target: &dyn Target,
    drafting: &dyn Drafting,
    prompts: &[Vec<u32>],
    stop_ids: &[u32],
    done: &mut dyn FnMut(usize),
) -> Result<Walks> {
    let mut contexts = Vec::with_capacity(prompts.len());
    for (index, prompt) in prompts.iter().enumerate() {
        let answer = FIRST_ANSWER + index;
        contexts.push(walk(target, drafting, prompt, answer, stop_ids).with_context(|| format!("prompt {index}"))?);
        done(index + 1);
    }
    Ok(Walks { contexts })
}

/// One walk after `answer` greedy tokens, or fewer when the target stops before: the stop token is the anchor then.
fn walk(target: &dyn Target, drafting: &dyn Drafting, prompt: &[u32], answer: usize, stop_ids: &[u32]) -> Result<Walk> {
    let (needed, positions) = (
        prompt.len() + answer + drafting.block_size(),
        target.info().max_positions,
    );
    ensure!(
        needed <= positions,
        "{} prompt tokens, {answer} of the answer and a block need {needed} positions, the target has {positions}",
        prompt.len()
    );
    let mut session = target.session(drafting.taps())?;
    let mut draft = drafting.session()?;
    let logits = prefill(session.as_mut(), prompt, &mut |taps: &Tensor| Ok(draft.extend(taps)?))?;
    let mut tokens = prompt.to_vec();
    let mut anchor = first(&argmax_rows(&logits)?)?;
    for _ in 1..answer {
        if stop_ids.contains(&anchor) {
            break;
        }
        let forward = session.forward(&[anchor], LogitRows::Last)?;
        draft.extend(&forward.taps)?;
        tokens.push(anchor);
        let logits = forward.logits.context("the target returned no logits")?;
        anchor = first(&argmax_rows(&logits)?)?;
    }
    let width = drafting.block_size() - 1;
    let walk = draft.propose(anchor, width, &mut Sampling::Greedy)?.tokens();
    ensure!(
        walk.len() == width,
        "the drafter proposed {} tokens, asked for {width}",
        walk.len()
    );
    Ok(Walk { tokens, anchor, walk })
}

fn first(choices: &[u32]) -> Result<u32> {
    choices
        .first()
        .copied()
        .context("the target returned no logits for the last token")
}
