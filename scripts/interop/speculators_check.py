#!/usr/bin/env python3
"""Holds our speculators export to its reader: PyPI `speculators` 0.9.0 loads the folder and must compute the hidden states
that we recorded for the published folder (f32, CPU, eager attention).

    speculators_check.py FOLDER TARGET WALKS.json       exit 1 when a tensor is not taken or a state is off by more than 1e-4

WALKS.json comes from `dflash-export walk --states`: each context has its tokens, the anchor, tap states and hidden states.
speculators computes hidden states only inside its training pass, so each context is given to that as a document in which
one position alone may be an anchor.

Its windows are another rule than the published one. It lets every slot of a block see the W rows before the anchor; the
published rule, |q - k| < W, takes one row away for the anchor and one more for every further slot. Contexts longer than the
window are therefore compared under the published rule, laid over theirs, and what their own rule makes of them is printed.
"""
import json
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from loguru import logger
from speculators.models.dflash import attention, core
from speculators.model import SpeculatorModel
from torch.nn.attention.flex_attention import and_masks
from transformers.utils import logging

LIMIT = 1e-4  # relative to the largest recorded state


def published_windows(document_ids, total_seq_len, anchor_positions, block_size, sliding_window=None, **rest):
    """speculators' mask, less the rows that a slot does not see by |q - k| < W."""
    theirs, q_len, kv_len = attention.create_anchor_block_mask_mod(
        document_ids, total_seq_len, anchor_positions, block_size, sliding_window, **rest)
    if sliding_window is None:
        return theirs, q_len, kv_len

    def within(_b, _h, q, k):
        position = anchor_positions[q // block_size] + q % block_size
        return (k >= total_seq_len) | (k > position - sliding_window)

    return and_masks(theirs, within), q_len, kv_len


def load(folder, target):
    """The model as its own reader makes it, and nothing drawn at random."""
    config = SpeculatorModel.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = str(target)
    model, report = SpeculatorModel.from_pretrained(folder, config=config, output_loading_info=True)
    borrowed = ("embed_tokens.", "lm_head.", "verifier_")  # the verifier's, which 0.9 does not save
    missing = [name for name in report["missing_keys"] if not name.startswith(borrowed)]
    faults = {"missing": missing, "unexpected": list(report["unexpected_keys"]), "mismatched": list(report["mismatched_keys"])}
    if any(faults.values()):
        sys.exit(f"{folder}: speculators does not take these tensors: {faults}")
    model.load_verifier_weights()
    return model.float().eval()


@torch.no_grad()
def hidden_states(model, context):
    """Hidden states of the slots after the anchor, [B - 1, H]."""
    taps, rows, size = torch.tensor(context["states"]["taps"]), len(context["tokens"]), model.block_size
    length = rows + 1 + size
    tokens = torch.zeros(1, length, dtype=torch.long)
    tokens[0, :rows] = torch.tensor(context["tokens"])
    tokens[0, rows] = context["anchor"]
    states = torch.zeros(1, length, taps.shape[1])
    states[0, :rows] = taps
    anchor = torch.zeros(1, length, dtype=torch.long)
    anchor[0, rows] = 1
    hidden, *_ = model._backbone_forward(
        states, tokens, anchor, torch.zeros(1, length, model.config.transformer_layer_config.hidden_size),
        torch.zeros(1, length, dtype=torch.long), max_anchors=1,
    )
    return hidden[0, 1:]


def main():
    logger.remove()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    folder, target, walks = map(Path, sys.argv[1:])
    model = load(folder, target)
    contexts = json.loads(walks.read_text())["contexts"]
    if not contexts:
        sys.exit(f"{walks}: no contexts")
    window = model.sliding_window if model.uses_sliding_window_attn else None
    beyond = [window is not None and len(context["tokens"]) + model.block_size > window for context in contexts]
    apart = {"equal": [], "own rule": []}
    for context, long in zip(contexts, beyond):
        ours = torch.tensor(context["states"]["hidden"])
        for rule in ("own rule", "equal") if long else ("equal",):
            core.create_anchor_block_mask_mod = published_windows if long and rule == "equal" else attention.create_anchor_block_mask_mod
            theirs = hidden_states(model, context)
            if theirs.shape != ours.shape:
                sys.exit(f"{walks}: hidden states of shape {tuple(ours.shape)}, theirs have {tuple(theirs.shape)}")
            apart[rule].append(((ours - theirs).abs().max() / ours.abs().max()).item())
    good = all(value <= LIMIT for value in apart["equal"])  # false for NaN
    print(f"speculators 0.9.0 ({type(model).__name__}): {len(contexts)} blocks, hidden states {max(apart['equal']):.1e} apart at most, "
          f"{'as it should be' if good else f'expected at most {LIMIT:.0e}'}")
    if any(beyond):
        print(f"  {sum(beyond)} contexts are longer than the window of {window}: compared under the published rule, by speculators' own "
              f"training rule {max(apart['own rule']):.1e} apart")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
