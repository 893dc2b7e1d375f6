#!/usr/bin/env bash
# TensorBoard's and W&B's own readers read what a run tracked: the same numbers, configuration and names.
#   scripts/interop/tracking.sh BUILT PYTHON      called by scripts/interop.sh with its programs
# The run is a short one on the demo, stopped by a signal on the way and taken up again. Uploading is not checked: it needs
# W&B's server.
set -euo pipefail
cd "$(dirname "$0")/../.."
built=$1 python=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
head -n 12 data/demo/responses.jsonl >"$work/conversations.jsonl"
train() { # in a subshell of its own, which becomes the program
  exec "$built/dflash-train" --config configs/demo.toml --quiet --set "run_dir=$work/run" --set "data.conversations=$work/conversations.jsonl" \
    --set "tracking=['jsonl', 'tensorboard', 'wandb']" --set "wandb={project='interop', name='a run', tags=['demo', 'two words']}" \
    --set train.steps=40 --set train.pack_tokens=256 --set checkpoint.every=10 --set validate.every=10 --set data.val_fraction=0.2 \
    --set evaluate.limit=2 --set evaluate.max_new=32 >/dev/null
}
train &
training=$!
for _ in $(seq 600); do
  [ -e "$work/run/step-000010" ] && break
  sleep 0.05
done
kill -TERM "$training" 2>/dev/null || true
status=0
wait "$training" || status=$?
[ "$status" = 0 ] || [ "$status" = 143 ] || exit "$status" # 0: it was done before the signal came
(train)
echo "== tracking (first process ended with $status)"
"$python" scripts/interop/tracking_check.py "$work/run"
