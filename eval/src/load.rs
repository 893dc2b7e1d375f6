//! From a command line's folders and files to a target, a drafter and tokenised prompts.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use candle_core::DType;
use dflash_data::hub::on_record;
pub use dflash_data::recipes::Selection;
use dflash_data::recipes::{self, PromptSet, Recipe, Source, load_conversations};
use dflash_data::{Chat, target_hash};
use dflash_model::{BoundDrafter, Drafter, Drafting, Target, formats};

use crate::folder::{drafter_in, sizes_for};
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

/// Where prompts come from.
#[derive(Debug, Clone)]
pub enum PromptSource {
    /// JSONL or Parquet of conversations; a last assistant turn is left out.
    File(PathBuf),
    /// A known data set, from its own files or the hub.
    Recipe(&'static Recipe, Source),
}

impl PromptSource {
    /// Reads the prompts.
    ///
    /// # Errors
    /// Names the option, and the file and row that are wrong.
    pub fn read(&self, selection: &Selection) -> Result<PromptSet> {
        match self {
            Self::File(path) => load_conversations(path, selection).context("--prompts"),
            Self::Recipe(recipe, source) => recipes::load(recipe, source, selection).context("--recipe"),
        }
    }

    /// What to call it in a report.
    pub fn name(&self, set: &PromptSet) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Recipe(..) => format!("{}: {}", set.facts.name, set.facts.source),
        }
    }
}

/// What to load.
#[derive(Debug, Clone)]
pub struct Request<'r> {
    /// Target folder.
    pub target: &'r Path,
    /// Drafter folder or file, of any format, or a run's folder.
    pub drafter: &'r Path,
    /// Where prompts come from.
    pub prompts: PromptSource,
    /// Which of them, in which order.
    pub selection: Selection,
    /// `cpu`, `metal` or `cuda`.
    pub device: &'r str,
    /// Whether the target computes in bf16 instead of f32.
    pub bf16: bool,
    /// Thinking switch for the chat template.
    pub thinking: Thinking,
    /// At most so many of those, from the first.
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
    drafter_in(request.drafter).context("--drafter")?;
    let mut setting = setting(request.target, request.device, request.bf16)?;
    // cheap and often wrong first: prompts before weights
    let prompts = load_prompts(request, &mut setting)?;
    let target = load_target(request.target, request.device, request.bf16)?;
    let drafting = bind(request.drafter, request.without_selector, target.as_ref(), &mut setting)?;
    Ok(Loaded {
        target,
        drafting: Box::new(drafting),
        prompts,
        setting,
    })
}

/// The circumstances that a target brings along: folder, device, type, chat template and stop ids.
///
/// # Errors
/// When the folder or its chat files are missing.
pub fn setting(target: &Path, device: &str, bf16: bool) -> Result<Setting> {
    ensure_folder("--target", target)?;
    let chat = Chat::load(target)?;
    Ok(Setting {
        target: on_record(target),
        target_hash: target_hash(target)?,
        dtype: if bf16 { "bf16" } else { "f32" }.into(),
        device: device.into(),
        threads: rayon::current_num_threads(),
        template_sha256: chat.template.hash().into(),
        stop_ids: chat.stops,
        version: env!("CARGO_PKG_VERSION").into(),
        ..Setting::default()
    })
}

/// Loads a target.
///
/// # Errors
/// Names the option and the folder.
pub fn load_target(folder: &Path, device: &str, bf16: bool) -> Result<Box<dyn Target>> {
    ensure_folder("--target", folder)?;
    let device = dflash_model::device::by_name(device).context("--device")?;
    let dtype = if bf16 { DType::BF16 } else { DType::F32 };
    dflash_model::target::load(folder, &device, dtype).with_context(|| format!("--target {}", folder.display()))
}

/// Loads a drafter onto its target and notes it in `setting`.
///
/// # Errors
/// When the folder is broken or was made for another target.
pub fn bind(folder: &Path, without_selector: bool, target: &dyn Target, setting: &mut Setting) -> Result<BoundDrafter> {
    let folder = &drafter_in(folder).context("--drafter")?;
    let device = dflash_model::device::by_name(&setting.device).context("--device")?;
    let named = || format!("--drafter {}", folder.display());
    let source = formats::read(folder, Some(&sizes_for(folder, target.info()))).with_context(named)?;
    let mut drafter = Drafter::from_source(&source, &device).with_context(named)?;
    if without_selector {
        ensure!(
            drafter.selector.take().is_some(),
            "--without-selector: {} has none",
            folder.display()
        );
    }
    let config = &drafter.config;
    setting.drafter = on_record(folder);
    setting.drafter_hash = target_hash(folder)?;
    setting.without_selector = without_selector;
    setting.block_size = config.block_size;
    setting.block_size_used = config.block_size;
    setting.mask_token_id = config.mask_token_id;
    setting.taps.clone_from(&config.target_layer_ids);
    let fits = || format!("{} for {}", folder.display(), setting.target);
    source.check_carried(target.head()).with_context(fits)?;
    drop(source);
    config.check_target(target.info()).with_context(fits)?;
    let bound = BoundDrafter::new(drafter, target.head()).with_context(fits)?;
    target.session(bound.taps()).map(drop).with_context(fits)?;
    Ok(bound)
}

fn ensure_folder(option: &str, folder: &Path) -> Result<()> {
    ensure!(folder.is_dir(), "{option} {}: no such folder", folder.display());
    Ok(())
}

/// Reads and renders the prompts and notes their file in `setting`.
///
/// # Errors
/// Names the file, and the line that the template refuses.
pub fn load_prompts(request: &Request<'_>, setting: &mut Setting) -> Result<Rendered> {
    let chat = Chat::load(request.target)?;
    let set = request.prompts.read(&request.selection)?;
    setting.prompts_file = request.prompts.name(&set);
    setting.prompts_sha256.clone_from(&set.facts.prompts_sha256);
    setting.prompt_set = serde_json::to_value(&set.facts)?;
    setting.thinking = request.thinking.name().into();
    let mut rows = Vec::new();
    for prompt in set.prompts.into_iter().take(request.limit.unwrap_or(usize::MAX)) {
        for &thinking in request.thinking.switches() {
            rows.push(Row {
                about: About {
                    id: prompt.id.clone(),
                    domain: prompt.domain.clone(),
                    thinking: thinking.filter(|_| request.thinking == Thinking::Both),
                },
                prompt: prompt.clone(),
                thinking,
            });
        }
    }
    let rendered = Rendered::new(chat, rows)?;
    setting.prompt_tail = rendered.tail()?;
    Ok(rendered)
}
