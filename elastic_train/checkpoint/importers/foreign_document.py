"""The document of a foreign checkpoint: the scalars that a run needs, and what can't be had from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.importers.pickle_free import OddTensor, Opaque, TensorRef
from elastic_train.checkpoint.importers.torch_file import TorchFile

_DEPTH = 32
FEW = 8
"""Lines of an account that one entry of a file may have."""
NO_DATA_CURSOR = "the position in the data: a run goes on with the sample order of its own seed at this step"
NO_RANDOM_STATE = "random states: a run draws from its own seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """A parameter group of an optimizer."""

    params: tuple[str, ...]
    hyperparameters: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """What the optimizer holds beside the rows of its tensors."""

    groups: tuple[ParameterGroup, ...] = ()
    scalars: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)  # fqn -> state -> value and dtype
    states: tuple[tuple[str, str], ...] = ()
    kind: str | None = None  # its class, where that is known
    lost: tuple[str, ...] = ()  # settings that are neither numbers nor text


def document(
    *,
    step: int | None,
    aliases: Mapping[str, str],
    optimizer: OptimizerState,
    system: str,
    facts: Mapping[str, Json],
    not_restored: Iterable[str],
    assumed: Iterable[str] = (),
) -> dict[str, Json]:
    """The fields of a run's own checkpoints, and `foreign`: the system, its facts, what isn't restored, and
    what had to be assumed. Without a `step` it is the optimizer's.
    """
    taken = list(assumed)
    if step is None and (step := _steps_of(optimizer)) is not None:
        taken.append(f"step {step}: so many steps has the optimizer made of every parameter")
    return {
        "step": step,
        "vote": None,
        "evaluated": 0,
        "trainable": sorted(fqn for group in optimizer.groups for fqn in group.params),
        "aliases": dict(aliases),
        "optimizer": {
            "class": optimizer.kind or _kind(optimizer),
            "groups": [
                {"params": list(g.params), "hyperparameters": dict(g.hyperparameters)}
                for g in optimizer.groups
            ],
            "scalars": {fqn: dict(values) for fqn, values in sorted(optimizer.scalars.items())},
            "states": [list(name) for name in sorted(optimizer.states)],
        },
        "schedule": None,
        "foreign": {
            "system": system,
            **facts,
            "not_restored": [*not_restored, *optimizer.lost, NO_DATA_CURSOR, NO_RANDOM_STATE],
            **({"assumed": taken} if taken else {}),
        },
    }


def hyperparameters(file: TorchFile, group: Mapping[str, Any]) -> dict[str, Json]:
    """A group's settings; what is no number, text or flag is left out, and `lost_settings` names it."""
    found: dict[str, Json] = {}
    for name, value in group.items():
        if name not in ("params", "param_names"):
            single = file.scalar(value) if _is_number(value) else value
            kept, lost = plain(single)
            if not lost:
                found[str(name)] = list(kept) if isinstance(kept, tuple) else kept
    return found


def lost_settings(groups: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """A line for each setting that `hyperparameters` leaves out."""
    return tuple(
        dict.fromkeys(
            line
            for group in groups
            for name, value in group.items()
            if name not in ("params", "param_names") and not _is_number(value)
            for line in plain(value, f"the optimizer's {name}")[1]
        )
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, TensorRef) and value.shape in ((), (1,))


def scalar(file: TorchFile, value: Any) -> dict[str, Json]:
    """One number of an optimizer's state, with the dtype it has as a tensor."""
    if isinstance(value, TensorRef):
        return {"value": file.scalar(value), "dtype": value.dtype}
    return {"value": value}


def steps_in(facts: Any, words: Iterable[str]) -> int | None:
    """The number of steps under one of these words, if it is a number of steps."""
    for word in words:
        value = facts.get(word) if isinstance(facts, Mapping) else None
        if type(value) is int and 0 <= value < 2**63:
            return value
    return None


def in_short(lost: Iterable[str]) -> list[str]:
    """The account with one line for what one entry of a file has many of."""
    entries: dict[str, list[str]] = {}
    for line in lost:
        entries.setdefault(re.split(r"[.:\[]", line, maxsplit=1)[0], []).append(line)
    return [
        line
        for entry, lines in entries.items()
        for line in (
            lines
            if len(lines) <= FEW
            else [f"{entry}: {len(lines)} parts that are no numbers or text, as {lines[0]}"]
        )
    ]


def plain(value: Any, place: str = "") -> tuple[Json, list[str]]:
    """What of a value is numbers, text and containers of them; the places of the rest, which becomes None."""
    lost: list[str] = []
    return _plain(value, place, lost, 0), lost


def _plain(value: Any, place: str, lost: list[str], depth: int) -> Json:
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case list() | tuple() if depth < _DEPTH:
            items = [_plain(v, f"{place}[{i}]", lost, depth + 1) for i, v in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        case Mapping() if depth < _DEPTH:
            found: dict[Any, Json] = {}
            for key, item in value.items():
                if isinstance(key, str | int | float | bool):
                    found[key] = _plain(item, f"{place}.{key}" if place else str(key), lost, depth + 1)
                else:
                    lost.append(f"{place}: an entry of key {key!r:.80}")
            return found
        case TensorRef():
            lost.append(f"{place}: a tensor of {value.dtype} {list(value.shape)}")
        case Opaque():
            lost.append(f"{place}: a {value.kind}")
        case OddTensor():
            lost.append(f"{place}: {value.what}")
        case _:
            lost.append(f"{place}: a {type(value).__name__}")
    return None


def _kind(optimizer: OptimizerState) -> str:
    """Adam and AdamW are told by their states and the flag that tells one from the other."""
    adam = {state for _, state in optimizer.states} >= {"exp_avg", "exp_avg_sq"}
    if not adam:
        return "unknown"
    flags = {group.hyperparameters.get("decoupled_weight_decay", True) for group in optimizer.groups}
    return "Adam" if flags == {False} else "AdamW"


def in_groups(
    groups: Sequence[Sequence[str]], settings: Sequence[Mapping[str, Json]]
) -> tuple[ParameterGroup, ...]:
    return tuple(
        ParameterGroup(params=tuple(params), hyperparameters=own)
        for params, own in zip(groups, settings, strict=True)
    )


def _steps_of(optimizer: OptimizerState) -> int | None:
    steps = {own["step"]["value"] for own in optimizer.scalars.values() if "step" in own}
    step = next(iter(steps)) if len(steps) == 1 else None
    whole = isinstance(step, int | float) and step == step // 1 and 0 <= step < 2**53
    return int(step) if whole and step is not None else None
