#!/usr/bin/env python3
"""Holds a GGUF file of ours, and what llama.cpp did with it, to the drafter folder that it was made from.

  gguf_check.py qwen3 TARGET OUT                         a random, untied Qwen3 target with TARGET's tokenizer
  gguf_check.py file FOLDER TARGET FILE.gguf DTYPE       keys, tensors and values as PyPI `gguf` reads them
  gguf_check.py judge OURS.json THEIRS.json DTYPE        texts, drafted blocks, tokenisation, logits, acceptance length

OURS.json is a report of `dflash-eval acceptance`, THEIRS.json what llama_speculative wrote, over the same prompts. Rounds that
the budget narrowed or a stop token cut are left out on both sides. Exit code 1 on any difference.
"""
import argparse, json, shutil, sys
from pathlib import Path

import numpy as np

OUTSIDE = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
INSIDE = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
    **{f"attn_{part}.weight": f"self_attn.{part}_proj.weight" for part in "qkv"},
    **{f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"},
    **{f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in ["gate", "up", "down"]},
}
faults = []


def equal(what, expected, got):
    if isinstance(expected, float):
        expected = float(np.float32(expected))
    if expected != got:
        faults.append(f"{what}: expected {expected}, got {got}")


def published(name):
    if not name.startswith("blk."):
        return OUTSIDE.get(name)
    _, layer, name = name.split(".", 2)
    return f"layers.{layer}.{INSIDE[name]}" if name in INSIDE else None


def make_qwen3(args):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source, out = Path(args.target), Path(args.out)
    text = json.loads((source / "config.json").read_text())["text_config"]
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        vocab_size=text["vocab_size"], max_position_embeddings=1024, rope_theta=1e6, tie_word_embeddings=False,
        eos_token_id=text["eos_token_id"], pad_token_id=text["pad_token_id"], bos_token_id=None,
    ))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else noise / parameter.shape[-1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(out)
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]:
        shutil.copy(source / name, out / name)
    return f"a random Qwen3 target in {out}"


def expected_keys(config, target):
    from transformers import AutoTokenizer

    nested = config["dflash_config"]
    # positions of a Qwen3.5 target have three parts
    three_part = json.loads((Path(target) / "config.json").read_text())["model_type"] != "qwen3"
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.causal": config.get("is_causal", False),
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "rope.dimension_sections": [config["head_dim"] // 2, 0, 0, 0] if three_part else None,
        "block_size": nested.get("block_size", config.get("block_size")),
        "target_layers": [layer + 1 for layer in nested["target_layer_ids"]],
        "sample_from_anchor": False,
    }
    if any(sliding):
        keys |= {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": sliding}
    for key in ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"]:
        if key in nested:
            keys[key] = nested[key]
    keys = {f"dflash.{key}": value for key, value in keys.items()}
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows = range(config["vocab_size"])
    keys |= {
        "general.architecture": "dflash",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.mask_token_id": nested["mask_token_id"],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": [tokenizer.convert_ids_to_tokens(row) or f"[PAD{row}]" for row in rows],
    }
    return keys


def check_file(args):
    import torch
    from gguf import GGMLQuantizationType as Type, GGUFReader, dequantize, quantize
    from safetensors.torch import load_file

    folder, reader = Path(args.folder), GGUFReader(args.file)
    config = json.loads((folder / "config.json").read_text())
    for key, value in expected_keys(config, args.target).items():
        field = reader.get_field(key)
        equal(key, value, None if field is None else field.contents())
    source = load_file(folder / "model.safetensors")
    names = {published(tensor.name): tensor for tensor in reader.tensors}
    equal("tensors", sorted(source), sorted(map(str, names)))
    wanted = {"f32": Type.F32, "bf16": Type.BF16, "f16": Type.F16, "q8_0": Type.Q8_0}[args.dtype]
    for name, tensor in names.items():
        values = source[name].to(torch.float32).numpy()
        kept = "selector" in name or "kernel_projection" in name
        single = values.ndim == 1 or name.endswith("base_kernel")
        stored = Type.F32 if single else Type.BF16 if kept and wanted == Type.Q8_0 else wanted
        equal(f"{name} type", stored.name, tensor.tensor_type.name)
        equal(f"{name} shape", list(values.shape[::-1]), [int(size) for size in tensor.shape])
        if stored == Type.Q8_0:
            same = np.array_equal(tensor.data, quantize(values, stored))
        else:
            same = np.array_equal(dequantize(tensor.data, tensor.tensor_type).reshape(values.shape), values)
        if not same:
            faults.append(f"{name}: values are not those of the folder")
    return f"{Path(args.file).stat().st_size} bytes as {args.dtype}: {len(names)} tensors and every key as gguf reads them"


def check_results(args):
    ours, theirs = json.load(open(args.ours)), json.load(open(args.theirs))
    assert not ours["include_truncated"], "expected a report made without --include-truncated"
    equal("max_new", ours["setting"]["max_new"], theirs["max_new"])
    equal("drafts a round", ours["setting"]["block_size"] - 1, theirs["n_draft"])
    equal("prompts", len(ours["per_prompt"]), len(theirs["prompts"]))
    same = 0
    for index, (a, b) in enumerate(zip(ours["per_prompt"], theirs["prompts"])):
        equal(f"prompt {index}: speculative text in llama.cpp", b["plain"], b["tokens"])
        equal(f"prompt {index}: tokenised alike", True, b["tokenised_alike"])
        same += a["tokens"] == b["tokens"]
    if args.dtype == "f32":
        equal("texts as here", len(ours["per_prompt"]), same)
        equal("blocks drafted as here", theirs["blocks"], theirs["blocks_equal"])
    rounds = [round for prompt in theirs["prompts"] for round in prompt["rounds"] if not round["truncated"]]
    accepted = sum(round["accepted"] for round in rounds)
    mine, length = ours["acceptance_length"], 1 + accepted / len(rounds)
    off = abs(length / mine - 1)
    if args.dtype == "f32" and off > 0.05:
        faults.append(f"acceptance length: expected {mine:.4f} within 5 %, got {length:.4f}")
    logits = theirs["logits"]
    equal("argmax of the target's logits", logits["rows"], logits["argmax_equal"])
    return (
        f"llama.cpp, drafter {args.dtype}: {same} of {len(theirs['prompts'])} texts and "
        f"{theirs['blocks_equal']} of {theirs['blocks']} blocks as here; acceptance length {length:.4f} over "
        f"{len(rounds)} rounds ({accepted} accepted), here {mine:.4f} over {ours['rounds']} ({ours['accepted']}), {100 * off:.2f} % "
        f"apart; target logits differ by {logits['max_abs_difference']:.1e} at most (largest {logits['max_abs']:.1f}), argmax equal in "
        f"{logits['argmax_equal']} of {logits['rows']} rows"
    )


def main():
    parser = argparse.ArgumentParser()
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode, names in {"qwen3": ["target", "out"], "file": ["folder", "target", "file", "dtype"], "judge": ["ours", "theirs", "dtype"]}.items():
        sub = modes.add_parser(mode)
        for name in names:
            sub.add_argument(name)
    args = parser.parse_args()
    print({"qwen3": make_qwen3, "file": check_file, "judge": check_results}[args.mode](args))
    for fault in faults:
        print("gguf_check:", fault[:600], file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
