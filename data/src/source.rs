//! Where training takes its taps from: stored ones, or the target itself running in the same process.
//!
//! Both give bf16 rows, rounded once from what the target computed, so that a run may move from one to the other
//! without a bit changing.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use dflash_model::Target;
use half::bf16;

use crate::capture::{check_layers, taps_of_example};
use crate::taps::TapStore;
use crate::tokens::Example;

/// One sequence with its taps.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Token ids, [T].
    pub tokens: Vec<u32>,
    /// Whether each token was written by the target, [T].
    pub loss_mask: Vec<bool>,
    /// Tap states, [T, n_taps * H], row-major.
    pub taps: Vec<bf16>,
    /// Length of a tap row, n_taps * H.
    pub tap_width: usize,
}

/// Random access to samples.
pub enum TapSource {
    /// Taps captured before.
    Stored(TapStore),
    /// Taps computed when asked for; nothing touches the disk.
    Online {
        /// The frozen target.
        target: Arc<dyn Target>,
        /// Tap ids, strictly increasing.
        layers: Vec<usize>,
        /// The sequences.
        examples: Vec<Example>,
    },
}

impl TapSource {
    /// A source that runs the target.
    ///
    /// # Errors
    /// When a tap id is not below N - 1, the ids are not strictly increasing, or there is no example.
    pub fn online(target: Arc<dyn Target>, layers: Vec<usize>, examples: Vec<Example>) -> Result<Self> {
        check_layers(&layers, target.info().num_layers)?;
        ensure!(!examples.is_empty(), "no examples to take taps of");
        Ok(Self::Online {
            target,
            layers,
            examples,
        })
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        match self {
            Self::Stored(store) => store.len(),
            Self::Online { examples, .. } => examples.len(),
        }
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of every sample, in order: what [`crate::batch::plan_epoch`] plans with.
    pub fn lengths(&self) -> Vec<usize> {
        match self {
            Self::Stored(store) => store.lengths(),
            Self::Online { examples, .. } => examples.iter().map(|example| example.tokens.len()).collect(),
        }
    }

    /// Length of a tap row, n_taps * H.
    pub fn tap_width(&self) -> usize {
        match self {
            Self::Stored(store) => store.tap_width(),
            Self::Online { target, layers, .. } => layers.len() * target.info().hidden_size,
        }
    }

    /// Tokens and mask of sample `i`, without its taps.
    pub fn example(&self, i: usize) -> Result<Example> {
        match self {
            Self::Stored(store) => store.example(i),
            Self::Online { examples, .. } => examples
                .get(i)
                .cloned()
                .with_context(|| format!("sample {i} of {}", examples.len())),
        }
    }

    /// Sample `i` with its taps.
    pub fn sample(&self, i: usize) -> Result<Sample> {
        match self {
            Self::Stored(store) => Ok(store.get(i)?.to_sample()),
            Self::Online {
                target,
                layers,
                examples,
            } => {
                let example = examples
                    .get(i)
                    .with_context(|| format!("sample {i} of {}", examples.len()))?;
                Ok(Sample {
                    taps: taps_of_example(target.as_ref(), layers, i, example)?,
                    tokens: example.tokens.clone(),
                    loss_mask: example.loss_mask.clone(),
                    tap_width: layers.len() * target.info().hidden_size,
                })
            }
        }
    }
}
