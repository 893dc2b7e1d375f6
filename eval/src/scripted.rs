//! Drafters that follow a script: always right, always wrong, random, or right for a given run each round.
//!
//! They prove that the output of speculative decoding does not depend on the drafter, and give acceptance counts
//! that are known in advance. They tell where they are by the context rows they were fed, nothing else, so a loop that
//! feeds one row too many or too few makes the right drafter wrong.

use candle_core::{Result, Tensor, bail};
use dflash_model::{DraftSession, Drafting, Proposal, ProposalSlot, Sampling};

use crate::random::below;

/// What a scripted drafter proposes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Script {
    /// The recorded continuation: every draft is accepted.
    Right,
    /// A token that is certainly not the recorded one: no draft is accepted.
    Wrong,
    /// Tokens drawn from the whole vocabulary, a function of seed, position and slot.
    Random {
        /// Stream of the draws.
        seed: u64,
    },
    /// Each slot is right with this chance, whatever the others are: conditional acceptance is the same at every position.
    Chance {
        /// Stream of the draws.
        seed: u64,
        /// Chance in millionths.
        millionths: u32,
    },
    /// Round j is right for `runs[j % runs.len()]` slots and wrong after them.
    Runs(Vec<usize>),
}

/// A drafter for one sequence whose continuation is known.
#[derive(Debug, Clone)]
pub struct Scripted {
    script: Script,
    truth: Vec<u32>,
    block_size: usize,
    taps: Vec<usize>,
    vocab_size: usize,
}

impl Scripted {
    /// A drafter of blocks of `block_size` slots (anchor included) over ids below `vocab_size`.
    ///
    /// `truth` is the whole sequence, prompt and text; only [`Script::Random`] works without the text.
    ///
    /// # Errors
    /// When a block has no slot to draft, the vocabulary has fewer than two tokens, or a run list is empty.
    pub fn new(script: Script, truth: Vec<u32>, block_size: usize, taps: &[usize], vocab_size: usize) -> Result<Self> {
        if block_size < 2 {
            bail!("scripted drafter: block size {block_size}, expected at least 2")
        }
        if vocab_size < 2 {
            bail!("scripted drafter: vocabulary of {vocab_size}, expected at least 2 tokens")
        }
        if script == Script::Runs(Vec::new()) {
            bail!("scripted drafter: an empty list of runs")
        }
        Ok(Self {
            script,
            truth,
            block_size,
            taps: taps.to_vec(),
            vocab_size,
        })
    }

    /// The token of slot `slot` (0-based among the drafted) of round `round`, at `position` of the sequence.
    fn draft(&self, round: usize, position: usize, slot: usize) -> u32 {
        // past the recorded end nothing is compared, so any token will do
        let truth = self.truth.get(position).copied().unwrap_or(0);
        let wrong = (truth + 1) % self.vocab_size as u32;
        match &self.script {
            Script::Right => truth,
            Script::Random { seed } => below(*seed, (position * self.block_size + slot) as u64, self.vocab_size) as u32,
            Script::Chance { seed, millionths } => {
                let drawn = below(*seed, (position * self.block_size + slot) as u64, 1_000_000);
                if drawn < *millionths as usize { truth } else { wrong }
            }
            Script::Runs(runs) if slot < runs[round % runs.len()] => truth,
            Script::Wrong | Script::Runs(_) => wrong,
        }
    }
}

impl Drafting for Scripted {
    fn block_size(&self) -> usize {
        self.block_size
    }

    fn taps(&self) -> &[usize] {
        &self.taps
    }

    fn session(&self) -> Result<Box<dyn DraftSession + '_>> {
        Ok(Box::new(ScriptedSession {
            drafter: self,
            len: 0,
            round: 0,
        }))
    }
}

/// A scripted drafter that takes as long as a real one: the real one proposes too, and its tokens are thrown away.
pub struct Shadow<'d> {
    /// Whose tokens count.
    pub script: Scripted,
    /// Whose time counts.
    pub real: &'d dyn Drafting,
}

impl Drafting for Shadow<'_> {
    fn block_size(&self) -> usize {
        self.script.block_size.min(self.real.block_size())
    }

    fn taps(&self) -> &[usize] {
        self.real.taps()
    }

    fn session(&self) -> Result<Box<dyn DraftSession + '_>> {
        Ok(Box::new(ShadowSession {
            script: self.script.session()?,
            real: self.real.session()?,
        }))
    }
}

struct ShadowSession<'d> {
    script: Box<dyn DraftSession + 'd>,
    real: Box<dyn DraftSession + 'd>,
}

impl DraftSession for ShadowSession<'_> {
    fn len(&self) -> usize {
        self.script.len()
    }

    fn extend(&mut self, taps: &Tensor) -> Result<()> {
        self.script.extend(taps)?;
        self.real.extend(taps)
    }

    fn propose(&mut self, anchor: u32, width: usize, sampling: &mut Sampling<'_>) -> Result<Proposal> {
        self.real.propose(anchor, width, sampling)?;
        self.script.propose(anchor, width, sampling)
    }
}

struct ScriptedSession<'d> {
    drafter: &'d Scripted,
    len: usize,
    round: usize,
}

impl DraftSession for ScriptedSession<'_> {
    fn len(&self) -> usize {
        self.len
    }

    fn extend(&mut self, taps: &Tensor) -> Result<()> {
        self.len += taps.dim(0)?;
        Ok(())
    }

    fn propose(&mut self, _: u32, width: usize, _: &mut Sampling<'_>) -> Result<Proposal> {
        let drafter = self.drafter;
        if width == 0 || width >= drafter.block_size {
            bail!(
                "scripted drafter: width {width}, expected 1..={}",
                drafter.block_size - 1
            )
        }
        let slot = |slot| ProposalSlot {
            token: drafter.draft(self.round, self.len + 1 + slot, slot),
            candidates: Vec::new(),
            q: Vec::new(),
        };
        let slots = (0..width).map(slot).collect();
        self.round += 1;
        Ok(Proposal { slots })
    }
}
