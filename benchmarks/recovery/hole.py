"""A run whose host vanishes: what its driver says of each step, and when steps come again after the cut."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_train.cluster.driver.result import Result
from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import FaultSchedule
from elastic_train.testing.hosts import Hosts

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "180",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
"""Of the hosts and of the driver."""


class Speaker:
    """In the driver, where chaos would stand: it only says each committed step, and how the run ended."""

    schedule = FaultSchedule(faults=())
    labels: Mapping[str, str] = {}

    def on_update(self, update: Any, controller: Any, store: Any) -> None:
        for record in update.records:
            if isinstance(record.event, StepCommitted):
                print(f"STEP {record.event.step} {record.event.generation} {record.seconds}", flush=True)

    def end(self, result: Result) -> None:
        end = {"outcome": result.outcome, "superseded": len(result.ledger.superseded)}
        print("END " + json.dumps(end), flush=True)
        for record in result.records:  # where the seconds went
            print(f"RECORD {record.wall} {record.phase} {record.reason}", flush=True)


@dataclass(slots=True, kw_only=True)
class Heard:
    """Wall times: of the cut, of the first step of a later group, of the last step, of the end. 0: never."""

    cut_at: float = 0.0
    back_at: float = 0.0
    last_at: float = 0.0
    ended_at: float = 0.0
    first_step: int = 0  # the one at `back_at`
    returncode: int | None = None
    end: dict[str, Any] = field(default_factory=dict[str, Any])
    others: list[str] = field(default_factory=list[str])


def cut_and_listen(
    hosts: Hosts, command: Sequence[str], environment: Mapping[str, str], *, host: int, after: int
) -> Heard:
    """Run a driver on the first host, cut `host` off once a step was committed, hear the run to its end."""
    heard, generation_then = Heard(), 0
    inside = hosts.inside(0, *command)
    with subprocess.Popen(inside, env=dict(environment), stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            word, _, rest = line.partition(" ")
            if word == "STEP":
                step, generation, seconds = rest.split()
                heard.last_at = float(seconds)
                if not heard.cut_at and int(step) >= after:
                    hosts.cut(host)
                    heard.cut_at, generation_then = time.time(), int(generation)
                elif heard.cut_at and not heard.back_at and int(generation) > generation_then:
                    heard.back_at, heard.first_step = float(seconds), int(step)
            elif word == "END":
                heard.ended_at, heard.end = time.time(), json.loads(rest)
            else:
                heard.others.append(line.rstrip("\n"))
    heard.returncode = driver.returncode
    return heard
