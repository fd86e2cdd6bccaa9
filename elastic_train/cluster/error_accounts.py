"""Attribute an error to the job, the machines, storage or us, by its type and never by its text."""

from __future__ import annotations

from typing import Literal

from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from elastic_train.errors import (
    CheckpointError,
    ConfigError,
    DeviceFailed,
    DeviceMemoryExceeded,
    Fenced,
    GroupBroken,
    LoaderLost,
    MemoryTooSmall,
    ReplicasDiffer,
    SampleFailed,
    StorageError,
    UserCodeError,
)

Account = Literal["job", "machines", "storage", "ours"]

_ACCOUNTS: tuple[tuple[Account, tuple[type[BaseException], ...]], ...] = (
    ("job", (UserCodeError, ConfigError, SampleFailed)),
    ("storage", (StorageError, CheckpointError, Fenced)),
    (
        "machines",
        (
            GroupBroken,
            LoaderLost,
            DeviceFailed,
            ReplicasDiffer,
            MemoryTooSmall,
            DeviceMemoryExceeded,
            MemoryError,
            RayError,
            GetTimeoutError,
        ),
    ),
)


def account_of(error: BaseException) -> Account:
    """The account that an error is charged to. One that crossed an actor's border is what was raised
    there.
    """
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return account_of(error.cause)
    for account, kinds in _ACCOUNTS:
        if isinstance(error, kinds):
            return account
    return "ours"
