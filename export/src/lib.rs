//! A drafter folder seen from outside: what it holds, whether it is whole, what it drafts.
//!
//! - [`inspect`]: configuration, tensor table, strict verdict; cheap, reads no weight
//! - [`verify`]: everything computed: a copy written and reloaded drafts the same, and a short real decode is accepted
//! - [`walk`]: single drafted blocks with the tokens before them, for other implementations to compare with
//! - [`logits`]: prompts and the target's logits, for the same purpose
//! - [`gguf`]: drafter and target as files for llama.cpp
//! - [`cli`]: the command line over them
//!
//! The format itself lives in `dflash_model::folder` and `dflash_model::drafter_config`.

pub mod cli;
pub mod compare;
pub mod convert;
pub mod engines;
pub mod gguf;
pub mod inspect;
pub mod logits;
pub mod verify;
pub mod walk;
