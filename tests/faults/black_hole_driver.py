"""The driver of the black hole's run, inside the head's namespace.

black_hole_driver.py ADDRESS STORAGE STEPS
"""

from __future__ import annotations

import dataclasses
import sys

from benchmarks.recovery.hole import Speaker
from elastic_train.cluster.driver.launch import fit
from elastic_train.config import Checkpoints, Timing
from jobs.pretrain_lm import trainer


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
    speaker = Speaker()
    speaker.end(fit(job.task, spec, address=address, local_nodes=0, quiet=True, chaos=speaker))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
