//! What crosses files: the optimizer against PyTorch, resuming, keeping, signals, faults, and the run files in `configs/`.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod command;
mod faults;
mod golden;
mod leak;
mod optim;
mod resume;
mod run_files;
mod shape;
mod stopping;
