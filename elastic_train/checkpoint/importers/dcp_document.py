"""The scalars of a checkpoint of torch.distributed.checkpoint, and whose its optimizer's numbers are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.importers.dcp_metadata import Metadata
from elastic_train.checkpoint.importers.dcp_names import Names
from elastic_train.checkpoint.importers.foreign_document import (
    OptimizerState,
    ParameterGroup,
    document,
    in_short,
    steps_in,
)
from elastic_train.checkpoint.importers.numbered_parameters import match, shape_of

STEPS = ("step", "global_step", "train_state.step", "trainer.step", "iteration")
"""Keys under which systems keep the number of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDocument:
    """The names with those of numbers filled in, and what came of that."""

    names: Names
    lost: Sequence[str] = ()
    assumed: Sequence[str] = ()


def tell_numbers(
    names: Names, metadata: Metadata, values: Mapping[str, Any], given: Sequence[str] | None
) -> ReadDocument:
    """Names for an optimizer that has numbers; where they can't be told, it is left out as a whole."""
    if all(name.number is None for name in names.tensors.values()):
        return ReadDocument(names=names)
    groups: dict[int, list[int]] = {}
    recorded: dict[int, str] = {}
    for key, (group, word) in names.hyperparameters.items():
        if isinstance(group, int) and word == "params" and isinstance(values.get(key), list | tuple):
            groups[group] = [n for n in values[key] if isinstance(n, int)]
    for key, (group, word) in names.hyperparameters.items():
        if isinstance(group, int) and word == "param_names" and isinstance(values.get(key), list | tuple):
            recorded |= dict(zip(groups.get(group, ()), values[key], strict=False))
    states: dict[int, dict[str, tuple[int, ...]]] = {}
    for key, name in names.tensors.items():
        if name.number is not None:
            states.setdefault(name.number, {})[name.state] = metadata.tensors[key].shape
    if not groups:
        groups = {0: sorted(states)}
    parameters = {n.tensor: metadata.tensors[k].shape for k, n in names.tensors.items() if n.state == "param"}
    found: Mapping[int, str] | str = recorded
    assumed: list[str] = []
    numbered = [groups[g] for g in sorted(groups)]
    if set(states) - recorded.keys() or not set(recorded.values()) <= parameters.keys():
        known = parameters
        if given is not None:
            known = {name: parameters[name] for name in given if name in parameters}
            assumed = ["the optimizer numbers its parameters, and they were matched with the names given"]
        found = match(
            numbered, {n: shape_of(s) for n, s in states.items()}, known, in_order=given is not None
        )
    if isinstance(found, str) or set(states) - found.keys():
        why = found if isinstance(found, str) else "it has states of parameters that are in no group"
        return ReadDocument(
            names=replace(
                names,
                tensors={k: n for k, n in names.tensors.items() if n.number is None},
                hyperparameters={},
            ),
            lost=[
                f"the optimizer: {why}. Give the names of its parameters in their order with "
                "`ckpt import --names FILE`, or save it with get_optimizer_state_dict"
            ],
        )
    reported = {
        key: name if name.number is None else replace(name, tensor=found[name.number])
        for key, name in names.tensors.items()
    }
    return ReadDocument(names=replace(names, tensors=reported), assumed=assumed)


def document_of(
    names: Names,
    scalars: Mapping[str, tuple[str, Any]],
    values: Mapping[str, Any],
    lost: Iterable[str],
    aliases: Mapping[str, str],
    assumed: Iterable[str],
    step: int | None = None,
) -> dict[str, Json]:
    """The document; objects of which nothing is known are in `foreign.objects`. `step` is what is said beside
    it, for where it says none itself.
    """
    groups: dict[int | str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for key, value in values.items():
        if key in names.hyperparameters:
            group, name = names.hyperparameters[key]
            groups.setdefault(group, {})[name] = list(value) if isinstance(value, tuple) else value
        else:
            rest[key] = value
    own: dict[str, dict[str, Any]] = {}
    numbers: dict[int, str] = {}
    for key, name in names.tensors.items():
        if name.number is not None:
            numbers[name.number] = name.tensor
        if key in scalars:
            dtype, value = scalars[key]
            own.setdefault(name.tensor, {})[name.state] = {"value": value, "dtype": dtype}
    rest |= {key: scalars[key][1] for key in names.beside if key in scalars}
    states = tuple(
        (name.tensor, name.state)
        for key, name in names.tensors.items()
        if name.optimizer and key not in scalars
    )
    own_step = steps_in(rest, STEPS)
    used = (
        next((word for word in STEPS if rest.get(word) is own_step), None) if own_step is not None else None
    )
    return document(
        step=step if own_step is None else own_step,
        aliases=aliases,
        optimizer=OptimizerState(groups=_groups(groups, numbers), scalars=own, states=states),
        system="torch.distributed.checkpoint",
        facts={"objects": rest},
        not_restored=in_short(
            [*lost, *(f"{k}: it is in foreign.objects" for k in sorted(rest) if k != used)]
        ),
        assumed=assumed,
    )


def _groups(
    groups: Mapping[int | str, dict[str, Any]], numbers: Mapping[int, str]
) -> tuple[ParameterGroup, ...]:
    """The groups as they were numbered; where they are per parameter, those with equal settings in one."""
    made: list[tuple[list[str], dict[str, Any]]] = []
    for key in sorted(groups, key=lambda k: (isinstance(k, str), k)):
        settings = dict(groups[key])
        params = settings.pop("params", [])
        recorded = settings.pop("param_names", [])
        if isinstance(key, int):
            if numbers:
                named = dict(zip(params, recorded, strict=False))
                params = [numbers.get(n) or named.get(n) for n in params]
            made.append(([p for p in params if isinstance(p, str)], settings))
            continue
        for other, known in made:
            if known == settings:
                other.append(key)
                break
        else:
            made.append(([key], settings))
    return tuple(ParameterGroup(params=tuple(params), hyperparameters=settings) for params, settings in made)
