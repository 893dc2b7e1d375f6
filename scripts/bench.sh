#!/usr/bin/env bash
# Speed, each figure beside its peer in one run on this machine.
#   scripts/bench.sh decode [DRAFTER]     DRAFTER: a drafter of the demo target [runs/demo/final]
#   scripts/bench.sh step                 training steps beside speculators'
#   scripts/bench.sh scaling              one training step by blocks, and by context with and without a window
#   scripts/bench.sh ops                  each training operation alone, beside its last run
#   scripts/bench.sh capture              prompt passes, captures of five taps and decoding beside transformers'
# decode: 1. transformers and ours, plain, on the demo target; 2. plain against speculative decoding of held-out prompts, fixed
# and automatic width; 3. a target of the 0.8B shape (random weights): cost of verification by rows, and the speed-up that
# drafts right with chance 0.8 would give.
# step: loss and gradients are held to the peer's on its own weights and batch, then both are timed in turns (ours, peer, ours,
# peer), shape small in f32 and bf16, shape 08b in f32. capture: prompt passes of 1,024 tokens and plain decoding steps, in turns,
# medians of several on either side.
# THREADS (default 2) holds for all. BIG=0 leaves the 0.8B shapes out (15 GB of memory for the peer, 4 GB of disk, 15 minutes).
# OUT=FILE keeps the table of step and capture as JSON. Needs network on the first run (scripts/setup_peers.sh). Leave the
# machine alone meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-} threads=${THREADS:-2} big=${BIG:-1}
target=data/demo/target prompts=data/demo/heldout.jsonl
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
load() { echo "load: $(cut -d' ' -f1-3 /proc/loadavg 2>/dev/null || uptime)"; }

prepare() {
  export BENCH_THREADS=$threads RAYON_NUM_THREADS=$threads
  python=$(scripts/setup_peers.sh | tail -n 1)
  cargo build --locked --release --workspace --bins
  built=${CARGO_TARGET_DIR:-target}/release
}

# note WHAT SIDE KEY MEMORY_KEY UNIT: one line of the table from a line of JSON
note() {
  "$python" -c 'import json, sys
what, side, key, memory, unit = sys.argv[1:]
line = json.loads(sys.stdin.read())
if "contexts" in line:
    last = line["contexts"][-1]
    line = {"prefill": last["prefill_median_tokens_per_s"], "capture": last["capture_median_tokens_per_s"],
            "decode": 1 / last["step_median_seconds"], "peak": line["peak_memory_mb"]}
print(json.dumps({"what": what, "side": side, "value": line[key], "memory_mb": line[memory], "unit": unit}))' "$@" >>"$work/lines.jsonl"
}

table() {
  load
  "$python" scripts/bench/table.py "$work/lines.jsonl" ${OUT:+"$OUT"}
}

step() { # SHAPE ALGO DTYPE REPEATS
  local what="step $1 $2 $3, supervised slots/s"
  # ours reads the peer's weights and batch where that leaves room for them
  [ "$3" = f32 ] && "$python" scripts/bench/speculators_step.py --shape "$1" --algo "$2" --dump "$work/dump" --only-dump
  [ "$3" = f32 ] && "$built/dflash-train" bench step --shape "$1" --algo "$2" --peer "$work/dump" --repeats 1
  rm -rf "$work/dump"
  for _ in 1 2; do
    "$built/dflash-train" bench step --shape "$1" --algo "$2" --dtype "$3" --repeats "$4" --json | tee >(cat >&2) | note "$what" ours slots_per_s peak_rss_mb slots/s
    "$python" scripts/bench/speculators_step.py --shape "$1" --algo "$2" --dtype "$3" --repeats "$4" | tee >(cat >&2) | note "$what" peer slots_per_s peak_rss_mb slots/s
  done
}

capture() { # SHAPE DTYPE FOLDER REPEATS
  for _ in 1 2; do
    "$built/dflash-eval" speed --target "$3" --dtype "$2" --contexts 1024 --rows 1 --quiet --json "$work/speed.json" >&2
    note "prompt pass $1 $2, tokens/s" ours prefill peak tokens/s <"$work/speed.json"
    note "capture $1 $2, tokens/s" ours capture peak tokens/s <"$work/speed.json"
    note "plain decoding $1 $2, tokens/s" ours decode peak tokens/s <"$work/speed.json"
    rm "$work/speed.json"
    "$python" scripts/bench/transformers_target.py --shape "$1" --dtype "$2" --repeats "$4" | tee "$work/peer.json" >&2
    note "prompt pass $1 $2, tokens/s" peer prefill_tok_s peak_rss_mb tokens/s <"$work/peer.json"
    note "capture $1 $2, tokens/s" peer prefill_tok_s peak_rss_mb tokens/s <"$work/peer.json" # it has no shorter pass
    note "plain decoding $1 $2, tokens/s" peer decode_tok_s peak_rss_mb tokens/s <"$work/peer.json"
  done
}

big_target() {
  "$python" scripts/bench/transformers_target.py --shape 08b --dtype bf16 --save "$work/08b" --only-save
  cp $target/tokenizer.json $target/tokenizer_config.json $target/generation_config.json "$work/08b/" # any text will do
}

decode() {
  local drafter=$1
  echo "== demo target, f32, $threads threads"
  load
  "$python" scripts/bench/transformers_target.py --shape demo --dtype f32 | tee "$work/peer.json"
  "$built/dflash-eval" speed --target $target --drafter "$drafter" --contexts 128,1024 --quiet --json "$work/speed.json"
  for block in 8 5 4 3 auto; do
    echo "-- block $block"
    "$built/dflash-eval" acceptance --target $target --drafter "$drafter" --prompts $prompts --max-new 96 --limit 100 --block $block --quiet \
      --json "$work/block-$block.json" | grep -E 'acceptance length|tokens/s|speculative|speed-up|texts|widths|: [0-9]+ %'
  done
  load
  "$python" - "$work" <<'PY'
import json, sys
at = lambda name: json.load(open(f"{sys.argv[1]}/{name}.json"))
peer, ours = at("peer"), at("speed")["contexts"][-1]
print(f"plain decoding, context {ours['context']}: {1 / ours['step_median_seconds']:.0f} tokens/s, transformers {peer['decode_tok_s']:.0f}: "
      f"{1 / ours['step_median_seconds'] / peer['decode_tok_s']:.1f} times")
for block in ["8", "5", "4", "3", "auto"]:
    print(f"speculative against plain, block {block}: {at('block-' + block)['speedup']:.2f} times")
PY
  [ "$big" = 1 ] || return 0
  echo "== 0.8B shape, random weights in BF16, $threads threads"
  big_target
  load
  for dtype in f32 bf16; do
    echo "-- $dtype arithmetic"
    "$built/dflash-eval" speed --target "$work/08b" --dtype $dtype --contexts 128 --rows 8 --quiet
  done
  "$built/dflash-eval" sweep --target "$work/08b" --prompts $prompts --limit 2 --max-new 48 --scripted 0.8 --blocks 2,4,6,8 --quiet
  load
}

case $mode in
decode)
  drafter=${2:-runs/demo/final}
  [ -e "$drafter/model.safetensors" ] || {
    echo "bench: no drafter in $drafter; train one: cargo run --release -p dflash-train -- --config configs/demo.toml" >&2
    exit 2
  }
  prepare
  decode "$drafter"
  ;;
step)
  prepare
  load
  step small dflash2 f32 9
  step small dflash2 bf16 9
  if [ "$big" = 1 ]; then
    step 08b dflash f32 2
    step 08b dflash2 f32 2
  fi
  table
  ;;
scaling)
  prepare
  load
  echo "blocks  context  window  s a step  memory, MB"
  for size in "16 2048" "32 2048" "64 2048" "128 2048" "32 512" "32 1024" "32 4096" "32 512 256" "32 1024 256" "32 2048 256" "32 4096 256"; do
    read -r anchors context window <<<"$size"
    "$built/dflash-train" bench step --shape small --algo dflash2 --anchors "$anchors" --context "$context" ${window:+--window "$window"} \
      --repeats 5 --json >"$work/step.json"
    "$python" -c 'import json, sys
line = json.load(open(sys.argv[1]))
print("{anchors:6} {context:8} {0:>7} {step_s:9.3f} {peak_rss_mb:8}".format(line["window"] or "none", **line))' "$work/step.json"
  done
  ;;
ops)
  RAYON_NUM_THREADS=$threads cargo bench --locked --workspace --bench ops
  ;;
capture)
  prepare
  load
  capture demo f32 $target 11
  capture demo bf16 $target 11
  if [ "$big" = 1 ]; then
    big_target
    capture 08b f32 "$work/08b" 3
    capture 08b bf16 "$work/08b" 3
  fi
  table
  ;;
*)
  sed -n '2,18s/^# \{0,1\}//p' "$0" >&2
  exit 2
  ;;
esac
