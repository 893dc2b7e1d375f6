//! What crosses files: the optimizer against PyTorch, resuming, keeping, signals, and the run files in `configs/`.

mod optim;
mod resume;
mod run_files;
mod shape;
