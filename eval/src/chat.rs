//! A conversation with the target, decoded speculatively, whose text tells what was drafted.
//!
//! Caches live on from turn to turn where the rendered conversation goes on as before; where the template rewrites
//! earlier turns (thinking is left out of them) the session starts afresh.

use anyhow::Result;
use dflash_data::{Chat, Conversation, Message, prompt_text};
use dflash_model::{DraftSession, Drafting, Session, Target};

use crate::evaluate::Options;
use crate::speculate::{Decision, Finish, Generation, speculate};
use crate::text::Limits;
use crate::width::Width;

/// A conversation under way.
pub struct Talk<'t> {
    target: &'t dyn Target,
    drafting: &'t dyn Drafting,
    chat: &'t Chat,
    options: &'t Options,
    thinking: Option<bool>,
    limits: Limits,
    width: Width,
    messages: Vec<Message>,
    session: Box<dyn Session + 't>,
    draft: Box<dyn DraftSession + 't>,
    /// Tokens in both caches.
    cached: Vec<u32>,
    turns: usize,
}

impl<'t> Talk<'t> {
    /// A conversation without a word.
    ///
    /// # Errors
    /// As the sessions report.
    pub fn new(
        target: &'t dyn Target,
        drafting: &'t dyn Drafting,
        chat: &'t Chat,
        options: &'t Options,
        thinking: Option<bool>,
    ) -> Result<Self> {
        Ok(Self {
            target,
            drafting,
            chat,
            options,
            thinking,
            limits: options.limits(target),
            width: options.width(drafting)?,
            messages: Vec::new(),
            session: target.session(drafting.taps())?,
            draft: drafting.session()?,
            cached: Vec::new(),
            turns: 0,
        })
    }

    /// Forgets what was said.
    ///
    /// # Errors
    /// As the sessions report.
    pub fn reset(&mut self) -> Result<()> {
        self.messages.clear();
        self.fresh_sessions()
    }

    fn fresh_sessions(&mut self) -> Result<()> {
        self.session = self.target.session(self.drafting.taps())?;
        self.draft = self.drafting.session()?;
        self.cached.clear();
        Ok(())
    }

    /// Says something and shows the answer as it comes: `show` gets text and whether it was drafted. When it fails the
    /// conversation is as it was before.
    ///
    /// # Errors
    /// When the template or the decoding fails, or the conversation is too long.
    pub fn say(&mut self, words: &str, show: &mut dyn FnMut(&str, bool)) -> Result<Generation> {
        let before = self.messages.len();
        self.messages.push(Message::new("user", words)?);
        let answer = self.answer(show);
        if let Ok(answer) = &answer {
            let text = self.chat.tokenizer.decode(&answer.tokens, true)?;
            self.messages.push(Message::new("assistant", &text)?);
        } else {
            self.messages.truncate(before);
            self.fresh_sessions()?;
        }
        answer
    }

    fn answer(&mut self, show: &mut dyn FnMut(&str, bool)) -> Result<Generation> {
        let conversation = Conversation::of(self.messages.clone());
        let text = prompt_text(&self.chat.template, &conversation, self.thinking)?;
        let tokens = self.chat.tokenizer.encode(&text)?;
        if self.cached.len() >= tokens.len() || !tokens.starts_with(&self.cached) {
            self.fresh_sessions()?;
        }
        let mut writer = Writer {
            chat: self.chat,
            open: Vec::new(),
        };
        let mut chooser = self.options.chooser(self.turns, true);
        self.turns += 1;
        let decision = Decision {
            limits: &self.limits,
            chooser: &mut chooser,
            width: &mut self.width,
        };
        let prompt = &tokens[self.cached.len()..];
        let (session, draft) = (self.session.as_mut(), self.draft.as_mut());
        let answer = speculate(session, draft, prompt, decision, &mut |emitted| {
            for (index, &token) in emitted.tokens.iter().enumerate() {
                writer.write(token, index < emitted.accepted, show);
            }
        })?;
        writer.finish(show);
        self.cached = [tokens.as_slice(), &answer.tokens[..answer.tokens.len() - 1]].concat();
        Ok(answer)
    }
}

/// Tokens to text; holds back what is not a whole character yet.
struct Writer<'c> {
    chat: &'c Chat,
    open: Vec<u32>,
}

impl Writer<'_> {
    fn write(&mut self, token: u32, drafted: bool, show: &mut dyn FnMut(&str, bool)) {
        self.open.push(token);
        let text = self.text();
        if !text.ends_with('\u{FFFD}') || self.open.len() >= 4 {
            show(&text, drafted);
            self.open.clear();
        }
    }

    fn finish(&mut self, show: &mut dyn FnMut(&str, bool)) {
        if !self.open.is_empty() {
            show(&self.text(), false);
        }
    }

    fn text(&self) -> String {
        self.chat.tokenizer.decode(&self.open, true).unwrap_or_default()
    }
}

/// One line about an answer: tokens, speed, acceptance length, and why it ended if not by itself.
pub fn summary(answer: &Generation) -> String {
    let rounds = answer.rounds.len();
    let accepted: usize = answer.rounds.iter().map(|round| round.accepted).sum();
    let tokens = answer.tokens.len();
    let seconds = answer.time.decode.as_secs_f64();
    let speed = if tokens > 1 && seconds > 0. {
        format!("{:.1} tokens/s", (tokens - 1) as f64 / seconds)
    } else {
        "-".into()
    };
    let length = if rounds > 0 {
        format!("{:.2}", 1. + accepted as f64 / rounds as f64)
    } else {
        "-".into()
    };
    let end = match answer.finish {
        Finish::Stop => "",
        Finish::Budget => ", cut by --max-new",
        Finish::Context => ", the target's positions are used up",
    };
    format!("[{tokens} tokens, {speed}, acceptance length {length} over {rounds} rounds{end}]")
}
