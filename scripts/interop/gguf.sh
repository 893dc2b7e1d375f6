#!/usr/bin/env bash
# llama.cpp runs our GGUF files: same text as plain decoding there and here, same acceptance length, target logits alike.
#   scripts/interop/gguf.sh BUILT PYTHON FOLDER ...      called by scripts/interop.sh with its programs and drafters
# Each drafter is written as f32, bf16 and q8_0. Every file is read by PyPI gguf and compared with the folder; every file
# must leave the text of ten prompts alone; in f32 the acceptance length is held to ours, within 5 %.
set -euo pipefail
cd "$(dirname "$0")/../.."
built=$1 python=$2
shift 2
target=data/demo/target prompts=data/demo/heldout.jsonl max_new=96
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
llama=$(scripts/setup_llama.sh "$(dirname "$(dirname "$python")")" | tail -n 1)

"$built/dflash-export" gguf-target "$target" --out "$work/target.gguf" --dtype f32
"$built/dflash-export" logits "$target" --prompts "$prompts" --limit 10 --json "$work/prompts.json"
for folder in "$@"; do
  echo "== $folder: llama.cpp"
  "$built/dflash-eval" acceptance --target "$target" --drafter "$folder" --prompts "$prompts" --limit 10 --max-new "$max_new" \
    --quiet --json "$work/ours.json" >/dev/null
  for dtype in f32 bf16 q8_0; do
    "$built/dflash-export" gguf "$folder" --target "$target" --out "$work/drafter.gguf" --dtype "$dtype" --force
    "$python" scripts/interop/gguf_check.py file "$folder" "$target" "$work/drafter.gguf" "$dtype"
    "$llama" "$work/target.gguf" "$work/drafter.gguf" "$work/prompts.json" "$work/theirs.json" "$max_new" "$(nproc)"
    "$python" scripts/interop/gguf_check.py judge "$work/ours.json" "$work/theirs.json" "$dtype"
  done
done
