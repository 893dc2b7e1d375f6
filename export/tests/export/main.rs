//! `dflash-export` from outside: folders good and bad, conversions there and back, what engines make of a drafter.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails like the test itself")]

mod conversions;
mod engines;
mod folders;
mod gguf;
