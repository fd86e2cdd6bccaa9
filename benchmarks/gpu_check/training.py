"""A loop on one device whose state is copied behind it; as a program it trains until it is killed.

benchmarks/gpu_check holds the memory that it copies into, as a peer store does, and reads what is left
there.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from benchmarks.stall.run import Tensors, model_of, tensors_of
from benchmarks.stall.systems import part_of
from elastic_train.checkpoint.engine.arena import Arena, slot_bytes
from elastic_train.checkpoint.engine.counts import Counts
from elastic_train.checkpoint.engine.engine import Engine
from elastic_train.checkpoint.snapshot import Snapshot
from elastic_train.testing.rehearsal import device as rehearsal
from elastic_train.train.snapshot.device_lane import DeviceLane
from elastic_train.train.snapshot.tensor_sources import TensorSource
from elastic_train.train.state.live_fragments import table

SLOTS = 3
ROWS = {"cpu": 1, rehearsal.NAME: 1}
"""By how much the batch of benchmarks/stall grows, so that a step outlasts a copy: elsewhere 64 times."""


def device_of(name: str) -> torch.device:
    """The device of that name, which this process has from now on."""
    if name.startswith(rehearsal.NAME):
        rehearsal.load()
    return torch.device(name)


class Training:
    """Square layers and fused AdamW. `seconds` of a step end when the loss is on the host, as a vote does."""

    def __init__(self, millions: float, device: torch.device) -> None:
        self.device = device
        model, batch = model_of(millions)
        self.model = model.to(device)
        self._batch = batch.repeat(ROWS.get(device.type, 64), 1).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.steps = 0

    def step(self, fence: Callable[[], None] = lambda: None) -> float:
        """One step; its loss."""
        loss = self.model(self._batch).square().mean()
        loss.backward()
        found = float(loss.detach())
        fence()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return found

    def tensors(self) -> Tensors:
        return tensors_of(self.model, self.optimizer, 0)

    def sources(self) -> list[TensorSource]:
        return [TensorSource(part_of(name, value)) for name, value in self.tensors().items()]

    def bytes(self) -> int:
        """What a slot for this state takes. The optimizer's state exists after the first step."""
        return slot_bytes(source.nbytes for source in self.sources())

    def digest(self) -> str:
        """Of the state, bit by bit."""
        mixed = xxhash.xxh3_128()
        for value in self.tensors().values():
            mixed.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return mixed.hexdigest()

    def load(self, step: int, memory: memoryview, places: Sequence[tuple[int, int]]) -> None:
        """Take the state of a step from a slot: offset and bytes of each tensor."""
        for value, (offset, nbytes) in zip(self.tensors().values(), places, strict=True):
            flat = torch.frombuffer(memory[offset : offset + nbytes], dtype=torch.uint8)
            value.copy_(flat.view(value.dtype).view(value.shape))
        for state in self.optimizer.state.values():
            state["step"].fill_(step)
        self.steps = step


class Snapshots:
    """The engine over a segment; the newest snapshot stays, the one before goes when there is a newer one."""

    def __init__(
        self, device: torch.device, arena: Arena, reported: Callable[[Snapshot], None] = lambda taken: None
    ) -> None:
        self.lane = DeviceLane(device, arena)
        self.newest: Snapshot | None = None
        self._reported = reported
        self._engine = Engine(arena, self._keep, lane=self.lane)

    @property
    def counts(self) -> Counts:
        return self._engine.counts

    def take(self, training: Training, digest: str = "") -> None:
        found = training.sources()
        fragments, document = table(source.part for source in found), {"digest": digest}
        snapshot = Snapshot(generation=1, rank=0, step=training.steps, fragments=fragments, document=document)
        self._engine.begin(snapshot, found, wait=True)

    def fence(self) -> None:
        self._engine.fence()

    def close(self) -> None:
        self._engine.close()
        assert not self.counts.failed, f"{self.counts.failed} snapshots failed"

    def _keep(self, taken: Snapshot) -> None:
        before, self.newest = self.newest, taken
        if before is not None:
            before.buffer.release()
        self._reported(taken)


def spans(taken: Snapshot) -> list[tuple[int, int]]:
    return list(zip(taken.buffer.offsets, taken.fragments.nbytes.tolist(), strict=True))


def hash_of(memory: memoryview, places: Sequence[Sequence[int]]) -> str:
    """What `Training.digest` says of the state that these bytes are."""
    mixed = xxhash.xxh3_128()
    for offset, nbytes in places:
        mixed.update(np.frombuffer(memory, np.uint8)[offset : offset + nbytes].data)
    return mixed.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segment", type=Path, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--millions", type=float, required=True)
    options = parser.parse_args()
    device = device_of(options.device)
    training = Training(options.millions, device)
    training.step()

    one = threading.Lock()  # word at a time

    def say(**words: Any) -> None:
        with one:
            print(json.dumps(words), flush=True)

    snapshots = Snapshots(
        device,
        Arena.attach(options.segment, options.size, slots=SLOTS),
        lambda taken: say(
            kept=taken.step,
            slot=taken.buffer.slot,
            stamp=taken.buffer.stamp,
            places=spans(taken),
            digest=taken.document["digest"],
        ),
    )
    for _ in range(10_000):
        training.step(snapshots.fence)
        snapshots.take(training, training.digest())
        say(committed=training.steps)
    time.sleep(60)
    sys.exit("nobody killed this process")


if __name__ == "__main__":
    main()
