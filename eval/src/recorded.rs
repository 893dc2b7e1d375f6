//! Replay mode: acceptance along texts that were recorded before, from a report or from conversations.
//!
//! On the target's own greedy text, in f32, its rounds are those of generation to the last one, and a report's rounds can
//! be checked against it. On other text it answers another question: what would be accepted if this were the text.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use dflash_data::{Conversation, prompt_text, read_conversations};
use dflash_model::{Drafting, Target, with_threads_awake};
use serde::{Deserialize, Serialize};

use crate::acceptance::{Counts, Tally, macro_acceptance_length};
use crate::bootstrap::bootstrap_interval;
use crate::evaluate::{Options, Progress};
use crate::load::Loaded;
use crate::prompts::Prompts;
use crate::replay::{Recording, replay};
use crate::report::{PromptResult, Report, Setting, definitions};
use crate::speculate::Finish;

/// One text to replay.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// Where it came from.
    pub id: String,
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Token ids of the text.
    pub text: Vec<u32>,
    /// Whether a stop token ended it.
    pub stopped: bool,
    /// The budget it was written under, if known.
    pub max_new: Option<usize>,
    /// Accepted and drafted tokens of each round of the generation that wrote it, if known.
    pub rounds: Option<Vec<(usize, usize)>>,
}

/// What a replay showed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReplayReport {
    /// Always `replay`.
    pub kind: String,
    /// Always `replay`.
    pub mode: String,
    /// 1 + mean accepted drafts, micro.
    pub acceptance_length: Option<f64>,
    /// Mean over texts.
    pub acceptance_length_macro: Option<f64>,
    /// 95 % bootstrap interval over texts.
    pub acceptance_length_ci95: Option<[f64; 2]>,
    /// Counted rounds.
    pub rounds: u64,
    /// Accepted drafts in them.
    pub accepted: u64,
    /// Counted rounds by accepted drafts.
    pub histogram: Vec<u64>,
    /// Joint acceptance by position.
    pub accept_at_pos: Vec<Option<f64>>,
    /// Conditional acceptance by position.
    pub accept_cond: Vec<Option<f64>>,
    /// Rounds narrowed or cut, apart unless asked for.
    pub truncated_rounds: u64,
    /// Whether they were asked for and are among the counted ones.
    #[serde(default)]
    pub include_truncated: bool,
    /// Texts replayed.
    pub texts: usize,
    /// Comparison with the generation that wrote the texts; null when they came from elsewhere.
    pub against_generation: Option<Comparison>,
    /// Circumstances.
    pub setting: Setting,
    /// Meaning of the numbers.
    pub definitions: BTreeMap<String, String>,
}

/// Rounds of a replay beside those of the generation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Rounds of the generation, truncated ones included.
    pub rounds: u64,
    /// Of these, rounds with the same drafted and accepted counts at the same place.
    pub equal_rounds: u64,
    /// Texts all of whose rounds are equal.
    pub equal_texts: usize,
}

/// What parts the drafting of a saved report from that of now: with any of it the texts can still be replayed, but other
/// rounds are expected.
pub fn drafting_differences(then: &Setting, now: &Setting) -> Vec<String> {
    let selector = |setting: &Setting| if setting.without_selector { "left out" } else { "used" };
    [
        ("drafter (hash)", then.drafter_hash.clone(), now.drafter_hash.clone()),
        ("selector", selector(then).into(), selector(now).into()),
        (
            "block",
            then.block_size_used.to_string(),
            now.block_size_used.to_string(),
        ),
        ("dtype", then.dtype.clone(), now.dtype.clone()),
    ]
    .into_iter()
    .filter(|(_, then, now)| then != now)
    .map(|(what, then, now)| format!("{what} {then}, now {now}"))
    .collect()
}

/// The texts of a saved report, on the prompts they were made with; their rounds only where the same drafting is expected
/// to give them again.
///
/// # Errors
/// When the report was sampled, was made with other prompts, or holds texts that this target cannot have written.
pub fn from_report(report: &Report, loaded: &Loaded) -> Result<Vec<Record>> {
    let (then, now) = (&report.setting, &loaded.setting);
    ensure!(
        then.sampling.is_greedy(),
        "its texts were sampled ({}): expected greedy ones",
        then.sampling
    );
    ensure!(
        then.width_policy != "auto",
        "its block widths were chosen by time: expected a fixed block"
    );
    for (what, then, now) in [
        ("prompts (SHA-256)", &then.prompts_sha256, &now.prompts_sha256),
        ("target (hash)", &then.target_hash, &now.target_hash),
        ("thinking", &then.thinking, &now.thinking),
        ("chat template (SHA-256)", &then.template_sha256, &now.template_sha256),
    ] {
        ensure!(then == now, "{what}: it was made with {then}, found {now}");
    }
    let comparable = drafting_differences(then, now).is_empty();
    let info = loaded.target.info();
    let (vocabulary, room) = (info.vocab_size, info.max_positions);
    ensure!(!report.per_prompt.is_empty(), "per_prompt is empty: no text to replay");
    let mut answers: BTreeMap<usize, Vec<Vec<u32>>> = BTreeMap::new();
    let mut records = Vec::new();
    for result in &report.per_prompt {
        let given = answers.entry(result.prompt).or_default();
        if result.prompt >= loaded.prompts.len() {
            break; // --limit is smaller than the report's
        }
        let prompt = loaded.prompts.turn(result.prompt, given)?;
        let prompt = prompt.with_context(|| format!("{}: no turn {}", result.id, result.turn + 1))?;
        ensure!(
            prompt.len() == result.prompt_tokens && !result.tokens.is_empty(),
            "{}: {} tokens of prompt and {} of text, expected {} and at least 1",
            result.id,
            prompt.len(),
            result.tokens.len(),
            result.prompt_tokens
        );
        if let Some(token) = result.tokens.iter().find(|token| **token as usize >= vocabulary) {
            anyhow::bail!("{}: token {token}: the target's vocabulary has {vocabulary}", result.id)
        }
        ensure!(
            prompt.len() + result.tokens.len() <= room,
            "{}: {} tokens of prompt and {} of text: the target serves {room} positions",
            result.id,
            prompt.len(),
            result.tokens.len()
        );
        given.push(result.tokens.clone());
        records.push(record(result, prompt, then.max_new, comparable));
    }
    Ok(records)
}

fn record(result: &PromptResult, prompt: Vec<u32>, max_new: usize, comparable: bool) -> Record {
    let counts = || result.accepted.iter().copied().zip(result.drafted.iter().copied());
    Record {
        id: result.id.clone(),
        prompt,
        text: result.tokens.clone(),
        stopped: result.finish == Finish::Stop,
        max_new: Some(max_new),
        rounds: comparable.then(|| counts().collect()),
    }
}

/// The answers that end the conversations of a file.
///
/// # Errors
/// On a conversation without an answer, and on one whose full rendering does not begin with its prompt.
pub fn from_conversations(path: &Path, loaded: &Loaded, limit: Option<usize>) -> Result<Vec<Record>> {
    let chat = loaded.prompts.chat();
    let rows = read_conversations(path)?;
    let switches: Vec<_> = loaded.prompts.rows().iter().map(|row| row.thinking).collect();
    let copies = switches.len() / rows.len().min(limit.unwrap_or(usize::MAX)).max(1);
    let mut records = Vec::new();
    for (index, prompt) in loaded.prompts.openings().iter().enumerate() {
        let (line, row) = &rows[index / copies.max(1)];
        let named = || format!("{}:{line}", path.display());
        let Some(answer) = row.messages.last().filter(|message| message.role() == "assistant") else {
            anyhow::bail!(
                "{}: does not end with an assistant message: there is no text to replay",
                named()
            )
        };
        let whole = whole_text(loaded, row, switches[index]).with_context(named)?;
        let tokens = chat.tokenizer.encode(&whole)?;
        ensure!(
            tokens.len() > prompt.len() && tokens.starts_with(prompt),
            "{}: the rendered answer does not follow the rendered prompt token by token ({} characters of answer)",
            named(),
            answer.content().chars().count()
        );
        let text = &tokens[prompt.len()..];
        // the template may write more after the stop token; the target's text ends there
        let stop = text.iter().position(|token| chat.stops.contains(token));
        let text = stop.map_or(text, |at| &text[..=at]).to_vec();
        records.push(Record {
            id: named(),
            prompt: prompt.clone(),
            text,
            stopped: stop.is_some(),
            max_new: None,
            rounds: None,
        });
    }
    Ok(records)
}

fn whole_text(loaded: &Loaded, row: &Conversation, thinking: Option<bool>) -> Result<String> {
    let chat = loaded.prompts.chat();
    let thinking = row.enable_thinking.or(thinking);
    let whole = chat
        .template
        .render(&row.messages, false, thinking, row.tools.as_ref())?;
    let mut opening = row.clone();
    opening.messages.pop();
    let prompt = prompt_text(&chat.template, &opening, thinking)?;
    if whole.starts_with(&prompt) {
        return Ok(whole);
    }
    // templates leave the thinking block of a prompt out of finished turns: put it back before the answer
    let answer = row.messages.last().map_or("", |message| message.content());
    let end = whole.rfind(answer).context("the template does not show the answer")?;
    Ok(prompt + &whole[end..])
}

/// Replays texts.
///
/// # Errors
/// On no texts, and on what target and drafter report, with the text named.
pub fn replay_all(
    target: &dyn Target,
    drafting: &dyn Drafting,
    records: &[Record],
    options: &Options,
    progress: &mut dyn FnMut(Progress) -> Result<()>,
) -> Result<ReplayReport> {
    ensure!(!records.is_empty(), "no texts to replay");
    let width = options.width(drafting)?.most();
    let (mut tally, mut texts) = (Tally::new(width), Vec::new());
    let mut comparison = records
        .iter()
        .all(|record| record.rounds.is_some())
        .then(Comparison::default);
    for (index, record) in records.iter().enumerate() {
        let tokens = [record.prompt.as_slice(), &record.text].concat();
        let rounds = with_threads_awake(|| -> Result<_> {
            // the text's last token is never context, so its taps are not needed
            let taps = target.taps(&tokens[..tokens.len() - 1], drafting.taps())?;
            let recording = Recording {
                tokens: &tokens,
                response: record.prompt.len()..tokens.len(),
                taps: &taps,
                stopped: record.stopped,
                max_new: record.max_new,
            };
            replay(drafting, &recording, width)
        })
        .with_context(|| record.id.clone())?;
        if let (Some(comparison), Some(then)) = (&mut comparison, &record.rounds) {
            let now: Vec<_> = rounds.iter().map(|round| (round.accepted, round.drafted)).collect();
            let equal = then.iter().zip(&now).filter(|(then, now)| then == now).count();
            comparison.rounds += then.len() as u64;
            comparison.equal_rounds += equal as u64;
            comparison.equal_texts += usize::from(*then == now);
        }
        let text = Tally::of_text(&rounds, width);
        texts.push(text.counted(options.include_truncated));
        tally.merge(&text);
        let counts = tally.counted(options.include_truncated);
        progress(Progress {
            done: index + 1,
            total: records.len(),
            acceptance_length: counts.acceptance_length(),
        })?;
    }
    Ok(report(&tally, &texts, comparison, options))
}

fn report(tally: &Tally, texts: &[Counts], comparison: Option<Comparison>, options: &Options) -> ReplayReport {
    let counts = tally.counted(options.include_truncated);
    ReplayReport {
        kind: "replay".into(),
        mode: "replay".into(),
        acceptance_length: counts.acceptance_length(),
        acceptance_length_macro: macro_acceptance_length(texts),
        acceptance_length_ci95: bootstrap_interval(texts, options.seed),
        rounds: counts.rounds,
        accepted: counts.accepted,
        accept_at_pos: counts.accept_at_pos(),
        accept_cond: counts.accept_cond(),
        histogram: counts.histogram,
        truncated_rounds: tally.truncated.rounds,
        include_truncated: options.include_truncated,
        texts: texts.len(),
        against_generation: comparison,
        setting: options.setting.clone(),
        definitions: definitions(),
    }
}
