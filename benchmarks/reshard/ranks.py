"""What the ranks of `reshard` do, each in a process of a gloo group: save and load with DCP and with us."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.reshard.state import SIZES, STATES, own_boxes, state_of
from elastic_train.checkpoint.reader import open_checkpoint

Rank = dict[str, Any]


def join(state: Rank, host: str, port: int, ranks: int, prefix: str) -> None:
    store = dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=state["index"], world_size=ranks)


def leave(state: Rank) -> None:
    dist.destroy_process_group()


def save_dcp(state: Rank, size: str, directory: str) -> None:
    """Every rank draws the state and keeps its rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = state_of(SIZES[size])
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    for (name, kind), array in whole.items():
        (box,) = own_boxes(array.shape, dist.get_rank(), dist.get_world_size())
        tensors[name, kind] = _sharded(array.shape, torch.from_numpy(array[box.slices].copy()), mesh)
    dcp.save(nested(tensors), checkpoint_id=directory)


def load_dcp(state: Rank, size: str, directory: str) -> dict[str, float]:
    """Seconds, and bytes that were read from files, of DCP's load into this group's shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    memory: list[torch.Tensor] = []
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    for name, shape in SIZES[size].shapes():
        (box,) = own_boxes(shape, dist.get_rank(), dist.get_world_size())
        for kind in STATES:
            memory.append(torch.ones(box.sizes))
            tensors[name, kind] = _sharded(shape, memory[-1], mesh)
    dcp.load(nested(dict(list(tensors.items())[:1])), checkpoint_id=directory)  # imports its modules
    empty = nested(tensors)
    measured = _measured(lambda: dcp.load(empty, checkpoint_id=directory))
    return {**measured, "sum": _sum(memory)}


def load_ours(state: Rank, size: str, url: str) -> dict[str, float]:
    """The same of a checkpoint that we open: opened, planned, read and verified."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    requests, memory = [], []
    for name, shape in SIZES[size].shapes():
        for box in own_boxes(shape, rank, ranks):
            for kind in STATES:
                requests.append((name, kind, box))
                memory.append(torch.ones(box.sizes))

    def load() -> None:
        open_checkpoint(url).read_many(requests, into=[m.numpy() for m in memory])

    open_checkpoint(url).read_many(requests[:1])  # imports its modules
    measured = _measured(load)
    return {**measured, "sum": _sum(memory)}


def nested(tensors: Mapping[tuple[str, str], torch.Tensor]) -> dict[str, Any]:
    """The form of `torch.distributed.checkpoint.state_dict`."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for (name, kind), tensor in tensors.items():
        if kind != "param":
            state.setdefault(name, {})[kind] = tensor
    model = {name: tensor for (name, kind), tensor in tensors.items() if kind == "param"}
    return {"model": model, "optimizer": {"state": state}}


def _sum(memory: list[torch.Tensor]) -> float:
    return sum(float(tensor.double().sum()) for tensor in memory)


def _measured(work: Callable[[], object]) -> dict[str, float]:
    dist.barrier()
    before, began = _read_bytes(), time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - began, "read_bytes": _read_bytes() - before}


def _sharded(shape: tuple[int, ...], local: torch.Tensor, mesh: Any) -> torch.Tensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
    )


def _read_bytes() -> int:
    """Bytes that this process asked the kernel to read from files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))
