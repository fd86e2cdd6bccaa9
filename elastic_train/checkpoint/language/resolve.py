"""From a specification and the names and shapes that are there to the map of every tensor.

All problems of a kind are reported together: names that no rule selects, names that two rules select, rules
that select nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic_train.checkpoint.account import Name
from elastic_train.checkpoint.language.rule_groups import RuleGroup, grouped
from elastic_train.checkpoint.language.specification import Spec
from elastic_train.checkpoint.language.union import extract, unite
from elastic_train.checkpoint.language.virtual import Virtual, source
from elastic_train.checkpoint.lazy_arrays import TensorInfo
from elastic_train.errors import TensorMismatch

Infos = Mapping[Name, TensorInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Each tensor as boxes of stored ones.

    `rules` says which rule made a tensor; `claims` are pairs that the specification says are equal (replicas,
    ties), to read and compare them; `left` are stored tensors that are of no use.
    """

    tensors: Mapping[Name, Virtual]
    aliases: Mapping[str, str]
    rules: Mapping[Name, str]
    claims: tuple[tuple[Name, Virtual, Virtual], ...] = ()
    left: tuple[Name, ...] = ()


@dataclass(slots=True)
class _Made:
    tensors: dict[Name, Virtual] = field(default_factory=dict)
    rules: dict[Name, str] = field(default_factory=dict)
    claims: list[tuple[Name, Virtual, Virtual]] = field(default_factory=list)


def to_ours(
    spec: Spec, parts: Sequence[Infos], *, aliases: Mapping[str, str] | None = None, url: str
) -> Resolved:
    """Our tensors in terms of theirs. `parts` are the holders, one unless files are per model-parallel rank.

    TensorMismatch says which names and rules don't fit.
    """
    held: dict[Name, list[Virtual]] = {}
    for number, infos in enumerate(parts):
        for (tensor, state), info in infos.items():
            one = source(info.shape, info.dtype, tensor, state, (number,))
            held.setdefault((tensor, state), []).append(one)
    ties = {**(aliases or {}), **dict(spec.ties)}
    groups, left = grouped(spec.rules, spec.ignore, spec.rest, held, url=url, spared=ties)
    made = _Made()
    for group in groups:
        inputs = [_united(group, name, held[name], made, url) for name in group.members]
        _run(group, inputs, made, url)
    _as_buffers(spec, made)
    kept = _tied(ties, made)
    return Resolved(
        tensors=made.tensors, aliases=kept, rules=made.rules, claims=tuple(made.claims), left=left
    )


def to_theirs(
    spec: Spec, infos: Infos, *, aliases: Mapping[str, str] | None = None, parts: int = 1, url: str
) -> tuple[Resolved, ...]:
    """Their tensors in terms of ours, for each of their parts. ConfigError where a rule has no inverse."""
    rules = tuple(rule.inverse() for rule in spec.rules)
    ties = {**(aliases or {}), **dict(spec.ties)}
    held = {name: [source(info.shape, info.dtype, *name)] for name, info in infos.items()}
    for alias, target in ties.items() if spec.write_ties else ():
        held |= {(alias, s): v for (t, s), v in list(held.items()) if t == target}
    plain = {(t, _plain_state(spec, t, s)): v for (t, s), v in held.items()}
    groups, left = grouped(rules, spec.omit, spec.rest, plain, url=url, spared=ties)
    found: list[_Made] = [_Made() for _ in range(parts)]
    for group in groups:
        whole = _Made()
        _run(group, [plain[name][0] for name in group.members], whole, url)
        for part, made in enumerate(found):
            for name, tensor in whole.tensors.items():
                piece = _extracted(group, tensor, part, parts, url)
                if piece is not None:
                    _add(made, name, piece, group.rule.label, url)
    return tuple(Resolved(tensors=m.tensors, aliases={}, rules=m.rules, left=left) for m in found)


def _united(group: RuleGroup, name: Name, parts: list[Virtual], made: _Made, url: str) -> Virtual:
    try:
        whole = unite(group.rule.union, parts)
    except ValueError as error:
        raise _misfit(group, name, str(error), url) from error
    if group.rule.union.kind == "replicated":
        made.claims += [(name, parts[0], other) for other in parts[1:]]
    return whole


def _extracted(group: RuleGroup, tensor: Virtual, part: int, parts: int, url: str) -> Virtual | None:
    if parts == 1:
        return tensor
    try:
        return extract(group.rule.union, tensor, part, parts)
    except ValueError as error:
        raise _misfit(group, group.members[0], str(error), url) from error


def _run(group: RuleGroup, tensors: list[Virtual], made: _Made, url: str) -> None:
    """Perform a group's operations and give the results their names."""
    for operation in group.rule.operations:
        try:
            tensors = operation.apply(tensors)
        except ValueError as error:
            name = f"{type(operation).__name__.lower()}: {error}"
            raise _misfit(group, group.members[0], name, url) from error
    names = group.outputs(len(tensors))
    if len(names) != len(tensors):
        problem = f"makes {len(tensors)} tensors, and `to` names {len(names)}"
        raise _misfit(group, group.members[0], problem, url)
    for name, tensor in zip(names, tensors, strict=True):
        _add(made, (name, group.state), tensor, group.rule.label, url)


def _add(made: _Made, name: Name, tensor: Virtual, label: str, url: str) -> None:
    if name in made.tensors:
        raise TensorMismatch(
            url=url, problem=f"{made.rules[name]} and {label} both make {name[0]} ({name[1]})."
        )
    made.tensors[name] = tensor
    made.rules[name] = label


def _as_buffers(spec: Spec, made: _Made) -> None:
    for tensor, state in list(made.tensors):
        if state == "param" and any(p.match(tensor) for p in spec.buffers):
            made.tensors[tensor, "buffer"] = made.tensors.pop((tensor, state))
            made.rules[tensor, "buffer"] = made.rules.pop((tensor, state))


def _plain_state(spec: Spec, tensor: str, state: str) -> str:
    return "param" if state == "buffer" and any(p.match(tensor) for p in spec.buffers) else state


def _tied(ties: Mapping[str, str], made: _Made) -> dict[str, str]:
    """Leave one of two tied tensors, with a claim that the other is the same; the aliases that hold."""
    for alias, target in ties.items():
        for name in [n for n in made.tensors if n[0] == alias]:
            kept = (target, name[1])
            tensor = made.tensors.pop(name)
            label = made.rules.pop(name)
            if kept in made.tensors:
                made.claims.append((name, made.tensors[kept], tensor))
            else:  # a system that keeps only one of them may have kept this one
                made.tensors[kept] = tensor
                made.rules[kept] = label
    there = {tensor for tensor, _ in made.tensors}
    return {alias: target for alias, target in ties.items() if target in there}


def _misfit(group: RuleGroup, name: Name, problem: str, url: str) -> TensorMismatch:
    return TensorMismatch(url=url, problem=f"{group.rule.label}, {name[0]} ({name[1]}): {problem}.")
