//! The trainable variables of a drafter, by name and in name order.
//!
//! Variables carry the published tensor names, so a checkpoint loads elsewhere unrenamed. The one exception are
//! factored codebooks: A = E Wa^T and B = E' Wb, with E the target's frozen embedding and E' its head, are trained
//! as Wa [r, H] and Wb [H, r] and multiplied out on publication (about 2 H r parameters instead of 2 V r).

use crate::drafter_config::DrafterConfig;
use crate::init;
use crate::target::TargetHead;
use candle_core::{Device, Result, Tensor, Var};
use std::collections::BTreeMap;

/// Published names of the two codebooks.
pub const PREDECESSOR_CODEBOOK: &str = "candidate_selector.predecessor_codebook";
/// See [`PREDECESSOR_CODEBOOK`].
pub const SUCCESSOR_CODEBOOK: &str = "candidate_selector.successor_codebook";
/// Names of their factors, [r, H] and [H, r].
pub const PREDECESSOR_FACTOR: &str = "candidate_selector.predecessor_factor";
/// See [`PREDECESSOR_FACTOR`].
pub const SUCCESSOR_FACTOR: &str = "candidate_selector.successor_factor";

/// How the selector's codebooks are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codebooks {
    /// As products with the target's frozen matrices.
    Factored,
    /// As two free [V, r] tables.
    Free,
}

/// Name-sorted f32 variables.
#[derive(Debug)]
pub struct Params {
    vars: BTreeMap<String, Var>,
}

impl Params {
    /// Fresh variables: matrices N(0, 0.02), norms 1, convolution the identity with zero dynamics, successor zero.
    ///
    /// A fresh DFlash 2 therefore equals the DFlash inside it bit for bit. Values depend on (seed, name) only.
    pub fn init(config: &DrafterConfig, codebooks: Codebooks, seed: u64, device: &Device) -> Result<Self> {
        let mut vars = BTreeMap::new();
        for (name, shape) in trainable_shapes(config, codebooks) {
            let values = initial_values(&name, &shape, seed);
            vars.insert(name, Var::from_tensor(&Tensor::from_vec(values, shape, device)?)?);
        }
        Ok(Self { vars })
    }

    /// All variables in name order.
    pub fn vars(&self) -> &BTreeMap<String, Var> {
        &self.vars
    }

    /// Overwrites one variable.
    ///
    /// # Errors
    /// When there is no such variable or the shape differs.
    pub fn set(&self, name: &str, value: &Tensor) -> Result<()> {
        let Some(var) = self.vars.get(name) else {
            candle_core::bail!("{name}: not a variable of this drafter")
        };
        if var.shape() != value.shape() {
            candle_core::bail!("{name}: expected shape {:?}, came {:?}", var.shape(), value.shape())
        }
        var.set(&value.to_dtype(var.dtype())?.contiguous()?)
    }

    /// f32 tensors under exactly the published names, codebooks multiplied out.
    ///
    /// # Errors
    /// When the head's sizes do not fit the factors.
    pub fn published(&self, head: &TargetHead) -> Result<BTreeMap<String, Tensor>> {
        let mut tensors = BTreeMap::new();
        for (name, var) in &self.vars {
            let value = var.as_tensor().detach();
            match name.as_str() {
                PREDECESSOR_FACTOR => {
                    let table = head.embed.to_dtype(value.dtype())?.matmul(&value.t()?)?;
                    tensors.insert(PREDECESSOR_CODEBOOK.to_string(), table);
                }
                SUCCESSOR_FACTOR => {
                    let table = head.head.to_dtype(value.dtype())?.matmul(&value)?;
                    tensors.insert(SUCCESSOR_CODEBOOK.to_string(), table);
                }
                _ => {
                    tensors.insert(name.clone(), value);
                }
            }
        }
        Ok(tensors)
    }
}

/// Names and shapes of the variables: the published list, with the codebooks replaced by their factors if factored.
fn trainable_shapes(config: &DrafterConfig, codebooks: Codebooks) -> Vec<(String, Vec<usize>)> {
    let h = config.hidden_size;
    let replace = |(name, shape): (String, Vec<usize>)| match (codebooks, name.as_str(), shape.last()) {
        (Codebooks::Factored, PREDECESSOR_CODEBOOK, Some(r)) => (PREDECESSOR_FACTOR.to_string(), vec![*r, h]),
        (Codebooks::Factored, SUCCESSOR_CODEBOOK, Some(r)) => (SUCCESSOR_FACTOR.to_string(), vec![h, *r]),
        _ => (name, shape),
    };
    config.tensor_shapes().into_iter().map(replace).collect()
}

fn initial_values(name: &str, shape: &[usize], seed: u64) -> Vec<f32> {
    /// Standard deviation of every fresh matrix, the family's `initializer_range`.
    const DEVIATION: f64 = 0.02;
    let count = shape.iter().product();
    if name.ends_with("base_kernel") {
        // [side, tap, channel]: tap 0 passes the current slot through.
        let (taps, h) = (shape[1], shape[2]);
        (0..count)
            .map(|i| if (i / h).is_multiple_of(taps) { 1.0 } else { 0.0 })
            .collect()
    } else if shape.len() == 1 {
        vec![1.0; count]
    } else if name.ends_with("kernel_projection.weight") || name == SUCCESSOR_CODEBOOK || name == SUCCESSOR_FACTOR {
        vec![0.0; count]
    } else {
        init::normal(init::named(seed, name), count, DEVIATION)
    }
}
