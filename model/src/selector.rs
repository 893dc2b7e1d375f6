//! DFlash 2's candidate selector: scores of pairs of neighbouring tokens.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, Var};

use crate::drafter::Source;
use crate::ops::{self, Weight, linear};
use crate::params::{PREDECESSOR_CODEBOOK, PREDECESSOR_FACTOR, SUCCESSOR_CODEBOOK, SUCCESSOR_FACTOR};
use crate::target::TargetHead;

/// DFlash 2's candidate selector.
#[derive(Debug, Clone)]
pub struct CandidateSelector {
    /// Candidates a slot, k.
    pub top_k: usize,
    pub(crate) hidden_projection: Weight, // [r, H]
    pub(crate) codebooks: CodebookTensors,
}

#[derive(Debug, Clone)]
pub(crate) enum CodebookTensors {
    Free { predecessor: Tensor, successor: Tensor },     // [V, r] each
    Factored { predecessor: Tensor, successor: Tensor }, // [r, H], [H, r]
}

/// Pair scores of a training pass.
#[derive(Debug)]
pub struct Edges {
    /// [R, k], differentiable.
    pub scores: Tensor,
    /// What stands in for free codebooks in the graph; empty when they are factored.
    pub touched: Vec<TouchedRows>,
}

/// The rows of a free codebook that a pass uses, as a variable of their own, so that no [V, r] gradient is ever formed.
#[derive(Debug)]
pub struct TouchedRows {
    /// The codebook's name.
    pub name: &'static str,
    /// Rows of the codebook, ascending.
    pub ids: Vec<u32>,
    /// Their numbers, [ids, r].
    pub rows: Var,
}

impl TouchedRows {
    /// Of the rows `tokens`, with the place of each token among them.
    fn new(name: &'static str, codebook: &Tensor, tokens: &[u32]) -> Result<(Self, Vec<u32>)> {
        let mut ids = tokens.to_vec();
        ids.sort_unstable();
        ids.dedup();
        let places = tokens.iter().map(|token| ids.partition_point(|id| id < token) as u32);
        let places = places.collect();
        let chosen = Tensor::from_slice(&ids, ids.len(), codebook.device())?;
        let rows = Var::from_tensor(&codebook.detach().index_select(&chosen, 0)?)?;
        Ok((Self { name, ids, rows }, places))
    }
}

impl CandidateSelector {
    pub(crate) fn load(top_k: usize, source: &Source<'_>) -> Result<Self> {
        let codebooks = match (source.optional(PREDECESSOR_FACTOR), source.optional(SUCCESSOR_FACTOR)) {
            (Some(predecessor), Some(successor)) => CodebookTensors::Factored { predecessor, successor },
            _ => CodebookTensors::Free {
                predecessor: source.tensor(PREDECESSOR_CODEBOOK)?,
                successor: source.tensor(SUCCESSOR_CODEBOOK)?,
            },
        };
        let hidden_projection = source.weight("candidate_selector.hidden_projection.weight")?;
        Ok(Self {
            top_k,
            hidden_projection,
            codebooks,
        })
    }

    /// Whether the codebooks are still products with the target's matrices, which they then need as tensors.
    pub(crate) fn is_factored(&self) -> bool {
        matches!(self.codebooks, CodebookTensors::Factored { .. })
    }

    /// Pair scores `<A[p] * P h, B[c]>` of k candidates a row, differentiable.
    ///
    /// `hidden`: [R, H] post-norm; `predecessors`: R tokens; `candidates`: R * k tokens.
    pub fn edges(
        &self,
        hidden: &Tensor,
        predecessors: &[u32],
        candidates: &Arc<Vec<u32>>,
        head: &TargetHead,
    ) -> Result<Edges> {
        let z = self.project(hidden)?;
        let CodebookTensors::Free { predecessor, successor } = &self.codebooks else {
            let scores = self.edges_of(&z, predecessors, candidates, head)?;
            return Ok(Edges {
                scores,
                touched: Vec::new(),
            });
        };
        let rows = z.dim(0)?;
        let (before, places) = TouchedRows::new(PREDECESSOR_CODEBOOK, predecessor, predecessors)?;
        let (after, candidates) = TouchedRows::new(SUCCESSOR_CODEBOOK, successor, candidates)?;
        let places = Tensor::from_vec(places, rows, z.device())?;
        let x = (before.rows.index_select(&places, 0)? * z)?;
        let k = candidates.len() / rows.max(1);
        Ok(Edges {
            scores: ops::gathered_dot(&x, &after.rows, &Arc::new(candidates), k)?,
            touched: vec![before, after],
        })
    }

    /// P h of every row, [R, r]: what [`Self::edges_of`] starts from.
    pub(crate) fn project(&self, hidden: &Tensor) -> Result<Tensor> {
        self.hidden_projection.apply(hidden)
    }

    /// As [`Self::edges`], of projected hidden rows `z` [R, r]; no gradient reaches a free codebook.
    pub(crate) fn edges_of(
        &self,
        z: &Tensor,
        predecessors: &[u32],
        candidates: &Arc<Vec<u32>>,
        head: &TargetHead,
    ) -> Result<Tensor> {
        let rows = z.dim(0)?;
        let k = candidates.len() / rows.max(1);
        let predecessors = Tensor::from_slice(predecessors, rows, z.device())?;
        match &self.codebooks {
            CodebookTensors::Free { predecessor, successor } => {
                let x = (predecessor.detach().index_select(&predecessors, 0)? * z)?;
                ops::gathered_dot(&x, &successor.detach(), candidates, k)
            }
            CodebookTensors::Factored { predecessor, successor } => {
                let rows_of = head.embed.index_select(&predecessors, 0)?.to_dtype(DType::F32)?;
                let x = (linear(&rows_of, predecessor)? * z)?;
                // B[c] . x = (E'[c] Wb) . x = E'[c] . (Wb x): no codebook row is ever formed.
                ops::gathered_dot(&linear(&x, successor)?, &head.head, candidates, k)
            }
        }
    }
}
