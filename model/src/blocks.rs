//! Training blocks: `[anchor, MASK x (B - 1)]` at absolute positions over a packed context.
//!
//! Visibility is a rule, not a matrix: block n of a sample sees the sample's context rows strictly before its
//! anchor (within the layer's window) and its own B slots, nothing else.

/// One block and where its context lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Row of the packed context that holds position 0 of the block's sample.
    pub context_start: usize,
    /// Position of the anchor in its sample = number of context rows visible (before any window).
    pub anchor: usize,
}

/// N blocks of B slots over a packed context of T rows (several samples one after another).
#[derive(Debug, Clone, PartialEq)]
pub struct Blocks {
    /// Slots of a block, B.
    pub block_size: usize,
    /// The blocks, N, grouped by sample, anchors ascending within one.
    pub blocks: Vec<Block>,
    /// Anchor tokens, N. Slots 1..B of the input are the mask token.
    pub anchors: Vec<u32>,
    /// Position of each context row in its sample, T.
    pub context_positions: Vec<u32>,
    /// Label of every slot, N x B, slot-major within a block: the data token at anchor + slot (0 where not supervised).
    pub labels: Vec<u32>,
    /// Whether a slot is supervised, N x B: never slot 0, never past the sample's end or outside its response.
    pub supervised: Vec<bool>,
}
