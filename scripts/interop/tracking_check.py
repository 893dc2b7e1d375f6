#!/usr/bin/env python3
"""Reads what a run tracked with the trackers' own readers, and holds it to the run's files of JSON lines.

    tracking_check.py RUN_DIR       exit 1 on the first number, name or key that is not what the run wrote

PyPI `tensorboard` 2.21.0 accumulates RUN_DIR/tensorboard, PyPI `wandb` 0.22.3 scans RUN_DIR/wandb/offline-run-*/run-*.wandb
with its datastore reader and its own message types. Held to metrics.jsonl, validation.jsonl, config.resolved.toml and
evaluation.json: every step, every name, every number (as float32 in the event files), the whole configuration.
"""
import json
import struct
import sys
import tomllib
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal.datastore import DataStore

EVERYTHING = {"scalars": 0, "tensors": 0}
OWN = {"_step", "_runtime", "_timestamp"}


def flat(prefix, value):
    """Numbers below a name: lists count from 01, what is no number is left out."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(f"{prefix}/{key}", item)
    elif isinstance(value, list):
        for number, item in enumerate(value, 1):
            yield from flat(f"{prefix}/{number:02}", item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield prefix, value


def written(run):
    """{name: {step: number}} of the files of JSON lines."""
    curves = {}
    for file, prefix in (("metrics.jsonl", "train"), ("validation.jsonl", "validation")):
        for line in (run / file).read_text().splitlines():
            record = json.loads(line)
            step = record.pop("step")
            for name, number in flat(prefix, record):
                curves.setdefault(name, {})[step] = number
    return curves


def same(what, ours, theirs):
    if ours == theirs:
        return
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys(), key=str):
            same(f"{what}: {key}", ours.get(key), theirs.get(key))
    sys.exit(f"{what}: wrote {ours}, read {theirs}")


def single(number):
    return struct.unpack("<f", struct.pack("<f", number))[0]


def events(run, curves, config, report):
    read = EventAccumulator(str(run / "tensorboard"), size_guidance=EVERYTHING).Reload()
    scalars = {name: {event.step: event.value for event in read.Scalars(name)} for name in read.Tags()["scalars"]}
    evaluation = {name: list(points.values()) for name, points in scalars.items() if name.startswith("evaluation/")}
    training = {name: points for name, points in scalars.items() if name not in evaluation}
    same("tensorboard", {name: {step: single(n) for step, n in points.items()} for name, points in curves.items()}, training)
    for name in ("acceptance_length", "spec_tokens_per_s", "prompts"):
        same(f"tensorboard: evaluation/{name}", [single(report[name])], evaluation[f"evaluation/{name}"])
    text = read.Tensors("config")[0].tensor_proto.string_val[0].decode()
    same("tensorboard: config", config, tomllib.loads(text.removeprefix("```toml\n").removesuffix("```\n")))
    print(f"tensorboard 2.21.0: {len(training)} curves of {len(curves['train/loss'])} steps, configuration and evaluation as written")


def value(item):
    return json.loads(item.value_json)


def wandb_run(run, curves, config, report):
    logs = list(run.glob("wandb/offline-run-*/run-*.wandb"))
    if len(logs) != 1:
        sys.exit(f"{run}/wandb: expected one log, found {len(logs)}")
    store, history, summary, about, ended = DataStore(), {}, {}, None, None
    store.open_for_scan(str(logs[0]))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                history.setdefault(name, {})[record.history.step.num] = value(item)
        elif kind == "summary":
            for item in record.summary.update:
                summary[item.key or ".".join(item.nested_key)] = value(item)
        elif kind == "run":
            about = record.run
        elif kind == "exit":
            ended = record.exit.exit_code
    same("wandb: history", curves, {name: points for name, points in history.items() if name not in OWN})
    same("wandb: _step", {step: step for step in curves["train/loss"]}, history["_step"])
    for name in ("acceptance_length", "spec_tokens_per_s", "prompts"):
        same(f"wandb: summary evaluation/{name}", report[name], summary[f"evaluation/{name}"])
    same("wandb: summary train/loss", list(curves["train/loss"].values())[-1], summary["train/loss"])
    told = {item.key: value(item) for item in about.config.update}
    same("wandb: config", config, {key: told[key] for key in config})
    same("wandb: project", "interop", about.project)
    same("wandb: name", "a run", about.display_name)
    same("wandb: tags", ["demo", "two words"], list(about.tags))
    same("wandb: id", logs[0].stem.removeprefix("run-"), about.run_id)
    same("wandb: exit code", 0, ended)
    print(f"wandb 0.22.3: {len(curves)} curves of {len(curves['train/loss'])} steps, configuration, summary, names and end as written")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    run = Path(sys.argv[1])
    curves, report = written(run), json.loads((run / "evaluation.json").read_text())
    if len(curves["train/loss"]) < 2:
        sys.exit(f"{run}/metrics.jsonl: expected several steps")
    config = tomllib.loads((run / "config.resolved.toml").read_text())
    events(run, curves, config, report)
    wandb_run(run, curves, config, report)


if __name__ == "__main__":
    main()
