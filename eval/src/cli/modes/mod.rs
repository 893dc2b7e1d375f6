//! One file a mode: its options, and how it runs.

pub(super) mod acceptance;
pub(super) mod lossless;
pub(super) mod server;
