"""How long does training stand still when the group changes and nobody failed, beside Ray Train?

python -m benchmarks.switch [--quick] [--json FILE] [--size tiny|small|base|medium] [--case NAME]

A Llama is trained with AdamW by nodes of one worker, and each change comes once the group has trained for a
while: a node joins two data parallel ones and is drained again; one joins another; 3 grow to 4 and 6; two
replicas are cut in two each; a model is cut into two stages; a node that stood by takes the place of one that
is drained; a slow node is left (`cases.py`). Measured is the gap between the last committed step of the old
group and the first of the new one, in seconds and in steps of the old group; how fast the old group trains
between the change's cause and the change; of the gap, how much was forming and how much the first step; and
the most memory of a worker's process in steps before, how much more it is for the change, and what a newcomer
takes.

Ray Train's elastic run grows once in a cluster of its own. It restarts from its last checkpoint when a node
goes, and cuts no model by itself, so it has a row for one growth alone.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import program, record
from benchmarks.switch.cases import CASES, GIVE_UP_S, LABELS

OURS, PEER = "elastic_train", "Ray Train"
FIRST = "dp"  # the case that Ray Train has a part of
QUICK_SIZES, SIZES = ("tiny",), ("tiny", "small", "base")
TIMES = 10  # a growth and a drain at the smallest size; a third of them at others
QUICK_TIMES = 2
OTHERS = 3  # times that changes of other cases are made at the smallest size, once elsewhere
COLUMNS = {
    "size": "size",
    "system": "system",
    "change": "way",
    "gap s": "gap_s",
    "in steps": "gap_steps",
    "forming": "form_s",
    "pause": "pause_s",
    "first step": "first_step_s",
    "step s": "step_s",
    "speed beside": "speed_beside",
    "asked to step s": "asked_to_step_s",
    "step GB": "step_gb",
    "more": "change_more_gb",
    "newcomer": "newcomer_gb",
    "redone": "steps_redone",
    "load": "load",
}


def headline(results: list[dict[str, Any]]) -> dict[str, float | None]:
    """Of each change by its name: the steps that its gap takes, at each size."""

    def middle(key: str, **of: str) -> float | None:
        return record.median(r.get(key) for r in results if all(r.get(k) == v for k, v in of.items()))

    numbers: dict[str, float | None] = {}
    for size in dict.fromkeys(r["size"] for r in results):
        label = LABELS[size]
        for way in dict.fromkeys(r["way"] for r in results if r["size"] == size and "way" in r):
            key = f"{way.replace(' ', '_')}_gap_steps_{label}"
            numbers[key] = middle("gap_steps", size=size, system=OURS, way=way)
        growth = middle("gap_s", size=size, system=OURS, way="growth")
        numbers[f"x_vs_ray_train_{label}"] = record.ratio(middle("gap_s", size=size, system=PEER), growth)
    return numbers


def times(case: str, size: str, quick: bool) -> int:
    """How often the changes of a case are made."""
    if case == FIRST:
        return QUICK_TIMES if quick else TIMES if size == SIZES[0] else TIMES // 3
    return OTHERS if size == SIZES[0] and not quick else 1


def ours(size: str, case: str, quick: bool) -> list[dict[str, Any]]:
    often = times(case, size, quick)
    turns = CASES[case].turns(often)
    print(f"{size}: {', '.join(dict.fromkeys(change.name for change in turns))}; {OURS}", flush=True)
    load = program.load()
    command = program.command_of("benchmarks.switch.run", size, case, "--times", str(often))
    found = program.measured(command, GIVE_UP_S * (len(turns) + 1))
    rows = found if isinstance(found, list) else [found]
    return [{"size": size, "system": OURS, "case": case, "load": load, **row} for row in rows]


def peers(size: str) -> dict[str, Any]:
    print(f"{size}: one growth; {PEER}", flush=True)
    load = program.load()
    found = program.measured(program.command_of("benchmarks.peers.ray_train_switch", size), 4 * GIVE_UP_S)
    return {"size": size, "system": PEER, "way": "growth", "load": load, **found}


def main() -> int:
    parser = record.options(__doc__ or "")
    parser.add_argument("--size", action="append", choices=LABELS, help="only this one; may be repeated")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be repeated")
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    for size in given.size or (QUICK_SIZES if given.quick else SIZES):
        for case in given.case or CASES:
            results += ours(size, case, given.quick)
            if case == FIRST:
                results.append(peers(size))
    for result in results:
        if "problem" in result:
            print(f"{result['size']}, {result['system']}: {result['problem']}")
    print("\n" + record.table([*COLUMNS], [[r.get(key) for key in COLUMNS.values()] for r in results]))
    record.finish(record.record("switch", results=results, headline=headline(results)), given.json)
    return 1 if any("problem" in r for r in results if r["system"] == OURS) else 0


if __name__ == "__main__":
    sys.exit(main())
