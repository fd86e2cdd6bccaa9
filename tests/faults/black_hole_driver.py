"""The driver of the black hole's run, inside the head's namespace: says each committed step as it hears it.

black_hole_driver.py ADDRESS STORAGE STEPS
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from elastic_train.cluster.launch import fit
from elastic_train.config import Checkpoints, Timing
from elastic_train.control.events import StepCommitted
from elastic_train.control.faults import FaultSchedule
from jobs.pretrain_lm import trainer


class Voice:
    """Stands where chaos would: it only speaks."""

    schedule = FaultSchedule(faults=())
    labels: dict[str, str] = {}  # noqa: RUF012 - never changed

    def on_update(self, update: Any, controller: Any, store: Any) -> None:
        for record in update.records:
            if isinstance(record.event, StepCommitted):
                print(f"STEP {record.event.step} {record.event.generation} {record.seconds}", flush=True)


def main(address: str, storage: str, steps: str) -> None:
    job = trainer(
        size="nano", storage=storage, name="hole", workers="1:2", global_size=12, max_steps=int(steps)
    )
    spec = dataclasses.replace(
        job.spec,
        timing=Timing(heartbeat_s=1.0, join_window_s=1.0, lease_s=10.0),
        checkpoints=Checkpoints(every=1000, keep=1),
        standby=0,
        max_failures=5,
    )
    result = fit(job.task, spec, address=address, local_nodes=0, quiet=True, chaos=Voice())  # type: ignore[arg-type]
    end = {"outcome": result.outcome, "superseded": len(result.ledger.superseded)}
    print("END " + json.dumps(end), flush=True)
    for record in result.records:  # where the seconds went, for a failing test
        print(f"RECORD {record.wall} {record.phase} {record.reason}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
