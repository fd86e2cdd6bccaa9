"""What a loop carries from one micro-batch of a step to the next: which ones a rank gets depends on the plan.

Looked for while the first micro-batch of a run is computed, among what the code around it uses: variables and
attributes that changed, and that its body reads before it writes. Sums and lists that are only printed or
logged are left alone.
"""

from __future__ import annotations

import dis
from collections.abc import Hashable
from types import FrameType
from typing import Any

import torch
from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.train.custom.loop_variables import body_of, flowing, paired, read_first, uses_of
from elastic_train.train.model.surroundings import Surroundings, is_own, is_own_module
from elastic_train.train.model.value_prints import print_of


class Between:
    """Looks once, around the first micro-batch that a frame asks for."""

    def __init__(self, models: nn.Module, surroundings: Surroundings) -> None:
        self._models, self._surroundings = models, surroundings
        self._before: dict[str, Hashable] | None = None
        self.done = False

    def first(self, frame: FrameType) -> None:
        """The first micro-batch is about to be given to the frame."""
        self._before = self._prints(frame)

    def check(self, frame: FrameType) -> None:
        """It asks for the next one. ConfigError names what the first one changed, and the next would read."""
        before, self.done = self._before, True
        if before is None:
            return
        after = self._prints(frame)
        changed = {name for name in after if name in before and before[name] != after[name]}
        for place in sorted(name for name in changed if name.startswith(("*", "model."))):
            raise _carried(place.removeprefix("*"))
        within = body_of(frame)
        if within is None:
            return
        numbers = _numbers(frame)
        read = {name for name in changed if read_first(within, name)} | numbers
        found = flowing(frame.f_code, read - paired(frame))
        if found is not None:
            number = found in numbers
            raise _carried(f"the number {found!r} of a micro-batch" if number else f"{found.lstrip('.')!r}")

    def _prints(self, frame: FrameType) -> dict[str, Hashable]:
        """Of variables by name, of attributes of the job's objects by "." and name."""
        found: dict[str, Hashable] = {}
        for name, value in frame.f_locals.items():
            if is_own(value) and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
                for inner, held in vars(value).items():
                    found[f".{inner}"] = _print(held)
            else:
                found[name] = _print(value)
        for path, module in self._models.named_modules():
            for name, value in vars(module).items():
                if type(value) in (bool, int, float, str) and not name.startswith("_") and name != "training":
                    found[f"model.{path}.{name}"] = repr(value)
        return found | {f"*{name}": mark for name, mark in self._surroundings.prints().items()}


def _carried(what: str) -> ConfigError:
    return ConfigError(
        field="batch",
        problem=f"{what} goes from one micro-batch of a step to the next: which ones a rank gets, and in "
        "what order, depends on the plan.",
        remedy="Let a micro-batch depend on its samples alone. What lasts is changed behind the block of "
        "`with ctx.step()`, by step.loss or step.metrics, in an object that ctx.register(...) keeps. A list "
        "that each micro-batch appends to is read in a second pass, by zip(batch, list).",
    )


def _print(value: Any) -> Hashable:
    if isinstance(value, nn.Module | torch.optim.Optimizer) or not _may_carry(value):
        return "id"
    return print_of(value, content=True)


def _may_carry(value: Any) -> bool:
    return not type(value).__module__.startswith("elastic_train.")


def frame_of_job(frame: FrameType | None) -> FrameType | None:
    """The innermost of the job's own code, from one outwards: progress bars, for one, pass batches on."""
    while frame is not None and not is_own_module(str(frame.f_globals.get("__name__"))):
        frame = frame.f_back
    return frame


def _numbers(frame: FrameType) -> set[str]:
    """The variable that numbers the turns of the loop whose head a frame is at."""
    instructions = list(dis.get_instructions(frame.f_code))
    head = next((n for n, one in enumerate(instructions) if one.offset == frame.f_lasti), 0)
    before = [one.argval for one in instructions[max(0, head - 12) : head]]
    following = instructions[head + 1 : head + 3]
    numbered = "enumerate" in before and following and following[0].opname == "UNPACK_SEQUENCE"
    return {name for one in following[1:] for _, name in uses_of(one)} if numbered else set()
