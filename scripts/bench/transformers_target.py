#!/usr/bin/env python3
"""Time the Qwen3.5 target of Hugging Face transformers on this CPU: prompt pass with taps, one-token steps.

  transformers_target.py --shape demo|08b [--dtype f32|bf16] [--context 1024] [--repeats 3] [--save DIR] [--only-save]

Weights are random: time does not depend on them. --save writes the model, so that ours can be timed on the same folder.
Prints one line of JSON. BENCH_THREADS sets the threads.
"""
import argparse, json, os, resource, statistics, time, warnings

warnings.filterwarnings("ignore")
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

COMMON = dict(linear_conv_kernel_dim=4, full_attention_interval=4, tie_word_embeddings=True, rms_norm_eps=1e-6)
SHAPES = {
    "08b": dict(vocab_size=248320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
                num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
                linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=262144),
    "demo": dict(vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8,
                 linear_key_head_dim=32, linear_value_head_dim=32, max_position_embeddings=4096),
}
ROPE_SECTIONS = {"08b": [11, 11, 10], "demo": [4, 2, 2]}


def config(shape):
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_section": ROPE_SECTIONS[shape], "mrope_interleaved": True}
    return Qwen3_5TextConfig(**COMMON, **SHAPES[shape], rope_parameters=rope)


def timed(work):
    start = time.perf_counter()
    value = work()
    return value, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="demo", choices=list(SHAPES))
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save")
    parser.add_argument("--only-save", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ.get("BENCH_THREADS", os.cpu_count())))
    model = Qwen3_5ForCausalLM(config(args.shape)).to(torch.float32 if args.dtype == "f32" else torch.bfloat16).eval()
    if args.save:
        model.save_pretrained(args.save)
        if args.only_save:
            return
    ids = torch.randint(0, model.config.vocab_size - 8, (1, args.context), generator=torch.Generator().manual_seed(1))
    prompts, steps = [], []
    with torch.inference_mode():
        for repeat in range(args.repeats + 1):  # the first one warms up
            out, seconds = timed(lambda: model(input_ids=ids, output_hidden_states=True, use_cache=True, logits_to_keep=1))
            prompts += [seconds] if repeat else []
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        for repeat in range(17):
            out, seconds = timed(lambda: model(input_ids=token, past_key_values=cache, use_cache=True))
            token = out.logits[:, -1:].argmax(-1)
            steps += [seconds] if repeat else []
    prompt, step = statistics.median(prompts), statistics.median(steps)
    print(json.dumps({"peer": "transformers", "shape": args.shape, "dtype": args.dtype, "context": args.context,
                      "threads": torch.get_num_threads(), "prefill_tok_s": round(args.context / prompt, 1),
                      "decode_tok_s": round(1 / step, 2),
                      "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))


if __name__ == "__main__":
    main()
