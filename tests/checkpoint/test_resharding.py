"""Optimizer states that aren't elementwise: recorded with how they are cut, and never cut wrongly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.checkpoint import document as documents
from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.exporters.dcp import export_dcp
from elastic_train.checkpoint.import_run import adopt
from elastic_train.checkpoint.language.parse import parse
from elastic_train.checkpoint.language.translated_view import as_ours
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.read_plan import read_plan, sharded
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.resharding import box_of, check_cuts
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.verify import verify
from elastic_train.checkpoint.writer import write_part
from elastic_train.errors import FormatUnsupported, TensorMismatch
from elastic_train.geometry.box import Box
from elastic_train.geometry.fragments import Fragments
from elastic_train.geometry.state_layout import Blockwise, Coupled, Projection
from elastic_train.storage.fsspec_store import open_store

pytestmark = pytest.mark.ring1

Arrays = Mapping[tuple[str, str], np.ndarray]


def saved(root: Path, arrays: Arrays, **said: Any) -> Checkpoint:
    """A run with one checkpoint of these tensors."""
    run = RunDirectory(open_store(str(root)))
    term = run.begin_term("test")
    directory = attempt_path(step=3, generation=1)
    pieces = [
        Piece(tensor=t, state=s, dtype=a.dtype.name, shape=a.shape, box=Box.whole(a.shape), data=a)
        for (t, s), a in arrays.items()
    ]
    names = sorted({t for t, s in arrays if s == "param"})
    optimizer = {
        "class": "Any",
        "groups": [{"params": names, "hyperparameters": {}}],
        "scalars": {},
        "states": [list(name) for name in arrays if name[1] != "param"],
        **said,
    }
    document = {"step": 3, "trainable": names, "optimizer": optimizer}
    assembled = assemble(run.store, directory, [write_part(run.store, directory, 0, pieces)], document)
    return Checkpoint.of(run, run.commit(assembled, term=term, generation=1, step=3, lineage=[(1, 0)]))


def eight_bit(rows: int, columns: int) -> Arrays:
    """A parameter with its first moment as 8-bit codes in blocks of 256 and a scale for each block."""
    rng = np.random.default_rng(0)
    blocks = -(-rows * columns // 256)
    return {
        ("w", "param"): rng.standard_normal((rows, columns), dtype=np.float32),
        ("w", "state1"): rng.integers(0, 256, (rows, columns), dtype=np.uint8),
        ("w", "absmax1"): rng.standard_normal(blocks, dtype=np.float32),
        ("w", "qmap1"): rng.standard_normal(256, dtype=np.float32),
    }


def test_the_statistics_of_adafactor_are_cut_with_their_dims(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 8)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    model(torch.randn(3, 6)).square().sum().backward()
    optimizer.step()
    arrays = {(n, "param"): p.detach().numpy() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        arrays |= {(name, s): v.numpy() for s, v in state.items() if v.ndim}
    checkpoint = saved(tmp_path, arrays)
    kinds = checkpoint.kinds()
    assert kinds["weight", "row_var"] == Projection((0, None))
    assert kinds["weight", "col_var"] == Projection((None, 1))
    assert checkpoint.document["optimizer"]["reshard"]["weight"]["row_var"] == ["projection", [0, None]]
    box = Box((4, 0), (4, 6))  # the second of two ranks
    rows = box_of(("weight", "row_var"), box, checkpoint.tensors, kinds, url="")
    columns = box_of(("weight", "col_var"), box, checkpoint.tensors, kinds, url="")
    assert (rows, columns) == (Box((4, 0), (4, 1)), Box((0, 0), (1, 6)))
    assert read_plan(checkpoint, sharded(checkpoint, 2)).ranks[1].state_bytes == 4 * (4 * 6 + 4 + 6 + 4 + 4)


def test_eight_bit_states_are_cut_between_blocks_alone(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, eight_bit(64, 32))
    assert checkpoint.kinds()["w", "absmax1"] == Blockwise(256, 1)
    assert json.loads((tmp_path / "checkpoints/step-0000000003.g1/state.json").read_text())["requires"] == [
        "reshard"
    ]
    assert [r.state_bytes for r in read_plan(checkpoint, sharded(checkpoint, 4)).ranks] == [
        16 * 32 * 5 + 8 + 1024
    ] * 4
    with pytest.raises(TensorMismatch, match=r"w \(\w+\) can't be cut .* in multiples of 8"):
        read_plan(checkpoint, sharded(checkpoint, 3))


def test_a_rank_that_would_hold_half_a_block_is_refused_before_it_reads(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, eight_bit(64, 32))
    for rows, refused in ((16, False), (12, True)):
        needs = Fragments.of([("w", "param", "float32", (64, 32), Box((0, 0), (rows, 32)))])
        if refused:
            with pytest.raises(TensorMismatch, match="blocks of 256"):
                check_cuts(needs, checkpoint.tensors, checkpoint.kinds(), url="")
        else:
            check_cuts(needs, checkpoint.tensors, checkpoint.kinds(), url="")


def test_a_reader_that_does_not_know_of_such_states_refuses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, eight_bit(64, 32))
    monkeypatch.setattr(documents, "FEATURES", frozenset[str]())
    with pytest.raises(FormatUnsupported, match="requires reshard"):
        open_checkpoint(str(tmp_path))


def test_kinds_go_along_when_tensors_are_renamed_and_refuse_operations(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", eight_bit(64, 32))
    renamed = as_ours(source, parse('version = 1\n[[rule]]\nselect = "w"\nto = "v"\n'))
    adopt(renamed, open_store(str(tmp_path / "b")), holder="test", copy=True)
    assert open_checkpoint(str(tmp_path / "b")).kinds()["v", "state1"] == Blockwise(256, 256)
    turned = 'version = 1\n[[rule]]\nselect = "w"\nonly = ["param", "state1"]\n'
    turned += 'operations = [{ op = "transpose", order = [1, 0] }]\n'
    turned += '[[rule]]\nselect = "w"\nonly = ["absmax1", "qmap1"]\n'
    with pytest.raises(TensorMismatch, match="can only be renamed"):
        as_ours(source, parse(turned))


def test_kinds_survive_torchs_format(tmp_path: Path) -> None:
    said = {"w": {"factor": ["coupled"]}}
    arrays = {("w", "param"): np.ones((4, 4), np.float32), ("w", "factor"): np.ones((4, 4), np.float32)}
    export_dcp(saved(tmp_path / "run", arrays, reshard=said), open_store(str(tmp_path / "dcp")))
    back = open_checkpoint(str(tmp_path / "dcp"))
    assert back.kinds()["w", "factor"] == Coupled()
    with pytest.raises(TensorMismatch, match="goes with the whole parameter"):
        read_plan(back, sharded(back, 2))


@pytest.mark.parametrize(
    ("words", "error", "problem"),
    [
        (["spectral", 3], FormatUnsupported, "unknown to this release"),
        (["projection", [1, 0]], TensorMismatch, "has another shape"),
        (["block", 16, 1], TensorMismatch, "1 blocks of 16 elements"),
    ],
)
def test_a_kind_that_is_unknown_or_contradicted_is_refused(
    tmp_path: Path, words: list[Any], error: type[Exception], problem: str
) -> None:
    arrays = {("w", "param"): np.ones((4, 3), np.float32), ("w", "s"): np.ones((4, 3), np.float32)}
    with pytest.raises(error, match=problem):
        saved(tmp_path, arrays, reshard={"w": {"s": words}})


def test_a_checkpoint_from_before_kinds_were_recorded_is_told_by_shapes(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, eight_bit(64, 32))
    optimizer = {k: v for k, v in checkpoint.document["optimizer"].items() if k != "reshard"}
    checkpoint.document = {**checkpoint.document, "optimizer": optimizer}
    assert checkpoint.kinds()["w", "state1"] == Blockwise(256, 256)
    assert verify(checkpoint).sound
