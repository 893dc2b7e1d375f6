//! Drafters side by side on the same prompts: each one's report, and paired differences to the first.

use anyhow::{Context, Result, ensure};
use dflash_model::{Drafting, Target};
use serde::{Deserialize, Serialize};

use crate::acceptance::Counts;
use crate::bootstrap::paired_interval;
use crate::evaluate::{Options, Progress, evaluate};
use crate::measure::counts_of;
use crate::prompts::Prompts;
use crate::report::Report;

/// Several drafters on the same prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompareReport {
    /// Always `compare`.
    pub kind: String,
    /// One report a drafter, in the order given.
    pub reports: Vec<Report>,
    /// Each later drafter against the first.
    pub differences: Vec<Paired>,
}

/// One drafter's acceptance length minus the first's, over prompts on which both have counted rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Paired {
    /// Which drafter, index into `reports`.
    pub drafter: usize,
    /// Difference of the micro acceptance lengths.
    pub acceptance_length: Option<f64>,
    /// Its 95 % interval: prompts drawn with replacement, the same for both.
    pub ci95: Option<[f64; 2]>,
    /// Prompts on which it is longer, equal, shorter.
    pub longer_equal_shorter: [usize; 3],
}

/// Measures drafters one after the other and compares them.
///
/// # Errors
/// On fewer than two drafters, and as [`evaluate`].
pub fn compare(
    target: &dyn Target,
    drafters: &[(&dyn Drafting, Options)],
    prompts: &dyn Prompts,
    progress: &mut dyn FnMut(usize, Progress) -> Result<()>,
) -> Result<CompareReport> {
    ensure!(
        drafters.len() >= 2,
        "{} drafters: expected at least two to compare",
        drafters.len()
    );
    let mut reports = Vec::new();
    for (index, (drafting, options)) in drafters.iter().enumerate() {
        let report = evaluate(target, *drafting, prompts, options, &mut |state| progress(index, state))
            .with_context(|| format!("drafter {}", options.setting.drafter))?;
        reports.push(report);
    }
    let counts: Vec<Vec<Counts>> = reports.iter().map(by_conversation).collect();
    let differences = (1..reports.len())
        .map(|drafter| paired(drafter, &counts[0], &counts[drafter], reports[0].seed))
        .collect();
    Ok(CompareReport {
        kind: "compare".into(),
        reports,
        differences,
    })
}

fn paired(drafter: usize, first: &[Counts], second: &[Counts], seed: u64) -> Paired {
    let (mut a, mut b, mut signs) = (Counts::default(), Counts::default(), [0; 3]);
    for (x, y) in first.iter().zip(second).filter(|(x, y)| x.rounds > 0 && y.rounds > 0) {
        a.merge(x);
        b.merge(y);
        let order = y.acceptance_length().partial_cmp(&x.acceptance_length());
        signs[match order {
            Some(std::cmp::Ordering::Greater) => 0,
            Some(std::cmp::Ordering::Less) => 2,
            _ => 1,
        }] += 1;
    }
    Paired {
        drafter,
        acceptance_length: b.acceptance_length().zip(a.acceptance_length()).map(|(b, a)| b - a),
        ci95: paired_interval(first, second, seed),
        longer_equal_shorter: signs,
    }
}

/// Counted rounds of every conversation.
fn by_conversation(report: &Report) -> Vec<Counts> {
    let last = report
        .per_prompt
        .iter()
        .map(|result| result.prompt + 1)
        .max()
        .unwrap_or(0);
    let mut counts = vec![Counts::default(); last];
    for result in &report.per_prompt {
        counts[result.prompt].merge(&counts_of(result, report.include_truncated));
    }
    counts
}
