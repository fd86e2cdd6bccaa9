"""One file with everything: a model's state dict, alone or with its optimizer's, as FSDP gathers them.

The optimizer's state must be by name, nested or flattened. Numbers instead of names, as a bare optimizer's
`state_dict` has them, say nothing about whose state it is unless the groups record `param_names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_train.checkpoint.importers.foreign_document import (
    OptimizerState,
    ParameterGroup,
    document,
    hyperparameters,
    plain,
    scalar,
)
from elastic_train.checkpoint.importers.foreign_rows import whole_row
from elastic_train.checkpoint.importers.full_optimizer import by_name
from elastic_train.checkpoint.importers.imported import Imported, imported
from elastic_train.checkpoint.importers.pickle_free import TensorRef
from elastic_train.checkpoint.importers.torch_file import TorchFile, open_file
from elastic_train.checkpoint.manifest import Row
from elastic_train.errors import FormatUnsupported, TensorMismatch
from elastic_train.storage.fsspec_store import Options
from elastic_train.storage.store import Store

_MODELS = ("model", "model_state_dict", "state_dict", "module", "model_state")
_OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optim", "optim_state_dict", "optimizer_state")
_STEPS = ("step", "global_step", "global_steps", "iteration", "iter")
_WRAPPERS = frozenset({"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts that torch.compile, DDP, activation checkpointing and FSDP1 put into names."""


def canonical(name: str) -> str:
    """The name without the parts that wrappers added, in any order and at any depth."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def open_full(store: Store, path: str, options: Options | None = None) -> Imported:
    """Index one file."""
    file = open_file(store, path)
    model, optimizer, rest = _split(file)
    directory, _, name = path.rpartition("/")
    names = _names(file, model)
    states = by_name(optimizer, canonical, url=file.url) if optimizer else None
    tensors = {names[k]: v for k, v in model.items() if isinstance(v, TensorRef)}
    aliases = _aliases(tensors, set(states.state) if states else set())
    trained = {fqn for g in states.groups for fqn in g["params"]} if states else set()
    strange = sorted((trained | set(states.state)) - tensors.keys()) if states else []
    if strange:
        raise TensorMismatch(
            url=file.url,
            problem=f"the optimizer has {strange[0]} and the model hasn't; {len(strange)} names differ.",
        )
    rows = [whole_row(file, name, fqn, "param", ref) for fqn, ref in tensors.items() if fqn not in aliases]
    kept = OptimizerState()
    if states is not None:
        rows_of_states, scalars = _states(file, name, states.state, aliases, tensors)
        rows += rows_of_states
        kept = OptimizerState(
            groups=tuple(_group(file, g, aliases) for g in states.groups),
            scalars=scalars,
            states=tuple(sorted((r.tensor, r.state) for r in rows_of_states)),
        )
    facts, lost = plain(rest, "")
    lost += [
        f"model.{k}: a {type(v).__name__} that is no tensor"
        for k, v in model.items()
        if not isinstance(v, TensorRef)
    ]
    lost.append("which tensors are buffers: the file doesn't say, and all are `param`")
    if states is None:
        lost.append("the optimizer: the file has none, and which parameters are trained isn't known")
    step = next((facts[k] for k in _STEPS if isinstance(facts.get(k), int)), None)
    said = document(
        step=step,
        aliases=aliases,
        optimizer=kept,
        system="torch full state dict",
        facts={"client_state": facts},
        not_restored=lost,
    )
    return imported(store, directory, rows, said, aliases=aliases, options=options)


def _split(file: TorchFile) -> tuple[Mapping[str, Any], Mapping[str, Any] | None, dict[str, Any]]:
    """The model's state dict, the optimizer's, and everything beside them."""
    tree = file.tree
    if isinstance(tree, Mapping):
        for name in _MODELS:
            if isinstance(tree.get(name), Mapping) and _is_state_dict(tree[name]):
                found = [k for k in _OPTIMIZERS if isinstance(tree.get(k), Mapping)]
                if len(found) > 1:
                    raise FormatUnsupported(url=file.url, problem=f"it has several optimizers: {found}.")
                rest = {k: v for k, v in tree.items() if k != name and k not in found}
                return tree[name], tree[found[0]] if found else None, rest
        if _is_state_dict(tree):
            return tree, None, {}
    raise FormatUnsupported(
        url=file.url,
        problem=f"it holds no model's state dict, neither by itself nor under {', '.join(_MODELS)}. Save "
        "one with "
        "torch.save.",
    )


def _is_state_dict(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(k, str) for k in value) and any(isinstance(v, TensorRef) for v in value.values())


def _names(file: TorchFile, model: Mapping[str, Any]) -> dict[str, str]:
    names = {key: canonical(key) for key in model}
    if len(set(names.values())) != len(names):
        twice = next(n for n in names.values() if list(names.values()).count(n) > 1)
        raise TensorMismatch(url=file.url, problem=f"{twice} is in the model twice, once inside a wrapper.")
    return names


def _aliases(tensors: Mapping[str, TensorRef], stepped: set[str]) -> dict[str, str]:
    """Names of tensors that are the same bytes in the same shape; the one that is optimized holds them."""
    groups: dict[TensorRef, list[str]] = {}
    for fqn, ref in tensors.items():
        if all(ref.shape):
            groups.setdefault(ref, []).append(fqn)
    found: dict[str, str] = {}
    for same in groups.values():
        owner = next((fqn for fqn in same if fqn in stepped), same[0])
        found |= {fqn: owner for fqn in same if fqn != owner}
    return found


def _group(file: TorchFile, group: Mapping[str, Any], aliases: Mapping[str, str]) -> ParameterGroup:
    params: list[str] = group["params"]
    return ParameterGroup(
        params=tuple(dict.fromkeys(aliases.get(p, p) for p in params)),
        hyperparameters=hyperparameters(file, group),
    )


def _states(
    file: TorchFile,
    name: str,
    states: Mapping[str, Mapping[str, Any]],
    aliases: Mapping[str, str],
    tensors: Mapping[str, TensorRef],
) -> tuple[list[Row], dict[str, dict[str, Any]]]:
    """Rows of the states that are tensors of a parameter; numbers as scalars."""
    rows: list[Row] = []
    scalars: dict[str, dict[str, Any]] = {}
    for fqn, own in states.items():
        owner = aliases.get(fqn, fqn)
        for state, value in own.items():
            number = (
                isinstance(value, TensorRef)
                and value.shape == ()
                and (tensors[owner].shape != () or state == "step")
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
