"""What both systems of the spot benchmark are given: the problem, the trace, and where the result goes."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.problem import Problem
from benchmarks.spot.trace import Capacity, scaled
from elastic_train.testing.slow_samples import SlowSamples

GLOBAL_BATCH, MICRO_BATCH = 24, 2
CHECKPOINT_EVERY = 10
START_S = 180.0  # until the first step at most
TELL_S = 10.0  # how often a program says how far it is


class Waiting(Problem):
    """Most of a step is waiting, as for an accelerator: six workers have room on two cores."""

    def dataset(self) -> Any:
        return SlowSamples(super().dataset(), 0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    trace: tuple[Capacity, ...]
    seconds: float
    seed: int
    result: Path

    @property
    def most(self) -> int:
        return max(capacity.nodes for capacity in self.trace)

    def tell(self, found: dict[str, Any]) -> None:
        """What is known now, written as a whole each time: a reader finds it even if this process ends."""
        new = self.result.with_suffix(".new")
        new.write_text(json.dumps(found, indent=1))
        new.replace(self.result)


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("trace", type=Path, help="a CSV file with the columns time_s and total")
    made.add_argument("--nodes", type=int, default=6, help="what the trace's largest capacity becomes")
    made.add_argument("--seconds", type=float, default=300.0, help="what its length becomes")
    made.add_argument("--seed", type=int, default=0, help="which nodes go")
    return made


def given(description: str) -> Given:
    """From the command line of one system's program."""
    words = parser(description)
    words.add_argument("--json", type=Path, required=True)
    said = words.parse_args()
    return Given(
        trace=scaled(said.trace, nodes=said.nodes, seconds=said.seconds),
        seconds=said.seconds,
        seed=said.seed,
        result=said.json,
    )
