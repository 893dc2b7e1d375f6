//! Acceptance of a drafter that somebody else's engine serves: the same prompts through its API, its own counters read before
//! and after, ours and theirs by one definition.
//!
//! | engine | source | ours | theirs |
//! |---|---|---|---|
//! | `vllm` | `/metrics` | 1 + accepted / drafts | the same |
//! | `sglang` | `meta_info` of each answer | 1 + sum i h_i / sum h_i | completion tokens / verify_ct |
//! | `llamacpp` | `/metrics`, else `timings` | 1 + accepted / drafts, else approximate | the same, in its log |

mod chat;
mod client;
mod counters;
mod detect;
mod llamacpp;
mod prometheus;
mod reading;
mod report;
mod sglang;
mod table;
mod vllm;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dflash_data::recipes::Facts;

pub use client::{Client, Reply};
pub use detect::Engine;
pub use reading::Theirs;
pub use report::{Ours, ServerPrompt, ServerReport, ServerSetting};
pub use table::table;

use crate::console::Failure;
use crate::load::{PromptSource, Selection};
use crate::sampling::SamplingConfig;

/// What to measure.
pub struct Request {
    /// `http://HOST:PORT`.
    pub url: String,
    /// The engine; nothing to find out.
    pub engine: Option<Engine>,
    /// The model's name there; nothing for the only one.
    pub model: Option<String>,
    /// Sent as a bearer token.
    pub api_key: Option<String>,
    /// Longest wait for an answer.
    pub timeout: Duration,
    /// Where prompts come from; only their first turns are sent.
    pub prompts: PromptSource,
    /// Which of them, in which order.
    pub selection: Selection,
    /// Only so many prompts, from the first.
    pub limit: Option<usize>,
    /// Most new tokens an answer.
    pub max_new: usize,
    /// How tokens are chosen.
    pub sampling: SamplingConfig,
    /// Thinking switch for the server's template; nothing leaves it alone.
    pub thinking: Option<bool>,
    /// Seed of sampling and of the bootstrap.
    pub seed: u64,
    /// Requests at a time.
    pub concurrency: usize,
}

/// The counters before a run, where an engine has global ones.
enum Before {
    Vllm(Box<counters::Snapshot>),
    Llamacpp(Box<std::result::Result<counters::Snapshot, String>>),
    Sglang,
}

/// Sends the prompts and reads what the engine counted; `on_answer` sees answers so far and prompts in all.
///
/// # Errors
/// Of [`Failure::Input`] on whatever is found before the first prompt is sent: prompts, address, engine, speculation that is
/// off. Of [`Failure::Run`] afterwards.
pub fn measure(request: &Request, on_answer: &mut dyn FnMut(usize, usize)) -> Result<ServerReport, Failure> {
    let prepared = prepare(request).map_err(Failure::Input)?;
    run(request, &prepared, on_answer).map_err(Failure::Run)
}

struct Prepared {
    client: Client,
    prompts: Vec<chat::Prompt>,
    name: String,
    facts: Facts,
    /// Prompts of more than one turn.
    several: usize,
    detected: detect::Detected,
    model: String,
    before: Before,
}

fn prepare(request: &Request) -> Result<Prepared> {
    let set = request.prompts.read(&request.selection)?;
    let (name, facts) = (request.prompts.name(&set), set.facts.clone());
    let several = set.prompts.iter().filter(|prompt| prompt.turns() > 1).count();
    let prompts = chat::prompts(set, request.limit);
    let client = Client::new(&request.url, request.api_key.clone(), request.timeout).context("--server")?;
    let detected = detect::detect(&client, request.engine)?;
    let before = match detected.engine {
        Engine::Vllm => Before::Vllm(Box::new(vllm::before(&client)?)),
        Engine::Llamacpp => Before::Llamacpp(Box::new(llamacpp::before(&client)?)),
        Engine::Sglang => {
            sglang::check(&detected.info)?;
            Before::Sglang
        }
    };
    let model = match &request.model {
        Some(model) => model.clone(),
        None => detect::model(&client)?,
    };
    Ok(Prepared {
        client,
        prompts,
        name,
        facts,
        several,
        detected,
        model,
        before,
    })
}

fn run(request: &Request, prepared: &Prepared, on_answer: &mut dyn FnMut(usize, usize)) -> Result<ServerReport> {
    let Prepared {
        client,
        prompts,
        detected,
        model,
        ..
    } = prepared;
    let common = chat::Common {
        engine: detected.engine,
        model,
        max_new: request.max_new,
        sampling: request.sampling,
        seed: request.seed,
        thinking: request.thinking,
    };
    let start = Instant::now();
    let answers = chat::answers(client, prompts, &common, request.concurrency, &mut |done| {
        on_answer(done, prompts.len());
    })?;
    let wall_seconds = start.elapsed().as_secs_f64();
    let reading = match &prepared.before {
        Before::Vllm(before) => vllm::reading(client, before, &answers)?,
        Before::Llamacpp(before) => llamacpp::reading(client, before, &answers)?,
        Before::Sglang => {
            // asked anew: the average has moved
            let now = detect::detect(client, Some(Engine::Sglang))?;
            sglang::reading(&answers, sglang::average(&now.info))?
        }
    };
    let completion_tokens = answers.iter().map(|answer| answer.completion_tokens).sum();
    let per_prompt = prompts
        .iter()
        .zip(&answers)
        .enumerate()
        .map(|(index, (prompt, answer))| {
            let counts = reading.texts.get(index);
            ServerPrompt {
                id: prompt.about.id.clone(),
                domain: prompt.about.domain.clone(),
                prompt_tokens: answer.prompt_tokens,
                cached_tokens: answer.cached_tokens,
                completion_tokens: answer.completion_tokens,
                finish_reason: answer.finish_reason.clone(),
                seconds: answer.seconds,
                rounds: counts.map(|counts| counts.rounds),
                drafted: counts.map(|counts| counts.drafted).filter(|&drafted| drafted > 0),
                accepted: counts.map(|counts| counts.accepted),
                acceptance_length: counts.and_then(crate::acceptance::Counts::acceptance_length),
            }
        });
    Ok(ServerReport {
        kind: "server".into(),
        engine: detected.engine,
        version: detected.version.clone(),
        url: client.url().into(),
        model: model.clone(),
        ours: Ours::of(&reading, request.seed),
        per_prompt: per_prompt.collect(),
        theirs: reading.theirs,
        prompts: prompts.len(),
        completion_tokens,
        wall_seconds,
        tokens_per_s: completion_tokens as f64 / wall_seconds.max(f64::MIN_POSITIVE),
        definitions: report::definitions(),
        setting: ServerSetting {
            prompts_file: prepared.name.clone(),
            prompts_sha256: prepared.facts.prompts_sha256.clone(),
            prompt_set: serde_json::to_value(&prepared.facts)?,
            max_new: request.max_new,
            sampling: request.sampling,
            seed: request.seed,
            concurrency: request.concurrency,
            thinking: match request.thinking {
                None => "template default",
                Some(true) => "on",
                Some(false) => "off",
            }
            .into(),
            timeout_seconds: request.timeout.as_secs_f64(),
            version: env!("CARGO_PKG_VERSION").into(),
        },
        warnings: [reading.warnings, turns_left_out(prepared.several)].concat(),
    })
}

fn turns_left_out(several: usize) -> Vec<String> {
    if several == 0 {
        return Vec::new();
    }
    vec![format!(
        "{several} prompts have later turns, which were not sent: only first answers are counted"
    )]
}
