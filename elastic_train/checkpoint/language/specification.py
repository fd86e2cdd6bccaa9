"""A specification: how the tensors of a foreign system ("theirs") correspond to ours, as values.

`Spec(rules=(Rule(select=("h.{l}.attn.c_attn.weight",), to=("h.{l}.q.weight", ...), operations=(...)),))`. The
direction is from theirs to ours; `inverse` turns it around.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from elastic_train.checkpoint.language.cuts import Cuts
from elastic_train.checkpoint.language.operations import Operation
from elastic_train.checkpoint.language.pattern import Pattern
from elastic_train.errors import ConfigError

Kind = Literal["unique", "replicated", "fragment", "average"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Union:
    """How the parts (files of model-parallel ranks) that hold one name become one tensor.

    `unique`: one part has it. `replicated`: all have the same. `fragment`: each has a block along `dim`, in
    the order of the parts; with `sub_fragments` each of those was cut on its own, with `widths` into parts of
    these sizes: one number per part, for all sub-fragments or [sub-fragment][part]. `average`: the mean of
    all; lossy, so import only.
    """

    kind: Kind = "unique"
    dim: int = 0
    sub_fragments: Cuts | None = None
    widths: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Tensors that match `select` are united, operated on, and named by `to`.

    Captures on both sides tell the groups apart. One capture may be on one side only: its values must be 0,
    1, ... and number the tensors that are stacked or unstacked. `states` renames states; `only` limits the
    rule to some of them (of `select`'s side). `optional` rules may match nothing.
    """

    select: tuple[Pattern, ...]
    to: tuple[Pattern, ...]
    union: Union = Union()
    operations: tuple[Operation, ...] = ()
    only: tuple[str, ...] | None = None
    states: tuple[tuple[str, str], ...] = ()
    optional: bool = False
    label: str = "rule"

    def __post_init__(self) -> None:
        for key, patterns in (("select", self.select), ("to", self.to)):
            if not patterns:
                raise ConfigError(field=f"{self.label}, {key}", problem="names no tensor.")
            for pattern in patterns[1:]:
                if set(pattern.captures) != set(patterns[0].captures):
                    raise ConfigError(
                        field=f"{self.label}, {key}",
                        problem=f"{pattern.text!r} and {patterns[0].text!r} capture different words.",
                    )
        kinds = {name: kind for p in (*self.select, *self.to) for name, kind in p.kinds.items()}
        object.__setattr__(self, "select", tuple(p.with_kinds(kinds) for p in self.select))
        object.__setattr__(self, "to", tuple(p.with_kinds(kinds) for p in self.to))
        if len(self.numbered) > 1:
            raise ConfigError(
                field=f"{self.label}, to",
                problem=f"{', '.join(sorted(self.numbered))} are captured on one side only; one may be.",
            )

    @property
    def numbered(self) -> frozenset[str]:
        """The capture that is on one side only and numbers stacked tensors."""
        return frozenset(self.select[0].captures) ^ frozenset(self.to[0].captures)

    def inverse(self) -> Rule:
        """The rule from ours to theirs, or ConfigError with the operation that has no inverse."""
        undone: list[Operation] = []
        for operation in reversed(self.operations):
            back = operation.inverse()
            if isinstance(back, str):
                raise ConfigError(field=self.label, problem=f"can't be exported: {back}.")
            undone.append(back)
        if self.union.kind == "average":
            raise ConfigError(field=self.label, problem="can't be exported: an average has no inverse.")
        renamed = dict(self.states)
        if len(set(renamed.values())) < len(renamed):
            raise ConfigError(field=self.label, problem="can't be exported: two states become one.")
        return replace(
            self,
            select=self.to,
            to=self.select,
            operations=tuple(undone),
            only=None if self.only is None else tuple(renamed.get(s, s) for s in self.only),
            states=tuple((ours, theirs) for theirs, ours in self.states),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Rules, and what no rule is for.

    `ties`: our alias -> our name that holds the fragments; export leaves aliases out, or writes both with
    `write_ties`. `ignore`: theirs that are of no use; `omit`: ours that they don't want. `buffers`: our names
    that are buffers and no parameters. `rest`: what becomes of other names.
    """

    rules: tuple[Rule, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    write_ties: bool = False
    ignore: tuple[Pattern, ...] = ()
    omit: tuple[Pattern, ...] = ()
    buffers: tuple[Pattern, ...] = ()
    rest: Literal["error", "keep"] = "error"
    origin: str = "specification"

    def __post_init__(self) -> None:
        alias = dict(self.ties)
        for name, target in self.ties:
            if target in alias:
                raise ConfigError(
                    field=f"{self.origin}, ties.{name!r}", problem=f"{target} is an alias itself."
                )


IDENTITY = Spec(rest="keep", origin="no specification")
"""Their names and shapes are ours."""
