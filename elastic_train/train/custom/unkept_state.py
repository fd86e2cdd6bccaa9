"""What a loop would carry from step to step in plain variables and objects that nobody keeps.

Looked for at the head of the loop over its batches, before its first step: what is there is made anew
whenever the group changes, so that training must not depend on what it became.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from elastic_train.errors import ConfigError
from elastic_train.train.custom.loop_variables import (
    body_of,
    carried,
    flowing,
    of_the_rank,
    repeated,
    uses_of,
)
from elastic_train.train.model.loss_scale import check_no_scaler
from elastic_train.train.model.surroundings import is_own_module

log = logging.getLogger(__name__)
RUNNER = "elastic_train.train.custom.loop_runner"
"""Whoever calls that is not the loop."""
_CONTAINERS = (list, dict, set, deque, bytearray)
_FILL = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "setdefault"})


def check_unkept(frame: FrameType, context: object, registered: Collection[object], *, warns: bool) -> None:
    """ConfigError for what training depends on, where `frame` stands at the head of the loop. What is only
    told is named in a warning.
    """
    for name, value in frame.f_locals.items():
        check_no_scaler(name, value)
    asked = of_the_rank(frame, context, frozenset({"rank", "world_size"}))
    if asked is not None:
        raise ConfigError(
            field=f"ctx.{asked}",
            problem="a loss is computed with it: the result would depend on the plan.",
            remedy="It is for logs and names of files. Compute from the samples, and put tensors on "
            "ctx.device.",
        )
    _check_objects(frame, registered)
    names = carried(frame)
    needed = flowing(frame.f_code, {*names, *_filled(frame)})
    if needed is not None:
        raise ConfigError(
            field="loop",
            problem=f"the variable {needed!r} goes from one step to the next, and training depends on it: it "
            "would begin anew whenever the group changes.",
            remedy="Keep it in an object with state_dict and load_state_dict, and declare that by "
            "ctx.register(...) before the first batch.",
        )
    for name in names if warns else ():
        log.warning(
            "loop: the variable %r goes from one step to the next and is not kept: it begins anew whenever "
            "the group changes. Register what training depends on, by ctx.register",
            name,
        )


def check_around(frame: FrameType | None) -> None:
    """ConfigError where `frame`, which asks for the batches, or one of the job's that called it, does so in a
    loop: what the loop does between, as for each epoch, would follow the last step of the run."""
    while frame is not None and frame.f_globals.get("__name__") != RUNNER:
        if is_own_module(str(frame.f_globals.get("__name__"))) and repeated(frame):
            raise ConfigError(
                field="ctx.batches",
                problem="there is a loop around it, and its batches are those of the whole run: what is done "
                "for each epoch would be done when the last one is over.",
                remedy="Take the outer loop away. batch.epoch counts epochs, and batch.step % "
                "batch.steps_per_epoch == 0 is the last step of one.",
            )
        frame = frame.f_back


def _check_objects(frame: FrameType, registered: Collection[object]) -> None:
    """Schedulers, averages and the like that the loop uses are registered."""
    for name in _loaded(frame):
        for value in _held(frame.f_locals.get(name)):
            if any(value is thing for thing in registered) or not _has_state(value):
                continue
            raise ConfigError(
                field="loop",
                problem=f"the state of {name!r} ({type(value).__name__}) is not kept: it would begin anew "
                "whenever the group changes.",
                remedy=f"Register it before the first batch: {name} = ctx.register({name!r}, ...).",
            )


def _has_state(value: Any) -> bool:
    if isinstance(value, LRScheduler | AveragedModel):
        return True
    if isinstance(value, nn.Module | Optimizer | type) or type(value).__module__.startswith("elastic_train."):
        return False  # the context's own, or a loss or the like, which stays as it is made
    if not (callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict")):
        return False
    return bool(value.state_dict())


def _filled(frame: FrameType) -> set[str]:
    """Containers that were made before the loop, and that it fills and reads."""
    there = {name for name, value in frame.f_locals.items() if isinstance(value, _CONTAINERS)}
    body = body_of(frame) or []
    filled = {
        name
        for one, following in itertools.pairwise(body)
        for kind, name in uses_of(one)
        if kind == "LOAD" and following.argval in _FILL
    }
    filled |= {
        name
        for number, one in enumerate(body)
        if one.opname == "STORE_SUBSCR"
        for before in body[max(0, number - 2) : number]
        for kind, name in uses_of(before)
        if kind == "LOAD"
    }
    made = {name for one in body for kind, name in uses_of(one) if kind == "STORE"}
    return there & filled - made


def _loaded(frame: FrameType) -> list[str]:
    return sorted({name for one in body_of(frame) or [] for kind, name in uses_of(one) if kind == "LOAD"})


def _held(value: Any) -> Iterator[Any]:
    """A value, or those of a container of them."""
    match value:
        case list() | tuple():
            yield from value
        case dict():
            yield from value.values()
        case _:
            yield value
