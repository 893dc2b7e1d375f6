//! What each engine makes of a drafter: loads it, loads it when told more, misreads it without a word, or refuses it.
//!
//! `rules` holds what is known of each engine's reader, `serve` the command that starts it with the right count of
//! drafts. The facts are those of the engines' sources and bug reports of autumn 2026, not of a run of them here: of the
//! six only llama.cpp, PyPI dflash and its MLX port are run by `scripts/interop.sh`.

mod lookup;
mod rules;
mod serve;

use std::collections::BTreeMap;

use dflash_model::formats::Format;
use dflash_model::{DrafterConfig, TargetInfo};
use serde::Serialize;
use serde_json::Value;

/// An engine, or a family that reads alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Engine {
    /// vLLM.
    #[serde(rename = "vLLM")]
    Vllm,
    /// SGLang.
    #[serde(rename = "SGLang")]
    Sglang,
    /// llama.cpp.
    #[serde(rename = "llama.cpp")]
    LlamaCpp,
    /// The authors' MLX loop and its ports.
    #[serde(rename = "MLX")]
    Mlx,
    /// The authors' PyTorch class over transformers.
    #[serde(rename = "HF")]
    Transformers,
    /// Modular MAX.
    #[serde(rename = "MAX")]
    Max,
}

impl Engine {
    /// Every engine, in the order of the table.
    pub const ALL: [Self; 6] = [
        Self::Vllm,
        Self::Sglang,
        Self::LlamaCpp,
        Self::Mlx,
        Self::Transformers,
        Self::Max,
    ];

    /// Its name in a table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::LlamaCpp => "llama.cpp",
            Self::Mlx => "MLX",
            Self::Transformers => "HF",
            Self::Max => "MAX",
        }
    }
}

/// What happens when an engine is given the drafter; the worst that applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It drafts as it was trained to.
    Loads,
    /// It does so when told more, by a flag, a release or a conversion.
    LoadsWithFlags,
    /// It starts without an error and drafts something else.
    Misreads,
    /// It ends with an error.
    Refuses,
}

impl Verdict {
    /// The verdict in words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loads => "loads",
            Self::LoadsWithFlags => "loads with flags",
            Self::Misreads => "misreads",
            Self::Refuses => "refuses",
        }
    }
}

/// One engine's verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Judgement {
    /// The engine.
    pub engine: Engine,
    /// What happens.
    pub verdict: Verdict,
    /// Why, worst first.
    pub reasons: Vec<String>,
    /// How to start it; absent where it refuses.
    pub command: Option<String>,
}

/// What is known of a drafter without reading a weight.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Path or name as an engine would be given it.
    pub name: String,
    /// Its format.
    pub format: Format,
    /// `config.json` as it stands; null for a GGUF file.
    pub raw: Value,
    /// The configuration, where the strict reader takes it.
    pub config: Option<DrafterConfig>,
    /// Why the strict reader does not.
    pub refused: Option<String>,
    /// Shapes of the stored tensors.
    pub tensors: BTreeMap<String, Vec<usize>>,
    /// Files beside them that an engine may load.
    pub stray: Vec<String>,
    /// Whether a `dflash.py` lies beside it, as in the first published folders.
    pub remote_code: bool,
    /// The target's sizes, where known.
    pub target: Option<TargetInfo>,
    /// The target as an engine would be given it.
    pub target_name: Option<String>,
}

/// Findings about one engine.
#[derive(Debug, Default)]
struct Findings(Vec<(Verdict, String)>);

impl Findings {
    fn refuse(&mut self, when: bool, reason: impl Into<String>) {
        self.add(when, Verdict::Refuses, reason);
    }

    fn misread(&mut self, when: bool, reason: impl Into<String>) {
        self.add(when, Verdict::Misreads, reason);
    }

    fn flag(&mut self, when: bool, reason: impl Into<String>) {
        self.add(when, Verdict::LoadsWithFlags, reason);
    }

    fn add(&mut self, when: bool, verdict: Verdict, reason: impl Into<String>) {
        if when {
            self.0.push((verdict, reason.into()));
        }
    }
}

/// Every engine's verdict, in the order of [`Engine::ALL`].
pub fn judge(seen: &Seen) -> Vec<Judgement> {
    let seen = &with_depth(seen);
    Engine::ALL.into_iter().map(|engine| judge_one(seen, engine)).collect()
}

/// A depth that is not written down is not needed by every engine: the target's is taken, for the rest to be judged.
fn with_depth(seen: &Seen) -> Seen {
    let mut seen = seen.clone();
    let Some(depth) = seen.target.as_ref().map(|target| target.num_layers) else {
        return seen;
    };
    if seen.config.is_none() && seen.format == Format::Published && seen.raw.get("num_target_layers").is_none() {
        let mut raw = seen.raw.clone();
        if let Some(keys) = raw.as_object_mut() {
            keys.insert("num_target_layers".to_owned(), depth.into());
        }
        if let Ok(config) = DrafterConfig::from_json(&raw, "config.json") {
            (seen.config, seen.refused) = (Some(config), None);
        }
    }
    seen
}

fn judge_one(seen: &Seen, engine: Engine) -> Judgement {
    let mut findings = rules::findings(seen, engine);
    // a GGUF file's list is read with its keys, which may be what is wrong there
    let unreadable = seen.tensors.is_empty() && seen.format != Format::Gguf;
    findings.refuse(unreadable, "no weights can be read");
    // whatever is not understood here may be understood differently there
    if let (Some(refused), true) = (
        &seen.refused,
        findings.0.iter().all(|found| found.0 < Verdict::Misreads),
    ) {
        findings.misread(true, format!("read at its own discretion: {refused}"));
    }
    findings.0.sort_by_key(|found| std::cmp::Reverse(found.0));
    let verdict = findings.0.first().map_or(Verdict::Loads, |found| found.0);
    Judgement {
        engine,
        verdict,
        reasons: findings.0.into_iter().map(|(_, reason)| reason).collect(),
        command: seen
            .config
            .as_ref()
            .filter(|_| verdict != Verdict::Refuses)
            .map(|config| serve::command(seen, config, engine)),
    }
}
