"""Whether a forward freezes parts of its model by chance, found by trying it with other random numbers.

Each forward may set anew what is trained: that is a part of it. What it sets at some times only stays for
the forwards after it, which are other ranks'; and ranks that cut parameters have to reduce the same ones.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_train.errors import ConfigError
from elastic_train.train.collectives.process_group import is_collective_error
from elastic_train.train.parallel.trained_parts import TrainedParts, unlike

TURNS = 8
_OF_USERS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError)


def check_freezing(trained: TrainedParts, call: Callable[[int], object]) -> None:
    """`call(turn)` is a forward with the random numbers of that turn. ConfigError names a parameter."""
    before = trained.now()
    seen: dict[str, set[bool | None]] = {fqn: set() for fqn in before}
    try:
        for turn in range(1, TURNS + 1):
            # From either start: what comes to the same was set, what stays as it was is left alone.
            found: list[dict[str, bool]] = []
            for start in (before, {fqn: not flag for fqn, flag in before.items()}):
                trained.put(start)
                call(turn)
                found.append(trained.now())
            for fqn, kinds in seen.items():
                kinds.add(found[0][fqn] if found[0][fqn] == found[1][fqn] else None)
    except _OF_USERS as error:
        if is_collective_error(error):
            raise
        return  # no other values can be given to it
    finally:
        trained.put(before)
    for fqn, kinds in seen.items():
        if None in kinds and len(kinds) > 1:
            raise ConfigError(
                field=f"model.{fqn}",
                problem="forward sets requires_grad at some times and not at others, so that what is trained "
                "depends on which forwards ran before: other ranks run other ones.",
                remedy="Set it in each forward, or in the model's constructor.",
            )
        if len(kinds) > 1 and trained.sharded:
            raise unlike(fqn)
