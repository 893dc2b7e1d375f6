//! The rows of one verification: the whole block in one target pass, or row by row as plain decoding would.
//!
//! One pass is what makes speculation fast. Row by row costs as much as plain decoding, stops at the first draft that
//! does not stand, and has plain decoding's arithmetic to the last bit on every device: it tells a difference of logic
//! from one of rounding.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use dflash_model::{DraftSession, LogitRows, ProposalSlot, Session, VerifyStep};

/// The target's answer to `[anchor, d_1 .. d_K]`, one row at a time.
pub(crate) enum Rows<'s> {
    /// All rows came at once and none is kept yet.
    Block { step: VerifyStep<'s>, logits: Vec<f32> },
    /// Each row is run, and kept, when it is asked for.
    Single {
        session: &'s mut dyn Session,
        tokens: Vec<u32>,
        logits: Vec<f32>,
        taps: Vec<Tensor>,
    },
}

impl<'s> Rows<'s> {
    /// Starts verifying; `exact` is row by row.
    pub(crate) fn verify(
        session: &'s mut dyn Session,
        anchor: u32,
        drafts: &[ProposalSlot],
        exact: bool,
    ) -> Result<Self> {
        let tokens: Vec<u32> = std::iter::once(anchor)
            .chain(drafts.iter().map(|slot| slot.token))
            .collect();
        if exact {
            return Ok(Self::Single {
                session,
                tokens,
                logits: Vec::new(),
                taps: Vec::new(),
            });
        }
        let step = session.verify(&tokens).context("verify")?;
        let rows = step.logits.dim(0)?;
        ensure!(
            rows == tokens.len(),
            "verify of {} tokens returned {rows} rows",
            tokens.len()
        );
        let logits = step.logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        Ok(Self::Block { step, logits })
    }

    /// Logits, `[V]`, after row `row`; rows are asked for in order.
    pub(crate) fn logits(&mut self, row: usize) -> Result<&[f32]> {
        match self {
            Self::Block { step, logits } => {
                let vocab = logits.len() / step.rows;
                Ok(&logits[row * vocab..][..vocab])
            }
            Self::Single {
                session,
                tokens,
                logits,
                taps,
            } => {
                let forward = session.forward(&tokens[row..=row], LogitRows::Last).context("verify")?;
                let last = forward.logits.context("the target returned no logits")?;
                *logits = last.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
                taps.push(forward.taps);
                Ok(logits)
            }
        }
    }

    /// Keeps the first `n` rows and returns their taps, [n, n_taps * H].
    pub(crate) fn commit(self, n: usize) -> Result<Tensor> {
        match self {
            Self::Block { step, .. } => {
                let taps = step.taps.narrow(0, 0, n)?;
                step.commit(n)?;
                Ok(taps)
            }
            Self::Single { taps, .. } => {
                ensure!(taps.len() == n, "{} rows were run, {n} are to be kept", taps.len());
                Ok(Tensor::cat(&taps, 0)?)
            }
        }
    }
}

/// Taps of committed tokens on their way to the drafter: plain steps between drafts need not stop for it.
#[derive(Default)]
pub(crate) struct Owed(Vec<Tensor>);

impl Owed {
    pub(crate) fn add(&mut self, taps: Tensor) {
        self.0.push(taps);
    }

    /// Hands them over.
    pub(crate) fn pay(&mut self, draft: &mut dyn DraftSession) -> Result<()> {
        let taps = match self.0.as_slice() {
            [] => return Ok(()),
            [one] => one.clone(),
            many => Tensor::cat(many, 0)?,
        };
        self.0.clear();
        draft.extend(&taps).context("drafter context")
    }
}
