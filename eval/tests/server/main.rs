//! Acceptance measured against servers: stubs with the fields of vLLM, SGLang and llama.cpp, well-behaved and hostile.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod command;
mod engines;
mod failures;
mod stub;

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use dflash_eval::SamplingConfig;
use dflash_eval::console::Failure;
use dflash_eval::load::{PromptSource, Selection};
use dflash_eval::server::{Request, ServerReport, measure};
use serde_json::{Value, json};
use tempfile::TempDir;

use stub::{Answer, Call, Stub, answer};

/// Drafts a round.
const K: u64 = 7;

/// Two prompts, the first with an answer of its own.
fn prompts() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompts.jsonl");
    let rows = [
        json!({"messages": [{"role": "user", "content": "first"}, {"role": "assistant", "content": "recorded"}]}),
        json!({"messages": [{"role": "user", "content": "second"}], "enable_thinking": false, "domain": "b"}),
    ];
    std::fs::write(&path, format!("{}\n\n{}\n", rows[0], rows[1])).unwrap();
    (folder, path)
}

fn request(url: &str, prompts: PathBuf) -> Request {
    Request {
        url: url.into(),
        engine: None,
        model: None,
        api_key: None,
        timeout: Duration::from_secs(5),
        prompts: PromptSource::File(prompts),
        selection: Selection::default(),
        limit: None,
        max_new: 64,
        sampling: SamplingConfig::default(),
        thinking: None,
        seed: 1,
        concurrency: 1,
    }
}

/// Measures a stub; `change` may alter the request.
fn measured(stub: &Stub, change: impl Fn(&mut Request)) -> Result<ServerReport, Failure> {
    let (_folder, path) = prompts();
    let mut request = request(&stub.url, path);
    change(&mut request);
    measure(&request, &mut |_, _| ())
}

fn report(stub: &Stub) -> ServerReport {
    match measured(stub, |_| ()) {
        Ok(report) => report,
        Err(Failure::Input(error) | Failure::Run(error)) => panic!("{error:#}"),
    }
}

/// The message of a failure before the first prompt.
fn refused(result: Result<ServerReport, Failure>) -> String {
    match result {
        Err(Failure::Input(error)) => format!("{error:#}"),
        Err(Failure::Run(error)) => panic!("failed too late: {error:#}"),
        Ok(_) => panic!("expected a refusal"),
    }
}

/// The message of a failure afterwards.
fn failed(result: Result<ServerReport, Failure>) -> String {
    match result {
        Err(Failure::Run(error)) => format!("{error:#}"),
        Err(Failure::Input(error)) => panic!("failed too early: {error:#}"),
        Ok(_) => panic!("expected a failure"),
    }
}

fn models() -> Answer {
    answer(
        200,
        json!({"object": "list", "data": [{"id": "stub-model", "object": "model"}]}),
    )
}

fn is_first(call: &Call) -> bool {
    call.body["messages"][0]["content"] == "first"
}

/// A chat answer of so many tokens, without anything of speculation.
fn chat(tokens: u64) -> Value {
    json!({
        "id": "c", "object": "chat.completion", "model": "stub-model",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
    })
}

/// Counters of rounds with a scheme of names; starts far from zero, as a server that has served before.
struct Counted {
    drafts: AtomicU64,
    accepted: [AtomicU64; K as usize],
    generated: AtomicU64,
}

impl Default for Counted {
    fn default() -> Self {
        Self {
            drafts: AtomicU64::new(1000),
            accepted: std::array::from_fn(|i| AtomicU64::new(700 - 100 * i as u64)),
            generated: AtomicU64::new(5000),
        }
    }
}

impl Counted {
    /// Counts a text's rounds; returns the tokens of the text, the prefill's included.
    fn text(&self, rounds: &[u64]) -> u64 {
        for &accepted in rounds {
            self.drafts.fetch_add(1, SeqCst);
            for position in &self.accepted[..accepted as usize] {
                position.fetch_add(1, SeqCst);
            }
        }
        let tokens = 1 + rounds.iter().map(|accepted| accepted + 1).sum::<u64>();
        self.generated.fetch_add(tokens, SeqCst);
        tokens
    }

    /// Rounds of the two prompts: K = 7, [7, 7, 7, 0] and [0, 0].
    fn both(&self, call: &Call) -> u64 {
        self.text(if is_first(call) { &[7, 7, 7, 0] } else { &[0, 0] })
    }

    fn accepted(&self) -> u64 {
        self.accepted.iter().map(|position| position.load(SeqCst)).sum()
    }
}

/// A vLLM that counts what `text` says of each request, and whose metrics are `metrics`.
fn vllm(
    text: impl Fn(&Counted, &Call) -> u64 + Send + Sync + 'static,
    metrics: impl Fn(&Counted) -> String + Send + Sync + 'static,
) -> Stub {
    let counted = Counted::default();
    Stub::new(move |call| match call.path.as_str() {
        "/version" => answer(200, json!({"version": "0.11.0"})),
        "/metrics" => answer(200, metrics(&counted)),
        "/v1/models" => models(),
        "/v1/chat/completions" => answer(200, chat(text(&counted, call))),
        _ => answer(404, json!({"detail": "Not Found"})),
    })
}

/// vLLM's metrics of two engines: the second idle, its labels in another order, and neighbours with similar names.
fn vllm_metrics(counted: &Counted) -> String {
    let mut out = String::from("# HELP python_info x\npython_info{version=\"3.12\"} 1.0\n# TYPE nonsense {{{\n");
    let mut add = |name: &str, extra: &str, value: u64| {
        writeln!(
            out,
            "vllm:{name}_total{{engine=\"0\",model_name=\"a}} b\"{extra}}} {value}.0\n\
             vllm:{name}_created{{engine=\"0\",model_name=\"a}} b\"{extra}}} 1.76e+09\n\
             vllm:{name}_total{{model_name=\"a}} b\"{extra},engine=\"1\"}} 40.0"
        )
        .unwrap();
    };
    let drafts = counted.drafts.load(SeqCst);
    add("spec_decode_num_drafts", "", drafts);
    add("spec_decode_num_draft_tokens", "", drafts * K);
    add("spec_decode_num_accepted_tokens", "", counted.accepted());
    add("generation_tokens", "", counted.generated.load(SeqCst));
    for (position, count) in counted.accepted.iter().enumerate() {
        let label = format!(",position=\"{position}\"");
        add("spec_decode_num_accepted_tokens_per_pos", &label, count.load(SeqCst));
    }
    out
}
