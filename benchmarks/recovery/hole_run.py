"""A host that vanishes without a word, in a cluster of network namespaces: run by benchmarks.recovery."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import elastic_train as et
from benchmarks.problem import Problem
from benchmarks.recovery.cases import GLOBAL_BATCH, MICRO_BATCH
from benchmarks.recovery.hole import ENVIRONMENT, Speaker, cut_and_listen
from elastic_train.cluster.driver.launch import fit
from elastic_train.config import RunSpec
from elastic_train.testing.hosts import Hosts, why_not

STEPS, CUT_AFTER = 120, 40


def run() -> dict[str, Any]:
    why = why_not()
    if why:
        return {"absent": why}
    with tempfile.TemporaryDirectory(prefix="et-bench-") as storage, Hosts(3, ENVIRONMENT) as hosts:
        command = (
            sys.executable,
            "-m",
            "benchmarks.recovery.hole_run",
            "hole",
            "--drive",
            hosts.address,
            storage,
        )
        heard = cut_and_listen(hosts, command, ENVIRONMENT, host=2, after=CUT_AFTER)
    if not heard.back_at:
        return {"problem": "did not come back", "events": heard.others[-40:]}
    return {
        "kill_to_step_s": heard.back_at - heard.cut_at,
        "first_step": heard.first_step,
        "steps_redone": heard.end["superseded"],
        "from": "live",
        "workers": 1,
        "events": heard.others[-40:],
    }


def drive(address: str, storage: str) -> None:
    """The driver, on the host that is the head."""
    spec = RunSpec(
        name="hole",
        storage_path=storage,
        batch=et.Batch(global_size=GLOBAL_BATCH, micro_size=MICRO_BATCH),
        max_steps=STEPS,
        min_workers=1,
        max_workers=2,
        checkpoints=et.Checkpoints(every=1000, keep=1),
    )
    speaker = Speaker()
    speaker.end(fit(Problem(), spec, address=address, local_nodes=0, quiet=True, chaos=speaker))  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=("hole",))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--drive", nargs=2, metavar=("ADDRESS", "STORAGE"), help="be the driver of the run")
    given = parser.parse_args()
    if given.drive:
        drive(*given.drive)
    else:
        given.json.write_text(json.dumps(run(), indent=1))


if __name__ == "__main__":
    main()
