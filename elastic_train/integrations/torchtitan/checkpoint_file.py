"""A run's checkpoint in the form of torchtitan's own, which its CheckpointManager loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from elastic_train.api import open_checkpoint
from elastic_train.errors import TensorMismatch
from elastic_train.integrations.torchtitan.titan_task import TitanTask


def save_checkpoint(run: Any, folder: str | os.PathLike[str], config: Any) -> Path:
    """Write a run's newest checkpoint as `step-N` in a folder, with weights, moments, rates and the step.

    `run` is its directory or URL, one of its checkpoints, or the Result of `fit`; `config` the run's. The
    state passes through this process's memory whole. The position in the data is not in it: torchtitan's
    `checkpoint.exclude_from_loading` has to name "dataloader". Raises TensorMismatch where the config
    describes another model.
    """
    checkpoint = open_checkpoint(os.fspath(run) if isinstance(run, str | os.PathLike) else str(run.path))
    task = TitanTask(config() if callable(config) else config, (), None)
    model = task.model()
    step = int(checkpoint.document.get("step") or 0)
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            parameter.copy_(_tensor(checkpoint, fqn, "param", parameter))
    optimizers = task.prepared.optimizer.build(model_parts=[model])
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                fqn = names[parameter]
                moments = [s for s in checkpoint[fqn] if s not in ("param", "buffer")]
                own = {s: _tensor(checkpoint, fqn, s, parameter) for s in moments}
                optimizer.state[parameter] = {"step": torch.tensor(float(step)), **own}
    config = task.prepared
    rates = config.lr_scheduler.build(optimizers=optimizers, training_steps=config.training.steps)
    rates.load_state_dict({"last_epoch": step})
    for schedule in rates:
        for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate  # torchtitan takes the next step's from here
    target = Path(folder) / f"step-{step}"
    state = {
        **model.state_dict(),
        "optimizer": optimizers.state_dict(),
        "lr_scheduler": rates.state_dict(),
        "train_state": {
            "step": torch.tensor(step, dtype=torch.int32),
            "ntokens_seen": torch.tensor(0, dtype=torch.int64),
        },
    }
    save(state, checkpoint_id=str(target), no_dist=True)
    return target


def _tensor(checkpoint: Any, fqn: str, state: str, like: torch.Tensor) -> torch.Tensor:
    """Of the run, as `like` is. Of parameters that are one tensor the run has the first name."""
    held = checkpoint.get(checkpoint.aliases.get(fqn, fqn))
    if held is None or tuple(held[state].shape) != tuple(like.shape):
        there = "none of it" if held is None else f"{list(held[state].shape)}"
        raise TensorMismatch(
            url=checkpoint.url, problem=f"{fqn} is {list(like.shape)} in the model, and {there} in the run."
        )
    return torch.from_numpy(np.array(held[state][...])).to(like.dtype)
