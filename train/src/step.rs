//! Provisional: the sums of one step.

/// Sums and counts of one or more passes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepSums {
    /// Sum of weight x cross-entropy.
    pub base_loss_sum: f64,
    /// Sum of slot weights.
    pub weight_sum: f64,
    /// Sum of weight x selector cross-entropy, over slots whose gold token is a candidate.
    pub selector_loss_sum: f64,
    /// Sum of those weights.
    pub selector_weight_sum: f64,
    /// Correct first choices of each slot 1..B-1.
    pub slot_correct: Vec<u64>,
    /// Supervised slots of each.
    pub slot_total: Vec<u64>,
    /// Slots whose gold token is a candidate.
    pub recall_hits: u64,
    /// Of those, where the selector picks it.
    pub selector_correct: u64,
    /// Of those, where the unary choice is right.
    pub unary_correct_on_hits: u64,
    /// Supervised slots.
    pub slots: u64,
    /// Context tokens.
    pub tokens: u64,
}
