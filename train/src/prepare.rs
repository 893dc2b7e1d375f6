//! The prepare stage: the target answers the prompts, and its answers become the conversations to train on.
//!
//! One JSONL row a prompt, in the prompts' order: the prompt's own fields, `messages` with the answer appended,
//! `finish_reason` (`stop`, or `length` when a limit cut it), `enable_thinking`, and `generated` with what the
//! answer depends on (`generated.exact`: whether the row tokenises to exactly what the target read and wrote). Rows are appended whole to `NAME.part`, which an interrupted run continues and a finished
//! one renames. An assistant message that ends a prompt is replaced.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use dflash_data::conversation::{Conversation, read_conversations};
use dflash_data::rng::Stream;
use dflash_data::target_hash;
use dflash_data::tokens::{LengthPolicy, PrepareConfig, Turns, prepare as examples_of, prompt_tokens};
use dflash_eval::evaluate::decode_plainly;
use dflash_eval::speculate::{Finish, Limits, prefill};
use dflash_model::{LogitRows, Target};
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use crate::failure::{Blame, Failure};
use crate::materials::Materials;
use crate::progress::{Display, Stage};
use crate::signals::{Interruptible, StopFlag};

/// Keeps the sampling stream apart from all other streams of the same seed.
const GENERATE_STREAM: u64 = 0x6765_6E65_7261;
/// Prompts a thread answers between two writes.
const PROMPTS_A_THREAD: usize = 8;

/// Writes the conversations if they are not there yet. A signal ends it at the next token; whole answers are kept.
///
/// # Errors
/// When the prompts cannot be read, what is there was made with other settings, or the target fails.
pub fn prepare(materials: &Materials, display: Display, stop: &StopFlag) -> Result<(), Failure> {
    let config = materials.config();
    let path = materials.conversations();
    let settings = settings(materials).input()?;
    if path.exists() {
        // a named file may hold anybody's answers; the run's own must be those that it would write
        return match config.data.conversations {
            Some(_) => {
                if let Some(prompts) = &config.data.prompts {
                    display.note(&format!(
                        "prepare: {} exists and is trained on; data.prompts, {}, is not used",
                        path.display(),
                        prompts.display()
                    ));
                }
                Ok(())
            }
            None => check_answers(&path, &settings).input(),
        };
    }
    let prompts_path = config.data.prompts.as_ref().with_context(|| {
        format!(
            "{} is missing, and data.prompts names no prompts to make it from",
            path.display()
        )
    });
    let prompts_path = prompts_path.input()?;
    let prompts = read_conversations(prompts_path).input()?;
    let part = part_path(&path);
    let (mut next, file) = open_part(&part, &settings).input()?;
    display.note(&format!(
        "prepare: {} does not exist: answering {} prompts of {} first",
        path.display(),
        prompts.len() - next.min(prompts.len()),
        prompts_path.display()
    ));
    let mut stage = Stage::start(display, "prepare", next as u64, prompts.len() as u64);
    let rest = Rest {
        materials,
        target: Interruptible::new(Arc::clone(&materials.target), stop.clone()),
        prompts: &prompts,
        settings: &settings,
        stop,
    };
    let _saves_first = stop.defer();
    rest.answer_all(&mut next, file, &part, &mut stage).work()?;
    if next == prompts.len() {
        fs::rename(&part, &path)
            .with_context(|| format!("renaming to {}", path.display()))
            .work()?;
    }
    Ok(())
}

/// The unfinished file, open for more rows, and the first prompt that it does not answer yet.
fn open_part(part: &Path, settings: &Map<String, Value>) -> Result<(usize, File)> {
    if let Some(parent) = part.parent() {
        fs::create_dir_all(parent).with_context(|| format!("making {}", parent.display()))?;
    }
    let next = continue_part(part, settings)?;
    let file = OpenOptions::new().create(true).append(true).open(part);
    Ok((next, file.with_context(|| part.display().to_string())?))
}

/// The prompts, and what answering them takes.
struct Rest<'p> {
    materials: &'p Materials,
    target: Interruptible,
    prompts: &'p [(usize, Conversation)],
    settings: &'p Map<String, Value>,
    stop: &'p StopFlag,
}

impl Rest<'_> {
    /// Answers the prompts from `next` on, batch by batch, until the last or a signal; `next` is then the first that
    /// has no row.
    fn answer_all(&self, next: &mut usize, mut file: File, part: &Path, stage: &mut Stage) -> Result<()> {
        let (mut too_long, mut inexact) = (0, 0);
        while *next < self.prompts.len() && self.stop.exit_code().is_none() {
            let end = self
                .prompts
                .len()
                .min(*next + PROMPTS_A_THREAD * rayon::current_num_threads());
            let answers: Vec<Result<Option<Value>>> =
                (*next..end).into_par_iter().map(|index| self.row(index)).collect();
            let mut text = String::new();
            let mut failure = None;
            for answer in answers {
                let row = match answer {
                    Ok(row) => row,
                    Err(error) => {
                        // what comes before it is whole and stays
                        failure = Some(error);
                        break;
                    }
                };
                *next += 1;
                too_long += usize::from(row.is_none());
                if let Some(row) = row {
                    inexact += usize::from(row["generated"]["exact"] == false);
                    text += &(row.to_string() + "\n");
                }
            }
            file.write_all(text.as_bytes())
                .with_context(|| part.display().to_string())?;
            stage.set(*next as u64, || "prompts answered".to_owned());
            match failure {
                // interrupted in the middle of an answer
                Some(_) if self.stop.exit_code().is_some() => {}
                Some(error) => return Err(error),
                None => {}
            }
        }
        file.sync_all().with_context(|| part.display().to_string())?;
        if too_long > 0 {
            stage.note(&format!(
                "{too_long} prompts left no room for an answer and were left out"
            ));
        }
        if inexact > 0 {
            stage.note(&format!(
                "{inexact} answers do not tokenise to the very tokens that the target wrote (generated.exact = false)"
            ));
        }
        Ok(())
    }

    /// The row of the prompt at `index`.
    fn row(&self, index: usize) -> Result<Option<Value>> {
        let (line, prompt) = &self.prompts[index];
        answer(self.materials, &self.target, prompt, index, self.settings)
            .with_context(|| format!("data.prompts, line {line}"))
    }
}

/// Refuses answers of the run's own file that were made with other settings.
fn check_answers(path: &Path, settings: &Map<String, Value>) -> Result<()> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    for (index, line) in text.lines().enumerate() {
        let place = || format!("{}:{}", path.display(), index + 1);
        let row: Value = serde_json::from_str(line).with_context(place)?;
        if row.get("generated").is_some() {
            generated_prompt(&row, settings).with_context(place)?;
        }
    }
    Ok(())
}

/// Index of the prompt that a row answers, which must have been made with `settings`.
fn generated_prompt(row: &Value, settings: &Map<String, Value>) -> Result<usize> {
    let made = row.get("generated").and_then(Value::as_object);
    let mut made = made.cloned().context("generated: expected an object")?;
    made.shift_remove("exact");
    let prompt = made.shift_remove("prompt").as_ref().and_then(Value::as_u64);
    let prompt = prompt.context("generated.prompt: expected a number")?;
    ensure!(
        made == *settings,
        "made with other settings ({}); this run has ({}). Remove the file to start again",
        Value::Object(made),
        Value::Object(settings.clone())
    );
    Ok(prompt as usize)
}
/// Everything that an answer depends on besides its prompt.
fn settings(materials: &Materials) -> Result<Map<String, Value>> {
    let config = materials.config();
    let generate = config.generation();
    let mut settings = Map::new();
    settings.insert("target".into(), json!(target_hash(&config.target.path)?));
    settings.insert("dtype".into(), serde_json::to_value(config.target.dtype)?);
    settings.insert("max_new".into(), json!(generate.max_new));
    settings.insert("temperature".into(), json!(generate.temperature));
    if generate.temperature > 0.0 {
        settings.insert("seed".into(), json!(generate.seed.unwrap_or(config.seed)));
    }
    Ok(settings)
}

fn part_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    path.with_file_name(name)
}

/// The first prompt that `part` does not answer yet; drops a torn last line.
fn continue_part(part: &Path, settings: &Map<String, Value>) -> Result<usize> {
    if !part.exists() {
        return Ok(0);
    }
    let text = fs::read_to_string(part).with_context(|| part.display().to_string())?;
    let whole = text.rfind('\n').map_or(0, |at| at + 1);
    let mut next = 0;
    for (index, line) in text[..whole].lines().enumerate() {
        let place = || format!("{}:{}", part.display(), index + 1);
        let row: Value = serde_json::from_str(line).with_context(place)?;
        let prompt = generated_prompt(&row, settings).with_context(place)?;
        ensure!(
            prompt >= next,
            "{}: prompt {prompt} comes after {}",
            place(),
            next.saturating_sub(1)
        );
        next = prompt + 1;
    }
    if whole < text.len() {
        let file = File::options()
            .write(true)
            .open(part)
            .with_context(|| part.display().to_string())?;
        file.set_len(whole as u64).with_context(|| part.display().to_string())?;
    }
    Ok(next)
}

/// The row of one prompt; none when it leaves no room for an answer.
fn answer(
    materials: &Materials,
    target: &dyn Target,
    prompt: &Conversation,
    index: usize,
    settings: &Map<String, Value>,
) -> Result<Option<Value>> {
    let config = materials.config();
    let mut prompt = prompt.clone();
    while prompt
        .messages
        .last()
        .is_some_and(|message| message.role() == "assistant")
    {
        prompt.messages.pop();
    }
    let thinking = prompt.enable_thinking.unwrap_or(config.data.thinking);
    let tokens = prompt_tokens(&materials.chat, &prompt, Some(thinking))?;
    let room = materials.target.info().max_positions.saturating_sub(tokens.len());
    if room == 0 {
        return Ok(None);
    }
    let limits = Limits::new(
        config.generation().max_new.min(room),
        materials.target.info().max_positions,
        materials.chat.stops.clone(),
    );
    let seed = config.generation().seed.unwrap_or(config.seed);
    let (written, stopped) = generate(
        target,
        &tokens,
        &limits,
        config.generation().temperature,
        Stream::new(&[GENERATE_STREAM, seed, index as u64]),
    )?;
    let response = &written[..written.len() - usize::from(stopped)];
    // special tokens inside an answer must survive, the template reads some of them
    let text = materials.chat.tokenizer.decode(response, false)?;
    let open_thought = thinking
        && materials
            .chat
            .tokenizer
            .decode(&tokens, false)?
            .trim_end()
            .ends_with("<think>");
    let mut messages: Vec<Value> = prompt
        .messages
        .iter()
        .map(|message| Value::Object(message.fields().clone()))
        .collect();
    messages.push(assistant_message(&text, open_thought));

    let mut row = prompt.fields.clone();
    row.insert("messages".into(), Value::Array(messages));
    if let Some(tools) = &prompt.tools {
        row.insert("tools".into(), tools.clone());
    }
    row.insert("enable_thinking".into(), json!(thinking));
    row.insert("finish_reason".into(), json!(if stopped { "stop" } else { "length" }));
    let mut generated = Map::from_iter([("prompt".to_owned(), json!(index))]);
    generated.extend(settings.clone());
    let exact = tokenises_to(materials, &row, &[tokens, written].concat());
    generated.insert("exact".into(), json!(exact));
    row.insert("generated".into(), Value::Object(generated));
    Ok(Some(Value::Object(row)))
}

/// Whether training on the row sees exactly `tokens`. Text can lose what tokens said: merges, trimmed white space.
fn tokenises_to(materials: &Materials, row: &Map<String, Value>, tokens: &[u32]) -> bool {
    let settings = PrepareConfig {
        max_length: usize::MAX,
        length_policy: LengthPolicy::Drop,
        turns: Turns::Last,
        thinking: None,
    };
    let example = Conversation::from_json(Value::Object(row.clone()))
        .and_then(|conversation| examples_of(&materials.chat, &[(1, conversation)], &settings));
    example.is_ok_and(|(examples, _)| examples.iter().any(|example| example.tokens == tokens))
}

/// The answer as a message; a thought that the prompt opened becomes `reasoning_content`, as templates expect it.
fn assistant_message(text: &str, open_thought: bool) -> Value {
    if !open_thought {
        return json!({"role": "assistant", "content": text});
    }
    let (thought, content) = text.split_once("</think>").unwrap_or((text, ""));
    json!({"role": "assistant", "reasoning_content": thought.trim_matches('\n'), "content": content.trim_start_matches('\n')})
}

/// New tokens, a stop token included, and whether one ended them.
fn generate(
    target: &dyn Target,
    prompt: &[u32],
    limits: &Limits,
    temperature: f64,
    mut stream: Stream,
) -> Result<(Vec<u32>, bool)> {
    if temperature == 0.0 {
        let text = decode_plainly(target, &[], prompt, limits)?;
        return Ok((text.tokens, text.finish == Finish::Stop));
    }
    let mut session = target.session(&[])?;
    let mut logits = prefill(session.as_mut(), prompt, &mut |_| Ok(()))?;
    let mut tokens = Vec::new();
    loop {
        let row = logits.flatten_all()?.to_vec1::<f32>()?;
        let token = sample(&row, temperature, stream.uniform())?;
        tokens.push(token);
        let stopped = limits.stop_ids.contains(&token);
        if stopped || tokens.len() >= limits.max_new {
            return Ok((tokens, stopped));
        }
        let forward = session.forward(&[token], LogitRows::Last)?;
        logits = forward.logits.context("the target returned no logits")?;
    }
}

/// The index at which the cumulated softmax of `logits / temperature` passes `uniform`, in [0, 1).
fn sample(logits: &[f32], temperature: f64, uniform: f64) -> Result<u32> {
    let largest = logits
        .iter()
        .fold(f32::NEG_INFINITY, |largest, &logit| largest.max(logit));
    ensure!(
        largest.is_finite() && !logits.iter().any(|logit| logit.is_nan()),
        "the target's logits are not finite"
    );
    let weights: Vec<f64> = logits
        .iter()
        .map(|&logit| (f64::from(logit - largest) / temperature).exp())
        .collect();
    let mut left = uniform * weights.iter().sum::<f64>();
    for (token, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return Ok(token as u32);
        }
    }
    // rounding may leave a crumb: the last token that has any weight takes it
    Ok(weights.iter().rposition(|&weight| weight > 0.0).unwrap_or(0) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_inverts_the_cumulated_softmax() {
        let logits = [0.0, f32::NEG_INFINITY, 2.0_f32.ln(), 0.0];
        let drawn: Vec<u32> = [0.0, 0.24, 0.26, 0.74, 0.76, 0.999_999]
            .iter()
            .map(|&u| sample(&logits, 1.0, u).unwrap())
            .collect();
        assert_eq!(drawn, [0, 0, 2, 2, 3, 3]);
        // at half the temperature the weights are 1, 4, 1
        assert_eq!(sample(&logits, 0.5, 0.17).unwrap(), 2);
        assert!(sample(&[f32::NAN], 1.0, 0.0).is_err());
    }

    #[test]
    fn an_opened_thought_becomes_reasoning() {
        let message = assistant_message("because\n</think>\n\nYes", true);
        assert_eq!(
            message,
            json!({"role": "assistant", "reasoning_content": "because", "content": "Yes"})
        );
        assert_eq!(
            assistant_message("Yes", false),
            json!({"role": "assistant", "content": "Yes"})
        );
    }

    #[test]
    fn a_part_is_continued_after_its_last_whole_row_and_only_with_its_settings() {
        let folder = tempfile::tempdir().unwrap();
        let part = folder.path().join("r.jsonl.part");
        let settings = Map::from_iter([("max_new".to_owned(), json!(4))]);
        assert_eq!(continue_part(&part, &settings).unwrap(), 0);
        let rows = "{\"generated\":{\"prompt\":0,\"max_new\":4,\"exact\":true}}\n{\"generated\":{\"prompt\":2,\"max_new\":4}}\n";
        fs::write(&part, format!("{rows}{{\"gen")).unwrap();
        assert_eq!(continue_part(&part, &settings).unwrap(), 3);
        assert_eq!(fs::read_to_string(&part).unwrap(), rows);
        let other = Map::from_iter([("max_new".to_owned(), json!(5))]);
        let error = format!("{:#}", continue_part(&part, &other).unwrap_err());
        assert!(error.contains(":1") && error.contains("other settings"), "{error}");
    }
}
