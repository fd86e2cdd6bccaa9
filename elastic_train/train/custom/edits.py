"""Detect a loop that changes its models itself between steps: such a step cannot be rolled forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic_train.errors import ConfigError
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.rehearsal import marks_of, versions


@dataclass(slots=True, kw_only=True, eq=False)
class Edits:
    """What is known of a loop in this process. `found` is None until the code after a step was seen once.

    A rank that holds a step's gradient may apply it without the loop only where nothing follows.
    """

    found: bool | None = None
    _versions: dict[str, int] = field(default_factory=dict[str, int])
    _contents: dict[str, object] = field(default_factory=dict[str, object])

    def enter(self) -> None:
        """The loop is entered anew, with other tensors."""
        self._versions, self._contents = {}, {}

    def begin(self, shards: Shards) -> None:
        """A step was committed, what follows it is the loop's. The first time contents are looked at too:
        writes through `.data` change no version."""
        self._versions = versions(_lasting(shards))
        self._contents = dict(marks_of(_lasting(shards))) if self.found is None else {}

    def changed(self, shards: Shards) -> bool:
        """Whether a parameter is not as the step left it."""
        if self._versions != versions(_lasting(shards)):
            return True
        return bool(self._contents) and self._contents != dict(marks_of(_lasting(shards)))

    def passed(self, shards: Shards) -> None:
        """The loop asks for the next batch."""
        self.found = bool(self.found) or self.changed(shards)
        self._versions = versions(_lasting(shards))

    def evaluated(self, shards: Shards) -> None:
        """What an evaluation did to parameters was put back."""
        self._versions = versions(_lasting(shards))

    def check_head(self, shards: Shards) -> None:
        """The loop begins a step. ConfigError where it changed a parameter since it asked for the batch."""
        for fqn, version in versions(_lasting(shards)).items():
            if self._versions.get(fqn, version) != version:
                raise ConfigError(
                    field=f"model.{fqn}",
                    problem="the loop changes this tensor between asking for a batch and its step, and "
                    "would do so twice where the step is broken off.",
                    remedy="Change it behind the block of `with ctx.step()`.",
                )


def _lasting(shards: Shards) -> dict[str, Any]:
    """Parameters and buffers of the models, without what the loop registered."""
    registered = shards.registered.tensors if shards.registered is not None else {}
    return shards.parameters | {fqn: b for fqn, b in shards.buffers.items() if fqn not in registered}
