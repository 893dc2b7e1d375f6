//! Acceptance over recorded text: no target pass, only the drafter.
//!
//! The first anchor is the first token of the response. Each round drafts from its anchor's context, compares with
//! the recorded tokens, and the next anchor is a + 1 further on, as in generation. When the record is the target's
//! own greedy text under the same arithmetic, the rounds equal those of generation to the last one; on any other
//! text the numbers answer a different question, and whoever prints them must say «replay».

use std::ops::Range;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use dflash_model::{Drafting, Sampling};

use crate::speculate::{Round, leading_run};

/// One recorded sequence.
#[derive(Debug, Clone)]
pub struct Recording<'r> {
    /// Prompt and response, T.
    pub tokens: &'r [u32],
    /// Where the response lies in `tokens`: see [`response_range`].
    pub response: Range<usize>,
    /// The target's taps at least of every position before the response's last, [>= end - 1, n_taps * H].
    pub taps: &'r Tensor,
    /// Whether the response ends with a stop token (else it was cut by a length).
    pub stopped: bool,
    /// The budget that the response was generated under, if known; narrows the last rounds as generation does.
    pub max_new: Option<usize>,
}

/// Drafts through `recording` in blocks of at most `width` drafted tokens and returns the rounds.
///
/// # Errors
/// On a recording that contradicts itself, on a proposal wider than asked, and on whatever the drafter reports.
pub fn replay(drafting: &dyn Drafting, recording: &Recording<'_>, width: usize) -> Result<Vec<Round>> {
    check(recording)?;
    let most = drafting.block_size() - 1;
    ensure!((1..=most).contains(&width), "draft width {width}: expected 1..={most}");
    let Range { start, end } = recording.response;
    let mut draft = drafting.session()?;
    draft
        .extend(&recording.taps.narrow(0, 0, start)?)
        .context("drafter context")?;
    let mut rounds = Vec::new();
    let mut anchor = start;
    while anchor + 1 < end {
        let left = end - anchor - 1;
        // a stopped text could have gone on: only its budget, not its end, was known when it was drafted
        let room = match (recording.stopped, recording.max_new) {
            (false, _) => left,
            (true, None) => usize::MAX,
            (true, Some(max_new)) => max_new - (anchor + 1 - start),
        };
        let asked = width.min(room - 1);
        let drafts = match asked {
            0 => Vec::new(),
            _ => draft
                .propose(recording.tokens[anchor], asked, &mut Sampling::Greedy)
                .context("draft")?
                .tokens(),
        };
        ensure!(
            drafts.len() <= asked,
            "the drafter proposed {} tokens where at most {asked} were asked for",
            drafts.len()
        );
        let accepted = leading_run(&drafts, &recording.tokens[anchor + 1..end]);
        let emitted = left.min(accepted + 1);
        rounds.push(Round {
            anchor,
            drafted: drafts.len(),
            accepted,
            emitted,
            truncated: asked < width || emitted <= accepted,
        });
        draft
            .extend(&recording.taps.narrow(0, anchor, emitted)?)
            .context("drafter context")?;
        anchor += emitted;
    }
    Ok(rounds)
}

/// The one run of supervised tokens in a loss mask.
///
/// # Errors
/// When nothing is supervised, or the supervised tokens are not one run.
pub fn response_range(loss_mask: &[bool]) -> Result<Range<usize>> {
    let Some(start) = loss_mask.iter().position(|&supervised| supervised) else {
        anyhow::bail!("loss mask of {} tokens supervises none", loss_mask.len())
    };
    let length = loss_mask[start..].iter().take_while(|&&supervised| supervised).count();
    ensure!(
        loss_mask[start + length..].iter().all(|&supervised| !supervised),
        "loss mask supervises a second run after token {}: expected one response a record",
        start + length
    );
    Ok(start..start + length)
}

fn check(recording: &Recording<'_>) -> Result<()> {
    let Range { start, end } = recording.response;
    let tokens = recording.tokens.len();
    ensure!(
        0 < start && start < end && end <= tokens,
        "response {start}..{end} of {tokens} tokens: expected a non-empty range after a prompt"
    );
    let rows = recording.taps.dim(0)?;
    ensure!(
        rows + 1 >= end,
        "{rows} tap rows for a response that ends at {end}: expected at least {}",
        end - 1
    );
    if let Some(max_new) = recording.max_new {
        ensure!(
            end - start <= max_new,
            "response of {} tokens: its budget was {max_new}",
            end - start
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_is_one_run_of_supervised_tokens() {
        let range = |mask: &str| response_range(&mask.chars().map(|c| c == '1').collect::<Vec<_>>());
        assert_eq!(range("001110").unwrap(), 2..5);
        assert_eq!(range("1").unwrap(), 0..1);
        assert!(range("00").is_err());
        let two = range("0101").unwrap_err();
        assert!(two.to_string().contains("after token 2"), "{two}");
    }
}
