//! The prompts as an OpenAI-compatible server takes them, sent some at a time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use anyhow::{Context, Result};
use dflash_data::Conversation;
use dflash_data::recipes::PromptSet;
use serde_json::{Value, json};

use crate::prompts::About;
use crate::sampling::SamplingConfig;
use crate::server::client::Client;
use crate::server::detect::Engine;

const PATH: &str = "/v1/chat/completions";

/// A conversation to be answered.
pub(super) struct Prompt {
    pub(super) about: About,
    conversation: Conversation,
}

/// What all requests have in common.
pub(super) struct Common<'c> {
    pub(super) engine: Engine,
    pub(super) model: &'c str,
    pub(super) max_new: usize,
    pub(super) sampling: SamplingConfig,
    pub(super) seed: u64,
    pub(super) thinking: Option<bool>,
}

/// One answer.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) prompt_tokens: Option<u64>,
    pub(super) cached_tokens: Option<u64>,
    pub(super) completion_tokens: u64,
    pub(super) finish_reason: Option<String>,
    pub(super) seconds: f64,
    /// Everything, for what only one engine says.
    pub(super) body: Value,
}

/// The first turn of every prompt of a set, at most `limit`.
pub(super) fn prompts(set: PromptSet, limit: Option<usize>) -> Vec<Prompt> {
    let rows = set.prompts.into_iter().take(limit.unwrap_or(usize::MAX));
    rows.map(|row| Prompt {
        about: About {
            id: row.id,
            domain: row.domain,
            thinking: row.start.enable_thinking,
        },
        conversation: row.start,
    })
    .collect()
}

/// A request's body. Every sampling key is sent, because servers fill absent ones from the model's own configuration.
pub(super) fn request(prompt: &Prompt, common: &Common<'_>) -> Value {
    let sampling = &common.sampling;
    let all = if common.engine == Engine::Llamacpp { 0 } else { -1 };
    let repetition = if common.engine == Engine::Llamacpp {
        "repeat_penalty"
    } else {
        "repetition_penalty"
    };
    let mut body = json!({
        "model": common.model,
        "messages": prompt.conversation.messages,
        "max_tokens": common.max_new,
        "stream": false,
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": if sampling.top_k == 0 { all } else { i64::try_from(sampling.top_k).unwrap_or(i64::MAX) },
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        repetition: sampling.repetition_penalty,
    });
    if sampling.temperature > 0. {
        body["seed"] = common.seed.into();
    }
    if let Some(tools) = &prompt.conversation.tools {
        body["tools"] = tools.clone();
    }
    if let Some(on) = prompt.conversation.enable_thinking.or(common.thinking) {
        body["chat_template_kwargs"] = json!({ "enable_thinking": on });
    }
    if common.engine == Engine::Sglang {
        // the counts of speculation are left out of chat answers otherwise
        body["return_meta_info"] = true.into();
    }
    body
}

/// Sends all prompts, at most `concurrency` at a time. Answers come in the order of the prompts; stops at the first failure.
///
/// # Errors
/// Names the prompt and what the server said, and how many answers came before.
pub(super) fn answers(
    client: &Client,
    prompts: &[Prompt],
    common: &Common<'_>,
    concurrency: usize,
    on_answer: &mut dyn FnMut(usize),
) -> Result<Vec<Answer>> {
    let next = AtomicUsize::new(0);
    let mut found: Vec<Option<Answer>> = vec![None; prompts.len()];
    std::thread::scope(|scope| {
        let (send, receive) = mpsc::channel();
        for _ in 0..concurrency.min(prompts.len()) {
            let (send, next) = (send.clone(), &next);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(prompt) = prompts.get(index) else { return };
                    let result = answer(client, &request(prompt, common));
                    if send.send((index, result)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(send);
        for done in 0..prompts.len() {
            let (index, result) = receive.recv().context("a request was lost")?;
            match result {
                Ok(answer) => found[index] = Some(answer),
                Err(error) => {
                    // no thread takes another prompt; those under way are awaited
                    next.store(prompts.len(), Ordering::Relaxed);
                    return Err(error).with_context(|| {
                        format!(
                            "{}: failed after {done} of {} answers; nothing was written",
                            prompts[index].about.id,
                            prompts.len()
                        )
                    });
                }
            }
            on_answer(done + 1);
        }
        found
            .into_iter()
            .map(|answer| answer.context("an answer is missing"))
            .collect()
    })
}

fn answer(client: &Client, request: &Value) -> Result<Answer> {
    let start = Instant::now();
    let reply = client.post(PATH, request)?;
    let seconds = start.elapsed().as_secs_f64();
    let body = client.json(&reply, PATH)?;
    let usage = &body["usage"];
    let completion_tokens = usage["completion_tokens"].as_u64().with_context(|| {
        format!(
            "{PATH}: no usage.completion_tokens in {}",
            client.beginning(&reply.body)
        )
    })?;
    Ok(Answer {
        prompt_tokens: usage["prompt_tokens"].as_u64(),
        cached_tokens: usage["prompt_tokens_details"]["cached_tokens"].as_u64(),
        completion_tokens,
        finish_reason: body["choices"][0]["finish_reason"].as_str().map(str::to_owned),
        seconds,
        body,
    })
}
