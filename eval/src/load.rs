//! From a command line's folders and files to a target, a drafter and tokenised prompts.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::DType;
use dflash_data::files::sha256_hex;
use dflash_data::{Chat, Conversation, read_jsonl, target_hash};
use dflash_model::{BoundDrafter, Drafter, Drafting, Target, device};

use crate::prompts::About;
use crate::rendered::{Rendered, Row};
use crate::report::Setting;

/// The chat template's thinking switch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Thinking {
    /// Left to the template.
    #[default]
    Template,
    /// On.
    On,
    /// Off.
    Off,
    /// Every prompt twice, on and off, counted apart as well.
    Both,
}

impl Thinking {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Template => "template default",
            Self::On => "on",
            Self::Off => "off",
            Self::Both => "both",
        }
    }

    fn switches(self) -> &'static [Option<bool>] {
        match self {
            Self::Template => &[None],
            Self::On => &[Some(true)],
            Self::Off => &[Some(false)],
            Self::Both => &[Some(true), Some(false)],
        }
    }
}

/// What to load.
#[derive(Debug, Clone, Copy)]
pub struct Request<'r> {
    /// Target folder.
    pub target: &'r Path,
    /// Drafter folder.
    pub drafter: &'r Path,
    /// JSONL of conversations.
    pub prompts: &'r Path,
    /// `cpu`, `metal` or `cuda`.
    pub device: &'r str,
    /// Whether the target computes in bf16 instead of f32.
    pub bf16: bool,
    /// Thinking switch for the chat template.
    pub thinking: Thinking,
    /// Only so many prompts, from the first.
    pub limit: Option<usize>,
    /// Takes the best token of each slot instead of walking with the selector, to measure what the selector adds.
    pub without_selector: bool,
}

/// Everything that an evaluation needs.
pub struct Loaded {
    /// The target.
    pub target: Box<dyn Target>,
    /// The drafter on the target's embedding and head.
    pub drafting: Box<dyn Drafting>,
    /// The prompts, first turns rendered.
    pub prompts: Rendered,
    /// Where all of it came from; `max_new` and `block_size_used` are the caller's to fill.
    pub setting: Setting,
}

/// Loads a request.
///
/// # Errors
/// On a missing or broken file, on a drafter that does not fit the target, and on a prompt that the template refuses;
/// each names the file and what was expected.
pub fn load(request: &Request<'_>) -> Result<Loaded> {
    let device = device::by_name(request.device).context("--device")?;
    let dtype = if request.bf16 { DType::BF16 } else { DType::F32 };
    for (flag, folder) in [("--target", request.target), ("--drafter", request.drafter)] {
        ensure!(folder.is_dir(), "{flag} {}: no such folder", folder.display());
    }
    // cheap and often wrong first: prompts before weights
    let mut setting = Setting {
        target: request.target.display().to_string(),
        drafter: request.drafter.display().to_string(),
        dtype: if request.bf16 { "bf16" } else { "f32" }.into(),
        device: request.device.into(),
        threads: rayon::current_num_threads(),
        prompts_file: request.prompts.display().to_string(),
        thinking: request.thinking.name().into(),
        version: env!("CARGO_PKG_VERSION").into(),
        ..Setting::default()
    };
    let prompts = prompts(request, &mut setting)?;
    let mut drafter =
        Drafter::load(request.drafter, &device).with_context(|| format!("--drafter {}", request.drafter.display()))?;
    if request.without_selector {
        ensure!(
            drafter.selector.take().is_some(),
            "--without-selector: {} has none",
            request.drafter.display()
        );
        setting.without_selector = true;
    }
    let target = dflash_model::target::load(request.target, &device, dtype)
        .with_context(|| format!("--target {}", request.target.display()))?;
    let config = &drafter.config;
    setting.block_size = config.block_size;
    setting.mask_token_id = config.mask_token_id;
    setting.taps.clone_from(&config.target_layer_ids);
    setting.target_hash = target_hash(request.target)?;
    setting.drafter_hash = target_hash(request.drafter)?;
    let fits = || format!("{} for {}", request.drafter.display(), request.target.display());
    config.check_target(target.info()).with_context(fits)?;
    let drafting = BoundDrafter::new(drafter, target.head()).with_context(fits)?;
    target.session(drafting.taps()).map(drop).with_context(fits)?;
    Ok(Loaded {
        target,
        drafting: Box::new(drafting),
        prompts,
        setting,
    })
}

/// Reads and renders the prompts; notes file, template and stop ids in `setting`.
fn prompts(request: &Request<'_>, setting: &mut Setting) -> Result<Rendered> {
    let chat = Chat::load(request.target)?;
    let bytes = std::fs::read(request.prompts).with_context(|| format!("--prompts {}", request.prompts.display()))?;
    setting.prompts_sha256 = sha256_hex(&bytes);
    setting.template_sha256 = chat.template.hash().into();
    setting.stop_ids.clone_from(&chat.stops);
    let mut rows = Vec::new();
    for (line, row) in read_jsonl(request.prompts)?
        .iter()
        .take(request.limit.unwrap_or(usize::MAX))
    {
        let opening = without_answer(row);
        for &thinking in request.thinking.switches() {
            rows.push(Row {
                about: About {
                    id: format!("{}:{line}", request.prompts.display()),
                    domain: row
                        .fields
                        .get("domain")
                        .and_then(|name| name.as_str())
                        .map(String::from),
                    thinking: thinking.filter(|_| request.thinking == Thinking::Both),
                },
                opening: opening.clone(),
                follow_ups: Vec::new(),
                thinking,
            });
        }
    }
    let rendered = Rendered::new(chat, rows)?;
    setting.prompt_tail = rendered.tail()?;
    Ok(rendered)
}

/// The conversation without the answer that it ends with, if it does: recorded conversations serve as prompts.
fn without_answer(row: &Conversation) -> Conversation {
    let mut row = row.clone();
    while row.messages.last().is_some_and(|message| message.role() == "assistant") {
        row.messages.pop();
    }
    row
}
