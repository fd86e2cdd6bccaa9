"""Account of a restore: which tensors come from the checkpoint, which don't, and which don't fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_train.checkpoint.lazy_arrays import TensorInfo

Name = tuple[str, str]
"""Tensor and state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreAccount:
    """Each name of the state and of the checkpoint, in exactly one place."""

    restored: tuple[Name, ...]
    absent: tuple[Name, ...]  # wanted and not stored: initialised, where the caller allows it
    extra: tuple[Name, ...]  # stored and not wanted
    mismatched: tuple[str, ...]  # stored with another dtype or shape; nothing is ever cast silently

    def __str__(self) -> str:
        counts = f"{len(self.restored)} restored, {len(self.absent)} absent, {len(self.extra)} extra"
        return "; ".join((counts, *self.mismatched))


def account(stored: Mapping[Name, TensorInfo], wanted: Mapping[Name, TensorInfo]) -> RestoreAccount:
    """Compare what a checkpoint holds with what a state needs."""
    both = sorted(stored.keys() & wanted.keys())
    return RestoreAccount(
        restored=tuple(n for n in both if stored[n] == wanted[n]),
        absent=tuple(sorted(wanted.keys() - stored.keys())),
        extra=tuple(sorted(stored.keys() - wanted.keys())),
        mismatched=tuple(
            f"{tensor} ({state}) is {_text(stored[tensor, state])} in the checkpoint and "
            f"{_text(wanted[tensor, state])} in the model"
            for tensor, state in both
            if stored[tensor, state] != wanted[tensor, state]
        ),
    )


def _text(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"
