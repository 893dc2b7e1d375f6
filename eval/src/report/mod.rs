//! What a run measured, as JSON. Every number's definition travels with it. The same as CSV and as a page: [`csv()`],
//! [`html()`].

mod csv;
mod definitions;
mod derived;
mod html;
#[cfg(test)]
mod rendering_tests;
mod write;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use csv::{COLUMNS, csv};
pub use definitions::{DEFINITIONS, definitions};
pub use html::html;
pub use write::{prepare_output, write_json, write_text};

use crate::acceptance::Counts;
use crate::sampling::SamplingConfig;
use crate::speculate::{Finish, TimeSplit};

/// Under which circumstances a report was made.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Setting {
    /// Target folder.
    pub target: String,
    /// Drafter folder.
    pub drafter: String,
    /// Whether the drafter's selector was left out on purpose.
    pub without_selector: bool,
    /// Hash of the target's config and weights, hexadecimal.
    pub target_hash: String,
    /// Hash of the drafter's config and weights, hexadecimal.
    pub drafter_hash: String,
    /// Compute type of the target, `f32` or `bf16`.
    pub dtype: String,
    /// `cpu`, `metal` or `cuda`.
    pub device: String,
    /// CPU threads.
    pub threads: usize,
    /// Slots of a block as trained, anchor included.
    pub block_size: usize,
    /// Slots of a block as used here.
    pub block_size_used: usize,
    /// The drafter's mask token.
    pub mask_token_id: u32,
    /// Target layers that the drafter reads.
    pub taps: Vec<usize>,
    /// File of the prompts.
    pub prompts_file: String,
    /// SHA-256 over the prompts drawn, hexadecimal.
    pub prompts_sha256: String,
    /// `on`, `off` or `template default`.
    pub thinking: String,
    /// SHA-256 of the chat template, hexadecimal.
    pub template_sha256: String,
    /// The last characters of the first rendered prompt: shows what the template did about thinking.
    pub prompt_tail: String,
    /// Most new tokens a prompt.
    pub max_new: usize,
    /// Tokens that end a text.
    pub stop_ids: Vec<u32>,
    /// How tokens were chosen.
    pub sampling: SamplingConfig,
    /// Whether blocks were verified row by row.
    #[serde(default)]
    pub exact_verify: bool,
    /// `fixed`, or `auto`: the width that paid most was chosen round by round.
    #[serde(default)]
    pub width_policy: String,
    /// Which prompts: name, source, revision, sample count, order; null for a plain file.
    #[serde(default)]
    pub prompt_set: serde_json::Value,
    /// Version of this program.
    pub version: String,
}

/// Result of an acceptance run. Numbers over no round at all are null.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Always `acceptance`.
    pub kind: String,
    /// `generation` or `replay`.
    pub mode: String,
    /// 1 + mean accepted drafts, micro.
    pub acceptance_length: Option<f64>,
    /// Mean over prompts of each one's acceptance length.
    pub acceptance_length_macro: Option<f64>,
    /// 95 % bootstrap interval over prompts of the micro value.
    pub acceptance_length_ci95: Option<[f64; 2]>,
    /// Sum of a_r / rounds.
    pub mean_accepted_drafts: Option<f64>,
    /// Sum of a_r / sum of K_r.
    pub draft_acceptance_rate: Option<f64>,
    /// Counted rounds.
    pub rounds: u64,
    /// Tokens drafted in them.
    pub drafted: u64,
    /// Drafts accepted in them.
    pub accepted: u64,
    /// Counted rounds by accepted drafts, 0..=K.
    pub histogram: Vec<u64>,
    /// Joint acceptance by position, 1..=K.
    pub accept_at_pos: Vec<Option<f64>>,
    /// Conditional acceptance by position, 1..=K.
    pub accept_cond: Vec<Option<f64>>,
    /// Whether truncated rounds are among the counted.
    pub include_truncated: bool,
    /// Rounds narrowed or cut.
    pub truncated_rounds: u64,
    /// Their counts.
    pub truncated: Counts,
    /// Tokens emitted after the prefill's / all rounds.
    pub tokens_per_verify_e2e: Option<f64>,
    /// Plain decoding, tokens/s without prefill.
    pub plain_tokens_per_s: Option<f64>,
    /// Speculative decoding, tokens/s without prefill.
    pub spec_tokens_per_s: Option<f64>,
    /// Their ratio.
    pub speedup: Option<f64>,
    /// The ratio with prefill.
    pub speedup_with_prefill: Option<f64>,
    /// Seconds of all speculative decoding by part.
    pub spec_seconds: Seconds,
    /// Seconds of all plain decoding.
    pub plain_seconds: Seconds,
    /// Whether all texts are identical; null when tokens were sampled, which makes texts differ by right.
    pub identical: Option<bool>,
    /// Prompts, 0-based, whose texts differ, with the index of the first differing token.
    pub differing: Vec<(usize, usize)>,
    /// Prompts measured.
    pub prompts: usize,
    /// Prompts whose text repeats itself so much that its acceptance says little.
    pub degenerate_prompts: usize,
    /// Acceptance of the prompts of each domain and thinking mode, where there are several.
    #[serde(default)]
    pub groups: Vec<Group>,
    /// Acceptance by the anchor's position, counted rounds only.
    #[serde(default)]
    pub by_context: Vec<ContextBin>,
    /// Measured cost of a round by width, 0 (a plain step) to K.
    #[serde(default)]
    pub costs: Vec<WidthCost>,
    /// How often each width was used; one entry when the width is fixed.
    #[serde(default)]
    pub widths: Vec<WidthUse>,
    /// Texts with the lowest acceptance, token by token.
    #[serde(default)]
    pub worst: Vec<TextDetail>,
    /// What a reader should know before quoting a number.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Seed of sampling and of the bootstrap.
    pub seed: u64,
    /// Circumstances.
    pub setting: Setting,
    /// Meaning of the numbers above.
    pub definitions: BTreeMap<String, String>,
    /// Every prompt's own result.
    pub per_prompt: Vec<PromptResult>,
}

/// One prompt's result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PromptResult {
    /// 0-based index among the prompts measured.
    pub prompt: usize,
    /// Where it came from: `file:line`, or the data set's own id.
    #[serde(default)]
    pub id: String,
    /// Domain or category, where the prompts have one.
    #[serde(default)]
    pub domain: Option<String>,
    /// `on` or `off` where both were measured.
    #[serde(default)]
    pub thinking: Option<String>,
    /// 0-based turn of its conversation.
    #[serde(default)]
    pub turn: usize,
    /// Tokens of the rendered prompt.
    pub prompt_tokens: usize,
    /// Tokens generated, a stop token included.
    pub new_tokens: usize,
    /// Why the text ended.
    pub finish: Finish,
    /// Acceptance length over the counted rounds.
    pub acceptance_length: Option<f64>,
    /// Accepted drafts of every round, truncated ones included.
    pub accepted: Vec<usize>,
    /// Rounds of these that are truncated, by index.
    pub truncated: Vec<usize>,
    /// Seconds of speculative decoding without prefill.
    pub spec_seconds: f64,
    /// Seconds of plain decoding without prefill.
    pub plain_seconds: f64,
    /// Whether both texts are identical.
    pub identical: bool,
    /// Ids of the speculative text: the prefill's token, then each round's accepted drafts and the target's own token.
    #[serde(default)]
    pub tokens: Vec<u32>,
    /// Drafted tokens of every round.
    #[serde(default)]
    pub drafted: Vec<usize>,
    /// Longest run of one repeated token.
    pub longest_run: usize,
    /// Distinct tokens / tokens.
    pub distinct_ratio: f64,
}

/// Acceptance of some of the prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// `domain NAME` or `thinking on`.
    pub name: String,
    /// Prompts in it.
    pub prompts: usize,
    /// Counted rounds.
    pub rounds: u64,
    /// Micro acceptance length over them.
    pub acceptance_length: Option<f64>,
    /// Its 95 % bootstrap interval over prompts.
    pub acceptance_length_ci95: Option<[f64; 2]>,
    /// Mean over prompts.
    pub acceptance_length_macro: Option<f64>,
    /// Ratio of decoding rates.
    pub speedup: Option<f64>,
}

/// Counted rounds whose anchor lies at positions `from..to`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContextBin {
    /// First position.
    pub from: usize,
    /// One past the last.
    pub to: usize,
    /// Counted rounds.
    pub rounds: u64,
    /// Drafts accepted in them.
    pub accepted: u64,
}

/// Seconds of one round, fastest of several, at one context length.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WidthCost {
    /// Drafted tokens; 0 is a plain step.
    pub width: usize,
    /// Tokens of context.
    pub context: usize,
    /// Proposal of so many tokens.
    pub draft: f64,
    /// Target pass over width + 1 rows.
    pub verify: f64,
    /// The median of those passes; absent in reports of earlier versions.
    #[serde(default)]
    pub verify_median: Option<f64>,
    /// Keeping half of them, and feeding the drafter their taps.
    pub commit: f64,
}

impl WidthCost {
    /// Seconds of the whole round.
    pub fn total(&self) -> f64 {
        self.draft + self.verify + self.commit
    }
}

/// Rounds that drafted a width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WidthUse {
    /// Drafted tokens.
    pub width: usize,
    /// Rounds, truncated ones included.
    pub rounds: u64,
    /// Drafts accepted in them.
    pub accepted: u64,
}

/// One text, token by token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TextDetail {
    /// Index into `per_prompt`.
    pub result: usize,
    /// The end of the rendered prompt.
    pub prompt_tail: String,
    /// Tokens in order.
    pub pieces: Vec<Piece>,
}

/// One token of a text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    /// Its text; empty while a character is not complete.
    pub text: String,
    /// Who wrote it.
    pub source: PieceSource,
}

/// Where a token came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PieceSource {
    /// The prompt's own pass.
    Prefill,
    /// An accepted draft.
    Accepted,
    /// The target, in place of a rejected draft.
    Corrected,
    /// The target, after all drafts were accepted (or in a step without drafts).
    Bonus,
}

/// Wall-clock seconds by part.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Seconds {
    /// Prompts.
    pub prefill: f64,
    /// Everything after them; the parts below sum to it.
    pub decode: f64,
    /// Drafter.
    pub draft: f64,
    /// Target passes.
    pub verify: f64,
    /// Cache updates.
    pub commit: f64,
    /// The rest.
    pub other: f64,
}

impl Seconds {
    /// Adds one generation's time.
    pub fn add(&mut self, time: &TimeSplit) {
        let [prefill, decode, draft, verify, commit] =
            [time.prefill, time.decode, time.draft, time.verify, time.commit].map(|part| part.as_secs_f64());
        self.prefill += prefill;
        self.decode += decode;
        self.draft += draft;
        self.verify += verify;
        self.commit += commit;
        self.other += (decode - draft - verify - commit).max(0.);
    }
}
