#!/usr/bin/env bash
# The authors' own PyTorch code loads our folders and must draft the same tokens as we do (f32, greedy, ten contexts each).
#   scripts/interop.sh [FOLDER ...]      exported drafter folders of the demo target, beside a random DFlash and DFlash 2
# Needs network on the first run (scripts/setup_peers.sh). PROFILE=dev reuses the tests' build; default: release.
set -euo pipefail
cd "$(dirname "$0")/.."
target_model=data/demo/target
python=$(scripts/setup_peers.sh | tail -n 1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

folders=("$@")
for algorithm in dflash dflash2; do
  "$python" scripts/interop/zlab_walk.py random "$target_model" "$work/$algorithm" --algorithm "$algorithm"
  folders+=("$work/$algorithm")
done
for folder in "${folders[@]}"; do
  echo "== $folder"
  cargo run --locked --quiet --profile "${PROFILE:-release}" -p dflash-export -- \
    walk "$folder" --target "$target_model" --prompts data/demo/heldout.jsonl --contexts 10 --json "$work/walks.json"
  "$python" scripts/interop/zlab_walk.py check "$target_model" "$folder" "$work/walks.json"
done
echo "interop: ${#folders[@]} folders, every walk equal"
