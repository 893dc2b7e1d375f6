//! Provisional: gradients of one pass.

/// Gradients by variable name.
pub type Gradients = std::collections::BTreeMap<String, candle_core::Tensor>;
