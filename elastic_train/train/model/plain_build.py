"""Build the model on the host by the job's own code, seeded as in one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from elastic_train.train.model import rng
from elastic_train.train.model.unwritten import MarkUnwritten

T = TypeVar("T")

DTYPE_OF = {**dict.fromkeys(("fp32", "bf16", "fp16"), torch.float32), "fp64": torch.float64}
"""What floating parameters of default dtype are held in; "bf16" and "fp16" compute in these on float32."""


class default_dtype:
    """Within it, new floating tensors have this dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._before)


def seed_as_a_script_does(seed: int) -> None:
    """What a person writes at the top of a script: the same number for Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def plainly(build: Callable[[], T], dtype: torch.dtype, seed: int) -> T:
    """What `build` makes, bit for bit as in one process that seeds and calls it. Generators are put back."""
    with rng.preserved(), default_dtype(dtype), torch.enable_grad(), MarkUnwritten():
        seed_as_a_script_does(seed)
        return build()
