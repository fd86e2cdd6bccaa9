"""What is left of the time on spot machines, beside Ray Train's elastic training?

python -m benchmarks.spot TRACE [--quick] [--nodes 6] [--seconds 300] [--json FILE]

A trace of spot capacity is scaled to a few local nodes and a few minutes. Both systems start with the nodes
that it starts with, and from their first step on nodes are killed (SIGKILL of everything on them) and added
as it says, the same ones for both. Goodput is the time of each kept step's first execution over the time from
submission to the end of the trace; after the start, over the time from the first step.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import program, record
from benchmarks.spot.case import START_S, parser
from benchmarks.spot.trace import scaled

OURS, PEER = "elastic_train", "ray_train"
PROGRAMS = {OURS: "benchmarks.spot.run", PEER: "benchmarks.peers.ray_train_spot"}
QUICK_S = 120.0
COLUMNS = {
    "system": "system",
    "goodput": "goodput",
    "after start": "after_start",
    "steps": "steps",
    "redone": "steps_redone",
    "groups": "groups",
    "steps' s": "good_s",
    "wall s": "wall_s",
    "load": "load",
}


def measured(system: str, command: list[str], limit_s: float) -> dict[str, Any]:
    """One system's way through the trace, as its program tells it."""
    load, said = program.load(), ""

    def told(file: Path) -> None:
        nonlocal said
        if (now := program.written(file).get("progress", said)) != said:
            said = now
            print(f"  {said}", flush=True)

    found = program.measured(command, limit_s, told)
    found.pop("progress", None)
    return {"system": system, "load": load, **found}


def headline(results: list[dict[str, Any]]) -> dict[str, float | None]:
    of = {
        system: {
            key: record.median(r.get(key) for r in results if r["system"] == system)
            for key in ("goodput", "after_start", "steps")
        }
        for system in PROGRAMS
    }
    return {
        "goodput": of[OURS]["goodput"],
        "goodput_after_start": of[OURS]["after_start"],
        "x_vs_ray_train": record.ratio(of[OURS]["goodput"], of[PEER]["goodput"]),
        "steps_x_vs_ray_train": record.ratio(of[OURS]["steps"], of[PEER]["steps"]),
    }


def main() -> int:
    words = parser(__doc__ or "")
    words.add_argument("--quick", action="store_true", help=f"the trace in {QUICK_S:.0f} s")
    words.add_argument("--json", type=Path, metavar="FILE", help="write the whole record there")
    said = words.parse_args()
    seconds = QUICK_S if said.quick else said.seconds
    trace = scaled(said.trace, nodes=said.nodes, seconds=seconds)
    print("nodes: " + ", ".join(f"{c.nodes} from {c.at_s:.0f} s" for c in trace), flush=True)
    options = [f"--nodes={said.nodes}", f"--seconds={seconds}", f"--seed={said.seed}"]
    systems = [OURS, *([PEER] if importlib.util.find_spec("ray.train") else [])]
    results: list[dict[str, Any]] = []

    def whole() -> dict[str, Any]:
        return record.record(
            "spot",
            results=results,
            headline=headline(results),
            trace=[(c.at_s, c.nodes) for c in trace],
            absent=[] if len(systems) == 2 else [PEER],
        )

    for system in systems:
        print(f"{system}, seed {said.seed}", flush=True)
        command = program.command_of(PROGRAMS[system], str(said.trace), *options)
        results.append(measured(system, command, 2 * START_S + seconds))
        print("\n".join([*results[-1].get("summary", []), results[-1].get("problem", "")]), flush=True)
        if said.json is not None:  # whatever becomes of the next one
            said.json.write_text(json.dumps(whole(), indent=1) + "\n")
    print("\n" + record.table(COLUMNS, [[r.get(key) for key in COLUMNS.values()] for r in results]))
    record.finish(whole(), said.json)
    ours = results[0]
    return 0 if ours.get("exact") and "problem" not in ours else 1


if __name__ == "__main__":
    sys.exit(main())
