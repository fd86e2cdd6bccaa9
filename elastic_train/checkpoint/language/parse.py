"""A specification as TOML or as the same Python values. Errors name the file, the rule and the key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from elastic_train.checkpoint.language.operations import (
    Cast,
    Fuse,
    Operation,
    Resize,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from elastic_train.checkpoint.language.specification import Rule, Spec, Union
from elastic_train.checkpoint.language.toml_table import Table
from elastic_train.errors import ConfigError

VERSION = 1
OPERATIONS = ("split", "fuse", "stack", "unstack", "transpose", "strip", "pad", "cast")
KINDS = ("unique", "replicated", "fragment", "average")


def parse(said: str | Mapping[str, Any], *, origin: str = "specification") -> Spec:
    """The specification of a TOML document, or of what it would be in Python; ConfigError says where it is
    wrong.
    """
    try:
        document = tomllib.loads(said) if isinstance(said, str) else _plain(said)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(field=origin, problem=f"isn't TOML: {error}.") from error
    table = Table(document, origin)
    version = table.take("version", int, VERSION)
    if version != VERSION:
        raise table.wrong("version", f"{version} is unknown; this release reads {VERSION}")
    rules = table.take("rule", list, [])
    spec = Spec(
        rules=tuple(_rule(Table(r, f"{origin}, rule {i}")) for i, r in enumerate(rules, start=1)),
        ties=table.pairs("ties"),
        write_ties=table.take("write_ties", bool, False),
        ignore=table.patterns("ignore"),
        omit=table.patterns("omit"),
        buffers=table.patterns("buffers"),
        rest=table.choice("rest", ("error", "keep"), "error"),
        origin=origin,
    )
    table.finish()
    return spec


def _plain(value: Any) -> Any:
    """Any mappings and sequences as the dictionaries and lists that TOML gives."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _rule(table: Table) -> Rule:
    select = table.patterns("select")
    to = table.patterns("to") or select
    union = _union(table)
    operations = table.take("operations", list, [])
    only = table.strings("only") or None
    states = table.pairs("states")
    optional = table.take("optional", bool, False)
    table.finish()
    return Rule(
        select=select,
        to=to,
        union=union,
        operations=tuple(
            _operation(Table(o, f"{table.place}, operation {i}")) for i, o in enumerate(operations, start=1)
        ),
        only=only,
        states=states,
        optional=optional,
        label=table.place,
    )


def _union(table: Table) -> Union:
    kind = table.choice("kind", KINDS, "unique")
    if kind != "fragment":
        return Union(kind=kind)
    sub_fragments = None
    if table.has("sub_fragments"):
        inner = Table(table.take("sub_fragments", dict), f"{table.place}, sub_fragments")
        sub_fragments = inner.cuts()
        inner.finish()
    return Union(kind=kind, dim=table.take("dim", int, 0), sub_fragments=sub_fragments, widths=_widths(table))


def _widths(table: Table) -> tuple[tuple[int, ...], ...] | None:
    """One list for all sub-fragments, or a list for each."""
    value = table.take("widths", list)
    if value is None:
        return None
    rows = value if value and all(isinstance(row, list) for row in value) else [value]
    if not all(isinstance(n, int) for row in rows for n in row):
        raise table.wrong("widths", f"must be a list of numbers, or a list of such lists, not {value!r}")
    return tuple(tuple(row) for row in rows)


def _operation(table: Table) -> Operation:
    op = table.choice("op", OPERATIONS)
    try:
        operation = _build(op, table)
    except ValueError as error:
        raise table.wrong(op, str(error)) from error
    table.finish()
    return operation


def _build(op: str, table: Table) -> Operation:
    match op:
        case "split":
            cuts = table.cuts()
            if cuts is None:
                raise table.wrong("parts", "is missing; or say sizes, or heads")
            return Split(dim=table.take("dim", int, 0), cuts=cuts)
        case "fuse":
            return Fuse(dim=table.take("dim", int, 0), cuts=table.cuts())
        case "stack":
            return Stack(dim=table.take("dim", int, 0))
        case "unstack":
            return Unstack(dim=table.take("dim", int, 0))
        case "transpose":
            return Transpose(order=table.numbers("order"))
        case "strip" | "pad":
            before = table.take("padded" if op == "strip" else "unpadded", int)
            return Resize(dim=table.take("dim", int, 0), before=before, after=table.need("size", int))
        case _:
            return Cast(dtype=table.need("to", str), back=table.take("back", str))
