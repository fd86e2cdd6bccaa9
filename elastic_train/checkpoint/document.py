"""Scalars as canonical JSON: what goes in comes out equal, and equal values have equal bytes.

Keys sorted, no spaces, UTF-8, integers of any size, floats in their shortest exact form. What JSON has no
word for is an object with one key that begins with `$`: `{"$float": "nan" | "inf" | "-inf"}`, `{"$tuple":
[...]}`, `{"$bytes": base64}`, and `{"$map": [[key, value], ...]}` for mappings with keys that aren't strings
or that begin with `$`. No pickle.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_train.checkpoint.validate.manifest_rows import malformed
from elastic_train.checkpoint.validate.state import (
    MOST_DEEP,
    check_count,
    check_depth,
    check_state,
    too_many,
)
from elastic_train.errors import ChecksumMismatch, ConfigError, FormatUnsupported

Json = Any
"""None, bool, int, float, str, bytes, list, tuple and mappings of these."""

FORMAT = "elastic_train.checkpoint"
VERSION = 1
MOST_INT = 10**4000
"""Python reads no number of more digits than 4,300."""
FEATURES: frozenset[str] = frozenset({"reshard"})
"""Features that a state file may require and this release knows; what they mean is in docs/format.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """`state.json`: the scalars of a checkpoint and what a reader must know.

    `aliases` maps the name of a tied tensor to the name under which its fragments are stored, `views` the
    name of a part of a tensor to where in that tensor it is (views.py).
    """

    document: Mapping[str, Json]
    aliases: Mapping[str, str] = field(default_factory=dict)
    views: Mapping[str, Json] = field(default_factory=dict)
    requires: tuple[str, ...] = ()

    def encode(self) -> bytes:
        value = {
            "format": FORMAT,
            "version": VERSION,
            "requires": list(self.requires),
            "aliases": dict(self.aliases),
            "document": self.document,
        }
        return encode(value | ({"views": dict(self.views)} if self.views else {}))

    @classmethod
    def decode(cls, data: bytes, *, url: str) -> StateFile:
        value = decode(data, url=url)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise FormatUnsupported(url=url, problem=f"its state file doesn't say {FORMAT!r}.")
        check_version(value.get("version"), value.get("requires", []), url=url)
        check_state(value, url=url)
        return cls(
            document=value["document"],
            aliases=value["aliases"],
            views=value.get("views", {}),
            requires=tuple(value.get("requires", ())),
        )


def check_version(version: Any, requires: Any, *, url: str) -> None:
    """FormatUnsupported unless this release reads the version and knows all required features."""
    if type(version) is not int or not 1 <= version <= VERSION:
        raise FormatUnsupported(
            url=url,
            problem=f"it has format version {version}, this release reads up to {VERSION}. "
            "Upgrade elastic_train.",
        )
    if not isinstance(requires, list | tuple) or not all(isinstance(name, str) for name in requires):
        raise malformed(url, "the features that it requires aren't names")
    unknown = sorted(set(requires) - FEATURES)
    if unknown:
        raise FormatUnsupported(
            url=url,
            problem=f"it requires {', '.join(unknown)}, unknown to this release. Upgrade elastic_train.",
        )


def encode(value: Json) -> bytes:
    """Canonical bytes of a value, which `decode` takes; ConfigError names the place of what can't be
    stored.
    """
    plain = _plain(value, "document", 0)
    data = json.dumps(
        plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()
    if too_many(data):
        parts = value.items() if isinstance(value, Mapping) else ()
        largest = max(parts, key=lambda item: len(repr(item[1])), default=("document", None))[0]
        raise _cannot(str(largest), f"a value of {too_many(data)} lists and mappings")
    return data


def decode(data: bytes, *, url: str) -> Json:
    """The value of canonical bytes."""
    check_count(data, url=url)
    try:
        value = json.loads(data, object_pairs_hook=_object, parse_constant=_no_number)
    except (ValueError, TypeError, RecursionError) as error:
        said = str(error)[:200]
        raise ChecksumMismatch(url=url, problem=f"its state file can't be read ({said}).") from error
    check_depth(value, url=url)
    return value


def _plain(value: Json, place: str, depth: int) -> Json:
    if depth >= MOST_DEEP:
        raise _cannot(place[:200], f"something inside more than {MOST_DEEP} containers")
    match value:
        case None | bool():
            return value
        case str():
            return _text(value, place)
        case int():
            if abs(value) >= MOST_INT:
                raise _cannot(place, "a number of more than 4,000 digits")
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case list():
            return [_plain(v, f"{place}[{i}]", depth + 1) for i, v in enumerate(value)]
        case tuple():
            return {"$tuple": [_plain(v, f"{place}[{i}]", depth + 1) for i, v in enumerate(value)]}
        case Mapping():
            if all(isinstance(k, str) and not k.startswith("$") for k in value):
                return {_text(k, place): _plain(v, f"{place}.{k}", depth + 1) for k, v in value.items()}
            entries = [
                [_plain(k, f"{place} key", depth + 1), _plain(v, f"{place}.{k}", depth + 1)]
                for k, v in value.items()
            ]
            return {"$map": entries}
        case _:
            raise _cannot(place, f"a {type(value).__name__}")


def _text(value: str, place: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _cannot(place, f"text that is no Unicode ({error.reason})") from error
    return str(value)


def _cannot(place: str, what: str) -> ConfigError:
    return ConfigError(
        field=place,
        problem=f"{what} can't be stored as a scalar.",
        remedy="Use numbers, strings, lists, tuples and dictionaries; tensors go into fragments.",
    )


def _object(pairs: list[tuple[str, Json]]) -> Json:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name is there twice in one object")
    if len(value) == 1:
        match next(iter(value.items())):
            case "$float", "nan" | "inf" | "-inf" as text:
                return float(text)
            case "$tuple", list(items):
                return tuple(items)
            case "$bytes", str(text):
                return base64.b64decode(text, validate=True)
            case "$map", list(entries):
                made = dict(entries)
                if len(made) != len(entries):
                    raise ValueError("a key is there twice in one mapping")
                return made
            case ("$float" | "$tuple" | "$bytes" | "$map") as name, _:
                raise ValueError(f"a {name} that holds something else")
            case _:
                pass
    return value


def _no_number(text: str) -> Json:
    raise ValueError(f"{text} is no number of JSON")
