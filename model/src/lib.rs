//! The mathematics of DFlash and the checkpoint folder: targets, drafters, their operations and caches.
//!
//! This room knows no path but a model folder, no clock and no global random state. Everything above it
//! (`dflash-data`, `dflash-eval`, `dflash-train`, `dflash-export`) speaks to it through the types below.
//!
//! Words used throughout: the *target* is the large model whose output must not change; the *drafter* proposes
//! a *block* of tokens that starts with an already committed *anchor*; a *tap* is the output of one target layer.

mod awake;
mod beside;
mod blocks;
mod buffer;
mod candle_threads;
pub mod device;
pub mod drafter;
pub mod drafter_config;
mod drafter_cpu;
pub mod drafting;
pub mod folder;
pub mod formats;
mod freed_memory;
pub mod init;
pub mod ops;
mod packed;
mod pages;
pub mod params;
mod recompute;
pub mod selector;
pub mod simd;
mod small_matmul;
pub mod target;
pub mod tensor_file;
pub mod walk;

pub use awake::with_threads_awake;
pub use blocks::{Block, Blocks};
pub use candle_threads::leave_threads_to_rayon;
pub use drafter::Drafter;
pub use drafter_config::{ConvConfig, DrafterConfig, LayerRule, SelectorConfig};
pub use drafting::{DraftSession, Drafting, Proposal, ProposalSlot, Sampling};
pub use freed_memory::keep_freed_memory;
pub use params::{Codebooks, Params};
pub use target::{
    DeltaNetState, Forward, LogitRows, Session, Target, TargetConfig, TargetHead, TargetInfo, Verified, VerifyStep,
};
pub use tensor_file::TensorFolder;
pub use walk::BoundDrafter;
