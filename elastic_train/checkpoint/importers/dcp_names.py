"""What the keys of torch.distributed.checkpoint mean: parameters, optimizer states, settings and the rest.

Torch keeps nested state dicts under flat keys and, usually, the nesting. The optimizer's part is recognised
by `state` and `param_groups`; in flat forms only if what follows is the name of a stored parameter, or of one
that has a learning rate: a state dict may have a parameter in parts, and its moments whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elastic_train.checkpoint.importers.dcp_metadata import Metadata
from elastic_train.errors import FormatUnsupported

MODELS = frozenset({"model", "app", "state_dict", "module"})
"""Words at the beginning of a path that only say that the model follows."""
BESIDE = frozenset(
    (
        "train_state", "lr_scheduler", "lr_schedulers", "scheduler", "dataloader", "data_loader", "rng",
        "extra_state", "rng_state", "rng_states", "random_state", "trainer", "trainer_state", "sampler",
        "client_state", "metrics", "progress", "scaler", "grad_scaler", "ema", "ema_model", "fit_loop",
        "callbacks", "loader",
    )
)  # fmt: skip
"""Words at the beginning of a path under which jobs keep what isn't the model's."""
_PART = re.compile(r"(?:^|\.)state\.(.+)$")
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """`number` is the parameter's where the optimizer has no name for it."""

    tensor: str
    state: str
    optimizer: bool = False
    number: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Key -> name for tensors; for hyperparameters key -> (group number or parameter, name). Keys of tensors
    that are neither the model's nor the optimizer's are `beside`.
    """

    tensors: Mapping[str, Name]
    hyperparameters: Mapping[str, tuple[int | str, str]]
    beside: tuple[str, ...] = field(default=())


def named(metadata: Metadata, *, url: str) -> Names:
    """The meaning of every key; FormatUnsupported where two keys would be one tensor, or several models are
    there.
    """
    tensors: dict[str, Name] = {}
    pending: list[str] = []
    model: dict[str, Path] = {}
    settings: list[str] = []
    for key in metadata.tensors:
        path = metadata.paths.get(key, (key,))
        nested = _nested(path)
        if _hyperparameter(path, set()) is not None or "param_groups" in key.split("."):
            settings.append(key)
        elif nested is not None:
            tensors[key] = nested
        elif _PART.search(key):
            pending.append(key)
        else:
            model[key] = path
    root = _root({**model, **{key: metadata.paths.get(key, (key,)) for key in pending}}, url)
    beside = [key for key, path in model.items() if not _is_model(path, root)]
    tensors |= {
        key: Name(tensor=_model(path), state="param") for key, path in model.items() if key not in set(beside)
    }
    known = {name.tensor for name in tensors.values() if not name.optimizer}
    for key, name in tensors.items():
        if name.optimizer and name.tensor not in known and name.tensor.isdecimal() and len(name.tensor) < 10:
            tensors[key] = replace(name, number=int(name.tensor))
    known |= _with_rates(metadata)
    for key in pending:
        path = metadata.paths.get(key, (key,))
        flat = _flat(key, known)
        if flat is None and not _is_model(path, root):
            beside.append(key)
        else:
            tensors[key] = flat or Name(tensor=_model(path), state="param")
    _check_distinct(tensors, url)
    return Names(
        tensors=tensors,
        hyperparameters={
            key: found
            for key in (*metadata.objects, *settings)
            if (found := _setting(key, metadata, known)) is not None
        },
        beside=(*beside, *(k for k in settings if not _setting(k, metadata, known))),
    )


def _check_distinct(tensors: Mapping[str, Name], url: str) -> None:
    taken: dict[tuple[str, str], str] = {}
    for key, name in tensors.items():
        other = taken.setdefault((name.tensor, name.state), key)
        if other != key:
            problem = (
                f"{other} and {key} would both be {name.tensor} ({name.state}). Save one model at a time."
            )
            raise FormatUnsupported(url=url, problem=problem)


def _root(paths: Mapping[str, Path], url: str) -> Path:
    """The words before the model, () where it is at the top."""
    roots: dict[Path, str] = {}
    for key, path in paths.items():
        words = _words(path)
        if words:
            roots.setdefault(path[:words], key)
    if len(roots) > 1:
        raise FormatUnsupported(
            url=url,
            problem=f"it holds several models: {' and '.join(roots.values())} are of two. Save one alone.",
        )
    return next(iter(roots), ())


def _is_model(path: Path, root: Path) -> bool:
    if root:
        return path[: len(root)] == root
    first = str(path[0])
    return (first if len(path) > 1 else first.partition(".")[0]) not in BESIDE or first == ""


def _nested(path: Path) -> Name | None:
    """(..., "state", parameter, state)"""
    if len(path) < 3 or path[-3] != "state":
        return None
    return Name(tensor=str(path[-2]), state=str(path[-1]), optimizer=True)


def _words(path: Path) -> int:
    """How many words at the beginning only say that the model follows."""
    count = 0
    while count + 1 < len(path) and path[count] in MODELS:
        count += 1
    return count


def _model(path: Path) -> str:
    return ".".join(str(part) for part in path[_words(path) :])


def _flat(key: str, known: set[str]) -> Name | None:
    """`state.<parameter>.<state>`, or Megatron's `optimizer.state.<state>.<parameter>`."""
    found = _PART.search(key)
    assert found is not None
    head, _, tail = found[1].partition(".")
    if tail in known:
        return Name(tensor=tail, state=head, optimizer=True)
    head, _, tail = found[1].rpartition(".")
    if head in known:
        return Name(tensor=head, state=tail, optimizer=True)
    return None


def _with_rates(metadata: Metadata) -> set[str]:
    """Parameters of which the optimizer says a learning rate, by name."""
    found: set[str] = set()
    for key in metadata.objects:
        path = ".".join(map(str, metadata.paths.get(key, (key,))))
        fqn, _, word = path.rpartition("param_groups.")[2].rpartition(".")
        if word == "lr" and "param_groups." in path and not fqn.isdecimal():
            found.add(fqn)
    return found


def _setting(key: str, metadata: Metadata, known: set[str]) -> tuple[int | str, str] | None:
    return _hyperparameter(metadata.paths.get(key, (key,)), known)


def _hyperparameter(path: Path, known: set[str]) -> tuple[int | str, str] | None:
    """(..., "param_groups", number, name), or `param_groups.<parameter>.<name>`."""
    if len(path) >= 3 and path[-3] == "param_groups" and isinstance(path[-2], int):
        return path[-2], str(path[-1])
    text = ".".join(map(str, path))
    _, found, rest = text.rpartition("param_groups.")
    head, _, tail = rest.rpartition(".")
    if not found or not head:
        return None
    if head.isdecimal():
        return int(head), tail
    return (head, tail) if head in known else None
