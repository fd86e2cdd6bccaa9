"""Which names each rule takes, group by group: one group per combination of shared captures and state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from elastic_train.checkpoint.account import Name
from elastic_train.checkpoint.language.pattern import Pattern, near
from elastic_train.checkpoint.language.specification import Rule, Union
from elastic_train.checkpoint.language.virtual import Virtual
from elastic_train.errors import TensorMismatch

LISTED = 5
COMPARED = 500
"""Names that are compared with the patterns, to list the likeliest first."""
Held = Mapping[Name, Sequence[Virtual]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleGroup:
    """Tensors that go through a rule's operations together: by number, then in the order of `select`."""

    rule: Rule
    captures: Mapping[str, str]
    state: str  # of the results
    members: tuple[Name, ...]

    def outputs(self, count: int) -> list[str]:
        """The names of `count` results."""
        (number,) = self.rule.numbered or ("",)
        if number not in self.rule.to[0].captures:
            return [p.name(self.captures) for p in self.rule.to]
        rounds = range(count // len(self.rule.to))
        return [p.name({**self.captures, number: str(n)}) for n in rounds for p in self.rule.to]


def grouped(
    rules: Sequence[Rule],
    ignore: Sequence[Pattern],
    rest: str,
    held: Held,
    *,
    url: str,
    spared: Mapping[str, str],
) -> tuple[list[RuleGroup], tuple[Name, ...]]:
    """The groups of all rules and the names that are ignored; TensorMismatch where names and rules don't fit.

    `spared` are aliases, whose rules may select nothing.
    """
    taken: dict[int, dict[Name, tuple[int, dict[str, str]]]] = {i: {} for i in range(len(rules))}
    ignored: list[Name] = []
    groups: list[RuleGroup] = []
    unmatched: list[Name] = []
    for name in held:
        found = list(_matches(rules, name))
        dropped = any(p.match(name[0]) for p in ignore)
        if len(found) + dropped > 1:
            labels = [rules[i].label for i, _, _ in found] + ["ignore"] * dropped
            raise TensorMismatch(
                url=url, problem=f"{name[0]} ({name[1]}) is selected twice, by {' and by '.join(labels)}."
            )
        if found:
            rule, pattern, captures = found[0]
            taken[rule][name] = (pattern, captures)
        elif dropped:
            ignored.append(name)
        elif rest == "keep":
            groups.append(_identity(name))
        else:
            unmatched.append(name)
    if unmatched:
        raise TensorMismatch(url=url, problem=_unmatched(unmatched, rules))
    for index, rule in enumerate(rules):
        if not taken[index] and not rule.optional and not _spared(rule, spared):
            text = rule.select[0].text
            raise TensorMismatch(
                url=url,
                problem=f"{rule.label} selects nothing: no tensor is called {text!r}"
                f"{near(text, (tensor for tensor, _ in held))}.",
            )
        groups += _groups(rule, taken[index], held, url)
    return groups, tuple(ignored)


def _matches(rules: Sequence[Rule], name: Name) -> Iterable[tuple[int, int, dict[str, str]]]:
    tensor, state = name
    for index, rule in enumerate(rules):
        if rule.only is not None and state not in rule.only:
            continue
        for number, pattern in enumerate(rule.select):
            captures = pattern.match(tensor)
            if captures is not None:
                yield index, number, captures


def _groups(
    rule: Rule, taken: Mapping[Name, tuple[int, dict[str, str]]], held: Held, url: str
) -> list[RuleGroup]:
    (number,) = rule.numbered or ("",)
    collected = number in rule.select[0].captures
    found: dict[tuple[tuple[tuple[str, str], ...], str], dict[tuple[int, int], Name]] = {}
    for name, (pattern, captures) in taken.items():
        _check_state(rule, name, held, url)
        place = 0
        if collected:
            word = captures.pop(number)
            if not word.isdecimal() or str(int(word)) != word:
                raise TensorMismatch(
                    url=url, problem=f"{rule.label}: {name[0]} is numbered by {word!r}, not by a number."
                )
            place = int(word)
        found.setdefault((tuple(captures.items()), name[1]), {})[place, pattern] = name
    renamed = dict(rule.states)
    groups: list[RuleGroup] = []
    for (captures, state), members in found.items():
        rounds = 1 + max(place for place, _ in members)
        grid = [(place, pattern) for place in range(rounds) for pattern in range(len(rule.select))]
        for place, pattern in grid:
            if (place, pattern) not in members:
                name = rule.select[pattern].name({**dict(captures), number: str(place)})
                other = next(iter(members.values()))[0]
                raise TensorMismatch(
                    url=url,
                    problem=f"{rule.label}: {other} ({state}) is there without {name}, which it goes with.",
                )
        groups.append(
            RuleGroup(
                rule=rule,
                captures=dict(captures),
                state=renamed.get(state, state),
                members=tuple(members[at] for at in grid),
            )
        )
    return groups


def _check_state(rule: Rule, name: Name, held: Held, url: str) -> None:
    """Operations are about the parameter's shape: a state of another shape needs a rule of its own."""
    tensor, state = name
    parameter = held.get((tensor, "param"))
    if rule.only is not None or not parameter or not (rule.operations or rule.union != Union()):
        return
    if parameter[0].shape != held[name][0].shape:
        raise TensorMismatch(
            url=url,
            problem=f"{rule.label}: {tensor} ({state}) has the shape {held[name][0].shape} and the parameter "
            f"{parameter[0].shape}; limit the rule with `only` and write another one for {state}.",
        )


def _identity(name: Name) -> RuleGroup:
    pattern = Pattern("{name...}")
    rule = Rule(select=(pattern,), to=(pattern,), label="rest")
    return RuleGroup(rule=rule, captures={"name": name[0]}, state=name[1], members=(name,))


def _spared(rule: Rule, spared: Mapping[str, str]) -> bool:
    patterns = (*rule.select, *rule.to)
    return any(p.match(alias) for alias in spared for p in patterns)


def _unmatched(names: Sequence[Name], rules: Sequence[Rule]) -> str:
    patterns = [p.text for rule in rules for p in rule.select]
    compared = {tensor for tensor, _ in names[:COMPARED]}
    alike = {t: max((SequenceMatcher(None, t, p).ratio() for p in patterns), default=0.0) for t in compared}
    names = sorted(names, key=lambda name: -alike.get(name[0], 0.0))  # what a mistyped rule means comes first
    lines = [f"{tensor} ({state}){near(tensor, patterns)}" for tensor, state in names[:LISTED]]
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"no rule selects {', '.join(lines)}{more}."
