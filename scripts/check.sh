#!/usr/bin/env bash
# Everything that a change must pass, cheapest first.
#   scripts/check.sh [STEP ...]      default: fmt tidy clippy test doc
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}

fmt() { cargo fmt --all --check; }

# the house rules alone, without building a dependency; `test` runs them again in their place
tidy() {
  mkdir -p "$target"
  CARGO_MANIFEST_DIR=$PWD/model rustc --edition 2024 --test model/tests/tidy.rs -o "$target/tidy"
  "$target/tidy" --quiet
}

clippy() { cargo clippy --locked --workspace --all-targets -- -D warnings; }

test() {
  if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --locked --workspace
    cargo test --locked --workspace --doc
  else
    cargo test --locked --workspace
  fi
}

doc() { RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --document-private-items; }

[ $# -gt 0 ] || set -- fmt tidy clippy test doc
for step in "$@"; do
  case $step in
    fmt | tidy | clippy | test | doc) ;;
    *) echo "check: unknown step $step: expected fmt, tidy, clippy, test or doc" >&2; exit 2 ;;
  esac
done
for step in "$@"; do
  echo "== $step"
  "$step"
done
