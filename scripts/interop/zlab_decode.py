#!/usr/bin/env python3
"""The authors' own MLX decoding loop, on this CPU, beside a report of ours: same texts, same acceptance.

  zlab_decode.py TARGET DRAFTER PROMPTS.jsonl REPORT.json [--limit 10]

REPORT.json comes from `dflash-eval acceptance --include-truncated` over the same prompts, greedy, f32. Their loop records a
round's accepted drafts + 1, and a 0 or 1 where no round was; both are counted here as 1 + accepted / rounds over all rounds.
Exit code 1 when the lengths differ by more than 1 % or a text differs.
"""
import argparse, json, sys, warnings

warnings.filterwarnings("ignore")
import dflash.model_mlx as theirs
import mlx.core as mx
from mlx.utils import tree_map
from transformers import AutoTokenizer

theirs.snapshot_download = lambda path, **_: path  # local folders: nothing to look up


def single(model):
    model.update(tree_map(lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters()))


def main():
    parser = argparse.ArgumentParser()
    for name in ["target", "drafter", "prompts", "report"]:
        parser.add_argument(name)
    parser.add_argument("--limit", type=int, default=10)
    args = parser.parse_args()
    report = json.load(open(args.report))
    assert report["include_truncated"], "expected a report made with --include-truncated"
    target, tokenizer = theirs.load(args.target)
    drafter = theirs.load_draft(args.drafter)
    single(target), single(drafter)
    # mlx-lm's wrapper switches thinking on by itself: the template's own default, or the report's switch, is what we render
    render = AutoTokenizer.from_pretrained(args.target).apply_chat_template
    switch = {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}}.get(report["setting"]["thinking"], {})
    max_new, equal, ours, mine = report["setting"]["max_new"], 0, [0, 0], [0, 0]
    results = report["per_prompt"][: args.limit]
    for line, result in zip(open(args.prompts), results):
        messages = [m for m in json.loads(line)["messages"] if m["role"] != "assistant"]
        prompt = render(messages, tokenize=False, add_generation_prompt=True, **switch)
        ids, rounds = [], []
        for piece in theirs.stream_generate(target, drafter, tokenizer, prompt, max_tokens=max_new, temperature=0.0):
            ids += [int(token) for token in piece.tokens]
            rounds += [int(piece.accepted)] if piece.accepted else []
        stop = set(report["setting"]["stop_ids"])
        bare = [token for token in result["tokens"] if token not in stop]
        same = [token for token in ids if token not in stop] == bare
        equal += same
        if not same:
            at = next((i for i, (a, b) in enumerate(zip(ids, bare)) if a != b), min(len(ids), len(bare)))
            print(f"{result['id']}: texts part at token {at + 1}: theirs {ids[at:at + 3]}, ours {bare[at:at + 3]}")
        mine = [mine[0] + sum(result["accepted"]), mine[1] + len(result["accepted"])]
        ours = [ours[0] + sum(r - 1 for r in rounds), ours[1] + len(rounds)]
    theirs_length, our_length = 1 + ours[0] / max(ours[1], 1), 1 + mine[0] / max(mine[1], 1)
    off = abs(our_length / theirs_length - 1)
    print(f"texts equal {equal} of {len(results)}; acceptance length theirs {theirs_length:.4f} over {ours[1]} rounds, "
          f"ours {our_length:.4f} over {mine[1]} rounds, {100 * off:.2f} % apart")
    sys.exit(0 if equal == len(results) and off <= 0.01 else 1)


if __name__ == "__main__":
    main()
