"""How long from a SIGKILL to the next committed step, beside Ray Train, torchrun and torchft?

python -m benchmarks.recovery [--quick] [--json FILE] [--peers PYTHON] [--case NAME]

Each system runs each case in a process and a cluster of its own, one after the other, in turns: the same
model (a 0.2 M parameter Llama, AdamW, data parallel, a checkpoint every 10 steps), the same nodes, the same
kill five steps after a checkpoint. Measured is the wall time from just before the signal to the first step
that all planned workers of a new group committed. For Ray Train and torchrun that is a step which they run
again: the time until a step that was never run before stands in a column of its own. torchft's survivors
commit steps of smaller batches at once; its time is the first of those, and "with all" the first of a whole
batch. It runs in an environment of its own
(`make bench-peers` makes one).

Ours is taken apart: until the loss was noticed, until a new group was ordered, until its ranks had met, until
they had their state, until the first step. Rows for each rung of the ladder back are ours alone: live replica
(node, crash, shrink, cold), peer memory, the log of a boundary, storage; and a host that vanishes without a
word (hole), in network namespaces, which need root. `at_6m` and `at_85m` are larger models, beside Ray Train;
`at_368m` is run where it is named, as two workers of it take more than 24 GiB.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from benchmarks import program, record
from benchmarks.peers import torchft
from benchmarks.recovery.cases import CASES, CHECKPOINT_EVERY, GIVE_UP_S

OURS = "elastic_train"
PROGRAMS = {
    OURS: "benchmarks.recovery.run",
    "ray_train": "benchmarks.peers.ray_train",
    "torchrun": "benchmarks.peers.torchrun",
    "torchft": "benchmarks.peers.torchft",
}
HOLE = "hole"
NAMED = ("at_368m",)
"""Cases that run only where they are asked for."""

QUICK = ("node", "crash", "peer", "log", "storage", HOLE)
REPETITIONS = 3
LIMIT_S = 2 * GIVE_UP_S + 180.0  # of one program: its cluster, its waits, its end
COLUMNS = {
    "case": "case",
    "system": "system",
    "kill to step s": "kill_to_step_s",
    "detect": "detect_s",
    "decide": "decide_s",
    "rebuild": "rebuild_s",
    "transfer": "transfer_s",
    "first step": "first_step_s",
    "to a new step s": "kill_to_regained_s",
    "with all s": "kill_to_whole_s",
    "in steps": "kill_to_step_steps",
    "steps redone": "steps_redone",
    "run again": "again_of_lost_share",
    "from": "from",
    "step s": "step_s",
    "load": "load",
}


def measured(system: str, case: str, repetition: int, python: str = sys.executable) -> dict[str, Any]:
    """One case of one system."""
    load, module = program.load(), "benchmarks.recovery.hole_run" if case == HOLE else PROGRAMS[system]
    found = program.measured(program.command_of(module, case, python=python), LIMIT_S)
    if system == OURS:  # nothing is run again unless steps were lost: the first step is a new one
        found["kill_to_regained_s"] = found.get("kill_to_step_s") if not found.get("steps_redone") else None
    found["kill_to_step_steps"] = in_steps(found)
    found.setdefault("kill_to_whole_s", found.get("kill_to_step_s"))  # only torchft goes on with fewer before
    return {"case": case, "system": system, "repetition": repetition, "load": load, **found}


def headline(results: list[dict[str, Any]]) -> dict[str, float | None]:
    """Medians; the first case under plain names, the others with theirs in front."""
    numbers: dict[str, float | None] = {}
    for case in dict.fromkeys(r["case"] for r in results):
        of = {
            system: record.median(
                r.get("kill_to_step_s") for r in results if r["case"] == case and r["system"] == system
            )
            for system in PROGRAMS
        }
        if case == HOLE:
            numbers["black_hole_to_step_s"] = of[OURS]
            continue
        prefix = "" if case == "node" else f"{case}_"
        numbers[f"{prefix}kill_to_step_s"] = of[OURS]
        steps = (in_steps(r) for r in results if r["case"] == case and r["system"] == OURS)
        if CASES[case].at:
            found = (
                r.get("again_of_lost_share") for r in results if r["case"] == case and r["system"] == OURS
            )
            numbers[f"{case}_again_of_lost_share"] = record.median(found)
        label = case.removeprefix("at_") if case.startswith("at_") else case
        numbers[f"kill_to_step_steps_{label}"] = record.median(steps)
        if CASES[case].everybody:
            peers = [system for system in PROGRAMS if system != OURS]
            numbers |= {f"{prefix}x_vs_{peer}": record.ratio(of[peer], of[OURS]) for peer in peers}
            whole = record.median(
                r.get("kill_to_whole_s") for r in results if r["case"] == case and r["system"] == "torchft"
            )
            numbers[f"{prefix}x_vs_torchft_whole"] = record.ratio(whole, of[OURS])
    return numbers


def in_steps(result: dict[str, Any]) -> float | None:
    """From the kill to the next step, in steps of the run."""
    seconds, step_s = result.get("kill_to_step_s"), result.get("step_s")
    return seconds / step_s if seconds and step_s else None


def main() -> int:
    parser = record.options(__doc__ or "")
    every = (*CASES, HOLE)
    parser.add_argument("--case", action="append", choices=every, help="only this row; may be repeated")
    parser.add_argument("--system", action="append", choices=PROGRAMS, help="only this one; may be repeated")
    record.peers_option(parser)
    given = parser.parse_args()
    missing = absent(given.peers)
    systems = [s for s in PROGRAMS if s not in missing and s in (given.system or PROGRAMS)]
    results: list[dict[str, Any]] = []
    for repetition in range(1 if given.quick else REPETITIONS):
        usual = QUICK if given.quick else [case for case in every if case not in NAMED]
        for case in given.case or usual:
            alone = case == HOLE or not CASES[case].everybody
            says = "a host is cut off without a word" if case == HOLE else CASES[case].says
            compared = None if case == HOLE else CASES[case].systems
            for system in [OURS] if alone else [s for s in systems if compared is None or s in compared]:
                print(f"{case}: {says}; {system}, run {repetition + 1}", flush=True)
                python = str(given.peers.absolute()) if system == "torchft" else sys.executable
                results.append(measured(system, case, repetition, python))
                print(f"  {_words(results[-1])}", flush=True)
    print("\n" + record.table(COLUMNS, [[r.get(key) for key in COLUMNS.values()] for r in results]))
    for system, why in missing.items():
        print(f"{system} is absent: {why}")
    whole = record.record(
        "recovery",
        results=results,
        headline=headline(results),
        checkpoint_every=CHECKPOINT_EVERY,
        cases={case.name: case.says for case in CASES.values()},
        absent=missing,
    )
    record.finish(whole, given.json)
    ours = [r for r in results if r["system"] == OURS and "absent" not in r]
    return 1 if any("kill_to_step_s" not in r for r in ours) else 0


def absent(peers: Path) -> dict[str, str]:
    """The peers that cannot run here, and why."""
    found = {
        "ray_train": "" if importlib.util.find_spec("ray.train") else "this Ray has no ray.train",
        "torchft": torchft.absent(peers),
    }
    return {system: why for system, why in found.items() if why}


def _words(result: dict[str, Any]) -> str:
    for reason in ("problem", "absent"):
        if reason in result:
            return f"{reason}: {result[reason]}"
    return (
        f"{result['kill_to_step_s']:.2f} s to step {result['first_step']} on {result['workers']} workers, "
        f"{result['steps_redone']} steps redone, from {result['from']}"
    )


if __name__ == "__main__":
    sys.exit(main())
