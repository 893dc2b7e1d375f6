//! From conversations to training examples: one per assistant turn, tokens with a loss mask.
//!
//! For turn t the template renders `messages[..t]` with the generation prompt (P) and `messages[..=t]` (F). F must
//! begin with P; the response R = F - P. P and R are tokenised apart, as serving does it: the prompt is what the
//! server encodes, the response is what the target writes. The mask covers R from its first token to the first stop
//! token, which is included; what the template adds after it is nobody's prediction and is cut off.
//! A template that rewrites history (drops earlier reasoning) is harmless, because each turn has its own rendering.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, Result, bail, ensure};
use rayon::prelude::*;

use crate::anchors::anchor_candidates;
use crate::conversation::{Conversation, Finish, Message};
use crate::stops::stop_ids;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

/// What turns conversations into tokens: everything textual of a checkpoint folder.
#[derive(Debug)]
pub struct Chat {
    /// The chat template.
    pub template: ChatTemplate,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Ids that end a turn.
    pub stops: Vec<u32>,
}

impl Chat {
    /// Loads template, tokenizer and stop ids of a checkpoint folder.
    pub fn load(folder: &std::path::Path) -> Result<Self> {
        let tokenizer = Tokenizer::load(folder)?;
        Ok(Self {
            template: ChatTemplate::load(folder)?,
            stops: stop_ids(folder, &tokenizer)?,
            tokenizer,
        })
    }
}

/// One training sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// Token ids, `[T]`.
    pub tokens: Vec<u32>,
    /// Whether each token was written by the target, `[T]`.
    pub loss_mask: Vec<bool>,
    /// Line of the row that it comes from, 1-based.
    pub source: usize,
}

impl Example {
    /// A sequence from token ids that are known already: a prompt and the target's own answer to it.
    pub fn of_response(prompt: &[u32], response: &[u32], source: usize) -> Self {
        let mut loss_mask = vec![false; prompt.len()];
        loss_mask.resize(prompt.len() + response.len(), true);
        Self {
            tokens: [prompt, response].concat(),
            loss_mask,
            source,
        }
    }
}

/// Which assistant turns become examples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turns {
    /// Each of them.
    Every,
    /// The last one of a conversation.
    Last,
}

/// What happens to sequences that are too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LengthPolicy {
    /// They are dropped and counted.
    Drop,
    /// Their tail is cut; dropped only when nothing supervised remains.
    Truncate,
}

/// Settings of [`prepare`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareConfig {
    /// Most tokens of an example.
    pub max_length: usize,
    /// What happens to longer ones.
    pub length_policy: LengthPolicy,
    /// Which assistant turns become examples.
    pub turns: Turns,
    /// `enable_thinking` of rows that do not set it themselves; `None` leaves it to the template.
    pub thinking: Option<bool>,
}

/// Why a row or a turn gave no example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dropped {
    /// The row has no assistant turn.
    NoAssistantTurn,
    /// The template refused the conversation.
    TemplateError,
    /// The full rendering does not begin with the prompt: what serving would feed is not what the row contains.
    UnstableBoundary,
    /// The rendered turn holds no stop token.
    NoStopToken,
    /// More tokens than allowed.
    TooLong,
    /// No two neighbouring supervised tokens, so no anchor.
    NoSupervisedPair,
}

impl fmt::Display for Dropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoAssistantTurn => "no assistant turn",
            Self::TemplateError => "template error",
            Self::UnstableBoundary => "unstable boundary",
            Self::NoStopToken => "no stop token",
            Self::TooLong => "too long",
            Self::NoSupervisedPair => "no supervised token pair",
        })
    }
}

/// How often something was dropped, and the first case of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DropCount {
    /// Turns (or rows without a turn) dropped.
    pub count: usize,
    /// Line of the first one, 1-based.
    pub line: usize,
    /// What was wrong with it.
    pub sample: String,
}

/// What went in, what came out, and why the rest did not.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// Conversations read.
    pub rows: usize,
    /// Examples made.
    pub examples: usize,
    /// Tokens of all examples.
    pub tokens: usize,
    /// Supervised tokens of all examples.
    pub supervised: usize,
    /// Examples whose tail was cut.
    pub truncated: usize,
    /// What was dropped, by reason.
    pub dropped: BTreeMap<Dropped, DropCount>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} rows -> {} examples, {} tokens ({} supervised), {} truncated",
            self.rows, self.examples, self.tokens, self.supervised, self.truncated
        )?;
        for (reason, case) in &self.dropped {
            write!(
                f,
                "\n  dropped {}: {reason} (line {}: {})",
                case.count, case.line, case.sample
            )?;
        }
        Ok(())
    }
}

/// Makes examples of numbered rows, in the order of the rows, on all threads.
///
/// # Errors
/// When the tokenizer fails, or when no example is left: the report is then part of the error.
pub fn prepare(chat: &Chat, rows: &[(usize, Conversation)], config: &PrepareConfig) -> Result<(Vec<Example>, Report)> {
    ensure!(
        config.max_length >= 2,
        "max_length {}: expected at least 2 tokens",
        config.max_length
    );
    let per_row: Vec<Vec<Outcome>> = rows
        .par_iter()
        .map(|(line, row)| examples_of_row(chat, *line, row, config).with_context(|| format!("line {line}")))
        .collect::<Result<_>>()?;
    let mut report = Report {
        rows: rows.len(),
        ..Report::default()
    };
    let mut examples = Vec::new();
    for ((line, _), outcomes) in rows.iter().zip(per_row) {
        for outcome in outcomes {
            match outcome {
                Outcome::Made { example, truncated } => {
                    report.tokens += example.tokens.len();
                    report.supervised += example.loss_mask.iter().filter(|on| **on).count();
                    report.truncated += usize::from(truncated);
                    examples.push(example);
                }
                Outcome::Dropped(reason, sample) => {
                    let first = || DropCount {
                        count: 0,
                        line: *line,
                        sample,
                    };
                    report.dropped.entry(reason).or_insert_with(first).count += 1;
                }
            }
        }
    }
    report.examples = examples.len();
    ensure!(!examples.is_empty(), "no example is left: {report}");
    Ok((examples, report))
}

/// The text that serving would feed for this conversation; its hash tells two renderings apart.
///
/// # Errors
/// When the conversation already ends with an assistant turn, or the template refuses it or makes no text of it.
pub fn prompt_text(template: &ChatTemplate, conversation: &Conversation, thinking: Option<bool>) -> Result<String> {
    match conversation.messages.last().map(Message::role) {
        Some("user" | "tool") => {}
        Some(role) => bail!("a prompt must end with a user or tool message, this one ends with {role}"),
        None => bail!("a prompt without messages"),
    }
    let thinking = conversation.enable_thinking.or(thinking);
    let text = template.render(&conversation.messages, true, thinking, conversation.tools.as_ref())?;
    ensure!(
        !text.is_empty(),
        "expected the chat template to make a text of it, found an empty one"
    );
    Ok(text)
}

/// Tokens of [`prompt_text`]. The row's own `enable_thinking` stands above `thinking`.
pub fn prompt_tokens(chat: &Chat, conversation: &Conversation, thinking: Option<bool>) -> Result<Vec<u32>> {
    chat.tokenizer
        .encode(&prompt_text(&chat.template, conversation, thinking)?)
}

enum Outcome {
    Made { example: Example, truncated: bool },
    Dropped(Dropped, String),
}

fn examples_of_row(chat: &Chat, line: usize, row: &Conversation, config: &PrepareConfig) -> Result<Vec<Outcome>> {
    let mut turns: Vec<usize> = (0..row.messages.len())
        .filter(|&i| row.messages[i].role() == "assistant")
        .collect();
    if let (Turns::Last, Some(&last)) = (config.turns, turns.last()) {
        turns = vec![last];
    }
    if turns.is_empty() {
        let sample = format!("{} messages, none of the assistant", row.messages.len());
        return Ok(vec![Outcome::Dropped(Dropped::NoAssistantTurn, sample)]);
    }
    turns
        .into_iter()
        .map(|turn| example_of_turn(chat, line, row, turn, config))
        .collect()
}

fn example_of_turn(
    chat: &Chat,
    line: usize,
    row: &Conversation,
    turn: usize,
    config: &PrepareConfig,
) -> Result<Outcome> {
    let thinking = row.enable_thinking.or(config.thinking);
    let tools = row.tools.as_ref();
    let render = |messages, prompt| chat.template.render(messages, prompt, thinking, tools);
    let rendered = render(&row.messages[..turn], true).and_then(|p| Ok((p, render(&row.messages[..=turn], false)?)));
    let (prompt, full) = match rendered {
        Ok(texts) => texts,
        Err(error) => {
            return Ok(Outcome::Dropped(
                Dropped::TemplateError,
                format!("messages[{turn}]: {error:#}"),
            ));
        }
    };
    let Some(response) = full.strip_prefix(prompt.as_str()) else {
        let sample = format!("messages[{turn}]: {}", divergence(&prompt, &full));
        return Ok(Outcome::Dropped(Dropped::UnstableBoundary, sample));
    };
    let prompt = chat.tokenizer.encode(&prompt)?;
    let mut response = chat.tokenizer.encode(response)?;
    let Some(stop) = response.iter().position(|token| chat.stops.contains(token)) else {
        let sample = format!(
            "messages[{turn}]: none of {:?} in its {} tokens",
            chat.stops,
            response.len()
        );
        return Ok(Outcome::Dropped(Dropped::NoStopToken, sample));
    };
    let last_turn = row.messages[turn + 1..]
        .iter()
        .all(|message| message.role() != "assistant");
    let own_stop = !(last_turn && row.finish == Finish::Length);
    response.truncate(stop + usize::from(own_stop));
    Ok(fitted(
        Example::of_response(&prompt, &response, line),
        prompt.len(),
        config,
    ))
}

/// Applies the length policy and asks for at least one anchor.
fn fitted(mut example: Example, prompt: usize, config: &PrepareConfig) -> Outcome {
    let length = example.tokens.len();
    let long = length > config.max_length;
    if long {
        // an anchor needs two tokens of the response
        if config.length_policy == LengthPolicy::Drop || prompt + 2 > config.max_length {
            let sample = format!(
                "{length} tokens ({prompt} of them prompt), at most {} allowed",
                config.max_length
            );
            return Outcome::Dropped(Dropped::TooLong, sample);
        }
        example.tokens.truncate(config.max_length);
        example.loss_mask.truncate(config.max_length);
    }
    if anchor_candidates(&example.loss_mask).next().is_none() {
        let sample = format!("{} response tokens", length - prompt);
        return Outcome::Dropped(Dropped::NoSupervisedPair, sample);
    }
    Outcome::Made {
        example,
        truncated: long,
    }
}

/// Shows where two renderings part, for the report.
fn divergence(prompt: &str, full: &str) -> String {
    let common = prompt
        .char_indices()
        .zip(full.chars())
        .find(|((_, a), b)| a != b)
        .map_or(prompt.len().min(full.len()), |((at, _), _)| at);
    let tail = |text: &str| text[common..].chars().take(24).collect::<String>();
    format!(
        "the prompt goes on with {:?} where the row has {:?}; is thinking set as these rows were made?",
        tail(prompt),
        tail(full)
    )
}
