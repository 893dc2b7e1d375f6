//! Single drafted blocks on real contexts, written down so that another implementation can be held to them.
//!
//! A context is a prompt and the first few tokens of the target's greedy answer. The last of these is the anchor; the
//! target has seen everything before it, and the drafter walks B - 1 tokens from there.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use dflash_eval::argmax::argmax_rows;
use dflash_eval::speculate::prefill;
use dflash_model::{Drafting, LogitRows, Sampling, Target, formats};
use serde::Serialize;

use crate::compare::{bind, block};

/// Answer tokens of the first context; each further one has one more, so that anchors fall on different places.
const FIRST_ANSWER: usize = 5;

/// All walks of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Walks {
    /// One entry a prompt.
    pub contexts: Vec<Walk>,
}

/// One context and what was drafted from it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Walk {
    /// Tokens strictly before the anchor: those whose taps the drafter sees.
    pub tokens: Vec<u32>,
    /// The last known token.
    pub anchor: u32,
    /// The B - 1 drafted tokens, greedy.
    pub walk: Vec<u32>,
    /// What the drafter saw and made of it, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub states: Option<States>,
}

/// Input and output of the drafter, in f32.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct States {
    /// Tap states of the context, [tokens, taps * H].
    pub taps: Vec<Vec<f32>>,
    /// Final hidden states of the drafted slots, [B - 1, H].
    pub hidden: Vec<Vec<f32>>,
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
    Ok(Walk {
        tokens,
        anchor,
        walk,
        states: None,
    })
}

/// Adds to each walk what the drafter in `path` sees and computes there, in one pass over the context.
///
/// # Errors
/// On what target and drafter report.
pub fn add_states(found: &mut Walks, path: &Path, target: &dyn Target) -> Result<()> {
    let head = target.head().in_f32()?;
    let bound = bind(&formats::read(path, Some(target.info()))?, &head, head.embed.device())?;
    for context in &mut found.contexts {
        let taps = target.taps(&context.tokens, bound.taps())?.to_dtype(DType::F32)?;
        let hidden = block(&bound, &taps, context.anchor)?.hidden;
        context.states = Some(States {
            taps: taps.to_vec2()?,
            hidden: hidden.to_dtype(DType::F32)?.to_vec2()?,
        });
    }
    Ok(())
}

fn first(choices: &[u32]) -> Result<u32> {
    choices
        .first()
        .copied()
        .context("the target returned no logits for the last token")
}
