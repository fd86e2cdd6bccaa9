"""The state that `reshard` saves, loads and exports, and the files of it in each system's form."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.writer import WrittenPart, write_part
from elastic_train.geometry.box import Box
from elastic_train.geometry.layout import Sharded, boxes
from elastic_train.storage.store import Store

STATES = ("param", "exp_avg", "exp_avg_sq")
State = Mapping[tuple[str, str], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A decoder: words of its vocabulary, width, layers."""

    vocabulary: int
    width: int
    layers: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        d = self.width
        yield "embed.weight", (self.vocabulary, d)
        for i in range(self.layers):
            yield f"layers.{i}.qkv.weight", (3 * d, d)
            yield f"layers.{i}.o.weight", (d, d)
            yield f"layers.{i}.up.weight", (4 * d, d)
            yield f"layers.{i}.down.weight", (d, 4 * d)
            yield f"layers.{i}.norm.weight", (d,)
        yield "head.weight", (self.vocabulary, d)


SIZES = {
    "tiny": Size(vocabulary=8_000, width=256, layers=4),  # 7 M
    "small": Size(vocabulary=32_000, width=768, layers=8),  # 106 M
    "medium": Size(vocabulary=32_000, width=1_024, layers=24),  # 368 M
    "large": Size(vocabulary=32_000, width=1_152, layers=26),  # 488 M
}


def state_of(size: Size) -> dict[tuple[str, str], np.ndarray]:
    """Parameters and Adam's moments in float32, each element drawn."""
    rng = np.random.default_rng(0)
    return {
        (name, state): rng.standard_normal(shape, dtype=np.float32)
        for name, shape in size.shapes()
        for state in STATES
    }


def document(state: State) -> dict[str, Any]:
    names = [name for name, kind in state if kind == "param"]
    settings = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    return {
        "step": 10,
        "trainable": names,
        "aliases": {},
        "schedule": None,
        "vote": None,
        "evaluated": 0,
        "optimizer": {
            "class": "AdamW",
            "groups": [{"params": names, "hyperparameters": settings}],
            "scalars": {name: {"step": {"value": 10.0, "dtype": "float32"}} for name in names},
            "states": [list(name) for name in state if name[1] != "param"],
        },
    }


def pieces_of(state: State, rank: int, ranks: int) -> list[Piece]:
    """A rank's rows of every tensor."""
    return [
        Piece(
            tensor=name,
            state=kind,
            dtype="float32",
            shape=array.shape,
            box=box,
            data=array[box.slices],
        )
        for (name, kind), array in state.items()
        for box in own_boxes(array.shape, rank, ranks)
    ]


def own_boxes(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[Box, ...]:
    return boxes(shape, (ranks,), (rank,), (Sharded(0),))


def write_ours(store: Store, state: State, ranks: int) -> None:
    """A whole save by as many writers side by side: hashed, durable, committed."""
    run = RunDirectory(store)
    term = run.begin_term("benchmark")
    directory = attempt_path(step=10, generation=1)

    def part(rank: int) -> WrittenPart:
        return write_part(store, directory, rank, pieces_of(state, rank, ranks))

    with ThreadPoolExecutor(ranks) as pool:
        parts = list(pool.map(part, range(ranks)))
    assembled = assemble(store, directory, parts, document(state))
    run.commit(assembled, term=term, generation=1, step=10, lineage=[(1, 0)])


def write_zero(directory: Path, state: State, ranks: int) -> None:
    """ZeRO-1 files as DeepSpeed lays them out: a flat float32 partition and its moments per rank."""
    with _fragment_address() as address:
        _write_zero(directory, state, ranks, address)


def _write_zero(directory: Path, state: State, ranks: int, address: Any) -> None:
    tag = directory / "global_step10"
    tag.mkdir(parents=True)
    (directory / "latest").write_text(tag.name)
    tensors = {key: torch.from_numpy(array) for key, array in state.items()}
    names = [name for name, kind in state if kind == "param"]
    shapes = OrderedDict((name, tensors[name, "param"].shape) for name in names)
    model = {
        "module": {name: tensors[name, "param"].to(torch.bfloat16) for name in names},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "global_steps": 10,
        "ds_config": {"zero_optimization": {"stage": 1}},
        "ds_version": "0.19.8",
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    torch.save(model, tag / "mp_rank_00_model_states.pt")
    flat = {kind: torch.cat([tensors[name, kind].flatten() for name in names]) for kind in STATES}
    numel = len(flat["param"])
    share = -(-numel // (2 * ranks)) * 2
    for rank in range(ranks):
        low, high = rank * share, min((rank + 1) * share, numel)
        places, at = OrderedDict(), 0
        for name in names:
            first, last = max(at, low), min(at + tensors[name, "param"].numel(), high)
            if first < last:
                places[name] = address(start=first - low, numel=last - first)
            at += tensors[name, "param"].numel()
        moments = {kind: _padded(flat[kind][low:high], share) for kind in STATES[1:]}
        group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
        zero = {
            "loss_scaler": None,
            "dynamic_loss_scale": False,
            "zero_stage": 1,
            "group_paddings": [share * ranks - numel if rank == ranks - 1 else 0],
            "partition_count": [ranks],
            "base_optimizer_state": {
                "state": {0: {"step": torch.tensor(10.0), **moments}},
                "param_groups": [group],
            },
            "single_partition_of_fp32_groups": [flat["param"][low:high].clone()],
            "param_slice_mappings": [places],
        }
        file = tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": zero, "ds_version": "0.19.8"}, file)


def _padded(part: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(part, (0, length - len(part)))


@contextmanager
def _fragment_address() -> Iterator[Any]:
    """DeepSpeed's class; where it isn't installed, one that is pickled under the same name."""
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed.utils.tensor_fragment import fragment_address

        yield fragment_address
        return
    name = "deepspeed.utils.tensor_fragment"
    made = dataclasses.make_dataclass("fragment_address", [("numel", int), ("start", int)])
    made.__module__ = name
    stubs = {part: types.ModuleType(part) for part in ("deepspeed", "deepspeed.utils", name)}
    stubs[name].fragment_address = made  # type: ignore[attr-defined]
    sys.modules.update(stubs)
    try:
        yield made
    finally:
        for part in stubs:
            del sys.modules[part]
