#!/usr/bin/env bash
# Makes, once, the Python environment of the other implementations that the fixtures and interop checks compare with, and
# prints its interpreter's path as the last line. Neither building, nor training, nor `cargo test` needs it.
#   scripts/setup_peers.sh [DIR]      default: $PEERS, else ~/.cache/dflash-peers
# torch, transformers: the target's oracle   dflash: the authors' drafter   speculators: another trainer
# coremltools, gguf, tensorboard, wandb: readers of those files   mlx: the authors' MLX port, on the CPU
set -euo pipefail
dir=${1:-${PEERS:-$HOME/.cache/dflash-peers}}
done_mark=$dir/ok # written last: an interrupted installation is taken up again

if [ ! -e "$done_mark" ]; then
  if ! python3 -c 'import ensurepip' 2>/dev/null; then # Debian's python3 comes without
    $([ "$(id -u)" = 0 ] || echo sudo) apt-get update -qq >&2
    $([ "$(id -u)" = 0 ] || echo sudo) apt-get install -y -qq python3-venv >&2
  fi
  python3 -m venv "$dir" >&2
  install() { "$dir/bin/pip" install --quiet --disable-pip-version-check "$@" >&2; }
  install 'torch==2.11.0' 'transformers>=5.7,<5.19' 'numpy<2.5' safetensors tokenizers jinja2
  # their own requirements pin CUDA builds and servers that no check here touches
  install --no-deps 'dflash==0.1.0' 'speculators==0.9.0' 'hs-connectors==0.9.0'
  install 'pydantic>=2' pydantic-settings loguru datasets requests tqdm httpx aiohttp openai psutil protobuf rich typer click
  install 'coremltools==9.0' 'gguf>=0.19'
  install 'mlx[cpu]' mlx-lm || echo "setup_peers: mlx has no build for this machine; what needs it is skipped" >&2
  printf '#!/bin/sh\nexit 0\n' >"$done_mark"
  chmod +x "$done_mark"
fi
# readers of event files and W&B logs; the last wandb with its datastore in Python
if [ ! -e "$done_mark-trackers" ]; then
  "$dir/bin/pip" install --quiet --disable-pip-version-check 'tensorboard==2.21.0' 'wandb==0.22.3' >&2
  : >"$done_mark-trackers"
fi
# what `wandb sync` is today, in Go; beside the other, for those who set PYTHONPATH
if [ ! -e "$done_mark-newer-wandb" ]; then
  rm -rf "$dir/newer-wandb"
  "$dir/bin/pip" install --quiet --disable-pip-version-check --target "$dir/newer-wandb" 'wandb==0.31.0' >&2
  : >"$done_mark-newer-wandb"
fi
echo "$dir/bin/python"
