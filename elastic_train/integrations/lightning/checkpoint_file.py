"""Lightning's `.ckpt` files from a run's checkpoints, and a module with the values of one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elastic_train.api import open_checkpoint
from elastic_train.errors import TensorMismatch
from elastic_train.integrations.lightning.hooks import base_of, overridden
from elastic_train.integrations.lightning.loop import PREFIX


def save_checkpoint(
    run: Any,
    path: str | os.PathLike[str],
    module: Any,
    *,
    weights_only: bool = False,
    steps_per_epoch: int = 0,
) -> None:
    """Write the newest checkpoint of a run as a file that `load_from_checkpoint` opens.

    `run` is its directory or URL, one of its checkpoints, or the Result of `fit`; `module` a LightningModule
    of its class, which has the hyperparameters. With `weights_only`, and for several optimizers, their
    state is left out. Raises TensorMismatch where the module is another one.
    """
    checkpoint = open_checkpoint(_url(run))
    document: Mapping[str, Any] = checkpoint.document
    step = int(document.get("step") or 0)
    made: dict[str, Any] = {
        "epoch": step // steps_per_epoch if steps_per_epoch else 0,
        "global_step": step,
        "pytorch-lightning_version": _version(module),
        "state_dict": _values(checkpoint, module),
        "loops": {},
        "callbacks": {},
    }
    if not weights_only and module.automatic_optimization:
        made["optimizer_states"] = _optimizers(checkpoint, module)
        made["lr_schedulers"] = []
    if getattr(module, "hparams", None):
        if hasattr(module, "_hparams_name"):
            made["hparams_name"] = module._hparams_name
        made["hyper_parameters"] = dict(module.hparams)
    if overridden(module, "on_save_checkpoint"):
        module.on_save_checkpoint(made)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    torch.save(made, part)
    part.replace(target)


def take_values(run: Any, module: Any) -> None:
    """Give a module the values of a run's newest checkpoint."""
    module.load_state_dict(_values(open_checkpoint(_url(run)), module))


def write_files(result: Any, module: Any, callback: Any, steps_per_epoch: int) -> None:
    """What a ModelCheckpoint with a `dirpath` leaves: the best ones, and `last.ckpt` where there are none."""
    said = {"weights_only": callback.save_weights_only, "steps_per_epoch": steps_per_epoch}
    directory = Path(callback.dirpath)
    best = [(c.path, metrics) for c, metrics in result.best_checkpoints or ()]
    sign = -1.0 if callback.mode == "max" else 1.0
    chosen = [(p, m) for p, m in best if callback.monitor is not None and callback.monitor in m]
    chosen.sort(key=lambda each: sign * each[1][callback.monitor])
    for number, (place, metrics) in enumerate(chosen[: callback.save_top_k]):
        step = int(open_checkpoint(place).document.get("step") or 0)
        tensors = {name: torch.tensor(v) for name, v in metrics.items() if isinstance(v, int | float)}
        tensors |= {"epoch": torch.tensor((step - 1) // steps_per_epoch), "step": torch.tensor(step)}
        name = callback._format_checkpoint_name(
            callback.filename, tensors, auto_insert_metric_name=callback.auto_insert_metric_name
        )
        save_checkpoint(place, directory / f"{name}.ckpt", module, **said)
        if number == 0:
            callback.best_model_path = str(directory / f"{name}.ckpt")
            callback.best_model_score = tensors[callback.monitor]
    if callback.save_last or not chosen:
        save_checkpoint(result, directory / "last.ckpt", module, **said)
        callback.last_model_path = str(directory / "last.ckpt")


def _url(run: Any) -> str:
    return os.fspath(run) if isinstance(run, str | os.PathLike) else str(run.path)


def _version(module: Any) -> str:
    return sys.modules[base_of(module).__module__.split(".")[0]].__version__


def _values(checkpoint: Any, module: Any) -> dict[str, torch.Tensor]:
    """The module's state dict, from the run."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict().items():
        owner = checkpoint.aliases.get(PREFIX + name, PREFIX + name)
        states = checkpoint.get(owner)
        if states is None or not isinstance(tensor, torch.Tensor):
            raise TensorMismatch(
                url=checkpoint.url, problem=f"the run has no {name!r}: the module is another one."
            )
        values = states["param"] if "param" in states else states["buffer"]
        found[name] = _tensor(values[...]).to(tensor.dtype).reshape(tensor.shape)
    return found


def _optimizers(checkpoint: Any, module: Any) -> list[dict[str, Any]]:
    """State dicts of the optimizers, with numbers in the place of names as torch has them."""
    document = checkpoint.document.get("optimizer") or {}
    scalars = document.get("scalars", {})
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group in document.get("groups", ()):
        numbers = []
        for name in group["params"]:
            number = len(state)
            numbers.append(number)
            own = {k: _tensor(v[...]) for k, v in checkpoint[name].items() if k not in ("param", "buffer")}
            for key, scalar in scalars.get(name, {}).items():
                own[key] = torch.tensor(scalar["value"], dtype=torch.float32)
            state[number] = own
        hyper = {k: tuple(v) if isinstance(v, list) else v for k, v in group["hyperparameters"].items()}
        named = [name.removeprefix(PREFIX) for name in group["params"]]
        groups.append({**hyper, "params": numbers, "param_names": named})
    return [{"state": state, "param_groups": groups}]


def _tensor(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(values))
