"""Files that options name: a specification, names, settings. Each error says which option and which file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from elastic_train.checkpoint.language.parse import parse
from elastic_train.checkpoint.language.specification import IDENTITY, Spec
from elastic_train.errors import ConfigError


def specification(path: str | None) -> Spec:
    if path is None:
        return IDENTITY
    file = Path(path)
    if not file.is_file():
        raise ConfigError(field="--spec", problem=f"there is no file {path}.")
    return parse(_text(file, "--spec"), origin=file.name)


def settings_of(path: str) -> dict[str, Any]:
    """What becomes config.json: an object of JSON, read before anything is written."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(field="--config", problem=f"there is no file {path}.")
    try:
        settings = json.loads(_text(file, "--config"))
    except ValueError as error:
        raise ConfigError(field="--config", problem=f"{path} is no JSON: {error}.") from error
    if not isinstance(settings, dict):
        raise ConfigError(field="--config", problem=f"{path} holds no JSON object.")
    return cast("dict[str, Any]", settings)


def parameter_names_of(path: str) -> list[str]:
    """One name a line, or a JSON list."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(field="--names", problem=f"there is no file {path}.")
    text = _text(file, "--names")
    if not text.lstrip().startswith("["):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(field="--names", problem=f"{path} is no JSON list ({error}).") from error
    if not all(isinstance(name, str) for name in found):
        raise ConfigError(field="--names", problem=f"{path} has an entry that is no name.")
    return found


def _text(file: Path, field: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(field=field, problem=f"{file} can't be read: {error}.") from error
