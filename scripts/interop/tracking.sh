#!/usr/bin/env bash
# TensorBoard and W&B read what a run of ours leaves for them: same names, steps, numbers and config as its JSON lines.
#   scripts/interop/tracking.sh BUILT PYTHON      called by scripts/interop.sh with its programs
# The run is killed on the way, looked at, and resumed to its end. `wandb sync` uploads to a stand-in on 127.0.0.1: no
# W&B server is contacted. wandb comes in two versions: the last with a reader in Python, and a new one, in Go.
set -euo pipefail
cd "$(dirname "$0")/../.."
built=$1 python=$2
newer=$(dirname "$(dirname "$python")")/newer-wandb
export WANDB_API_KEY=fedcba9876543210fedcba9876543210fedcba98 # no account's; it must be nowhere in the run
work=$(mktemp -d)
training=
trap '[ -z "$training" ] || kill -9 "$training" 2>/dev/null || true; rm -rf "$work"' EXIT

head -n 60 data/demo/responses.jsonl >"$work/conversations.jsonl"
train() {
  local settings=(
    "run_dir=$work/run" "data.conversations=$work/conversations.jsonl" data.val_fraction=0.2
    'tracking=["jsonl", "tensorboard", "wandb"]' wandb.project=drafters wandb.entity=a-team 'wandb.name=three words here'
    'wandb.tags=["demo", "a b"]' drafter.layers=1 drafter.ffn=64 drafter.heads=2 drafter.kv_heads=1 drafter.head_dim=32
    drafter.selector_rank=8 train.steps=200 train.pack_tokens=128 train.anchors=6 checkpoint.every=20 validate.every=30
    validate.samples=4 evaluate.limit=4 evaluate.max_new=40
  )
  exec "$built/dflash-train" --config configs/demo.toml --quiet "${settings[@]/#/--set=}" "$@"
}
check() { "$python" scripts/interop/tracking_check.py "$@"; }
check_newer() { PYTHONPATH=$newer check "$@"; }
marks() { find "$work/run/wandb" -name '*.synced' "$@"; } # of an upload; wandb skips a run that has one

(train --stage capture)
echo "== trackers: a killed run"
train --stage train &
training=$!
until [ -e "$work/run/step-000040" ]; do
  kill -0 "$training" || { echo "tracking: the run ended before it could be killed" >&2; exit 1; }
  sleep 0.01
done
kill -9 "$training"
wait "$training" 2>/dev/null || true
training=
[ ! -e "$work/run/step-000200" ] || { echo "tracking: the run was not killed on the way" >&2; exit 1; }
for reader in tensorboard log upload; do check "$reader" "$work/run" --killed; done
marks -delete
check_newer upload "$work/run" --killed
[ -n "$(marks)" ] || { echo "tracking: wandb sync left no mark, so that its removal cannot be seen" >&2; exit 1; }

echo "== trackers: the same run, resumed"
(train >/dev/null)
[ -z "$(marks)" ] || { echo "tracking: expected the resumed run without a mark of the upload, got $(marks)" >&2; exit 1; }
for reader in tensorboard log upload; do check "$reader" "$work/run"; done
marks -delete
check_newer upload "$work/run"
if grep -rqF "$WANDB_API_KEY" "$work/run"; then
  echo "tracking: the API key is in $(grep -rlF "$WANDB_API_KEY" "$work/run")" >&2
  exit 1
fi
echo "trackers: every number equal, the key nowhere"
