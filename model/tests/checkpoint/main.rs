//! The published drafter: its configuration and its folder, from outside the crate.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails like the test itself")]

mod config;
mod folder;
mod refusals;
