"""Declared parts of tensors go by names of their own, in checkpoints that were written without them too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.import_run import adopt
from elastic_train.checkpoint.language.parse import parse
from elastic_train.checkpoint.language.translated_view import as_ours
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.views import View
from elastic_train.checkpoint.writer import write_part
from elastic_train.errors import TensorMismatch
from elastic_train.geometry.box import Box
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.memory_store import MemoryStore

pytestmark = pytest.mark.ring1

Cut = Callable[..., Piece]
QKV = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
EXPERTS = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2)
VIEWS = {
    "q": View(of="qkv", dim=0, spans=((0, 4), (8, 12))),  # two key heads, each with two queries, k and v
    "k": View(of="qkv", dim=0, spans=((4, 6), (12, 14))),
    "experts.1": View(of="experts", dim=0, spans=((1, 2),), single=True),
    "up": View(of="experts", dim=1, spans=((2, 4),)),
}


@pytest.fixture
def old(cut: Cut) -> Checkpoint:
    """A checkpoint that knows of no views, cut across them."""
    store = MemoryStore()
    pieces = [cut("qkv", QKV, Box((0, 0), (7, 3))), cut("qkv", QKV, Box((7, 0), (9, 3)))]
    pieces += [cut("qkv", -QKV, state="exp_avg"), cut("qkv", np.ones(3), state="column")]
    pieces += [cut("experts", EXPERTS)]
    assemble(store, "c", [write_part(store, "c", 0, pieces)], {})
    return Checkpoint.open(store, "c")


def viewed(checkpoint: Checkpoint, views: Mapping[str, View]) -> Checkpoint:
    """The same checkpoint with names for parts of its tensors, beside those that it has."""
    state = checkpoint._state
    more = {name: view.json() for name, view in views.items()}
    return Checkpoint(checkpoint.files, checkpoint.manifest, replace(state, views={**state.views, **more}))


def test_both_names_lead_to_the_bytes_in_every_state(old: Checkpoint) -> None:
    both = viewed(old, VIEWS)
    q = np.concatenate([QKV[0:4], QKV[8:12]])
    assert np.array_equal(both["q"]["param"], q)
    assert np.array_equal(both["q"]["exp_avg"][3:6, 1], -q[3:6, 1])
    assert np.array_equal(both["k"]["param"][...], np.concatenate([QKV[4:6], QKV[12:14]]))
    assert np.array_equal(both["experts.1"]["param"][1:], EXPERTS[1, 1:])
    assert np.array_equal(both["up"]["param"], EXPERTS[:, 2:4])
    assert np.array_equal(both["qkv"]["param"], QKV)
    assert set(both) == {"qkv", "experts", *VIEWS}
    assert set(both["q"]) == {"param", "exp_avg"}  # statistics of a column have no such part
    assert set(both.tensors) == set(old.tensors)


@pytest.mark.parametrize(
    "view",
    [
        View(of="gone", dim=0, spans=((0, 1),)),
        View(of="qkv", dim=2, spans=((0, 1),)),
        View(of="qkv", dim=0, spans=((8, 17),)),
        View(of="qkv", dim=0, spans=((0, 2),), single=True),
    ],
)
def test_a_view_of_what_is_not_there_is_refused(old: Checkpoint, view: View) -> None:
    with pytest.raises(TensorMismatch, match="the view part of"):
        viewed(old, {"part": view})


def test_a_view_may_not_hide_a_tensor(old: Checkpoint) -> None:
    with pytest.raises(TensorMismatch, match="the view experts"):
        viewed(old, {"experts": VIEWS["q"]})


@pytest.mark.parametrize("copy", [False, True])
def test_what_an_import_fuses_and_stacks_keeps_its_names(tmp_path: Path, copy: bool) -> None:
    rng = np.random.default_rng(0)
    theirs = {
        f"l.{n}": rng.standard_normal((rows, 3)).astype(np.float32)
        for n, rows in zip("qkv", (8, 4, 4), strict=True)
    }
    theirs |= {f"e.{i}.w": rng.standard_normal((2, 3)).astype(np.float32) for i in range(3)}
    (tmp_path / "theirs").mkdir()
    save_file(theirs, tmp_path / "theirs" / "model.safetensors")
    spec = parse(
        """
[[rule]]
select = ["l.q", "l.k", "l.v"]
to = "l.qkv"
operations = [{ op = "fuse", heads = 4, kv_heads = 2, grouped = true }]

[[rule]]
select = "e.{e}.w"
to = "experts"
operations = [{ op = "stack" }]
""",
        origin="test",
    )
    store = open_store(str(tmp_path / "run"))
    adopt(as_ours(open_checkpoint(str(tmp_path / "theirs")), spec), store, holder="test", copy=copy)
    ours = open_checkpoint(str(tmp_path / "run"))
    assert {tensor for tensor, _ in ours.tensors} == {"l.qkv", "experts"}
    for name, array in theirs.items():
        assert np.array_equal(ours[name]["param"], array), name
