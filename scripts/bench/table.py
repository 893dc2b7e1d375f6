#!/usr/bin/env python3
"""Prints figures of ours beside a peer's, taken in turns, as one table with ratios.

  table.py FILE.jsonl [OUT.json]     lines: {"what": .., "side": "ours"|"peer", "value": .., "unit": .., "memory_mb": ..}

The ratio is that of the medians of all turns; higher is better for us.
"""
import json, statistics, sys

rows = {}
for line in open(sys.argv[1]):
    entry = json.loads(line)
    rows.setdefault(entry["what"], {"ours": [], "peer": []})[entry["side"]].append(entry)
table = []
print(f"{'':44} {'ours':>10} {'peer':>10} {'ratio':>7}   memory, MB")
for what, sides in rows.items():
    median = {side: statistics.median(entry["value"] for entry in entries) for side, entries in sides.items() if entries}
    memory = {side: max(entry["memory_mb"] or 0 for entry in entries) for side, entries in sides.items() if entries}
    if len(median) < 2:
        continue
    ratio = median["ours"] / median["peer"]
    table.append({"what": what, "unit": sides["ours"][0]["unit"], **median, "ratio": ratio, "memory_mb": memory})
    print(f"{what:44} {median['ours']:10.1f} {median['peer']:10.1f} {ratio:6.2f}x   {memory['ours']} / {memory['peer']}")
if len(sys.argv) > 2:
    with open(sys.argv[2], "w") as file:
        json.dump(table, file, indent=1)
