"""Files that a job's own code leaves with a step, in the run's directory: images, samples, tables."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from elastic_train.storage.store import Store

DIRECTORY = "artifacts"
_STEP = re.compile(rf"{DIRECTORY}/step-(\d{{10}})/(.+)")


def artifact_path(step: int, name: str) -> str:
    """Of a file in the run's directory. A step that is run again has the same."""
    return f"{DIRECTORY}/step-{step:010}/{name}"


def write_files(store: Store, step: int, files: Mapping[str, Path]) -> None:
    """Publish files by name, in the place of those of these names."""
    for name, file in sorted(files.items()):
        store.write(artifact_path(step, name), file.read_bytes())


def steps_of(store: Store) -> dict[int, tuple[str, ...]]:
    """The paths of the files that are there, by step."""
    found: dict[int, list[str]] = {}
    for path in store.list(DIRECTORY):
        said = _STEP.fullmatch(path)
        if said is not None:
            found.setdefault(int(said[1]), []).append(path)
    return {step: tuple(paths) for step, paths in sorted(found.items())}


def keep_newest(store: Store, known: Collection[int], keep: int) -> set[int]:
    """Delete the files of all but the newest steps; those that stay."""
    old = sorted(known)[:-keep] if len(known) > keep else []
    for step in old:
        store.delete(list(store.list(f"{DIRECTORY}/step-{step:010}")))
    return set(known) - set(old)
