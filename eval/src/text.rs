//! A text under construction: when it ends, and how much room is left.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::speculate::{Emitted, Generation, Round, TimeSplit};

/// When to stop, and how to verify.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens to generate (>= 1), the first one after the prompt included.
    pub max_new: usize,
    /// Most tokens of prompt and text together: the target's `max_positions`.
    pub max_positions: usize,
    /// Tokens that end the text; the one that does is its last token.
    pub stop_ids: Vec<u32>,
    /// Whether a block is verified one row at a time, with the arithmetic of plain decoding to the last bit.
    pub exact_verify: bool,
}

impl Limits {
    /// Whole blocks, verified in one pass.
    pub fn new(max_new: usize, max_positions: usize, stop_ids: Vec<u32>) -> Self {
        Self {
            max_new,
            max_positions,
            stop_ids,
            exact_verify: false,
        }
    }
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// A stop token.
    Stop,
    /// `max_new` tokens.
    Budget,
    /// The target's positions are used up.
    Context,
}

/// The text under construction and the one rule that ends it.
pub(crate) struct Text<'l> {
    /// What was written so far.
    pub(crate) tokens: Vec<u32>,
    /// Why it ended, once it did.
    pub(crate) finish: Option<Finish>,
    budget: usize,
    limits: &'l Limits,
}

impl<'l> Text<'l> {
    pub(crate) fn new(seen: usize, prompt: &[u32], limits: &'l Limits) -> Result<Self> {
        ensure!(
            !prompt.is_empty(),
            "an empty prompt: the target needs at least one token"
        );
        ensure!(
            limits.max_new >= 1,
            "max_new 0: expected at least one token to generate"
        );
        let used = seen + prompt.len();
        ensure!(
            used < limits.max_positions,
            "{used} tokens of prompt leave no room in the target's {} positions",
            limits.max_positions
        );
        Ok(Self {
            tokens: Vec::new(),
            finish: None,
            budget: limits.max_new.min(limits.max_positions - used),
            limits,
        })
    }

    /// Tokens that may still be added, >= 1 while unfinished.
    pub(crate) fn room(&self) -> usize {
        self.budget - self.tokens.len()
    }

    /// The last token. The prefill always leaves one.
    pub(crate) fn last(&self) -> u32 {
        self.tokens[self.tokens.len() - 1]
    }

    /// Adds a token; it may be the last.
    pub(crate) fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.finish = if self.limits.stop_ids.contains(&token) {
            Some(Finish::Stop)
        } else if self.room() > 0 {
            None
        } else if self.budget == self.limits.max_new {
            Some(Finish::Budget)
        } else {
            Some(Finish::Context)
        };
    }

    /// The last `count` tokens as an observer sees them.
    pub(crate) fn news(&self, count: usize, accepted: usize) -> Emitted<'_> {
        Emitted {
            tokens: &self.tokens[self.tokens.len() - count..],
            accepted,
        }
    }

    pub(crate) fn finished(self, rounds: Vec<Round>, time: TimeSplit) -> Generation {
        Generation {
            tokens: self.tokens,
            finish: self.finish.unwrap_or(Finish::Budget),
            rounds,
            time,
        }
    }
}
