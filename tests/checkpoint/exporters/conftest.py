"""A committed checkpoint with every kind of tensor, an optimizer and a tie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.writer import write_part
from elastic_train.geometry.box import Box
from elastic_train.storage.fsspec_store import open_store

ADAM = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "fused": None}


def arrays() -> dict[tuple[str, str], np.ndarray]:
    """Tensors by name and state; every element is told apart."""
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    found: dict[tuple[str, str], np.ndarray] = {
        ("embed.weight", "param"): floats(11, 4),
        ("layers.0.wq.weight", "param"): floats(8, 4),
        ("layers.0.norm.weight", "param"): floats(4).astype(ml_dtypes.bfloat16),
        ("frozen.weight", "param"): floats(3, 5),
        ("scale", "buffer"): floats(),
        ("count", "buffer"): np.array(2**40, np.int64),
        ("mask", "buffer"): rng.integers(0, 2, (3, 3)).astype(np.bool_),
        ("small", "buffer"): floats(5).astype(ml_dtypes.float8_e4m3fn),
        ("half", "buffer"): floats(7).astype(np.float16),
        ("wide", "buffer"): np.arange(3, dtype=np.uint16),
        ("phase", "buffer"): (floats(4) + 1j * floats(4)).astype(np.complex64),
        ("nothing", "buffer"): np.zeros((0, 4), np.float32),
    }
    for tensor in ("embed.weight", "layers.0.wq.weight", "layers.0.norm.weight"):
        for state in ("exp_avg", "exp_avg_sq"):
            found[tensor, state] = floats(*found[tensor, "param"].shape)
    return found


def document() -> dict:
    decayed, rest = ["embed.weight", "layers.0.wq.weight"], ["layers.0.norm.weight"]
    return {
        "step": 12,
        "trainable": [*decayed, *rest],
        "aliases": {"head.weight": "embed.weight"},
        "cursor": {"epoch": 1, "key": 2**70, "note": "ü", "limit": float("inf")},
        "optimizer": {
            "class": "AdamW",
            "groups": [
                {"params": decayed, "hyperparameters": ADAM},
                {"params": rest, "hyperparameters": {**ADAM, "weight_decay": 0.0}},
            ],
            "scalars": {fqn: {"step": {"value": 12.0, "dtype": "float32"}} for fqn in [*decayed, *rest]},
            "states": [[fqn, state] for fqn in [*decayed, *rest] for state in ("exp_avg", "exp_avg_sq")],
        },
        "schedule": None,
    }


def piece(name: tuple[str, str], array: np.ndarray, box: Box) -> Piece:
    return Piece(
        tensor=name[0],
        state=name[1],
        dtype=array.dtype.name,
        shape=array.shape,
        box=box,
        data=array[box.slices],
    )


def cut(shape: Sequence[int]) -> list[Box]:
    """A tensor with rows in two boxes, uneven ones."""
    if not shape or shape[0] < 2:
        return [Box.whole(tuple(shape))]
    zeros, rest = (0,) * (len(shape) - 1), tuple(shape[1:])
    low = shape[0] // 3 + 1
    return [Box((0, *zeros), (low, *rest)), Box((low, *zeros), (shape[0] - low, *rest))]


@pytest.fixture
def ours(tmp_path: Path) -> Checkpoint:
    """The checkpoint, from two writers."""
    run = RunDirectory(open_store(str(tmp_path / "run")))
    term = run.begin_term("test")
    directory = attempt_path(step=12, generation=1)
    pieces: list[list[Piece]] = [[], []]
    for name, array in arrays().items():
        for number, box in enumerate(cut(array.shape)):
            pieces[number].append(piece(name, array, box))
    parts = [write_part(run.store, directory, i, own) for i, own in enumerate(pieces)]
    assembled = assemble(run.store, directory, parts, document(), aliases=document()["aliases"])
    run.commit(assembled, term=term, generation=1, step=12, lineage=((1, 0),))
    return open_checkpoint(run.store.url)
