//! Prompts as a measurement takes them, and what must be on record about them.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::{Value, json};

use super::selection::{Order, Selection};
use crate::conversation::{self, Conversation, Message};
use crate::files::{sha256_hex, sha256_of_file};
use crate::jsonl::kind;
use crate::parquet_file::is_parquet;

/// One prompt of one or several turns.
///
/// The first request is [`Self::start`]. A plain conversation is only that: its messages (earlier answers of the
/// assistant included) up to the last message that is not the assistant's. A recipe's `start` is one user message, and
/// `follow_ups` are what the user says after the model's own answers. [`Self::request`] puts the two together.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptRow {
    /// Stable name: the set's own id, else the 1-based number of the row (`PATH:LINE` for conversations).
    pub id: String,
    /// What kind of prompt it is (category, subject), where the set says so.
    pub domain: Option<String>,
    /// What is sent first; ends with a user or tool message.
    pub start: Conversation,
    /// User texts that are sent afterwards, one after each answer.
    pub follow_ups: Vec<String>,
}

impl PromptRow {
    /// How many answers the prompt asks for; at least one.
    pub fn turns(&self) -> usize {
        1 + self.follow_ups.len()
    }

    /// What is sent for the next turn, given the model's answers so far; `None` when all turns are answered.
    ///
    /// # Panics
    /// Never: the role of a follow-up is a known one.
    pub fn request(&self, answers: &[Message]) -> Option<Conversation> {
        if answers.len() >= self.turns() {
            return None;
        }
        let mut request = self.start.clone();
        for (answer, follow_up) in answers.iter().zip(&self.follow_ups) {
            request.messages.push(answer.clone());
            request.messages.push(Message::user(follow_up));
        }
        Some(request)
    }
}

/// A file that rows came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SourceFile {
    /// Its path, within the data set when it came from the hub.
    pub path: String,
    /// SHA-256 of its bytes.
    pub sha256: String,
    /// Rows in it.
    pub rows: usize,
}

/// What a report must record to make the same set again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// The recipe's name, or `conversations`.
    pub name: String,
    /// Where the rows came from, in words.
    pub source: String,
    /// Commit of the data set, when it came from the hub.
    pub revision: Option<String>,
    /// The files that were read, in the order of their rows.
    pub files: Vec<SourceFile>,
    /// Rows of all files.
    pub rows_total: usize,
    /// Prompts taken of them.
    pub samples: usize,
    /// Seed of the order; without effect when that is the file's.
    pub seed: u64,
    /// In which order they were taken.
    pub order: Order,
    /// SHA-256 over the taken prompts: ids, domains and texts, in order. Equal for equal prompts, whatever the source.
    pub prompts_sha256: String,
}

/// Prompts with their record.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptSet {
    /// What they are.
    pub facts: Facts,
    /// The prompts, in the order of measurement.
    pub prompts: Vec<PromptRow>,
}

/// Where all rows of a set came from.
pub(super) struct Origin {
    pub(super) name: String,
    pub(super) source: String,
    pub(super) revision: Option<String>,
    pub(super) files: Vec<SourceFile>,
}

impl PromptSet {
    /// Takes the selected ones of all rows.
    ///
    /// # Errors
    /// When there are no rows, fewer than asked for, or two of one id.
    pub(super) fn select(origin: Origin, all: Vec<PromptRow>, selection: &Selection) -> Result<Self> {
        let rows_total = all.len();
        ensure!(rows_total > 0, "{}: no rows", origin.source);
        let mut first_of = HashMap::new();
        for (index, row) in all.iter().enumerate() {
            if let Some(first) = first_of.insert(row.id.as_str(), index) {
                bail!(
                    "{}: id {:?} stands in two rows, {} and {}",
                    origin.source,
                    row.id,
                    first + 1,
                    index + 1
                );
            }
        }
        let indices = selection.indices(rows_total).with_context(|| origin.source.clone())?;
        let mut all: Vec<Option<PromptRow>> = all.into_iter().map(Some).collect();
        let prompts: Vec<PromptRow> = indices.into_iter().filter_map(|index| all[index].take()).collect();
        Ok(Self {
            facts: Facts {
                name: origin.name,
                source: origin.source,
                revision: origin.revision,
                files: origin.files,
                rows_total,
                samples: prompts.len(),
                seed: selection.seed,
                order: selection.order,
                prompts_sha256: hash(&prompts),
            },
            prompts,
        })
    }
}

/// Reads a file of conversations (JSONL, or Parquet with the same columns) as prompts.
///
/// Answers that a conversation ends with are left out. A row may name itself with `id` (text or whole number) and its
/// kind with `domain` (text).
///
/// # Errors
/// As [`conversation::read_conversations`]; when nothing of a row is left to answer, an `id` or `domain` has another type, two ids
/// are equal, or more samples are asked for than there are rows.
pub fn load_conversations(path: &Path, selection: &Selection) -> Result<PromptSet> {
    let rows = conversation::read_conversations(path)?;
    let file = SourceFile {
        path: path.display().to_string(),
        sha256: sha256_of_file(path)?,
        rows: rows.len(),
    };
    let origin = Origin {
        name: "conversations".to_owned(),
        source: format!(
            "{} {}",
            if is_parquet(path) { "Parquet" } else { "JSONL" },
            path.display()
        ),
        revision: None,
        files: vec![file],
    };
    let prompts = rows
        .into_iter()
        .map(|(number, row)| {
            let place = format!("{}:{number}", path.display());
            prompt_of(row, &place).with_context(|| place.clone())
        })
        .collect::<Result<_>>()?;
    PromptSet::select(origin, prompts, selection)
}

fn prompt_of(mut row: Conversation, place: &str) -> Result<PromptRow> {
    while row.messages.last().is_some_and(|message| message.role() == "assistant") {
        row.messages.pop();
    }
    match row.messages.last().map(Message::role) {
        Some("user" | "tool") => {}
        Some(role) => bail!("expected a user or tool message to answer, the last one is of {role}"),
        None => bail!("expected a user message to answer, found only the assistant's"),
    }
    Ok(PromptRow {
        id: match row.fields.get("id") {
            None | Some(Value::Null) => place.to_owned(),
            Some(id) => id_text(id).context("id")?,
        },
        domain: match row.fields.get("domain") {
            None | Some(Value::Null) => None,
            Some(domain) => Some(domain_text(domain).context("domain")?),
        },
        start: row,
        follow_ups: Vec::new(),
    })
}

/// An id as text.
pub(super) fn id_text(value: &Value) -> Result<String> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(text.clone()),
        Value::Number(number) if number.is_i64() || number.is_u64() => Ok(number.to_string()),
        other => bail!("expected a text or a whole number, found {}", shown(other)),
    }
}

/// A domain as text.
pub(super) fn domain_text(value: &Value) -> Result<String> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(text.clone()),
        other => bail!("expected a text, found {}", shown(other)),
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(_) => "an empty one".to_owned(),
        Value::Number(number) => number.to_string(),
        other => kind(other).to_owned(),
    }
}

fn hash(prompts: &[PromptRow]) -> String {
    let text: String = prompts
        .iter()
        .map(|row| {
            json!([
                row.id,
                row.domain,
                row.start.messages,
                row.start.tools,
                row.start.enable_thinking,
                row.follow_ups
            ])
            .to_string()
                + "\n"
        })
        .collect();
    sha256_hex(text.as_bytes())
}
