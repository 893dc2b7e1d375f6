//! `dflash-eval server`, and `dflash-eval acceptance --server`: acceptance as an engine that serves the drafter counts it.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

use crate::cli::arguments::{OutputArguments, PromptArguments, SamplingArguments, ThinkingName};
use crate::console::{Failure, at_least_one, print};
use crate::evaluate::Progress;
use crate::progress::Display;
use crate::server::{Engine, Request, measure, table};

/// Most requests at a time: a thread each.
const MOST_CONCURRENT: usize = 1024;

/// Options of the mode.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The server: http://HOST:PORT of vLLM, SGLang or llama.cpp.
    #[arg(id = "server", long = "url", visible_alias = "server", value_name = "URL")]
    url: String,
    #[command(flatten)]
    server: ServerArguments,
    #[command(flatten)]
    prompts: PromptArguments,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// Seed of sampling and of the bootstrap.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// No progress.
    #[arg(long)]
    quiet: bool,
    #[command(flatten)]
    output: OutputArguments,
}

/// How to talk to a server.
#[derive(Debug, Clone, Args)]
pub(crate) struct ServerArguments {
    /// The server's engine.
    #[arg(long, value_enum, default_value = "auto")]
    engine: EngineName,
    /// The model's name there [default: the only one].
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Requests at a time.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = concurrency)]
    concurrency: usize,
    /// Longest wait for an answer.
    #[arg(long, default_value = "600", value_name = "SECONDS", value_parser = seconds)]
    timeout: Duration,
    /// Environment variable that holds the API key.
    #[arg(long, value_name = "NAME")]
    api_key_env: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum EngineName {
    /// Found out.
    Auto,
    Vllm,
    Sglang,
    Llamacpp,
}

/// What both commands were given.
pub(crate) struct Given<'g> {
    pub(crate) url: &'g str,
    pub(crate) server: &'g ServerArguments,
    pub(crate) prompts: &'g PromptArguments,
    pub(crate) sampling: &'g SamplingArguments,
    pub(crate) seed: u64,
    pub(crate) quiet: bool,
    pub(crate) output: &'g OutputArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<bool, Failure> {
    run_given(&Given {
        url: &arguments.url,
        server: &arguments.server,
        prompts: &arguments.prompts,
        sampling: &arguments.sampling,
        seed: arguments.seed,
        quiet: arguments.quiet,
        output: &arguments.output,
    })
}

pub(crate) fn run_given(given: &Given<'_>) -> Result<bool, Failure> {
    let request = request(given).map_err(Failure::Input)?;
    let mut display = None;
    let report = measure(&request, &mut |done, total| {
        let display = display.get_or_insert_with(|| Display::new("server", total, given.quiet));
        display.update(Progress {
            done,
            total,
            acceptance_length: None,
        });
    })?;
    print(&table(&report)).map_err(Failure::Run)?;
    given.output.write(&report)?;
    Ok(true)
}

fn request(given: &Given<'_>) -> Result<Request> {
    given.output.check()?;
    let api_key = given.server.api_key_env.as_deref().map(|name| {
        // the variable's own error would show a value that is not UTF-8
        let value = std::env::var(name).ok();
        value.with_context(|| format!("--api-key-env {name}: no such environment variable, or no text in it"))
    });
    let thinking = match given.prompts.thinking {
        None => None,
        Some(ThinkingName::On) => Some(true),
        Some(ThinkingName::Off) => Some(false),
        Some(ThinkingName::Both) => bail!("--thinking both: a server's counters cannot be told apart; measure twice"),
    };
    Ok(Request {
        url: given.url.to_owned(),
        engine: match given.server.engine {
            EngineName::Auto => None,
            EngineName::Vllm => Some(Engine::Vllm),
            EngineName::Sglang => Some(Engine::Sglang),
            EngineName::Llamacpp => Some(Engine::Llamacpp),
        },
        model: given.server.model.clone(),
        api_key: api_key.transpose()?,
        timeout: given.server.timeout,
        prompts: given.prompts.source()?,
        selection: given.prompts.selection(),
        limit: given.prompts.limit,
        max_new: given.prompts.max_new,
        sampling: given.sampling.config()?,
        thinking,
        seed: given.seed,
        concurrency: given.server.concurrency,
    })
}

fn concurrency(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        many if many > MOST_CONCURRENT => Err(format!("expected at most {MOST_CONCURRENT}")),
        number => Ok(number),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.parse().ok();
    match seconds {
        Some(seconds) if seconds > 0. && seconds <= 86400. => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("expected seconds, above 0 and at most 86400".into()),
    }
}
