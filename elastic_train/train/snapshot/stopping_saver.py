"""Synchronous saver: training stops for each snapshot. For small states and as a reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elastic_train.checkpoint.snapshot import Buffer, Snapshot
from elastic_train.train.snapshot.saver import Described, empty_snapshot
from elastic_train.train.state.live_fragments import own_share, parts, read_box
from elastic_train.train.state.shards import Shards


class StoppingSaver:
    """Copies at the step boundary, for checkpoints alone, and hands on before the next step begins."""

    every_step = False

    def __init__(self, described: Described, deliver: Callable[[Snapshot], None]) -> None:
        self._described, self._deliver = described, deliver

    def start(self, shards: Shards) -> None:
        return None

    def count_step(self) -> None:
        return None

    def step_took(self, seconds: float) -> None:
        return None

    def ready(self, timeout: float, *, storage: bool) -> bool:
        return True

    def busy(self, *, storage: bool) -> bool:
        return False

    def fence(self) -> None:
        return None

    def take(self, shards: Shards, *, storage: bool, wait: bool) -> None:
        held = tuple(own_share(tuple(parts(shards))))
        snapshot = empty_snapshot(shards, held, self._described(shards), storage=storage)
        self._deliver(replace(snapshot, buffer=Buffer.of([read_box(part, part.box) for part in held])))

    def end(self) -> None:
        return None
