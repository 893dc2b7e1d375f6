#!/usr/bin/env bash
# Type-checks the workspace for Apple silicon on Debian Linux, Metal and Accelerate code included. It neither links nor runs.
#   scripts/apple-check.sh [cargo check arguments]      default: --workspace --all-targets --features metal,accelerate
# Rustup's compiler has no std for aarch64-apple-darwin without a download; Debian's rustc-web ships std's source, from
# which cargo builds one. Build scripts that compile C get a stand-in that writes empty files: no C is checked.
set -euo pipefail
cd "$(dirname "$0")/.."
sudo=$([ "$(id -u)" = 0 ] || echo sudo)

if ! { [ -x /usr/bin/cargo ] && /usr/bin/rustc --version | grep -q '^rustc 1\.9[0-9]'; } 2>/dev/null; then
  command -v apt-get >/dev/null || { echo "apple-check: needs Debian's rustc-web 1.90 or newer, and there is no apt-get" >&2; exit 1; }
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends rustc-web rust-web-src cargo-web >/dev/null
fi

export RUSTC=/usr/bin/rustc RUSTDOC=/usr/bin/rustdoc
export RUSTC_BOOTSTRAP=1 # -Zbuild-std on a stable compiler
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/apple # never mixed with the other compiler's artefacts
unset RUSTC_WRAPPER RUSTFLAGS

mkdir -p "$CARGO_TARGET_DIR"
no_c=$(cd "$CARGO_TARGET_DIR" && pwd)/no-c
cat >"$no_c" <<'END'
#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in
    -o) : >"$2" ;;
    *.a) : >"$1" ;;
  esac
  shift
done
END
chmod +x "$no_c"
export CC_aarch64_apple_darwin=$no_c AR_aarch64_apple_darwin=$no_c

[ $# -gt 0 ] || set -- --workspace --all-targets --features metal,accelerate
# checking runs no dependency's code; optimised, the macros alone would take minutes to build
exec /usr/bin/cargo check --locked --config 'profile.dev.package."*".opt-level=0' -Zbuild-std=std,panic_abort --target aarch64-apple-darwin "$@"
