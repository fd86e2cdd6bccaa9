"""A program of its own: a member moves to a new generation and says how much memory that took at most."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_train.cluster.worker.fill_shards import Answer, fill_from
from elastic_train.config import Batch, RunSpec
from elastic_train.geometry.fragments import Fragments
from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.recovery.evidence import Live
from elastic_train.train.collectives.tcp_store import serve_store
from elastic_train.train.member import Member
from elastic_train.train.rank_assignment import RankAssignment
from elastic_train.train.task import Task

HOST, WIDTH, LAYERS = "127.0.0.1", 1024, 24
SPEC = RunSpec(
    name="memory",
    storage_path="/nowhere",
    batch=Batch(global_size=2, micro_size=2, seed=1),
    max_steps=1,
    min_workers=1,
    max_workers=1,
)


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), index / 8.0)


@dataclass
class Wide(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_params], lr=1e-3)

    def dataset(self) -> Numbers:
        return Numbers()

    def loss(self, output: torch.Tensor, micro_batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return output.square().sum(), len(micro_batch)


def assignment(generation: int, port: int) -> RankAssignment:
    plan = Plan(mesh=Mesh(), workers=("w",), nodes=("n",), shares=even_shares(SPEC.batch.micro_batches, 1))
    return RankAssignment(
        generation=generation, rank=0, plan=plan, store_host=HOST, store_port=port, address=HOST
    )


def memory(field: str) -> int:
    """Bytes, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    server, port = serve_store(HOST)
    member = Member(Wide(), SPEC, on_step=lambda report: None)
    member.join(assignment(1, port))
    member.forming.initialise()
    member.go()
    member.run()
    table, document = member.held.table(1), member.document(1)
    own = np.array([table.names[key][1] == "param" for key in table.key.tolist()], bool)

    def ask(boxes: Fragments) -> Answer:
        """Another holder: what it sends is memory beside both shards."""
        sent: Sequence[np.ndarray] = member.held.read(1, 1, boxes)
        return lambda: sent

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is not there
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = memory("VmRSS")
    member.join(assignment(2, port))
    member.forming.needs(table)
    fill_from(member, Live(generation=1, step=1), table.take(own), [(ask, table.take(~own))])
    member.load(document)
    member.forming.digest()
    peak = memory("VmHWM")
    member.go()
    moved = int(table.nbytes[~own].sum())
    state = int(table.nbytes.sum())
    print(json.dumps({"before": before, "state": state, "moved": moved, "grown": peak - before}))
    member.close()
    del server  # it served until here


if __name__ == "__main__":
    main()
