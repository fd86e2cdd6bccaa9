"""What a loop registers comes back as it was, whatever containers it is in and however long they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_train.checkpoint.document import decode, encode
from elastic_train.checkpoint.validate import state
from elastic_train.train.model.registered_state import Registered

pytestmark = pytest.mark.ring0


class Thing:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def restored(state: Any) -> Any:
    """The state after a way through the bytes of a checkpoint."""
    kept = Registered()
    kept.reserve("x", Thing(state))
    kept.capture("x", Thing(state))
    kept.scalars = decode(encode(kept.scalars), url="x")
    found = Thing(None)
    kept.restore("x", found)
    return found.state


def test_containers_and_tensors_come_back_with_their_kinds() -> None:
    kept = {"h": [1, 2.5, None, True, "a"], "t": (1, ()), "n": [[], [(2,), {"k": [3]}]], 7: torch.ones(2)}
    found = restored(kept)
    assert torch.equal(found.pop(7), kept.pop(7))
    assert repr(found) == repr(kept)


def test_a_long_history_takes_no_container_for_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "FREE_CONTAINERS", 1000)
    history = [0.5] * 5000
    assert restored({"losses": history}) == {"losses": history}
