#!/usr/bin/env python3
"""Time one DFlash or DFlash 2 training step of speculators (PyTorch) on this CPU.

  speculators_step.py --shape tiny|small|08b [--algo dflash|dflash2] [--dtype f32|bf16] [--repeats 5] [--dump DIR]

The trainer comes from PyPI, unchanged. Weights and taps are random, anchors evenly spaced, labels the data tokens; cross-entropy
without recomputation, slot weights exp(-(k - 1) / gamma), AdamW, clip 1. Embedding and head hold BF16 numbers, as published targets
do. --dump writes weights.safetensors, batch.safetensors (tokens, taps, anchors), grads.safetensors and loss.json for
`dflash-train bench step --peer DIR`. Prints one line of JSON, medians in seconds. BENCH_THREADS sets the threads.
"""
import argparse, json, os, resource, statistics, time, warnings

warnings.filterwarnings("ignore")
import torch
from safetensors.torch import save_file
from speculators.losses import resolve_loss_config
from speculators.models.dflash import core
from transformers import Qwen3Config

SHAPES = {  # hidden, heads, kv heads, head size, feed-forward, layers, vocabulary, block, context tokens, blocks
    "tiny": (256, 4, 2, 64, 768, 2, 4096, 8, 256, 16),
    "small": (512, 8, 2, 64, 1536, 5, 8192, 16, 512, 32),
    "08b": (1024, 8, 2, 128, 3584, 5, 248320, 16, 1024, 64),
}
TAPS = 5
FROZEN = ("embed_tokens", "lm_head", "verifier_norm")


def build(shape, algo):
    hidden, heads, kv_heads, head_dim, feed_forward, layers, vocab, block, _, _ = SHAPES[shape]
    config = Qwen3Config(vocab_size=vocab, hidden_size=hidden, intermediate_size=feed_forward, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-6,
                         max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e7},
                         tie_word_embeddings=False, layer_types=["full_attention"] * layers)
    config._attn_implementation = "sdpa"
    common = dict(transformer_layer_config=config, draft_vocab_size=vocab, block_size=block, mask_token_id=vocab - 1,
                  aux_hidden_state_layer_ids=list(range(1, TAPS + 1)))
    if algo == "dflash":
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
        model = DFlashDraftModel(DFlashSpeculatorConfig(**common))
    else:
        from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
        model = DFlash2DraftModel(DFlash2SpeculatorConfig(**common, conv_kernel_size=2, conv_group_size=16,
                                                          selector_rank=min(256, hidden), selector_top_k=16))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            frozen = any(part in name for part in FROZEN)
            if name.endswith("verifier_norm.weight"):
                weight.fill_(1.0)
            elif frozen or weight.isnan().any():
                weight.normal_(0, 0.02)
            if frozen:
                weight.copy_(weight.bfloat16())
            weight.requires_grad_(not frozen)
        if hasattr(model, "lm_head"):
            model.verifier_lm_head.weight.copy_(model.lm_head.weight)
    return model


def inputs(shape, model, context, blocks):
    hidden, vocab, block = SHAPES[shape][0], SHAPES[shape][6], SHAPES[shape][7]
    noise = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocab - 2, (1, context), generator=noise)
    taps = torch.randn(1, context, TAPS * hidden, generator=noise) * 0.5
    # a last hidden state whose best token is the next one, so that the trainer's label (its argmax) is the data token
    last = torch.zeros(1, context, hidden)
    last[0, :-1] = 50 * model.verifier_lm_head.weight.detach()[tokens[0, 1:]]
    anchors = torch.linspace(8, context - block - 1, blocks).long()
    core.select_anchors = lambda *_, **__: (anchors, torch.ones(blocks, dtype=torch.bool))
    return tokens, taps, last, anchors


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="small", choices=list(SHAPES))
    parser.add_argument("--algo", default="dflash2", choices=["dflash", "dflash2"])
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--context", type=int)
    parser.add_argument("--anchors", type=int)
    parser.add_argument("--dump")
    parser.add_argument("--only-dump", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ.get("BENCH_THREADS", os.cpu_count())))
    block, context, blocks = SHAPES[args.shape][7:]
    context, blocks = args.context or context, args.anchors or blocks
    model = build(args.shape, args.algo)
    tokens, taps, last, anchors = inputs(args.shape, model, context, blocks)
    settings = dict(loss_config=resolve_loss_config("ce", "eager"), gamma=7.0 if block == 16 else 4.0, max_anchors=blocks,
                    per_position_loss_weight="fixed-exp-decay")
    if args.algo == "dflash2":
        settings.update(tv_loss_fn=resolve_loss_config("tv", "eager")["tv"][0], selector_loss_alpha=1.0)

    def forward():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
            return model(hidden_states=taps, input_ids=tokens, verifier_last_hidden_states=last,
                         loss_mask=torch.ones(1, context, dtype=torch.long),
                         document_ids=torch.zeros(1, context, dtype=torch.long), **settings)

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if args.dump:
        os.makedirs(args.dump, exist_ok=True)
        copy = lambda tensor: tensor.detach().clone().contiguous()
        save_file({name: copy(tensor) for name, tensor in model.state_dict().items()}, f"{args.dump}/weights.safetensors")
        save_file({"tokens": tokens.int(), "taps": taps, "anchors": anchors.int()}, f"{args.dump}/batch.safetensors")
        _, loss, metrics = forward()
        loss.backward()
        save_file({name: copy(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None},
                  f"{args.dump}/grads.safetensors")
        with open(f"{args.dump}/loss.json", "w") as file:
            json.dump({"loss": loss.item(), "metrics": {key: float(value) for key, value in metrics.items()}}, file)
        model.zero_grad()
        if args.only_dump:
            return
    optimizer = torch.optim.AdamW(trained, lr=6e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    times = {"forward": [], "backward": [], "update": [], "step": []}
    for repeat in range(args.repeats + 1):  # the first one warms up
        marks = [time.perf_counter()]
        loss = forward()[1]
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(time.perf_counter())
        if repeat:
            parts = [b - a for a, b in zip(marks, marks[1:])]
            for name, seconds in zip(times, parts + [sum(parts)]):
                times[name].append(seconds)
    median = {f"{name}_s": round(statistics.median(values), 4) for name, values in times.items()}
    print(json.dumps({"peer": "speculators", "algo": args.algo, "shape": args.shape, "dtype": args.dtype, "context": context,
                      "anchors": blocks, "threads": torch.get_num_threads(), "loss": loss.item(),
                      "trainable": sum(weight.numel() for weight in trained), **median,
                      "slots_per_s": round(blocks * (block - 1) / median["step_s"], 1),
                      "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))


if __name__ == "__main__":
    main()
