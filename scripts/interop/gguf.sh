#!/usr/bin/env bash
# llama.cpp runs our GGUF files: same text as plain decoding there and here, same acceptance length, target logits alike.
#   scripts/interop/gguf.sh BUILT PYTHON FOLDER ...      called by scripts/interop.sh with its programs and drafters
# Each drafter is written as f32, bf16 and q8_0. Every file is read by PyPI gguf and compared with the folder; every file
# must leave the text of ten prompts alone; in f32 ten drafted blocks must be ours, and the acceptance length within 5 %.
# A random Qwen3 target with a random drafter follows the demo target.
set -euo pipefail
cd "$(dirname "$0")/../.."
built=$1 python=$2
shift 2
prompts=data/demo/heldout.jsonl max_new=96
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
llama=$(scripts/setup_llama.sh "$(dirname "$(dirname "$python")")" | tail -n 1)
check() { "$python" scripts/interop/gguf_check.py "$@"; }

pairs() { # TARGET FOLDER ...
  local target=$1 folder dtype
  shift
  "$built/dflash-export" gguf-target "$target" --out "$work/target.gguf" --dtype f32 --force
  "$built/dflash-export" logits "$target" --prompts "$prompts" --limit 10 --json "$work/prompts.json"
  for folder in "$@"; do
    echo "== $folder: llama.cpp"
    "$built/dflash-eval" acceptance --target "$target" --drafter "$folder" --prompts "$prompts" --limit 10 --max-new "$max_new" \
      --quiet --json "$work/ours.json" >/dev/null
    "$built/dflash-export" walk "$folder" --target "$target" --prompts "$prompts" --contexts 10 --quiet --json "$work/walks.json"
    for dtype in f32 bf16 q8_0; do
      "$built/dflash-export" gguf "$folder" --target "$target" --out "$work/drafter.gguf" --dtype "$dtype" --force
      check file "$folder" "$target" "$work/drafter.gguf" "$dtype"
      "$llama" "$work/target.gguf" "$work/drafter.gguf" "$work/prompts.json" "$work/walks.json" "$work/theirs.json" \
        "$max_new" "$(nproc)"
      check judge "$work/ours.json" "$work/theirs.json" "$dtype"
    done
  done
}

pairs data/demo/target "$@"
check qwen3 data/demo/target "$work/qwen3"
"$python" scripts/interop/zlab_walk.py random "$work/qwen3" "$work/qwen3-drafter" --algorithm dflash2
pairs "$work/qwen3" "$work/qwen3-drafter"
