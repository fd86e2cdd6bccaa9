"""How long does training stand still when the group grows or a node is drained, beside Ray Train?

python -m benchmarks.switch [--quick] [--json FILE] [--size tiny|small|base]

Two nodes of one worker train a Llama with AdamW, data parallel; a node joins, is drained again, and so on,
each time once the group has trained for a while. Measured is the gap between the last committed step of the
old group and the first of the new one, in seconds and in steps of the old group; how fast the old group
trains between the change's cause and the change; and of the gap, how much was forming and how much the first
step. Ray Train's elastic run grows once in a cluster of its own. It restarts from its last checkpoint when a
node goes, so it has no row for drains.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.switch.cases import GIVE_UP_S, LABELS

OURS, PEER = "elastic_train", "Ray Train"
QUICK_SIZES, SIZES = ("tiny",), ("tiny", "small", "base")
PAIRS = 10  # of a growth and a drain at the smallest size; a third of them at others
QUICK_PAIRS = 2
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
    "redone": "steps_redone",
    "load": "load",
}


def measured(program: str, *words: str, limit_s: float) -> Any:
    """What a program in a process of its own wrote; a problem is a result too."""
    with tempfile.TemporaryDirectory(prefix="et-bench-") as directory:
        file, log = Path(directory) / "result.json", Path(directory) / "log"
        command = [sys.executable, "-m", program, *words, "--json", str(file)]
        with log.open("wb") as out:
            try:
                subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=limit_s, check=False)
            except subprocess.TimeoutExpired:
                return {"problem": f"not over after {limit_s:.0f} s"}
        return json.loads(file.read_text()) if file.exists() else {"problem": log.read_text()[-800:]}


def headline(results: list[dict[str, Any]]) -> dict[str, float | None]:
    def middle(key: str, **of: str) -> float | None:
        return record.median(r.get(key) for r in results if all(r.get(k) == v for k, v in of.items()))

    numbers: dict[str, float | None] = {}
    for size in dict.fromkeys(r["size"] for r in results):
        growth, label = middle("gap_s", size=size, system=OURS, way="growth"), LABELS[size]
        numbers |= {
            f"growth_gap_steps_{label}": middle("gap_steps", size=size, system=OURS, way="growth"),
            f"drain_gap_steps_{label}": middle("gap_steps", size=size, system=OURS, way="drain"),
            f"x_vs_ray_train_{label}": record.ratio(middle("gap_s", size=size, system=PEER), growth),
        }
    return numbers


def main() -> int:
    parser = record.options(__doc__ or "")
    parser.add_argument("--size", action="append", choices=SIZES, help="only this one; may be repeated")
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    for size in given.size or (QUICK_SIZES if given.quick else SIZES):
        pairs = QUICK_PAIRS if given.quick else PAIRS if size == SIZES[0] else PAIRS // 3
        print(f"{size}: {pairs} growths and drains; {OURS}", flush=True)
        load = round(os.getloadavg()[0], 1)
        ways = ["growth", "drain"] * pairs
        found = measured("benchmarks.switch.run", size, *ways, limit_s=GIVE_UP_S * (len(ways) + 1))
        rows = found if isinstance(found, list) else [found]
        results += [{"size": size, "system": OURS, "load": load, **row} for row in rows]
        print(f"{size}: one growth; {PEER}", flush=True)
        load = round(os.getloadavg()[0], 1)
        peer = measured("benchmarks.peers.ray_train_switch", size, limit_s=4 * GIVE_UP_S)
        results.append({"size": size, "system": PEER, "way": "growth", "load": load, **peer})
    for result in results:
        if "problem" in result:
            print(f"{result['size']}, {result['system']}: {result['problem']}")
    print("\n" + record.table([*COLUMNS], [[r.get(key) for key in COLUMNS.values()] for r in results]))
    record.finish(record.record("switch", results=results, headline=headline(results)), given.json)
    return 1 if any("problem" in r for r in results if r["system"] == OURS) else 0


if __name__ == "__main__":
    sys.exit(main())
