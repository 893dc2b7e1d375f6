//! Losslessness: speculative text against plain text, token for token, with four kinds of drafter.
//!
//! The trained drafter shows the product, the random one rejects nearly always, the always-right one accepts whole
//! blocks and the always-wrong one none: between them every kind of rollback happens. The claim is about
//! arithmetic as well as logic. In f32 on the CPU a difference is a defect. Elsewhere one row alone and the same row in a
//! block may round apart, so each first difference comes with the plain model's margin between its two best tokens there:
//! at most the stated tolerance is a near-tie, more is a failure. Equal texts over no accepted draft would prove nothing,
//! so [`DrafterResult::unproven`] says so and fails the run.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use dflash_model::{Drafting, LogitRows, Target};
use serde::{Deserialize, Serialize};

use crate::acceptance::Tally;
use crate::argmax::{TopTwo, top_two};
use crate::evaluate::{Options, Progress, decode_plainly_by, decode_speculatively_by, first_difference};
use crate::prompts::Prompts;
use crate::report::Setting;
use crate::scripted::{Script, Scripted};
use crate::speculate::{Decision, Generation, prefill};

/// A kind of drafter to check with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The drafter under test.
    Trained,
    /// Tokens from the whole vocabulary.
    Random,
    /// The plain text itself.
    Right,
    /// Never the plain text.
    Wrong,
}

impl Kind {
    /// All four, in the order of reports.
    pub const ALL: [Self; 4] = [Self::Trained, Self::Random, Self::Right, Self::Wrong];

    /// The name in reports and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Trained => "trained",
            Self::Random => "random",
            Self::Right => "right",
            Self::Wrong => "wrong",
        }
    }

    /// Whether a run without a single accepted draft leaves something unproven.
    fn must_accept(self) -> bool {
        matches!(self, Self::Trained | Self::Right)
    }
}

/// One place where a text leaves the plain text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Text, 0-based in the order of measuring.
    pub prompt: usize,
    /// Its prompt: `file:line` or the data set's own id.
    pub id: String,
    /// Index of the first differing token in the new text.
    pub position: usize,
    /// Plain decoding's token there; absent when its text had ended.
    pub plain_token: Option<u32>,
    /// Speculative decoding's token there; absent when its text had ended.
    pub spec_token: Option<u32>,
    /// The plain model's two best tokens there: the best one's logit minus the second's.
    pub top_two_margin: f32,
    /// The plain model's second choice there.
    pub runner_up: u32,
    /// Whether the margin is within the tolerance, and the speculative token is the runner-up.
    pub verdict: Verdict,
}

/// What a difference means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Rounding chose between two tokens that the target likes equally.
    NearTie,
    /// A defect.
    Fail,
}

/// Largest top-two margin, in logits, that passes as a near-tie by default: none in f32 on the CPU, where a row's numbers
/// do not depend on the rows beside it; rounding of sums on other devices; bf16's three digits elsewhere.
pub fn default_tolerance(dtype: &str, device: &str) -> f32 {
    match (dtype, device) {
        ("f32", "cpu") => 0.,
        ("f32", _) => 1e-3,
        _ => 0.25,
    }
}

/// What one drafter showed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DrafterResult {
    /// Which drafter.
    pub drafter: Kind,
    /// Prompts compared.
    pub prompts: usize,
    /// Prompts whose texts are identical.
    pub identical_prompts: usize,
    /// Prompts that differ from a near-tie on.
    pub near_ties: usize,
    /// All verification rounds, truncated ones included.
    pub rounds: u64,
    /// Tokens drafted in them.
    pub drafted: u64,
    /// Drafts accepted in them.
    pub accepted: u64,
    /// Acceptance length over full rounds.
    pub acceptance_length: Option<f64>,
    /// Every first difference.
    pub differences: Vec<Difference>,
    /// Why equal texts would prove nothing; absent when they prove something.
    pub unproven: Option<String>,
}

impl DrafterResult {
    /// Whether the drafter was exercised and changed nothing but near-ties.
    pub fn passed(&self) -> bool {
        self.near_ties == self.differences.len() && self.unproven.is_none()
    }
}

/// Result of a losslessness run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LosslessReport {
    /// Always `lossless`.
    pub kind: String,
    /// Whether every drafter passed.
    pub passed: bool,
    /// Whether every text of every drafter equals the plain text.
    pub identical: bool,
    /// Largest top-two margin that passes as a near-tie.
    pub tolerance: f32,
    /// Prompts compared.
    pub prompts: usize,
    /// Tokens of all plain texts.
    pub plain_tokens: usize,
    /// One result a drafter.
    pub drafters: Vec<DrafterResult>,
    /// Circumstances.
    pub setting: Setting,
    /// Meaning of the fields.
    pub definitions: BTreeMap<String, String>,
}

/// Compares speculative with plain greedy decoding over `prompts` with each of `kinds`.
///
/// # Errors
/// On no prompts or kinds, and on what decoding reports, with the prompt named. A difference is a result.
pub fn lossless(
    target: &dyn Target,
    drafting: &dyn Drafting,
    prompts: &dyn Prompts,
    kinds: &[Kind],
    tolerance: f32,
    options: &Options,
    progress: &mut dyn FnMut(Progress) -> Result<()>,
) -> Result<LosslessReport> {
    ensure!(
        !prompts.is_empty() && !kinds.is_empty(),
        "{} prompts and {} drafters: expected at least one of each",
        prompts.len(),
        kinds.len()
    );
    ensure!(
        options.sampling.is_greedy(),
        "losslessness is compared token by token: expected temperature 0, found {}",
        options.sampling
    );
    let limits = options.limits(target);
    let mut widths = vec![options.width(drafting)?; kinds.len()];
    let mut tallies = vec![Tally::new(widths[0].most()); kinds.len()];
    let mut differences = vec![Vec::new(); kinds.len()];
    let mut plain_tokens = 0;
    let mut texts = 0;
    for index in 0..prompts.len() {
        let id = prompts.about(index).id;
        let named = || id.clone();
        let mut answers = Vec::new();
        while let Some(prompt) = prompts.turn(index, &answers).with_context(named)? {
            let rule = || options.chooser(texts, true);
            let reference = decode_plainly_by(target, drafting.taps(), &prompt, &limits, rule()).with_context(named)?;
            plain_tokens += reference.tokens.len();
            for (slot, &kind) in kinds.iter().enumerate() {
                let decision = Decision {
                    limits: &limits,
                    chooser: &mut rule(),
                    width: &mut widths[slot],
                };
                let text = match scripted(kind, target, drafting, &prompt, &reference, options.seed)? {
                    Some(script) => decode_speculatively_by(target, &script, &prompt, decision),
                    None => decode_speculatively_by(target, drafting, &prompt, decision),
                };
                let text = text
                    .with_context(named)
                    .with_context(|| format!("{} drafter", kind.name()))?;
                tallies[slot].merge(&Tally::of_text(&text.rounds, widths[slot].most()));
                if let Some(position) = first_difference(&reference.tokens, &text.tokens) {
                    let top = plain_choice(target, drafting.taps(), &prompt, &reference.tokens[..position])?;
                    let chosen = text.tokens.get(position).copied();
                    let tie = top.margin <= tolerance && chosen == Some(top.second);
                    differences[slot].push(Difference {
                        prompt: texts,
                        id: id.clone(),
                        position,
                        plain_token: reference.tokens.get(position).copied(),
                        spec_token: chosen,
                        top_two_margin: top.margin,
                        runner_up: top.second,
                        verdict: if tie { Verdict::NearTie } else { Verdict::Fail },
                    });
                }
            }
            texts += 1;
            answers.push(reference.tokens);
        }
        progress(Progress {
            done: index + 1,
            total: prompts.len(),
            acceptance_length: tallies[0].full.acceptance_length(),
        })?;
    }
    let drafters: Vec<_> = kinds
        .iter()
        .zip(tallies)
        .zip(differences)
        .map(|((&kind, tally), differences)| result(kind, texts, &tally, differences))
        .collect();
    Ok(LosslessReport {
        kind: "lossless".into(),
        passed: drafters.iter().all(DrafterResult::passed),
        identical: drafters.iter().all(|drafter| drafter.differences.is_empty()),
        prompts: texts,
        tolerance,
        plain_tokens,
        drafters,
        setting: options.setting.clone(),
        definitions: definitions(),
    })
}

fn result(kind: Kind, prompts: usize, tally: &Tally, differences: Vec<Difference>) -> DrafterResult {
    let all = tally.counted(true);
    let unproven = if all.rounds == 0 {
        Some("no verification round took place".into())
    } else if kind.must_accept() && all.accepted == 0 {
        Some("no draft was ever accepted, so keeping part of a block was not tested".into())
    } else {
        None
    };
    DrafterResult {
        drafter: kind,
        prompts,
        identical_prompts: prompts - differences.len(),
        near_ties: differences
            .iter()
            .filter(|difference| difference.verdict == Verdict::NearTie)
            .count(),
        rounds: all.rounds,
        drafted: all.drafted,
        accepted: all.accepted,
        acceptance_length: tally.full.acceptance_length(),
        differences,
        unproven,
    }
}

/// The scripted drafter of a kind for one prompt; nothing for the trained one.
fn scripted(
    kind: Kind,
    target: &dyn Target,
    drafting: &dyn Drafting,
    prompt: &[u32],
    reference: &Generation,
    seed: u64,
) -> Result<Option<Scripted>> {
    let script = match kind {
        Kind::Trained => return Ok(None),
        Kind::Random => Script::Random { seed },
        Kind::Right => Script::Right,
        Kind::Wrong => Script::Wrong,
    };
    // a random drafter knows nothing, and must not stop at an anchor that plain decoding did not have
    let truth = match kind {
        Kind::Random => Vec::new(),
        _ => [prompt, &reference.tokens].concat(),
    };
    let vocab = target.info().vocab_size;
    Ok(Some(Scripted::new(
        script,
        truth,
        drafting.block_size(),
        drafting.taps(),
        vocab,
    )?))
}

/// The plain model's two best tokens after `prompt` and `text`, reached by plain decoding's own steps.
fn plain_choice(target: &dyn Target, taps: &[usize], prompt: &[u32], text: &[u32]) -> Result<TopTwo> {
    let mut session = target.session(taps)?;
    let mut logits = prefill(session.as_mut(), prompt, &mut |_| Ok(()))?;
    for &token in text {
        let forward = session.forward(&[token], LogitRows::Last)?;
        logits = forward.logits.context("the target returned no logits")?;
    }
    top_two(&logits)
}

fn definitions() -> BTreeMap<String, String> {
    [
        (
            "identical",
            "every speculative text equals the plain text of the same prompt, token for token, with every drafter",
        ),
        (
            "passed",
            "identical but for near-ties, and every drafter took part: rounds > 0, and accepted > 0 for the trained and the \
             right one",
        ),
        (
            "top_two_margin",
            "plain decoding's best logit minus its second best at the first differing token",
        ),
        (
            "near_tie",
            "top_two_margin at most the tolerance, and the speculative token is plain decoding's second choice",
        ),
        ("rounds, drafted, accepted", "over all rounds, truncated ones included"),
        (
            "acceptance_length",
            "1 + accepted drafts / rounds, over rounds that were not truncated",
        ),
    ]
    .map(|(name, text)| (name.into(), text.into()))
    .into()
}
