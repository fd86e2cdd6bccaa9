"""Where an export goes: an empty directory, and what was written there."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.errors import ConfigError
from elastic_train.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The files of an export, relative to its directory, and their bytes."""

    files: tuple[str, ...]
    bytes: int


def check_empty(store: Store) -> None:
    """ConfigError where files are that an export could mix with."""
    there = store.list()
    if there:
        raise ConfigError(
            field="OUT",
            problem=f"{store.url} isn't empty: it has {there[0]}.",
            remedy="Choose a new directory.",
        )
