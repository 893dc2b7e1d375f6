//! Speculative decoding with DFlash drafters: the loop, what it accepts, and whether it changes the text.
//!
//! - [`mod@speculate`]: the decoding loop, speculative and plain, on [`argmax`]
//! - [`acceptance`]: counts of rounds and the numbers read from them
//! - [`mod@evaluate`]: generation mode over prompts, timed; [`mod@replay`]: the same counts over recorded text
//! - [`lossless`]: speculative against plain text with trained, random, right and wrong drafters
//! - [`server`]: acceptance of a drafter that vLLM, SGLang or llama.cpp serves
//! - [`report`], [`table`]: JSON and terminal; [`load`], [`mod@folder`], [`console`]: what command lines name and share
//! - [`scripted`], [`scripted_target`]: drafters and a target for tests, of this room and of those above

pub mod acceptance;
pub mod argmax;
pub mod bootstrap;
pub mod chat;
pub mod chooser;
pub mod cli;
pub mod compare;
pub mod console;
pub mod costs;
pub mod evaluate;
pub mod folder;
pub mod load;
pub mod lossless;
mod measure;
pub mod progress;
pub mod prompts;
pub mod random;
pub mod recorded;
pub mod rendered;
mod repetition;
pub mod replay;
pub mod report;
pub mod sampling;
pub mod scripted;
pub mod scripted_target;
pub mod server;
pub mod speculate;
pub mod speed;
pub mod sweep;
pub mod table;
pub mod text;
mod verify;
mod warnings;
pub mod width;

pub use acceptance::{Counts, Tally};
pub use evaluate::{Block, Options, Progress, evaluate};
pub use folder::Folder;
pub use replay::{Recording, replay, response_range};
pub use report::{Report, Setting};
pub use sampling::SamplingConfig;
pub use speculate::{Decision, Emitted, Finish, Generation, Limits, Round, plain, speculate};
pub use width::Width;
