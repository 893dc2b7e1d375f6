//! Cross-file tests of the data room, in one binary.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

/// A deterministic target that can be told to fail.
mod fake;

/// Anchors, packing and the plan of an epoch.
mod batches;
/// The demo target's own taps.
mod demo;
/// Capture, resume, and reading back.
mod store;
/// Chat templates against what Python's engine prints.
mod templates;
/// Loss masks of whole conversations.
mod tokens;
