//! Provisional: the sums of one step, as the drafter's loss reports them.

/// Sums and counts of one or more passes; ratios are formed only when printed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepSums {
    /// Sum of w * CE over supervised slots, nats.
    pub base_loss: f64,
    /// Sum of w over supervised slots.
    pub weight: f64,
    /// Sum of w * selector CE over hits, nats.
    pub selector_loss: f64,
    /// Sum of w over hits.
    pub selector_weight: f64,
    /// Supervised slots by slot index 0..B (index 0 stays 0).
    pub slot_total: Vec<u64>,
    /// Of these, where the best unary token is the label.
    pub slot_correct: Vec<u64>,
    /// Slots whose label is among the k best.
    pub hits: u64,
    /// Of the hits, where the teacher-forced selector picks the label.
    pub selector_correct: u64,
    /// Of the hits, where the best unary token is the label.
    pub unary_correct_on_hits: u64,
    /// Context rows passed through.
    pub context_rows: u64,
}

impl StepSums {
    /// Supervised slots.
    pub fn slots(&self) -> u64 {
        self.slot_total.iter().sum()
    }
}
