//! The run file: what a run trains, from what, and where it writes. TOML, one section a concern.
//!
//! Unknown keys are errors, in files and in `--set`. A key that is absent takes its type's default; an `Option` has none
//! of its own and is filled by [`crate::resolve`] from the target, the drafter started from or another key. Relative
//! paths resolve against the current directory (the repository root under `cargo run`). "Step" always means one optimizer
//! update. The range of every number stands in [`crate::limits`].

use std::fmt;
use std::path::PathBuf;

use dflash_model::ops::Compute;
use serde::{Deserialize, Serialize};

use crate::from_hub;

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Folder that everything of the run is written into; made when absent.
    pub run_dir: PathBuf,
    /// Seed of every random choice: initial weights, sample order, anchors.
    #[serde(default)]
    pub seed: u64,
    /// Worker threads of the process; absent: one a core.
    pub threads: Option<usize>,
    /// Where the numbers of the training go beside `metrics.jsonl` and `validation.jsonl`, which are always written:
    /// `tensorboard` (`run_dir/tensorboard`), `wandb` (an offline run in `run_dir/wandb`), `jsonl` (nowhere else).
    #[serde(default = "jsonl")]
    pub tracking: Vec<TrackerName>,
    /// The frozen model that the drafter drafts for.
    pub target: TargetSection,
    /// Prompts, conversations and how they become examples.
    pub data: DataSection,
    /// How the target writes responses to the prompts; absent: with the defaults, but only into `run_dir`.
    pub generate: Option<GenerateSection>,
    /// The target states that the drafter reads.
    #[serde(default)]
    pub taps: TapsSection,
    /// The drafter's shape, or the folder that it starts from.
    #[serde(default)]
    pub drafter: DrafterSection,
    /// Loss, optimizer and length of the training.
    #[serde(default)]
    pub train: TrainSection,
    /// When states are saved and which are kept.
    #[serde(default)]
    pub checkpoint: CheckpointSection,
    /// Replay acceptance on held-out samples during training.
    #[serde(default)]
    pub validate: ValidateSection,
    /// Decoding of held-out prompts after training.
    #[serde(default)]
    pub evaluate: EvaluateSection,
    /// What the run is called on W&B; used when `tracking` names `wandb`. Keys and servers are the wandb program's business.
    pub wandb: Option<WandbSection>,
}

/// A place for the numbers of a training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrackerName {
    /// The files of JSON lines.
    Jsonl,
    /// TensorBoard event files.
    Tensorboard,
    /// A Weights & Biases offline run.
    Wandb,
}

/// The frozen model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetSection {
    /// Hugging Face folder of the target: `config.json`, safetensors, tokenizer and chat template; or
    /// `hf://org/name@revision`.
    #[serde(serialize_with = "from_hub::path")]
    pub path: PathBuf,
    /// Type that the target computes in: `f32` or `bf16`.
    #[serde(default)]
    pub dtype: Precision,
    /// Where target and drafter run: `cpu`, `metal` or `cuda`.
    #[serde(default = "cpu")]
    pub device: String,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

impl Precision {
    /// What the drafter's operations call it.
    pub fn compute(self) -> Compute {
        match self {
            Self::F32 => Compute::F32,
            Self::Bf16 => Compute::Bf16,
        }
    }
}

/// A compute type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32-bit floats.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
}

/// Prompts and conversations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSection {
    /// JSONL of prompts that the target answers in the prepare stage; needed while `conversations` does not exist.
    pub prompts: Option<PathBuf>,
    /// JSONL of conversations to train on; absent: `run_dir/responses.jsonl`, made from `prompts`. A file named here that
    /// does not exist is made from `prompts` only if the run file has a section `[generate]`: a mistyped name must not
    /// cost a generation.
    pub conversations: Option<PathBuf>,
    /// JSONL of held-out conversations; absent: `val_fraction` of `conversations` is held out.
    pub validation: Option<PathBuf>,
    /// Share of the conversations held out when `validation` is absent, in [0, 1).
    #[serde(default = "val_fraction")]
    pub val_fraction: f64,
    /// Whether the chat template opens the thinking mode.
    #[serde(default)]
    pub thinking: bool,
    /// Longest example, prompt included, in tokens.
    #[serde(default = "max_length")]
    pub max_length: usize,
    /// What happens to a longer example: `truncate` keeps its head, `drop` leaves it out.
    #[serde(default)]
    pub length_policy: TooLong,
}

/// What happens to an example above `data.max_length`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TooLong {
    /// The first `max_length` tokens are kept.
    #[default]
    Truncate,
    /// The example is left out and counted.
    Drop,
}

/// How responses are generated.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GenerateSection {
    /// Longest response, in tokens.
    pub max_new: usize,
    /// Softmax temperature; 0 is greedy.
    pub temperature: f64,
    /// Seed of the sampling; absent: the run's `seed`. Unused when greedy.
    pub seed: Option<u64>,
}

/// Tap states.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TapsSection {
    /// `stored`: captured once to disk; `online`: the target runs inside the training process.
    pub mode: TapMode,
    /// Target layers whose outputs are tapped, 0-based; absent: five layers by z-lab's formula, or the warm-start folder's.
    pub layers: Option<Vec<usize>>,
    /// Folder of the stored taps; absent: `run_dir/taps`.
    pub dir: Option<PathBuf>,
    /// Largest shard file, in MiB.
    pub shard_mib: usize,
}

/// Where tap states come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TapMode {
    /// From shards on disk.
    #[default]
    Stored,
    /// From the target, step by step.
    Online,
}

/// The drafter. Unset keys come from `init_from` when given, else from [`crate::resolve`]'s defaults.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DrafterSection {
    /// Drafter whose weights training starts from, in any format: published or speculators folder, or GGUF file; not the
    /// same as `--resume`. Or `hf://org/name@revision`.
    #[serde(serialize_with = "from_hub::optional")]
    pub init_from: Option<PathBuf>,
    /// What may differ from that drafter although its weights then mean something else; also `--allow`.
    pub allow: Vec<Change>,
    /// `dflash2` or `dflash`; default `dflash2`.
    pub algorithm: Option<Algorithm>,
    /// Decoder layers, at most 64; default 5.
    pub layers: Option<usize>,
    /// Query heads; default 32.
    pub heads: Option<usize>,
    /// Key/value heads; default 8.
    pub kv_heads: Option<usize>,
    /// Channels of a head; default 128.
    pub head_dim: Option<usize>,
    /// Feed-forward width, in channels; default the target's.
    pub ffn: Option<usize>,
    /// Slots of a block, anchor included; default 8.
    pub block_size: Option<usize>,
    /// Embedding row of the slots to be predicted; default 248070 for 248320 rows, 151669 for 151936; else required.
    pub mask_token_id: Option<u32>,
    /// Sliding window of every layer, in positions; 0 is full attention; default 2048.
    pub sliding_window: Option<usize>,
    /// Whether a slot sees only the slots before it in its block; default false.
    pub causal: Option<bool>,
    /// RoPE base; default the target's.
    pub rope_theta: Option<f64>,
    /// Taps of the convolution, in slots (DFlash 2); default 2.
    pub conv_kernel: Option<usize>,
    /// Channels that share a dynamic coefficient (DFlash 2); default 16.
    pub conv_group: Option<usize>,
    /// Codebook width of the selector, in channels (DFlash 2); default 256.
    pub selector_rank: Option<usize>,
    /// Candidates a slot (DFlash 2); default 16.
    pub selector_top_k: Option<usize>,
    /// `factored` over the frozen embedding and head, or `free` rows; default factored, free when `init_from` brings codebooks.
    pub codebooks: Option<CodebookKind>,
}

/// What a warm start changes only when it is asked for by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    /// `drafter.mask_token_id`.
    Mask,
    /// `taps.layers`; a layer that stays keeps its weights.
    Taps,
    /// A target of another depth or vocabulary, or with another embedding or head than came with the drafter.
    Target,
    /// `drafter.rope_theta`.
    Rope,
}

impl Change {
    /// Its name in a run file and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mask => "mask",
            Self::Taps => "taps",
            Self::Target => "target",
            Self::Rope => "rope",
        }
    }
}

/// A drafter family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// Backbone only.
    Dflash,
    /// Backbone with convolutions and a candidate selector.
    Dflash2,
}

/// How the selector's codebooks are parametrised while training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodebookKind {
    /// Two projections of the frozen embedding and head.
    Factored,
    /// Two free tables of V rows.
    Free,
}

/// Loss, optimizer and length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainSection {
    /// Length of the training, in steps; excludes `epochs`.
    pub steps: Option<u64>,
    /// Length of the training, in passes over the data; default 6 when `steps` is absent.
    pub epochs: Option<u64>,
    /// Fewest samples of one step, which is made of whole packs; absent: one pack a step.
    pub accumulate_samples: Option<usize>,
    /// Largest packed pass, in context tokens, at least 64; a longer sample passes alone.
    pub pack_tokens: usize,
    /// Blocks drawn a document and epoch, at most.
    pub anchors: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Decay rates of AdamW's first and second moment.
    pub betas: [f64; 2],
    /// AdamW's epsilon.
    pub eps: f64,
    /// Decoupled weight decay of matrices; norms, 1-D parameters and convolution base kernels get none.
    pub weight_decay: f64,
    /// Largest global gradient norm.
    pub clip: f64,
    /// Learning-rate shape after the warm-up: `cosine` or `constant`.
    pub schedule: Schedule,
    /// Share of the steps in which the learning rate rises from 0.
    pub warmup_ratio: f64,
    /// Learning rate at the end of the cosine, as a share of `lr`.
    pub min_lr_ratio: f64,
    /// Slot weights exp(-(k - 1) / gamma), in slots; default 4, 5, 7 for blocks of 8, 10, 16, linear between them.
    pub gamma: Option<f64>,
    /// Weight of the selector's loss beside the base loss.
    pub selector_alpha: f64,
    /// Steps over which `selector_alpha` rises from 0.
    pub selector_ramp_steps: u64,
    /// Whether the gold token replaces the weakest candidate in the selector's loss when it is missing.
    pub selector_inject_gold: bool,
    /// Whether the selector's gradient stops before the backbone.
    pub selector_detached: bool,
    /// What the products of a step are computed in, `f32` or `bf16`; weights, gradients and sums are f32 either way.
    pub compute: Precision,
    /// Whether activations are computed again for the gradients instead of kept: less memory, more time, the same numbers.
    pub recompute: bool,
}

/// Shape of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Half a cosine down to `min_lr_ratio`.
    #[default]
    Cosine,
    /// No decay.
    Constant,
}

/// Saving.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointSection {
    /// Steps between checkpoints; 0 saves only at the end.
    pub every: u64,
    /// Newest checkpoints kept; at least 1.
    pub keep_last: usize,
    /// Whether the best validated state is saved and kept beside them, and published as `final`.
    pub keep_best: bool,
}

/// Validation during training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ValidateSection {
    /// Steps between validations; 0 validates only at the end.
    pub every: u64,
    /// Held-out samples used, at most; 0 turns validation off.
    pub samples: usize,
}

/// Decoding after training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluateSection {
    /// JSONL of held-out prompts; absent: the evaluate stage is left out.
    pub prompts: Option<PathBuf>,
    /// Longest response, in tokens.
    pub max_new: usize,
    /// Prompts used, at most; absent: all.
    pub limit: Option<usize>,
}

/// Names on W&B.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WandbSection {
    /// Project that the run is uploaded into.
    pub project: String,
    /// User or team; absent: the default of whoever uploads.
    pub entity: Option<String>,
    /// Name that is shown; absent: the name of `run_dir`.
    pub name: Option<String>,
    /// Labels.
    pub tags: Vec<String>,
}

impl RunConfig {
    /// What the run is called on W&B, written or not.
    pub fn wandb(&self) -> WandbSection {
        let mut names = self.wandb.clone().unwrap_or_default();
        if names.name.is_none() {
            let folder = self.run_dir.file_name();
            names.name = folder.map(|name| name.to_string_lossy().into_owned());
        }
        names
    }

    /// How responses are generated, written or not.
    pub fn generation(&self) -> GenerateSection {
        self.generate.unwrap_or_default()
    }
}

fn jsonl() -> Vec<TrackerName> {
    vec![TrackerName::Jsonl]
}

fn cpu() -> String {
    "cpu".into()
}

fn val_fraction() -> f64 {
    0.02
}

fn max_length() -> usize {
    3072
}
