"""Checkpoints in the layout of Megatron-core's `torch_dist`, written by plain torch.distributed.checkpoint.

Megatron-core isn't needed and wasn't run: what follows is its public description of the format, with tensors
that say themselves how they are cut, as its own do.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save


@dataclass(frozen=True)
class Cut:
    """Blocks of a tensor of `shape`, by offset."""

    shape: tuple[int, ...]
    blocks: Mapping[tuple[int, ...], torch.Tensor]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(at)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(at), sizes=block.size()),
                    properties=TensorProperties.create_from_tensor(block),
                    size=torch.Size(self.shape),
                ),
            )
            for at, block in self.blocks.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), block.size()) for at, block in self.blocks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.blocks[tuple(index.offset)]


class Planner(DefaultSavePlanner):
    """Objects are bytes already; what is folded is said in the metadata."""

    def __init__(self, folded: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._folded = folded

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, Cut) else found

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object

    def create_global_plan(self, all_plans: Any) -> Any:
        plan, metadata = super().create_global_plan(all_plans)
        metadata.mcore_data = {  # type: ignore[attr-defined]
            key: {"nd_reformulated_orig_global_shape": self._folded[key]} if key in self._folded else {}
            for key in self.state_dict
        }
        return plan, metadata


def cut(tensor: torch.Tensor, parts: Sequence[int]) -> Cut:
    """A grid of blocks, as stages (of layers) and tensor parallelism make it."""
    sizes = [n // p for n, p in zip(tensor.shape, parts, strict=True)]
    blocks = {}
    for number in torch.cartesian_prod(*(torch.arange(p) for p in parts)).reshape(-1, len(parts)).tolist():
        at = tuple(n * s for n, s in zip(number, sizes, strict=True))
        blocks[at] = tensor[tuple(slice(a, a + s) for a, s in zip(at, sizes, strict=True))].contiguous()
    return Cut(tuple(tensor.shape), blocks)


def folded(tensor: torch.Tensor, parts: Sequence[int], ranks: int) -> Cut:
    """Each block flat, and cut into ranges at places that mean nothing to its shape."""
    grid = cut(tensor, parts)
    sizes = [n // p for n, p in zip(tensor.shape, parts, strict=True)]
    count = math.prod(sizes)
    blocks = {}
    for at, block in grid.blocks.items():
        number = tuple(a // s for a, s in zip(at, sizes, strict=True))
        edges = [count * r // ranks for r in range(ranks + 1)]
        for low, high in itertools.pairwise(edges):
            blocks[*number, low] = block.flatten()[low:high].reshape(*(1,) * len(parts), -1).clone()
    return Cut((*parts, count), blocks)


def write(
    root: Path,
    iteration: int,
    state: Mapping[str, Any],
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    common: Mapping[str, Any] | None = None,
) -> Path:
    """A directory with its pointer, whose path is returned; `shapes` are those of folded tensors."""
    directory = root / f"iter_{iteration:07d}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(dict(state), checkpoint_id=directory, planner=Planner(shapes or {}), no_dist=True)
    versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(versions))
    (root / "latest_checkpointed_iteration.txt").write_text(f"{iteration}")
    if common is not None:
        torch.save(common, directory / "common.pt")
    return directory


def bytes_of(value: Any) -> io.BytesIO:
    """An object of a rank, as it is stored."""
    stream = io.BytesIO()
    torch.save([value], stream)
    return stream


def settings(iteration: int) -> dict[str, Any]:
    """What is beside the tensors."""
    return {
        "args": argparse.Namespace(num_layers=4, hidden_size=8, bf16=True),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 80},
    }
