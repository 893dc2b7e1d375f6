//! Trains DFlash and DFlash 2 drafters: run files, loss, optimizer, loop and checkpoints.
//!
//! `main.rs` -> [`run`] -> [`fit`] -> one step. A run is described by [`config`], and everything it writes lies in
//! its run folder: resolved config, metrics, checkpoints that are published drafter folders, and `final`.

pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod config;
mod config_defaults;
pub mod config_file;
pub mod done;
pub mod durable;
pub mod evaluation;
pub mod examples;
pub mod failure;
pub mod fit;
pub mod flops;
pub mod from_hub;
pub mod gradient;
pub mod inputs;
pub mod limits;
pub mod loss;
pub mod materials;
pub mod metrics;
mod moments;
pub mod optim;
pub mod plan;
pub mod prepare;
pub mod progress;
pub mod provenance;
pub mod publish;
pub mod resolve;
pub mod room;
pub mod run;
pub mod schedule;
pub mod signals;
pub mod source;
pub mod step;
pub mod tracking;
pub mod training;
pub mod validate;
pub mod warm_start;
