"""What DeepSpeed writes now, here: read in place, it is to the bit what its own converters make of it.

With a tie, a frozen parameter, a buffer, two groups and sizes that two ranks have to pad. Where its own load
loses something, ours has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.reshard.peer import PeerFailed
from elastic_train.checkpoint.exporters.ucp import export_ucp
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.verify import verify
from elastic_train.storage.fsspec_store import open_store
from tests.deepspeed import peer

pytestmark = [pytest.mark.ring2, pytest.mark.matrix, pytest.mark.timeout(900)]

MODEL = ("--width", 35, "--tie", "--freeze")
STATES = ("exp_avg", "exp_avg_sq")


def written(root: Path, stage: int) -> Checkpoint:
    """Two steps and a checkpoint, converted by both of the peer's converters, opened by us."""
    peer("train", root, "--stage", stage, "--steps", 2, "--sub_group", 9000, "--poke", *MODEL)
    peer("universal", root / "global_step2", root / "global_step2_u")
    peer("whole", root, root / "whole.pt")
    checkpoint = open_checkpoint(str(root))
    assert verify(checkpoint).sound
    return checkpoint


def loaded(root: Path, stage: int) -> dict[str, Any]:
    """What the peer has after a load of the universal directory."""
    return peer("train", "--stage", stage, "--steps", 2, "--load", root, "--universal", *MODEL)


def compare(checkpoint: Checkpoint, root: Path) -> None:
    whole = torch.load(root / "whole.pt", weights_only=True)
    for name, tensor in whole.items():
        read = checkpoint.read(name, "buffer" if name == "scale" else "param")
        assert read.tobytes() == tensor.numpy().tobytes(), name
    trained = checkpoint.document["trainable"]
    # zero_to_fp32 leaves frozen parameters of ZeRO-1 out
    assert {*whole, "pos.weight"} == {*trained, *checkpoint.aliases, "pos.weight", "scale"}
    for name in trained:
        for state in ("param", *STATES):
            file = root / "global_step2_u/zero" / name / f"{'fp32' if state == 'param' else state}.pt"
            atom = torch.load(file, weights_only=True)
            atom = atom["param"] if isinstance(atom, dict) else atom
            assert checkpoint.read(name, state).tobytes() == atom.detach().numpy().tobytes(), (name, state)


def settings(checkpoint: Checkpoint) -> Sequence[dict[str, float]]:
    groups = [g["hyperparameters"] for g in checkpoint.document["optimizer"]["groups"]]
    return [{key: group[key] for key in ("lr", "weight_decay")} for group in groups]


GROUPS = [{"lr": 1e-3, "weight_decay": 0.1}, {"lr": 5e-4, "weight_decay": 0.0}]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ours_is_theirs_to_the_bit_and_has_what_their_load_loses(tmp_path: Path, stage: int) -> None:
    checkpoint = written(tmp_path, stage)
    compare(checkpoint, tmp_path)
    theirs = loaded(tmp_path, stage)
    assert settings(checkpoint) == GROUPS
    assert theirs["groups"] == ([GROUPS[0], GROUPS[0]] if stage == 3 else GROUPS)
    assert np.array_equal(checkpoint.read("scale", "buffer"), np.full(3, 7, np.float32))
    assert theirs["buffer"] == [1.0, 1.0, 1.0]
    assert (checkpoint.read("pos.weight", "param") == 3).all()
    assert theirs["frozen"] != [3.0, 3.0, 3.0]
    assert checkpoint.aliases == {"head.weight": "emb.weight"}


@pytest.mark.parametrize(("wrote", "loads"), [(1, 3), (3, 1)])
def test_their_load_of_another_stage_fails_and_that_of_what_we_export_does_not(
    tmp_path: Path, wrote: int, loads: int
) -> None:
    checkpoint = written(tmp_path / "theirs", wrote)
    with pytest.raises(PeerFailed):
        loaded(tmp_path / "theirs", loads)
    export_ucp(checkpoint, open_store(str(tmp_path / "ours")))
    said = loaded(tmp_path / "ours", loads)
    assert said["losses"] == []
