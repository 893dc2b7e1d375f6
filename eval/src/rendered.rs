//! Conversations rendered by the target's own template: the prompts of real runs.

use anyhow::{Context, Result};
use dflash_data::recipes::PromptRow;
use dflash_data::{Chat, Conversation, Message, prompt_text};

use crate::prompts::{About, Prompts, pieces};

/// Characters of the first rendered prompt's end that a report shows.
const TAIL: usize = 160;

/// A conversation to be had.
#[derive(Debug, Clone)]
pub struct Row {
    /// What is known of it.
    pub about: About,
    /// What is given, and what the user says after each answer.
    pub prompt: PromptRow,
    /// Thinking switch; nothing leaves it to the template.
    pub thinking: Option<bool>,
}

/// Prompts of a target's chat.
pub struct Rendered {
    chat: Chat,
    rows: Vec<Row>,
    /// Token ids of every first turn.
    openings: Vec<Vec<u32>>,
}

impl Rendered {
    /// Renders every opening, so that whatever the template refuses is found before any decoding.
    ///
    /// # Errors
    /// Names the row.
    pub fn new(chat: Chat, rows: Vec<Row>) -> Result<Self> {
        let render = |row: &Row| {
            let text = prompt_text(&chat.template, &row.prompt.start, row.thinking)?;
            chat.tokenizer.encode(&text)
        };
        let openings = rows
            .iter()
            .map(|row| render(row).with_context(|| row.about.id.clone()))
            .collect::<Result<_>>()?;
        Ok(Self { chat, rows, openings })
    }

    /// Token ids of every first turn.
    pub fn openings(&self) -> &[Vec<u32>] {
        &self.openings
    }

    /// The chat that they are rendered with.
    pub fn chat(&self) -> &Chat {
        &self.chat
    }

    /// The conversations.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The rendered first turn of a row.
    ///
    /// # Errors
    /// As [`Rendered::new`]; when there is no such row.
    pub fn text(&self, index: usize) -> Result<String> {
        let row = self
            .rows
            .get(index)
            .with_context(|| format!("prompt {index}: there are {}", self.rows.len()))?;
        prompt_text(&self.chat.template, &row.prompt.start, row.thinking)
    }

    /// The last characters of the first rendered prompt: shows what the template did about thinking.
    ///
    /// # Errors
    /// As [`Rendered::new`].
    pub fn tail(&self) -> Result<String> {
        if self.rows.is_empty() {
            return Ok(String::new());
        }
        let text = self.text(0)?;
        Ok(text.chars().skip(text.chars().count().saturating_sub(TAIL)).collect())
    }

    /// The conversation of a row after some answers (token ids of the texts); nothing when it is over.
    ///
    /// # Errors
    /// When an answer cannot be decoded.
    pub fn conversation(&self, index: usize, answers: &[Vec<u32>]) -> Result<Option<Conversation>> {
        let said = answers.iter().map(|answer| {
            let text = self.chat.tokenizer.decode(answer, true)?;
            Message::new("assistant", &text)
        });
        Ok(self.rows[index].prompt.request(&said.collect::<Result<Vec<_>>>()?))
    }
}

impl Prompts for Rendered {
    fn len(&self) -> usize {
        self.rows.len()
    }

    fn about(&self, index: usize) -> About {
        self.rows[index].about.clone()
    }

    fn turn(&self, index: usize, answers: &[Vec<u32>]) -> Result<Option<Vec<u32>>> {
        if answers.is_empty() {
            return Ok(Some(self.openings[index].clone()));
        }
        let Some(conversation) = self.conversation(index, answers)? else {
            return Ok(None);
        };
        let text = prompt_text(&self.chat.template, &conversation, self.rows[index].thinking)?;
        self.chat.tokenizer.encode(&text).map(Some)
    }

    fn pieces(&self, tokens: &[u32]) -> Option<Vec<String>> {
        pieces(tokens, &|ids| self.chat.tokenizer.decode(ids, false)).ok()
    }
}
