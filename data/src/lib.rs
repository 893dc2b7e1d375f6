//! From conversations to training batches.
//!
//! ```text
//! conversation   JSONL or Parquet -> messages
//! template       messages -> text, by the checkpoint's own chat template
//! tokens         text -> tokens and loss mask, one example per assistant turn
//! capture, taps  the target's tap states, stored and read back (or computed on the fly: source)
//! anchors        which positions begin a block, per epoch
//! batch          samples and anchors -> blocks over a packed context
//! ```
//! [`hub`] finds folders that are on the Hugging Face hub. [`recipes`] gives prompts to measure with: known benchmarks by name, or conversations.
//! Everything random is a pure function of (seed, epoch, sample), through [`rng::Stream`].

pub mod anchors;
pub mod batch;
pub mod capture;
pub mod conversation;
pub mod files;
pub mod hub;
mod jsonl;
mod manifest;
mod parquet_file;
mod python;
pub mod recipes;
pub mod rng;
pub mod source;
pub mod stops;
pub mod taps;
mod target_hash;
pub mod template;
pub mod tokenizer;
pub mod tokens;

pub use anchors::{anchor_candidates, anchors};
pub use batch::{Batch, pack, plan_epoch};
pub use capture::{CaptureConfig, DEFAULT_SHARD_BYTES, capture, check_layers, estimate_bytes};
pub use conversation::{Conversation, Finish, Message, read_conversations, read_jsonl};
pub use manifest::Identity;
pub use python::civil_date;
pub use rng::Stream;
pub use source::{Sample, TapSource};
pub use stops::stop_ids;
pub use taps::TapStore;
pub use target_hash::target_hash;
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
pub use tokens::{
    Chat, Dropped, Example, LengthPolicy, PrepareConfig, Report, Turns, prepare, prompt_text, prompt_tokens,
};
