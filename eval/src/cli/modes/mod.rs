//! One file a mode: its options, and how it runs.

pub(super) mod acceptance;
pub(super) mod chat;
pub(super) mod compare;
pub(super) mod inspect;
pub(super) mod lossless;
pub(super) mod replay;
pub(super) mod server;
pub(super) mod speed;
pub(super) mod sweep;
