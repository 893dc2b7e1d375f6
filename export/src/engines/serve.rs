//! The command that starts an engine with a drafter. Most count drafts, SGLang counts the block with its anchor.

use dflash_model::DrafterConfig;
use dflash_model::folder::{DraftCounts, shell};
use dflash_model::formats::Format;

use super::{Engine, Seen};

/// The command for `engine`, words quoted for a POSIX shell.
pub(super) fn command(seen: &Seen, config: &DrafterConfig, engine: Engine) -> String {
    let counts = DraftCounts::of(config.block_size);
    let target = shell(seen.target_name.as_deref().unwrap_or("TARGET"));
    let name = shell(&seen.name);
    let method = if config.is_dflash2() { "dflash2" } else { "dflash" };
    match engine {
        // the folder names its own target and count
        Engine::Vllm if seen.format == Format::Speculators => format!("vllm serve {name}"),
        Engine::Vllm => {
            let speculative = serde_json::json!({
                "method": "dflash", "model": seen.name, "num_speculative_tokens": counts.vllm,
            });
            format!(
                "vllm serve {target} --speculative-config {}",
                shell(&speculative.to_string())
            )
        }
        Engine::Sglang => format!(
            "python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \
             --speculative-draft-model-path {name} --speculative-num-draft-tokens {}",
            counts.sglang
        ),
        Engine::LlamaCpp => {
            let (convert, file) = match seen.format {
                Format::Gguf => (String::new(), name),
                Format::Published | Format::Speculators => (
                    format!("dflash-export gguf {name} --target {target} --out drafter.gguf && "),
                    "drafter.gguf".to_owned(),
                ),
            };
            format!(
                "{convert}llama-server -m TARGET.gguf -md {file} --spec-type draft-dflash --spec-draft-n-max {}",
                counts.llama_cpp
            )
        }
        Engine::Mlx => format!("dflash mlx --model {target} --draft {name} generate PROMPT"),
        Engine::Transformers => format!("dflash transformers --model {target} --draft {name} generate PROMPT"),
        // its options are spelled differently from release to release
        Engine::Max => format!(
            "MAX: model {target}, draft model {name}, speculative method {method}, num_speculative_tokens {}",
            counts.max
        ),
    }
}
