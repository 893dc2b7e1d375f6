//! Drafting as the decoding loop sees it: a session that is fed taps and proposes a block.
//!
//! The drafter implements it; so do the scripted drafters of the tests (always right, always wrong).

use candle_core::{Result, Tensor};

/// Something that proposes blocks for one target.
pub trait Drafting: Send + Sync {
    /// Slots of a block, anchor included: B. A proposal has at most B - 1 tokens.
    fn block_size(&self) -> usize;

    /// Target layers whose outputs [`DraftSession::extend`] expects, strictly increasing.
    fn taps(&self) -> &[usize];

    /// Starts an empty sequence.
    fn session(&self) -> Result<Box<dyn DraftSession + '_>>;
}

/// One sequence being drafted: the context that the target has committed.
pub trait DraftSession {
    /// Context rows seen so far; the anchor of the next proposal stands at this position.
    fn len(&self) -> usize;

    /// Whether no context has been fed yet.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends tap states of the next committed positions, [m, n_taps * H]. m may be 0.
    fn extend(&mut self, taps: &Tensor) -> Result<()>;

    /// Proposes up to `width` tokens (1 <= width <= B - 1) that follow `anchor`, the last committed token,
    /// whose own taps are not known yet.
    fn propose(&mut self, anchor: u32, width: usize, sampling: &mut Sampling<'_>) -> Result<Proposal>;
}

/// How a proposal is drawn.
pub enum Sampling<'r> {
    /// The walk takes the best-scored candidate at each slot.
    Greedy,
    /// The walk samples at `temperature` (> 0); `uniform` yields numbers in [0, 1) from the drafting stream.
    Random {
        /// Softmax temperature of the draft side; nothing else is applied to it.
        temperature: f64,
        /// The drafting stream, independent of the acceptance stream.
        uniform: &'r mut dyn FnMut() -> f64,
    },
}

/// A proposed continuation.
#[derive(Debug, Clone, PartialEq)]
pub struct Proposal {
    /// One entry a drafted token.
    pub slots: Vec<ProposalSlot>,
}

impl Proposal {
    /// The drafted tokens in order.
    pub fn tokens(&self) -> Vec<u32> {
        self.slots.iter().map(|slot| slot.token).collect()
    }
}

/// One drafted token with the distribution that it was drawn from.
#[derive(Debug, Clone, PartialEq)]
pub struct ProposalSlot {
    /// The drafted token.
    pub token: u32,
    /// Candidate ids of the slot, best unary logit first (empty without a selector).
    pub candidates: Vec<u32>,
    /// Realised probabilities of `candidates`, summing to 1; empty when the token is deterministic (one-hot q).
    pub q: Vec<f32>,
}
