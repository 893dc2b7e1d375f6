#!/usr/bin/env python3
"""Holds what trackers read in a run folder of ours to its metrics.jsonl, validation.jsonl, evaluation.json and
config.resolved.toml: the same names, steps and numbers, nothing missing, nothing twice.

  tracking_check.py tensorboard RUN_DIR       PyPI tensorboard: its event accumulator, and its server, asked for every curve
  tracking_check.py log RUN_DIR               the run as wandb's own datastore reader and messages have it (wandb < 0.30)
  tracking_check.py upload RUN_DIR            what `wandb sync` sends, to a stand-in server on 127.0.0.1

--killed: the run was killed; of the last step only metrics.jsonl may know, and nothing ended the run. Exit code 1 on any difference.
"""
import argparse, json, os, re, subprocess, sys, tempfile, time, tomllib, urllib.parse, urllib.request
from pathlib import Path

import numpy as np

KEY = "0123456789abcdef" * 2 + "01234567"  # of the form of an API key
faults = []


def equal(what, expected, got):
    if expected != got:
        faults.append(f"{what}: expected {str(expected)[:200]}, got {str(got)[:200]}")


def same_curves(what, expected, got):
    """Curves are {name: [(step, number), ...]}; a step twice, missing or out of order is a difference."""
    equal(f"{what}: names", sorted(expected), sorted(got))
    for name in expected.keys() & got.keys():
        if expected[name] != got[name]:  # the points on which the two differ, or the same points in another order
            missing, more = set(expected[name]) - set(got[name]), set(got[name]) - set(expected[name])
            equal(f"{what}: {name}", sorted(missing) or expected[name], sorted(more) or got[name])
    if expected == got:
        print(f"  {what}: {len(got)} names, {sum(map(len, got.values()))} numbers equal")


def flat(name, value):
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(f"{name}/{key}", inner)
    elif isinstance(value, list):
        for i, inner in enumerate(value, 1):
            yield from flat(f"{name}/{i:02}", inner)
    else:
        yield name, value


def run_numbers(run_dir, killed):
    """All numbers of the files of JSON lines, and the number of steps."""
    curves = {}
    for file, prefix in [("metrics.jsonl", "train"), ("validation.jsonl", "validation")]:
        for line in (run_dir / file).read_text().splitlines():
            record = json.loads(line)
            step = record.pop("step")
            for name, number in flat(prefix, record):
                curves.setdefault(name, []).append((step, number))
    steps = [step for step, _ in curves["train/loss"]]
    equal("metrics.jsonl: steps", list(range(1, len(steps) + 1)), steps)
    if not curves.keys() >= {"train/loss", "train/slot_accuracy/01", "validation/acceptance_length"}:
        faults.append(f"metrics.jsonl, validation.jsonl: expected losses, accuracies and validations, got {sorted(curves)}")
    evaluated = run_dir / "evaluation.json"
    if killed == evaluated.exists():
        faults.append(f"evaluation.json: expected {'none' if killed else 'one'}")
    return curves, len(steps)


def shorter(curves, last):
    cut = {name: [point for point in points if point[0] <= last] for name, points in curves.items()}
    return {name: points for name, points in cut.items() if points}


def without_evaluation(curves, run_dir):
    """Takes the numbers of the final evaluation out and compares those with evaluation.json."""
    evaluation = {name: curves.pop(name) for name in list(curves) if name.startswith("evaluation/")}
    report = run_dir / "evaluation.json"
    if report.exists():
        report = json.loads(report.read_text())
        for name in ["acceptance_length", "acceptance_length_macro", "draft_acceptance_rate", "rounds", "prompts", "speedup"]:
            equal(f"evaluation/{name}", report[name], evaluation.get(f"evaluation/{name}"))
        equal("evaluation/accept_at_pos/01", report["accept_at_pos"][0], evaluation.get("evaluation/accept_at_pos/01"))
    else:
        equal("evaluation", {}, evaluation)


def single(number):
    return float(np.float32(number))


def tensorboard(args):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected, steps = run_numbers(args.run_dir, args.killed)
    expected = {name: [(step, single(number)) for step, number in points] for name, points in expected.items()}
    folder = args.run_dir / "tensorboard"
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    judge_events("tensorboard, event accumulator", args, expected, steps, scalars)
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("config")]
    resolved = "```toml\n" + (args.run_dir / "config.resolved.toml").read_text() + "```\n"
    equal("tensorboard, text config: its end", True, bool(texts) and texts[-1] == resolved)
    judge_events("tensorboard, server", args, expected, steps, served(folder, set(scalars)))


def judge_events(what, args, expected, steps, got):
    evaluation = {name: got[name] for name in got if name.startswith("evaluation/")}
    got = {name: points for name, points in got.items() if name not in evaluation}
    if not args.killed:
        report = json.loads((args.run_dir / "evaluation.json").read_text())
        for name in ["acceptance_length", "rounds", "prompts", "speedup"]:
            equal(f"{what}: evaluation/{name}", [(steps, single(report[name]))], evaluation.get(f"evaluation/{name}"))
    same_curves(what, until(what, args, expected, steps, got.get("train/loss", [])), got)


def until(what, args, expected, steps, losses):
    """What to expect: everything, or of a killed run what came before the last step that the tracker knows."""
    last = losses[-1][0] if losses else 0
    if not args.killed:
        return expected
    if steps - last not in (0, 1):
        faults.append(f"{what}: expected {steps} steps or one less, got {last}")
    return shorter(expected, last)


def served(folder, tags):
    """The curves as TensorBoard's own server gives them to the browser."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stdout=said, stderr=said) as server:
        try:
            url, known = None, set()
            deadline = time.monotonic() + 90
            while known != tags and time.monotonic() < deadline:
                time.sleep(0.2)
                said.seek(0)
                found = re.search(r"at (http://127\.0\.0\.1:\d+)", said.read())
                if found:
                    url = found[1] + "/data/plugin/scalars/"
                    known = set(get(url + "tags").get(".", {}))
            return {tag: [(step, number) for _, step, number in get(f"{url}scalars?run=.&tag={urllib.parse.quote(tag)}")]
                    for tag in known}
        finally:
            server.terminate()


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def run_folder(args):
    folders = list((args.run_dir / "wandb").iterdir())
    if len(folders) != 1:
        sys.exit(f"tracking_check: {args.run_dir}/wandb: expected one run, got {[folder.name for folder in folders]}")
    return folders[0], folders[0].name.rsplit("-", 1)[1]


def judge_run(what, args, run):
    """`run`: what W&B knows, by history (a list of {name: number}), summary, config, id, project, name, tags, lines, exit."""
    expected, steps = run_numbers(args.run_dir, args.killed)
    curves = {}
    for row in run["history"]:
        for name, number in row.items():
            curves.setdefault(name, []).append((row["_step"], number))
    own = [curves.pop(name, []) for name in ["_step", "_timestamp", "_runtime"]]
    expected = until(what, args, expected, steps, curves.get("train/loss", []))
    for points in own:
        equal(f"{what}: own names, steps", [step for step, _ in expected["train/loss"]], [step for step, _ in points])
        equal(f"{what}: own names, order", sorted(points, key=lambda point: point[1]), points)
    same_curves(what, expected, curves)
    summary = {name: number for name, number in run["summary"].items() if not name.startswith("_")}
    without_evaluation(summary, args.run_dir)
    equal(f"{what}: summary", {name: points[-1][1] for name, points in expected.items()}, summary)
    resolved = tomllib.loads((args.run_dir / "config.resolved.toml").read_text())
    config = {key: value for key, value in run["config"].items() if key != "_wandb"}  # wandb's own version notes
    equal(f"{what}: config", resolved, config)
    equal(f"{what}: id", run_folder(args)[1], run["id"])
    names = resolved["wandb"]
    equal(f"{what}: project, entity, name", [names["project"], names["entity"], names["name"]],
          [run["project"], run["entity"], run["name"]])
    equal(f"{what}: tags", names["tags"], run["tags"])
    if not args.killed:  # of a run without an end wandb 0.22 says that it ended well, newer ones that it failed
        equal(f"{what}: exit code", 0, run["exit"])
        equal(f"{what}: last line", f"done after step {steps} of {steps}", run["lines"][-1].strip())
    print(f"  {what}: summary, {len(config)} sections of config, id, project, entity, name, {len(run['tags'])} tags")


def log(args):
    import wandb

    wandb._set_internal_process(disable=True)
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    folder, run_id = run_folder(args)
    store = DataStore()
    store.open_for_scan(str(folder / f"run-{run_id}.wandb"))
    run = {"history": [], "summary": {}, "lines": [], "exit": None}
    count = 0
    while (data := scan(store, args.killed)) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        count += 1
        kind = record.WhichOneof("record_type")
        if kind == "history":
            row = {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            equal("log: step of a row", row.get("_step"), record.history.step.num)
            run["history"].append(row)
        elif kind == "summary":
            run["summary"] |= {"/".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update}
        elif kind == "run":
            told = record.run
            run |= {"id": told.run_id, "project": told.project, "entity": told.entity, "name": told.display_name, "tags": list(told.tags),
                    "config": {item.key: json.loads(item.value_json) for item in told.config.update}}
        elif kind == "output_raw":
            run["lines"].append(record.output_raw.line)
        elif kind == "exit":
            run["exit"] = record.exit.exit_code
    if args.killed:
        equal("log: exit record", None, run["exit"])
    print(f"  wandb {wandb.__version__} datastore: {count} records")
    judge_run(f"wandb {wandb.__version__} datastore", args, run)


def scan(store, killed):
    try:
        return store.scan_data()
    except AssertionError:  # its word for a record that is cut off
        if killed:
            return None
        raise


def upload(args):
    import wandb
    from wandb_server import Server

    folder, _ = run_folder(args)
    with Server() as server, tempfile.TemporaryDirectory() as home:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "HOME": home, "WANDB_API_KEY": KEY,
                       "WANDB_BASE_URL": server.url, "WANDB_ERROR_REPORTING": "false"}
        sync = subprocess.run([sys.executable, "-m", "wandb", "sync", str(folder)], env=environment, cwd=home, timeout=300,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    what = f"wandb {wandb.__version__} sync"
    if sync.returncode or not server.run:
        sys.exit(f"tracking_check: {what}: exit code {sync.returncode}: {sync.stdout}\n{server.unknown}")
    lines = {name: [text for _, text in sorted(part.items())] for name, part in server.files.items()}
    history = [json.loads(line) for line in lines["wandb-history.jsonl"]]
    config = {key: entry["value"] for key, entry in json.loads(server.run["config"]).items()}
    told = server.run
    console = [line.split(" ", 1)[1] for line in lines.get("output.log", [])]  # behind the time of the upload
    judge_run(what, args, {
        "history": history, "summary": json.loads(lines["wandb-summary.json"][-1]), "config": config, "lines": console,
        "id": told["name"], "project": told["project"], "entity": told["entity"], "name": told["displayName"], "tags": told["tags"],
        "exit": server.exit})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", choices=["tensorboard", "log", "upload"])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--killed", action="store_true")
    args = parser.parse_args()
    {"tensorboard": tensorboard, "log": log, "upload": upload}[args.reader](args)
    for fault in faults[:20]:
        print(f"tracking_check: {fault}", file=sys.stderr)
    sys.exit(bool(faults))


main()
