//! Which engine answers: asked for what only one of them says.
//!
//! - SGLang: `/server_info`, formerly `/get_server_info`, holds `internal_states`
//!   (`python/sglang/srt/entrypoints/http_server.py`); vLLM's development mode has a `/server_info` without it.
//! - llama.cpp: `/props` holds `build_info` or `default_generation_settings` (`tools/server/server-context.cpp`).
//! - vLLM: `/metrics` has names that begin with `vllm:`; `/version` alone would be anybody's (TensorRT-LLM has one).

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::server::client::Client;

/// An engine whose counters we know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// llama.cpp's server.
    Llamacpp,
}

impl Engine {
    /// Its name as people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::Llamacpp => "llama.cpp",
        }
    }
}

/// What a server says of itself.
#[derive(Debug)]
pub(super) struct Detected {
    pub(super) engine: Engine,
    pub(super) version: Option<String>,
    /// SGLang's server information, else null.
    pub(super) info: Value,
}

/// Asks the server what it is; `wanted` is believed, and asked for its version only.
///
/// # Errors
/// When nothing answers at all, or no known engine: then with the status of everything tried.
pub(super) fn detect(client: &Client, wanted: Option<Engine>) -> Result<Detected> {
    let mut tried = Vec::new();
    let is_asked = |engine| wanted.is_none_or(|wanted| wanted == engine);
    if is_asked(Engine::Sglang) {
        for path in ["/server_info", "/get_server_info"] {
            let info = object(client, path, &mut tried)?;
            if info.get("internal_states").is_some() || info.get("speculative_algorithm").is_some() {
                return Ok(Detected {
                    engine: Engine::Sglang,
                    version: text(&info, "version"),
                    info,
                });
            }
        }
    }
    if is_asked(Engine::Llamacpp) {
        let info = object(client, "/props", &mut tried)?;
        if info.get("build_info").is_some() || info.get("default_generation_settings").is_some() {
            return Ok(Detected {
                engine: Engine::Llamacpp,
                version: text(&info, "build_info"),
                info: Value::Null,
            });
        }
    }
    if is_asked(Engine::Vllm) {
        let version = text(&object(client, "/version", &mut tried)?, "version");
        let metrics = client.get("/metrics")?;
        let is_vllm = metrics.status == 200 && metrics.body.lines().any(|line| line.starts_with("vllm:"));
        tried.push(format!("/metrics: HTTP {}", metrics.status));
        if is_vllm {
            return Ok(Detected {
                engine: Engine::Vllm,
                version,
                info: Value::Null,
            });
        }
    }
    if let Some(engine) = wanted {
        return Ok(Detected {
            engine,
            version: None,
            info: Value::Null,
        });
    }
    bail!(
        "{}: neither vLLM, SGLang nor llama.cpp answers as such (name it with --engine; vLLM shows itself only without \
         --disable-log-stats). Tried {}",
        client.url(),
        tried.join(", ")
    )
}

/// The only model that the server offers.
///
/// # Errors
/// When it offers none or several.
pub(super) fn model(client: &Client) -> Result<String> {
    let path = "/v1/models";
    let reply = client.json(&client.get(path)?, path)?;
    let models: Vec<&str> = reply["data"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|model| model["id"].as_str())
        .collect();
    ensure!(!models.is_empty(), "{path} lists no model; name it with --model");
    ensure!(
        models.len() == 1,
        "{path} lists {}; name one of them with --model",
        models.join(", ")
    );
    Ok(models[0].to_owned())
}

/// The JSON at a path, null when there is none; only silence is an error.
fn object(client: &Client, path: &str, tried: &mut Vec<String>) -> Result<Value> {
    let reply = client.get(path)?;
    tried.push(format!("{path}: HTTP {}", reply.status));
    if reply.status != 200 {
        return Ok(Value::Null);
    }
    Ok(serde_json::from_str(&reply.body).unwrap_or(Value::Null))
}

fn text(value: &Value, field: &str) -> Option<String> {
    value[field].as_str().map(str::to_owned)
}
