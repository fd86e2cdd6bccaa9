"""One file with everything: a model's state dict, alone or with its optimizer's, as scripts, Lightning, Ray
Train jobs and FSDP save them.

The optimizer's state must be by name, nested or flattened, or by numbers that can be matched
(numbered_parameters.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.importers.foreign_document import (
    OptimizerState,
    document,
    in_short,
    plain,
    steps_in,
)
from elastic_train.checkpoint.importers.foreign_rows import whole_row
from elastic_train.checkpoint.importers.full_optimizer import (
    NamedState,
    Parameters,
    by_name,
    is_optimizer,
    optimizer_in,
)
from elastic_train.checkpoint.importers.imported import Imported, imported
from elastic_train.checkpoint.importers.pickle_free import OddTensor, Opaque, TensorRef
from elastic_train.checkpoint.importers.torch_file import TorchFile, check_readable, open_file
from elastic_train.checkpoint.importers.wrappers import Wrappers
from elastic_train.errors import FormatUnsupported, TensorMismatch
from elastic_train.storage.fsspec_store import Options
from elastic_train.storage.store import Store

_MODELS = ("model", "model_state_dict", "state_dict", "module", "model_state")
_OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optim", "optim_state_dict", "optimizer_state")
_STEPS = ("step", "global_step", "global_steps", "iteration", "iter")
_LIGHTNING, _LIGHTNING_OPTIMIZERS = "pytorch-lightning_version", "optimizer_states"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a file holds: the model's state dict, where it was found, the optimizer's, and all else."""

    model: Mapping[str, Any]
    under: str
    optimizer: Mapping[str, Any] | None
    rest: Mapping[str, Any]
    lightning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The tensors of a state dict by the model's own names; aliases are names of the same bytes."""

    tensors: Mapping[str, TensorRef]
    wrappers: Wrappers
    lost: Sequence[str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: ref.shape for name, ref in self.tensors.items()}


def open_full(
    store: Store, path: str, options: Options | None = None, *, names: Sequence[str] | None = None
) -> Imported:
    """Index one file. `names`: the optimizer's parameters in its order, where the file has only numbers."""
    file = open_file(store, path)
    parts = _split(file)
    directory, _, name = path.rpartition("/")
    model = model_in(file, parts.model)
    facts, lost = plain(parts.rest, "")
    states = _named_states(file, parts, model, names, lost)
    aliases = aliases_in(model.tensors, set(states.state) if states else set())
    rows = [
        whole_row(file, name, fqn, "param", ref) for fqn, ref in model.tensors.items() if fqn not in aliases
    ]
    kept = OptimizerState()
    if states is not None:
        more, kept = optimizer_in(file, name, states, aliases, model.shapes)
        rows += more
    lost += model.lost
    kept_apart = [str(k)[:80] for k in parts.rest if steps_in({k: parts.rest[k]}, _STEPS) is None]
    if kept_apart:
        lost.append(f"{', '.join(kept_apart)}: what of them is numbers and text is in foreign.client_state")
    lost.append("which tensors are buffers: the file doesn't say, and all are `param`")
    if states is None and parts.optimizer is None:
        lost.append("the optimizer: the file has none, and which parameters are trained isn't known")
    said = document(
        step=steps_in(facts, _STEPS),
        aliases=aliases,
        optimizer=kept,
        system="Lightning" if parts.lightning else "torch full state dict",
        facts={"client_state": facts},
        not_restored=in_short(lost),
        assumed=[
            *model.wrappers.assumed,
            *(states.assumed if states else ()),
            *([f"the model is what lies under {parts.under!r}"] if parts.under not in ("", *_MODELS) else ()),
        ],
    )
    return imported(store, directory, rows, said, aliases=aliases, options=options)


def model_in(file: TorchFile, state_dict: Mapping[str, Any]) -> Model:
    """The tensors of a state dict under the names that the model itself has for them."""
    wrappers = Wrappers.around(list(state_dict))
    if (twice := wrappers.twice(list(state_dict))) is not None:
        raise TensorMismatch(url=file.url, problem=f"{twice} is in the model twice, once inside a wrapper.")
    tensors: dict[str, TensorRef] = {}
    lost: list[str] = []
    for key, value in state_dict.items():
        check_readable(value, key, url=file.url)
        if isinstance(value, TensorRef):
            tensors[wrappers(key)] = value
            if value.attributes:
                lost.append(f"{key}: its attributes {', '.join(value.attributes)}")
        else:
            lost.append(f"model.{key}: a {type(value).__name__} that is no tensor")
    return Model(tensors=tensors, wrappers=wrappers, lost=lost)


def aliases_in(tensors: Mapping[str, TensorRef], stepped: set[str]) -> dict[str, str]:
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


def is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(k, str) for k in value)
        and any(isinstance(v, TensorRef | OddTensor) for v in value.values())
    )


def _named_states(
    file: TorchFile, parts: Parts, model: Model, names: Sequence[str] | None, lost: list[str]
) -> NamedState | None:
    if not parts.optimizer:
        return None
    known = Parameters(shapes=model.shapes, names=names)
    try:
        return by_name(parts.optimizer, model.wrappers, url=file.url, parameters=known)
    except FormatUnsupported as error:
        if not parts.lightning:
            raise
        lost.append(f"the optimizer: {error.problem}")
        return None


def _split(file: TorchFile) -> Parts:
    tree = file.tree
    if isinstance(tree, Mapping):
        states = [k for k, v in tree.items() if isinstance(k, str) and is_state_dict(v)]
        usual = [k for k in _MODELS if k in states]
        if len(usual) > 1 or (not usual and len(states) > 1 and not is_state_dict(tree)):
            raise FormatUnsupported(
                url=file.url,
                problem=f"it holds several state dicts, under {', '.join(map(repr, usual or states))}. Save "
                "the one that is meant alone.",
            )
        if usual or (states and not is_state_dict(tree)):
            return _around(file, tree, (usual or states)[0])
        if is_state_dict(tree):
            return Parts(model=tree, under="", optimizer=None, rest={})
    raise FormatUnsupported(
        url=file.url,
        problem=f"it holds no model's state dict, neither by itself nor under {', '.join(_MODELS)}"
        f"{_substituted(tree)}. Save one with torch.save.",
    )


def _around(file: TorchFile, tree: Mapping[str, Any], name: str) -> Parts:
    lightning = _LIGHTNING in tree
    found = {
        k: v for k, v in tree.items() if is_optimizer(v) or (k in _OPTIMIZERS and isinstance(v, Mapping))
    }
    kept = tree.get(_LIGHTNING_OPTIMIZERS)
    if lightning and isinstance(kept, list) and len(kept) == 1 and is_optimizer(kept[0]):
        found[_LIGHTNING_OPTIMIZERS] = kept[0]
    if len(found) > 1:
        raise FormatUnsupported(url=file.url, problem=f"it has several optimizers: {list(found)}.")
    return Parts(
        model=tree[name],
        under=name,
        optimizer=next(iter(found.values()), None),
        rest={k: v for k, v in tree.items() if k != name and k not in found},
        lightning=lightning,
    )


def _substituted(tree: Any) -> str:
    """What the file is, as far as that helps."""
    if isinstance(tree, Opaque):
        return f": it is an object of {tree.kind}, a whole model perhaps, whose state_dict() is to be saved"
    if is_optimizer(tree):
        return ": it is an optimizer's, so open the model's file or the directory that they are in"
    return f": it is a {type(tree).__name__}" if not isinstance(tree, Mapping) else ""
