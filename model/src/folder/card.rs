//! The model card: what a reader of a drafter's page needs in order to serve it, and what its numbers mean.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::drafter_config::DrafterConfig;

/// What the acceptance columns of a card count.
pub const ACCEPTANCE_DEFINITION: &str = "Acceptance length is the number of tokens that one verification of the \
     target yields: accepted drafts plus the target's own token. It is averaged over all verification rounds \
     (\"per round\") and, separately, over prompts (\"per prompt\"). Rounds cut short by the end of the text or by \
     the token budget are left out.";

const LIMITS: &str = "## Limits\n\nAcceptance was not measured beyond what the table names. Expect less on contexts longer \
     than those trained on, on a quantised, abliterated or further fine-tuned target, and in another thinking mode.\n";

/// What the card says beyond the configuration. Whatever is not known is written as "not stated".
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    /// Name of the drafter as engines are told it: a repository or a path.
    pub name: String,
    /// Repository or path of the target.
    pub base_model: String,
    /// Revision of the target.
    pub base_revision: Option<String>,
    /// What the drafter is to the target, in the Hub's words. A drafter is none of them, and the Hub infers `finetune` where
    /// nothing is said.
    #[serde(default)]
    pub base_model_relation: Option<String>,
    /// Licence in the Hub's spelling.
    pub license: Option<String>,
    /// Thinking mode of the training text, e.g. `off`.
    pub thinking: Option<String>,
    /// What the drafter was trained on, in words.
    pub data: Option<String>,
    /// Longest training sequence, in tokens.
    pub training_length: Option<usize>,
    /// Measured acceptance.
    pub acceptance: Vec<AcceptanceRow>,
}

/// One line of the acceptance table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AcceptanceRow {
    /// Prompts measured on.
    pub prompts: String,
    /// Sampling, thinking and token budget.
    pub setting: String,
    /// Whole verification rounds.
    pub rounds: u64,
    /// Mean over rounds, in tokens.
    pub acceptance_length: f64,
    /// Mean over prompts of each prompt's mean, in tokens.
    pub acceptance_length_macro: f64,
}

/// How many tokens each engine has to be told: most count drafts, one counts the block with its anchor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DraftCounts {
    /// `num_speculative_tokens`.
    pub vllm: usize,
    /// `--speculative-num-draft-tokens`.
    pub sglang: usize,
    /// `--spec-draft-n-max`.
    pub llama_cpp: usize,
    /// `num_speculative_tokens`.
    pub max: usize,
}

impl DraftCounts {
    /// The counts for a block of `block_size` slots.
    pub fn of(block_size: usize) -> Self {
        let drafts = block_size.saturating_sub(1);
        Self {
            vllm: drafts,
            sglang: block_size,
            llama_cpp: drafts,
            max: drafts,
        }
    }
}

impl ModelCard {
    /// A card that names drafter and target, and leaves everything else not stated.
    pub fn named(name: impl Into<String>, base_model: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            base_model: base_model.into(),
            base_revision: None,
            base_model_relation: None,
            license: None,
            thinking: None,
            data: None,
            training_length: None,
            acceptance: Vec::new(),
        }
    }

    /// The card as Markdown with its YAML head.
    pub fn markdown(&self, config: &DrafterConfig) -> String {
        let sections = [
            self.head(config),
            self.introduction(config),
            self.facts(config),
            self.serving(config),
            self.acceptance_table(),
            LIMITS.to_owned(),
        ];
        sections.join("\n")
    }

    fn head(&self, config: &DrafterConfig) -> String {
        let license = self.license.iter().map(|license| format!("license: {}", yaml(license)));
        let target = [format!("base_model: {}", yaml(&self.base_model))];
        let relation = self.base_model_relation.iter();
        let relation = relation.map(|relation| format!("base_model_relation: {}", yaml(relation)));
        let fixed = [
            "library_name: transformers".to_owned(),
            "pipeline_tag: text-generation".to_owned(),
            "tags:".to_owned(),
        ];
        let method = if config.is_dflash2() { "dflash2" } else { "dflash" };
        let tags = [
            method,
            "speculative-decoding",
            "block-diffusion",
            "draft-model",
            "vllm",
            "sglang",
        ];
        // whose family the hub's readers filter by
        let family = self.base_model.to_lowercase().contains("qwen").then_some("qwen");
        let tags = tags.into_iter().chain(family).map(|tag| format!("- {tag}"));
        let lines: Vec<String> = license.chain(target).chain(relation).chain(fixed).chain(tags).collect();
        format!("---\n{}\n---\n", lines.join("\n"))
    }

    fn introduction(&self, config: &DrafterConfig) -> String {
        let method = if config.is_dflash2() { "DFlash 2" } else { "DFlash" };
        let revision = match &self.base_revision {
            Some(revision) => format!(" (revision `{}`)", one_line(revision)),
            None => String::new(),
        };
        format!(
            "# {}\n\nA {method} drafter for speculative decoding, to be paired with `{}`{revision} and with no other \
             model: it borrows that model's embedding and head, and reads its hidden states. On its own it generates \
             nothing.\n",
            one_line(&self.name),
            one_line(&self.base_model),
        )
    }

    fn facts(&self, config: &DrafterConfig) -> String {
        let stated = |value: &Option<String>| value.as_deref().map_or_else(|| "not stated".to_owned(), one_line);
        let window = config
            .sliding_window()
            .map_or_else(|| "none".to_owned(), |window| window.to_string());
        let length = self.training_length.map(|tokens| format!("{tokens} tokens"));
        let rows = [
            (
                "Block size",
                format!("{} (1 anchor + {} drafts)", config.block_size, config.block_size - 1),
            ),
            (
                "Tapped target layers (outputs, from 0)",
                format!("{:?}", config.target_layer_ids),
            ),
            ("Mask token id", config.mask_token_id.to_string()),
            ("Layers", config.layers.len().to_string()),
            ("Attention window", window),
            ("Parameters", config.parameter_count().to_string()),
            ("Thinking in the training text", stated(&self.thinking)),
            ("Longest training sequence", stated(&length)),
            ("Training data", stated(&self.data)),
        ];
        let mut text = String::from("| | |\n|---|---|\n");
        for (what, value) in rows {
            let _ = writeln!(text, "| {what} | {} |", cell(&value));
        }
        text
    }

    fn serving(&self, config: &DrafterConfig) -> String {
        let counts = DraftCounts::of(config.block_size);
        let (base, name) = (shell(&self.base_model), shell(&self.name));
        let speculative = serde_json::json!({
            "method": "dflash", "model": self.name, "num_speculative_tokens": counts.vllm,
        });
        let runner = if config.is_dflash2() {
            " DFlash 2 needs vLLM's V2 model runner."
        } else {
            ""
        };
        format!(
            "## Serving\n\nvLLM counts drafts, SGLang counts the block with its anchor.{runner}\n\n```sh\n\
             vllm serve {base} --speculative-config {}\n\n\
             python -m sglang.launch_server --model-path {base} --speculative-algorithm DFLASH \\\n    \
             --speculative-draft-model-path {name} --speculative-num-draft-tokens {}\n```\n\n\
             llama.cpp (after `dflash-export gguf`): `--spec-type draft-dflash --spec-draft-n-max {}`. MAX: \
             `num_speculative_tokens` {}.\n",
            shell(&speculative.to_string()),
            counts.sglang,
            counts.llama_cpp,
            counts.max,
        )
    }

    fn acceptance_table(&self) -> String {
        let mut text = String::from("## Acceptance\n\n");
        if self.acceptance.is_empty() {
            return text + "Not measured.\n";
        }
        text += "| prompts | setting | rounds | per round | per prompt |\n|---|---|---|---|---|\n";
        for row in &self.acceptance {
            let _ = writeln!(
                text,
                "| {} | {} | {} | {:.3} | {:.3} |",
                cell(&row.prompts),
                cell(&row.setting),
                row.rounds,
                row.acceptance_length,
                row.acceptance_length_macro
            );
        }
        text + "\n" + ACCEPTANCE_DEFINITION + "\n"
    }
}

/// A double-quoted YAML string; JSON's quoting is a part of YAML's.
fn yaml(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn cell(text: &str) -> String {
    one_line(text).replace('|', "\\|")
}

/// A word that a POSIX shell reads as it stands.
pub fn shell(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}
