"""An optimizer's state dict by the names of parameters, from each of the forms in which torch saves one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.importers.foreign_document import (
    OptimizerState,
    ParameterGroup,
    hyperparameters,
    lost_settings,
    scalar,
)
from elastic_train.checkpoint.importers.foreign_rows import whole_row
from elastic_train.checkpoint.importers.numbered_parameters import Shape, match, shape_of
from elastic_train.checkpoint.importers.pickle_free import TensorRef
from elastic_train.checkpoint.importers.torch_file import TorchFile, check_readable
from elastic_train.checkpoint.manifest import Row
from elastic_train.errors import FormatUnsupported, TensorMismatch

Canonical = Callable[[str], str]
"""A name without what wrappers added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedState:
    """fqn -> state name -> value, and the groups with fqns as `params`."""

    state: Mapping[str, Mapping[str, Any]]
    groups: tuple[Mapping[str, Any], ...]
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What is known of the model's parameters: their shapes, and whether these are in the model's order.

    `names` are the parameters in the order in which they were given to the optimizer, as the caller says.
    """

    shapes: Mapping[str, Shape]
    in_order: bool = False
    why: str = ""  # what the order is taken from
    names: Sequence[str] | None = None


def is_optimizer(value: Any) -> bool:
    """Whether a value has the form of an optimizer's state dict."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
    )


def by_name(
    tree: Mapping[Any, Any], canonical: Canonical, *, url: str, parameters: Parameters | None = None
) -> NamedState:
    """The state by canonical fqn; FormatUnsupported where the file has only numbers."""
    if "state" not in tree and "param_groups" not in tree:
        return _flattened(tree, canonical, url)
    state: dict[Any, dict[str, Any]] = tree.get("state") or {}
    groups: list[dict[str, Any]] = tree.get("param_groups") or []
    names: dict[Any, str] = {}
    assumed: tuple[str, ...] = ()
    said = [group.get("param_names", list(group["params"])) for group in groups]
    if all(
        len(own) == len(list(g["params"])) and all(isinstance(n, str) for n in own)
        for g, own in zip(groups, said, strict=True)
    ):
        for group, own in zip(groups, said, strict=True):
            names |= {n: canonical(name) for n, name in zip(group["params"], own, strict=True)}
    else:
        names, assumed = _numbers(state, groups, parameters or Parameters(shapes={}), url)
    if not groups:
        names = {key: canonical(key) for key in state if isinstance(key, str)}
    if strange := [key for key in state if key not in names]:
        raise TensorMismatch(
            url=url, problem=f"its optimizer has a state for {strange[0]!r}, which is in no group."
        )
    return NamedState(
        state={names[key]: own for key, own in state.items()},
        groups=tuple({**g, "params": [names[p] for p in g["params"]]} for g in groups),
        assumed=assumed,
    )


def _numbers(
    state: Mapping[Any, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], known: Parameters, url: str
) -> tuple[dict[Any, str], tuple[str, ...]]:
    """The names behind numbers, and what of that isn't proved."""
    numbered = [list(group["params"]) for group in groups]
    shapes = {
        n: shape_of({k: v.shape for k, v in state.get(n, {}).items() if isinstance(v, TensorRef)})
        for group in numbered
        for n in group
    }
    given, why = known.names, known.why
    if given is not None:
        if strange := [name for name in given if name not in known.shapes]:
            raise TensorMismatch(
                url=url, problem=f"{strange[0]} is among the names given and not in the model."
            )
        known = Parameters(shapes={name: known.shapes[name] for name in given}, in_order=True)
        why = "the names given"
    found = match(numbered, shapes, known.shapes, in_order=known.in_order)
    if isinstance(found, str):
        raise FormatUnsupported(
            url=url,
            problem=f"its optimizer state is by number, which doesn't say whose it is ({found}). Give the "
            "names of the optimizer's parameters, in their order, with `ckpt import --names FILE`, or save "
            "it with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, build the optimizer "
            "from named_parameters(), or save the model alone.",
        )
    if not known.in_order:
        return dict(found), ()
    return dict(found), (
        f"the optimizer numbers its parameters, and they were matched in the order of {why}, which their "
        "shapes fit in no other way",
    )


def rows_and_scalars(
    file: TorchFile,
    name: str,
    states: Mapping[str, Mapping[str, Any]],
    aliases: Mapping[str, str],
    shapes: Mapping[str, Shape],
) -> tuple[list[Row], dict[str, dict[str, Any]]]:
    """Rows of the states that are tensors of a parameter, in the file called `name`; numbers as scalars."""
    rows: list[Row] = []
    scalars: dict[str, dict[str, Any]] = {}
    for fqn, own in states.items():
        owner = aliases.get(fqn, fqn)
        for state, value in own.items():
            check_readable(value, f"{fqn} ({state})", url=file.url)
            number = (
                isinstance(value, TensorRef)
                and value.shape == ()
                and (shapes[owner] != () or state == "step")
            )
            if isinstance(value, TensorRef) and not number:
                rows.append(whole_row(file, name, owner, state, value))
            elif number or value is None or isinstance(value, bool | int | float | str):
                scalars.setdefault(owner, {})[state] = scalar(file, value)
            else:
                raise FormatUnsupported(
                    url=file.url, problem=f"the optimizer keeps a {type(value).__name__} as {state} of {fqn}."
                )
    return rows, scalars


def optimizer_in(
    file: TorchFile,
    name: str,
    states: NamedState,
    aliases: Mapping[str, str],
    shapes: Mapping[str, Shape],
) -> tuple[list[Row], OptimizerState]:
    """The rows and the scalars of an optimizer that is stored in one file."""
    trained = {fqn for g in states.groups for fqn in g["params"]}
    if strange := sorted((trained | set(states.state)) - shapes.keys()):
        raise TensorMismatch(
            url=file.url,
            problem=f"the optimizer has {strange[0]} and the model hasn't; {len(strange)} names differ.",
        )
    rows, scalars = rows_and_scalars(file, name, states.state, aliases, shapes)
    return rows, OptimizerState(
        groups=tuple(
            ParameterGroup(
                params=tuple(dict.fromkeys(aliases.get(p, p) for p in g["params"])),
                hyperparameters=hyperparameters(file, g),
            )
            for g in states.groups
        ),
        scalars=scalars,
        states=tuple(sorted((r.tensor, r.state) for r in rows)),
        lost=lost_settings(states.groups),
    )


def _flattened(tree: Mapping[Any, Any], canonical: Canonical, url: str) -> NamedState:
    """`state.<fqn>.<name>` and `param_groups.<fqn>.<name>`; parameters with equal settings are one group."""
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in tree.items():
        kind, _, rest = str(key).partition(".")
        fqn, _, name = rest.rpartition(".")
        if kind not in ("state", "param_groups") or not fqn:
            raise FormatUnsupported(
                url=url, problem=f"its optimizer has an entry {key!r}, in no form known here."
            )
        (state if kind == "state" else settings).setdefault(canonical(fqn), {})[name] = value
    return NamedState(state=state, groups=tuple(_grouped(settings.items())))


def _grouped(settings: Iterable[tuple[str, dict[str, Any]]]) -> Iterable[dict[str, Any]]:
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for fqn, own in settings:
        own = {k: v for k, v in own.items() if k != "params"}
        members = next((m for said, m in groups if said == own), None)
        if members is None:
            groups.append((own, [fqn]))
        else:
            members.append(fqn)
    return ({**own, "params": members} for own, members in groups)
