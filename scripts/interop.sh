#!/usr/bin/env bash
# The authors' own PyTorch code loads our folders and must draft the same tokens as we do (f32, greedy, ten contexts each);
# speculators loads our export for it and must compute the same hidden states.
#   scripts/interop.sh [FOLDER ...]      trained drafters of the demo target (these decode ten prompts with the authors' MLX loop,
#                                        too), beside three made here: a random DFlash and a random DFlash 2 that we have to load,
#                                        and a fresh DFlash 2 as dflash-train publishes it
# Needs network on the first run (scripts/setup_peers.sh). PROFILE=dev reuses the tests' build; default: release.
set -euo pipefail
cd "$(dirname "$0")/.."
profile=${PROFILE:-release}
target_model=data/demo/target
python=$(scripts/setup_peers.sh | tail -n 1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# all members at once, so that features are unified as in `cargo test --workspace` and nothing is built twice
cargo build --locked --profile "$profile" --workspace --bins
built=${CARGO_TARGET_DIR:-target}/${profile/#dev/debug}

folders=("$@")
for algorithm in dflash dflash2; do
  "$python" scripts/interop/zlab_walk.py random "$target_model" "$work/$algorithm" --algorithm "$algorithm"
  folders+=("$work/$algorithm")
done
"$built/dflash-train" --config configs/demo.toml --set "run_dir=$work/run" --dry-run --quiet
folders+=("$work/run/initialised")

for folder in "${folders[@]}"; do
  echo "== $folder"
  "$built/dflash-export" walk "$folder" --target "$target_model" --prompts data/demo/heldout.jsonl --contexts 10 --states --quiet \
    --json "$work/walks.json"
  "$python" scripts/interop/zlab_walk.py check "$target_model" "$folder" "$work/walks.json"
  # as a speculators folder it computes the hidden states of the published one
  "$built/dflash-export" speculators "$folder" --target "$target_model" --out "$work/speculators" --force
  "$python" scripts/interop/speculators_check.py "$work/speculators" "$target_model" "$work/walks.json"
done
# trained drafters decode with the authors' MLX loop as well (a random one accepts nothing worth comparing)
for folder in "$@"; do
  echo "== $folder: decoding with the authors' MLX loop"
  "$python" -c 'import mlx.core' 2>/dev/null || { echo "interop: mlx has no build for this machine; decoding not compared"; break; }
  "$built/dflash-eval" acceptance --target "$target_model" --drafter "$folder" --prompts data/demo/heldout.jsonl --limit 10 --max-new 96 \
    --include-truncated --quiet --json "$work/decode.json" >/dev/null
  "$python" scripts/interop/zlab_decode.py "$target_model" "$folder" data/demo/heldout.jsonl "$work/decode.json"
done
scripts/interop/gguf.sh "$built" "$python" "${folders[@]}" # the same drafters in llama.cpp
scripts/interop/tracking.sh "$built" "$python" # TensorBoard and W&B read what a run tracks
echo "interop: ${#folders[@]} folders, every walk equal"
