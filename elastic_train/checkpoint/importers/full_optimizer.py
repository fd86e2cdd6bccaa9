"""An optimizer's state dict by the names of parameters, from each of the forms in which torch saves one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.errors import FormatUnsupported, TensorMismatch

Canonical = Callable[[str], str]
"""A name without what wrappers added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedState:
    """fqn -> state name -> value, and the groups with fqns as `params`."""

    state: Mapping[str, Mapping[str, Any]]
    groups: tuple[Mapping[str, Any], ...]


def by_name(tree: Mapping[Any, Any], canonical: Canonical, *, url: str) -> NamedState:
    """The state by canonical fqn; FormatUnsupported where the file has only numbers."""
    if "state" not in tree and "param_groups" not in tree:
        return _flattened(tree, canonical, url)
    state: dict[Any, dict[str, Any]] = tree.get("state") or {}
    groups: list[dict[str, Any]] = tree.get("param_groups") or []
    names: dict[Any, str] = {}
    for group in groups:
        params = list(group["params"])
        said = group.get("param_names", params)
        if len(said) != len(params) or not all(isinstance(n, str) for n in said):
            raise FormatUnsupported(
                url=url,
                problem="its optimizer state is by number, which doesn't say whose it is. Save it with "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, build the optimizer from "
                "named_parameters(), or save the model alone.",
            )
        names |= dict(zip(params, said, strict=True))
    if not groups:
        names = {key: key for key in state if isinstance(key, str)}
    if strange := [key for key in state if key not in names]:
        raise TensorMismatch(
            url=url, problem=f"its optimizer has a state for {strange[0]!r}, which is in no group."
        )
    return NamedState(
        state={canonical(names[key]): own for key, own in state.items()},
        groups=tuple({**g, "params": [canonical(names[p]) for p in g["params"]]} for g in groups),
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
