#!/usr/bin/env bash
# Builds, once, the llama.cpp that the crate llama-cpp-sys-2 carries and scripts/interop/llama_speculative.cpp over it, and
# prints the program's path as the last line. llama.cpp takes about a minute on two cores, a changed program a few seconds.
#   scripts/setup_llama.sh [DIR]      default: $PEERS, else ~/.cache/dflash-peers, beside what scripts/setup_peers.sh makes
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.1.161 # llama.cpp 0.6.0, with DFlash 2
sha256=e9bea77fde41bbc15a278891cd5edd2ba07c5260d162614b41080ba1f100b39b
python=$(scripts/setup_peers.sh "$@" | tail -n 1)
bin=$(dirname "$python")
dir=$(dirname "$bin")/llama-$version
mkdir -p "$dir"
exec 9>"$dir/lock" # several checkouts share it
command -v flock >/dev/null && flock 9

if ! command -v c++ >/dev/null; then
  $([ "$(id -u)" = 0 ] || echo sudo) apt-get update -qq >&2
  $([ "$(id -u)" = 0 ] || echo sudo) apt-get install -y -qq g++ >&2
fi
[ -x "$bin/cmake" ] && [ -x "$bin/ninja" ] || "$bin/pip" install --quiet --disable-pip-version-check 'cmake>=3.28,<5' ninja >&2

if [ ! -e "$dir/source/ok" ]; then
  # a crate that needs it makes cargo fetch it, checked against the index; nothing of it is compiled by cargo
  mkdir -p "$dir/fetch/src"
  printf '[package]\nname = "fetch"\nversion = "0.0.0"\nedition = "2021"\n[dependencies]\nllama-cpp-sys-2 = "=%s"\n[workspace]\n' \
    "$version" >"$dir/fetch/Cargo.toml"
  : >"$dir/fetch/src/lib.rs"
  cargo fetch --quiet --manifest-path "$dir/fetch/Cargo.toml" >&2
  crate=$(ls "${CARGO_HOME:-$HOME/.cargo}"/registry/cache/*/llama-cpp-sys-2-$version.crate | head -n 1)
  echo "$sha256  $crate" | sha256sum --check --quiet >&2
  rm -rf "$dir/source"
  mkdir -p "$dir/source"
  tar -xzf "$crate" --strip-components=1 -C "$dir/source" "llama-cpp-sys-2-$version/llama.cpp"
  touch "$dir/source/ok" # last: an interrupted download is taken up again
fi

# by content: a checkout with another version of either file neither waits for nor breaks this one
key() { cat "$@" | sha256sum | cut -c 1-12; }
source=$dir/source/llama.cpp
parts=$dir/parts-$(key scripts/interop/CMakeLists.txt)
program=$parts/llama_speculative-$(key scripts/interop/llama_speculative.cpp)
# compiling is most of the work, running a model of this size is not: -O1. The warnings are not ours
build() {
  mkdir -p "$parts/cmake"
  cp scripts/interop/CMakeLists.txt "$parts/cmake" || return
  [ -e "$parts/build.ninja" ] || cmake -G Ninja -S "$parts/cmake" -B "$parts" "-DLLAMA_CPP=$source" -DCMAKE_BUILD_TYPE=Release \
    '-DCMAKE_C_FLAGS_RELEASE=-O1 -w' '-DCMAKE_CXX_FLAGS_RELEASE=-O1 -w' || return
  nice -n 10 ninja -C "$parts" everything || return
  local lib=$parts/llama.cpp
  nice -n 10 c++ -std=c++17 -O1 -Wall -Wextra -I"$source/common" -I"$source/include" -I"$source/ggml/include" \
    -isystem "$source/vendor" scripts/interop/llama_speculative.cpp "$parts/libllama_parts.a" "$lib/src/libllama.a" \
    "$lib/ggml/src/libggml.a" "$lib/ggml/src/libggml-cpu.a" "$lib/ggml/src/libggml-base.a" -lpthread -ldl -lm -o "$program.new" &&
    mv "$program.new" "$program"
}
started=$SECONDS
if [ ! -x "$program" ]; then
  PATH=$PATH:$bin build >"$parts.log" 2>&1 || { tail -n 40 "$parts.log" >&2; exit 1; }
  echo "setup_llama: $version built in $((SECONDS - started)) s" >&2
fi
echo "$program"
