#!/usr/bin/env bash
# Builds, once, scripts/interop/llama_speculative.cpp with the llama.cpp that the crate llama-cpp-sys-2 carries, and prints the
# program's path as the last line. A changed program is built again by itself; llama.cpp takes about a minute on two cores.
#   scripts/setup_llama.sh [DIR]      default: $PEERS, else ~/.cache/dflash-peers, beside what scripts/setup_peers.sh makes
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.1.161 # llama.cpp 0.6.0, with DFlash 2
sha256=e9bea77fde41bbc15a278891cd5edd2ba07c5260d162614b41080ba1f100b39b
python=$(scripts/setup_peers.sh "$@" | tail -n 1)
dir=$(dirname "$(dirname "$python")")/llama-$version
mkdir -p "$dir/program"

command -v c++ >/dev/null || $([ "$(id -u)" = 0 ] || echo sudo) apt-get install -y -qq g++ >&2
bin=$(dirname "$python")
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

# a copy, so that several checkouts can share the build
for file in CMakeLists.txt llama_speculative.cpp; do
  cmp -s "scripts/interop/$file" "$dir/program/$file" || cp "scripts/interop/$file" "$dir/program/$file"
done
build() {
  # compiling is most of the work, running a model of this size is not: -O1. The warnings are not ours
  [ -e "$dir/build/build.ninja" ] || cmake -G Ninja -S "$dir/program" -B "$dir/build" "-DLLAMA_CPP=$dir/source/llama.cpp" \
    -DCMAKE_BUILD_TYPE=Release '-DCMAKE_C_FLAGS_RELEASE=-O1 -w' '-DCMAKE_CXX_FLAGS_RELEASE=-O1 -w' || return
  nice -n 10 ninja -C "$dir/build" llama_speculative
}
started=$SECONDS
PATH=$PATH:$bin build >"$dir/build.log" 2>&1 || { tail -n 40 "$dir/build.log" >&2; exit 1; }
echo "setup_llama: $version, built or found in $((SECONDS - started)) s" >&2
echo "$dir/build/llama_speculative"
