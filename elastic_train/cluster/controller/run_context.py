"""The values that every process of a run is started with: name, term, job, options, environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.config import RunSpec
from elastic_train.control.fault_schedule import FaultSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """One run in one term. `controller` is its actor; `job` the pickled task; `faults` a schedule with the
    labels of nodes.
    """

    run: str
    term: int
    spec: RunSpec
    controller: Any
    environment: Mapping[str, str]
    job: bytes = b""
    faults: tuple[FaultSchedule, Mapping[str, str]] | None = None
