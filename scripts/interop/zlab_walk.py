#!/usr/bin/env python3
"""Holds our drafting to the authors': PyPI `dflash` 0.1.0 (PyTorch, f32, CPU) loads an exported folder as it stands and
must walk the same block as ours on each recorded context.

    zlab_walk.py check TARGET DRAFTER WALKS.json             compare; exit 1 on any difference
    zlab_walk.py record TARGET DRAFTER PROMPTS.jsonl OUT.json [--contexts 10]
                                                             write WALKS.json from this side, to test the other with
    zlab_walk.py random TARGET OUT_DIR [--algorithm dflash2] write a random drafter folder in the published layout

WALKS.json (`dflash-export walk` writes it): {"contexts": [{"tokens": [ids before the anchor], "anchor": id, "walk": [ids]}]}
Taps are transformers' hidden_states[id + 1] of the target over `tokens`; nothing of the anchor is known to the drafter.
"""
import argparse
import json
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from transformers.utils import logging

from dflash import DFlash2DraftModel, DFlashDraftModel, extract_context_feature
from dflash.model import _draft_value, _output_head, _raw_input_embeddings


def load_target(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_drafter(folder):
    """The reference model, refusing what it would let pass: names it does not know, names it would draw at random."""
    name = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
    kind = {"DFlash2DraftModel": DFlash2DraftModel, "DFlashDraftModel": DFlashDraftModel}.get(name)
    if kind is None:
        sys.exit(f"{folder}/config.json: architectures: expected DFlashDraftModel or DFlash2DraftModel, found {name}")
    model, report = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    faults = {key: report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if report.get(key)}
    if faults:
        sys.exit(f"{folder}: the reference does not take these tensors: {faults}")
    return model.eval()


@torch.no_grad()
def walk(target, drafter, tokens, anchor):
    """The reference's greedy block after `anchor`, and the smallest margin by which a slot was won."""
    states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    block = torch.full((1, drafter.block_size), drafter.mask_token_id)
    block[0, 0] = anchor
    scale = float(_draft_value(drafter.config, "input_embedding_scale", 1.0))
    hidden = drafter(
        target_hidden=extract_context_feature(states, drafter.target_layer_ids),
        noise_embedding=_raw_input_embeddings(target, block, scale),
        position_ids=torch.arange(len(tokens) + drafter.block_size)[None],
    )[:, 1:]
    logits = drafter.compute_logits(hidden, _output_head(target))
    if isinstance(drafter, DFlash2DraftModel):
        path = drafter.propose(hidden, block[:, 0], _output_head(target), 0.0)[0][0].tolist()
        selector, margins, predecessor = drafter.candidate_selector, [], block[0, 0]
        unary, candidates = logits[0].topk(selector.top_k)
        for slot, token in enumerate(path):
            edge = selector.predecessor_codebook(predecessor) * selector.hidden_projection(hidden[0, slot])
            scores = unary[slot] + selector.successor_codebook(candidates[slot]) @ edge
            first, second = scores.topk(2).values.tolist()
            margins.append(first - second)
            predecessor = torch.tensor(token)
    else:
        path = logits[0].argmax(-1).tolist()
        top = logits[0].topk(2).values
        margins = (top[:, 0] - top[:, 1]).tolist()
    return path, min(margins)


def check(options):
    target, drafter = load_target(options.target), load_drafter(options.drafter)
    contexts = json.loads(Path(options.walks).read_text())["contexts"]
    if not contexts:
        sys.exit(f"{options.walks}: no contexts")
    differing = 0
    for number, context in enumerate(contexts):
        theirs, margin = walk(target, drafter, context["tokens"], context["anchor"])
        same = theirs == context["walk"]
        differing += not same
        note = "same" if same else f"differs\n  theirs {theirs}\n  ours   {context['walk']}"
        print(f"context {number}: {len(context['tokens'])} tokens, smallest margin {margin:.2e}, {note}")
    print(f"{len(contexts) - differing} of {len(contexts)} walks equal to dflash 0.1.0 in f32")
    return 1 if differing else 0


@torch.no_grad()
def record(options):
    target, drafter = load_target(options.target), load_drafter(options.drafter)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    rows = [json.loads(line) for line in Path(options.prompts).read_text().splitlines()[: options.contexts]]
    contexts = []
    for number, row in enumerate(rows):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
        prompt = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        grown = target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=4 + 5 * number)[0].tolist()
        tokens, anchor = grown[:-1], grown[-1]
        contexts.append({"tokens": tokens, "anchor": anchor, "walk": walk(target, drafter, tokens, anchor)[0]})
    Path(options.out).write_text(json.dumps({"contexts": contexts}) + "\n")
    print(f"{len(contexts)} contexts in {options.out}")
    return 0


def random_folder(options):
    outer = json.loads((Path(options.target) / "config.json").read_text())
    target = outer.get("text_config", outer)
    second, layers, depth = options.algorithm == "dflash2", 2, target["num_hidden_layers"]
    taps = [1, (depth - 2) // 2, depth - 3]
    nested = {"block_size": 8, "mask_token_id": target["vocab_size"] - 1, "target_layer_ids": taps}
    if second:
        nested |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 64, "selector_top_k": 8}
    published = {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"], "model_type": "qwen3",
        "attention_bias": False, "attention_dropout": 0.0, "block_size": 8, "dflash_config": nested, "dtype": "bfloat16",
        "head_dim": 64, "hidden_act": "silu", "hidden_size": target["hidden_size"], "initializer_range": 0.02,
        "intermediate_size": target["intermediate_size"], "is_causal": False, "layer_types": ["sliding_attention"] * layers,
        "max_position_embeddings": target["max_position_embeddings"], "max_window_layers": layers,
        "num_attention_heads": 4, "num_hidden_layers": layers, "num_key_value_heads": 2, "num_target_layers": depth,
        "rms_norm_eps": 1e-6, "rope_theta": 1e7, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "sliding_window": 32, "use_sliding_window": True, "tie_word_embeddings": False, "use_cache": True,
        "vocab_size": target["vocab_size"],
    }
    torch.manual_seed(7)
    model = (DFlash2DraftModel if second else DFlashDraftModel)(Qwen3Config(**published))
    tensors = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        value = 1 + 0.2 * noise if parameter.ndim == 1 else 0.5 * noise if "base_kernel" in name else noise / parameter.shape[-1] ** 0.5
        value = 4 * value if "codebook" in name else value  # rows of norm 4: edges as large as the unary logits
        tensors[name.replace("codebook.weight", "codebook")] = value.to(torch.bfloat16).contiguous()
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with safe_open(folder / "model.safetensors", "pt") as file:
        print(f"{len(file.keys())} tensors in {folder}")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, action, words in (("check", check, ("target", "drafter", "walks")),
                                ("record", record, ("target", "drafter", "prompts", "out")),
                                ("random", random_folder, ("target", "out"))):
        command = commands.add_parser(name)
        command.set_defaults(action=action)
        for word in words:
            command.add_argument(word)
        if name == "record":
            command.add_argument("--contexts", type=int, default=10)
        if name == "random":
            command.add_argument("--algorithm", choices=["dflash", "dflash2"], default="dflash2")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sys.exit(options.action(options))


if __name__ == "__main__":
    main()
