#!/usr/bin/env bash
# Speed, each figure beside its peer in one run on this machine.
#   scripts/bench.sh decode [DRAFTER]     DRAFTER: a drafter of the demo target [runs/demo/final]
# decode: 1. transformers and ours, plain, on the demo target; 2. plain against speculative decoding of held-out prompts, fixed
# and automatic width; 3. a target of the 0.8B shape (random weights): cost of verification by rows, and the speed-up that
# drafts right with chance 0.8 would give.
# THREADS (default 2) holds for all. BIG=0 leaves the third part out (4 GB of memory and of disk, some minutes).
# Needs network on the first run (scripts/setup_peers.sh). Leave the machine alone meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "${1:-}" = decode ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
drafter=${2:-runs/demo/final} threads=${THREADS:-2}
[ -e "$drafter/model.safetensors" ] || {
  echo "bench: no drafter in $drafter; train one: cargo run --release -p dflash-train -- --config configs/demo.toml" >&2
  exit 2
}
export BENCH_THREADS=$threads RAYON_NUM_THREADS=$threads
python=$(scripts/setup_peers.sh | tail -n 1)
cargo build --locked --release --workspace --bins
eval_bin=${CARGO_TARGET_DIR:-target}/release/dflash-eval
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
target=data/demo/target prompts=data/demo/heldout.jsonl
load() { echo "load: $(cut -d' ' -f1-3 /proc/loadavg 2>/dev/null || uptime)"; }

echo "== demo target, f32, $threads threads"
load
"$python" scripts/bench/transformers_target.py --shape demo --dtype f32 | tee "$work/peer.json"
"$eval_bin" speed --target $target --drafter "$drafter" --contexts 128,1024 --quiet --json "$work/speed.json"
for block in 8 5 4 3 auto; do
  echo "-- block $block"
  "$eval_bin" acceptance --target $target --drafter "$drafter" --prompts $prompts --max-new 96 --limit 100 --block $block --quiet \
    --json "$work/block-$block.json" | grep -E 'acceptance length|tokens/s|speculative|speed-up|texts|widths|: [0-9]+ %'
done
load
"$python" - "$work" <<'PY'
import json, sys
at = lambda name: json.load(open(f"{sys.argv[1]}/{name}.json"))
peer, ours = at("peer"), at("speed")["contexts"][-1]
print(f"plain decoding, context {ours['context']}: {1 / ours['step_seconds']:.0f} tokens/s, transformers {peer['decode_tok_s']:.0f}: "
      f"{1 / ours['step_seconds'] / peer['decode_tok_s']:.1f} times")
for block in ["8", "5", "4", "3", "auto"]:
    print(f"speculative against plain, block {block}: {at('block-' + block)['speedup']:.2f} times")
PY

[ "${BIG:-1}" = 1 ] || exit 0
echo "== 0.8B shape, random weights in BF16, f32 arithmetic, $threads threads"
"$python" scripts/bench/transformers_target.py --shape 08b --dtype bf16 --save "$work/08b" --only-save
cp $target/tokenizer.json $target/tokenizer_config.json $target/generation_config.json "$work/08b/" # any text will do
load
"$eval_bin" speed --target "$work/08b" --contexts 128 --rows 8 --quiet
"$eval_bin" sweep --target "$work/08b" --prompts $prompts --limit 2 --max-new 48 --scripted 0.8 --blocks 2,4,6,8 --quiet
load
