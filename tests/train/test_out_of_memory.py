"""A user's code that asks for more memory than there is: no bug of theirs, told with the figures."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.checkpoint.engine.machine_memory import memory_now
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.user_code_guard import UserCodeGuard

pytestmark = pytest.mark.ring2


def ask_for_too_much(state: dict[str, Any]) -> tuple[str, str]:
    guard = UserCodeGuard(worker="w0001", node="n", rank=0, generation=1, broken=lambda: False)
    bounds = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (vm_size() + (256 << 20), bounds[1]))
    try:
        with guard.at("loss", 3):
            torch.empty(1 << 30, dtype=torch.uint8)
    except Exception as error:  # noqa: BLE001 - what it becomes is the question
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, bounds)
    return "", ""


def vm_size() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def test_memory_that_torch_cannot_get_is_no_error_of_the_users_code(pool: GlooPool) -> None:
    ((kind, text),) = pool.run(ask_for_too_much, ranks=[0])
    assert kind == "MemoryError"
    assert "can't allocate memory: you tried to allocate 1073741824 bytes" in text
    assert "it held" in text
    assert "were used where it ran" in text
    assert memory_now().room > 0
