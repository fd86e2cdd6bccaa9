"""Training state of Hugging Face's Trainer and Accelerate: optimizer, schedule, steps and more.

Their optimizers number the parameters of the model in its own order. The order is the weights' where they are
in files of torch; safetensors sorts its tensors, and then names are told by shapes or given by the caller.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.importers.foreign_document import OptimizerState, plain, steps_in
from elastic_train.checkpoint.importers.full_optimizer import Parameters, by_name, is_optimizer, optimizer_in
from elastic_train.checkpoint.importers.torch_file import TorchFile, open_file
from elastic_train.checkpoint.importers.wrappers import Wrappers
from elastic_train.checkpoint.manifest import Row
from elastic_train.errors import ChecksumMismatch, FormatUnsupported
from elastic_train.storage.store import Store

_TRAINER = "trainer_state.json"
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_SCHEDULES = ("scheduler.pt", "scheduler.bin")
_SCALERS = ("scaler.pt",)
_SETTINGS = ("training_args.bin",)
_OTHERS = re.compile(
    r"rng_state(_\d+)?\.pth|random_states_\d+\.pkl|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin|"
    r"custom_checkpoint_\d+\.pkl|optimizer_\d+\.(pt|bin)|scheduler_\d+\.(pt|bin)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What was found beside the weights."""

    optimizer: OptimizerState
    rows: Sequence[Row] = ()
    step: int | None = None
    facts: Mapping[str, Json] = field(default_factory=dict)
    lost: Sequence[str] = ()
    assumed: Sequence[str] = ()


def beside_weights(
    store: Store,
    at: str,
    there: Sequence[str],
    parameters: Parameters,
    aliases: Mapping[str, str],
    *,
    names: Sequence[str] | None = None,
) -> Beside:
    """The state of training in a directory of files `there`; no tensor is read."""
    facts: dict[str, Json] = {}
    lost: list[str] = []
    assumed: list[str] = []
    rows: list[Row] = []
    optimizer = OptimizerState(kind="none")
    prefix = f"{at}/" if at else ""
    found = next((n for n in _OPTIMIZERS if n in there), None)
    if found is not None:
        file = open_file(store, prefix + found)
        known = replace(parameters, names=names)
        try:
            rows, optimizer, assumed = _optimizer(file, found, known, aliases)
        except FormatUnsupported as error:
            lost.append(f"{found}: the optimizer: {error.problem}")
    for word, kinds in (("lr_scheduler", _SCHEDULES), ("scaler", _SCALERS), ("settings", _SETTINGS)):
        for name in (n for n in kinds if n in there):
            facts[word] = _facts(store, prefix + name, name, lost)
            if facts[word] is not None:
                lost.append(f"{name}: what of it is numbers and text is in foreign.{word}; the code's counts")
    trainer = _trainer(store, prefix + _TRAINER) if _TRAINER in there else None
    if trainer is not None:
        facts["trainer_state"] = {k: v for k, v in trainer.items() if k != "log_history"}
        lost.append(f"{_TRAINER}: all but the step is in foreign.trainer_state, without its history of logs")
    lost += [f"{n}: random states, samplers or objects of their own" for n in there if _OTHERS.fullmatch(n)]
    step = steps_in(trainer, ("global_step",))
    return Beside(optimizer=optimizer, rows=rows, step=step, facts=facts, lost=lost, assumed=assumed)


def _optimizer(
    file: TorchFile, name: str, known: Parameters, aliases: Mapping[str, str]
) -> tuple[list[Row], OptimizerState, list[str]]:
    tree: Any = file.tree
    if not is_optimizer(tree):
        raise FormatUnsupported(url=file.url, problem="it has no `state` and `param_groups`.")
    named = [n for group in tree["param_groups"] for n in group.get("param_names", ())]
    wrappers = Wrappers.around([n for n in named if isinstance(n, str)])
    states = by_name(tree, wrappers, url=file.url, parameters=known)
    shapes = {**known.shapes, **{alias: known.shapes[owner] for alias, owner in aliases.items()}}
    rows, optimizer = optimizer_in(file, name, states, aliases, shapes)
    return rows, optimizer, list(states.assumed)


def _facts(store: Store, path: str, name: str, lost: list[str]) -> Json:
    try:
        found, missing = plain(open_file(store, path).tree, name)
    except FormatUnsupported as error:
        lost.append(f"{name}: {error.problem}")
        return None
    lost += missing
    return found


def _trainer(store: Store, path: str) -> dict[str, Any]:
    try:
        said = json.loads(store.read(path))
        if not isinstance(said, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise ChecksumMismatch(
            url=f"{store.url}/{path}", problem=f"it can't be read ({error}). Copy it again."
        ) from error
    return said
