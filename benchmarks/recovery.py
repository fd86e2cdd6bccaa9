"""How long from a SIGKILL to the next committed step, beside Ray Train?

python -m benchmarks.recovery [--quick] [--json FILE]

Each system runs each case in a process and a cluster of its own, one after the other, in turns: the same
model (a 0.2 M parameter Llama, AdamW, data parallel, a checkpoint every 10 steps), the same nodes, the same
kill five steps after a checkpoint. Measured is the wall time from just before the signal to the first step
that all planned workers of a new group committed. For Ray Train that is a step which it runs again: the time
until a step that it never ran before stands in a column of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.cases import CASES, CHECKPOINT_EVERY, GIVE_UP_S, Case

OURS, PEER = "elastic_train", "ray_train"
PROGRAMS = {OURS: "benchmarks.recovery_run", PEER: "benchmarks.peers.ray_train"}
QUICK = ("node", "crash")
REPETITIONS = 3
LIMIT_S = 2 * GIVE_UP_S + 180.0  # of one program: its cluster, its waits, its end
COLUMNS = {
    "case": "case",
    "system": "system",
    "kill to step s": "kill_to_step_s",
    "to all ranks ready s": "kill_to_ready_s",
    "to a new step s": "kill_to_regained_s",
    "steps redone": "steps_redone",
    "from": "from",
    "step s": "step_s",
    "load": "load",
}


def measured(system: str, case: Case, repetition: int) -> dict[str, Any]:
    """One case of one system; a problem is a result too."""
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory(prefix="et-bench-") as directory:
        file, log = Path(directory) / "result.json", Path(directory) / "log"
        command = [sys.executable, "-m", PROGRAMS[system], case.name, "--json", str(file)]
        with log.open("wb") as out:
            program = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
            try:
                program.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                _end(program)
        found = (
            json.loads(file.read_text())
            if file.exists()
            else {"problem": f"exit code {program.returncode}: {log.read_text()[-800:]}"}
        )
    if system == OURS:  # nothing is run again unless steps were lost: the first step is a new one
        found["kill_to_regained_s"] = found.get("kill_to_step_s") if not found.get("steps_redone") else None
    return {"case": case.name, "system": system, "repetition": repetition, "load": load, **found}


def headline(results: list[dict[str, Any]]) -> dict[str, float | None]:
    """Medians; the first case under plain names, the others with theirs in front."""
    numbers: dict[str, float | None] = {}
    for case in CASES:
        of = {
            system: record.median(
                r.get("kill_to_step_s") for r in results if r["case"] == case and r["system"] == system
            )
            for system in PROGRAMS
        }
        if any(r["case"] == case for r in results):
            prefix = "" if case == "node" else f"{case}_"
            numbers[f"{prefix}kill_to_step_s"] = of[OURS]
            numbers[f"{prefix}x_vs_ray_train"] = record.ratio(of[PEER], of[OURS])
    return numbers


def main() -> int:
    parser = record.options(__doc__ or "")
    parser.add_argument("--case", action="append", choices=CASES, help="only this row; may be repeated")
    given = parser.parse_args()
    chosen = given.case or (QUICK if given.quick else CASES)
    cases = [CASES[name] for name in chosen]
    systems = [OURS, *([PEER] if importlib.util.find_spec("ray.train") else [])]
    results: list[dict[str, Any]] = []
    for repetition in range(1 if given.quick else REPETITIONS):
        for case in cases:
            for system in systems:
                print(f"{case.name}: {case.says}; {system}, run {repetition + 1}", flush=True)
                results.append(measured(system, case, repetition))
                print(f"  {_words(results[-1])}", flush=True)
    print("\n" + record.table(COLUMNS, [[r.get(key) for key in COLUMNS.values()] for r in results]))
    if len(systems) == 1:
        print(f"{PEER} is absent: this Ray has no ray.train")
    whole = record.record(
        "recovery",
        results=results,
        headline=headline(results),
        checkpoint_every=CHECKPOINT_EVERY,
        cases={case.name: case.says for case in cases},
        absent=[] if len(systems) == 2 else [PEER],
    )
    record.finish(whole, given.json)
    failed = [r for r in results if r["system"] == OURS and "kill_to_step_s" not in r]
    return 1 if failed else 0


def _words(result: dict[str, Any]) -> str:
    for reason in ("problem", "absent"):
        if reason in result:
            return f"{reason}: {result[reason]}"
    return (
        f"{result['kill_to_step_s']:.2f} s to step {result['first_step']} on {result['workers']} workers, "
        f"{result['steps_redone']} steps redone, from {result['from']}"
    )


def _end(program: subprocess.Popen[bytes]) -> None:
    """As a person would: the program ends its cluster when it is interrupted."""
    program.send_signal(signal.SIGINT)
    try:
        program.wait(60.0)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


if __name__ == "__main__":
    sys.exit(main())
