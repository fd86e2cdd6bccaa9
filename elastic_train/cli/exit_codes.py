"""Exit codes of the command line, and how an error becomes one.

0 finished; 1 the job's own code failed; 2 wrong usage or configuration; 3 infrastructure failed beyond its
budget; 4 waited too long for capacity; 5 stopped on request; 6 damaged or missing checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic_train.cli.output import say
from elastic_train.errors import (
    CapacityTimeout,
    CheckpointError,
    ConfigError,
    ElasticTrainError,
    HeadLost,
    LeaseHeld,
    StorageError,
    UserCodeError,
)

FINISHED, USER_ERROR, USAGE, INFRASTRUCTURE, CAPACITY, STOPPED, CHECKPOINT = range(7)

OUTCOMES = {
    "finished": FINISHED,
    "user_error": USER_ERROR,
    "infrastructure": INFRASTRUCTURE,
    "capacity": CAPACITY,
    "stopped": STOPPED,
    "checkpoint": CHECKPOINT,
    "fenced": INFRASTRUCTURE,
}


def code_of(error: ElasticTrainError) -> int:
    match error:
        case UserCodeError():
            return USER_ERROR
        case ConfigError() | LeaseHeld() | StorageError():
            return USAGE
        case CapacityTimeout():
            return CAPACITY
        case CheckpointError():
            return CHECKPOINT
        case _:
            return INFRASTRUCTURE


@contextmanager
def exits(*, driver: bool = False) -> Iterator[Callable[[int], None]]:
    """Run a verb: an error on purpose is printed as its sentence, and its code is the process's.

    A run's `driver` that lost the head ends at once: Ray's own end would wait for the head, at length.
    """

    def leave(code: int) -> None:
        sys.exit(code)

    try:
        yield leave
    except ElasticTrainError as error:
        say(f"error: {error}", error=True)
        say(f"see docs/errors.md#{error.entry}", error=True)
        if driver and isinstance(error, HeadLost):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code_of(error))
        sys.exit(code_of(error))
