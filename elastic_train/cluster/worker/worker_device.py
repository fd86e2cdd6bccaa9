"""The device that a worker trains on: the CPU, or the accelerator that torch finds where Ray gave it one.

Which kind that is nobody says: torch knows, for CUDA, for ROCm, which calls itself cuda, and for whatever
registered itself with torch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from elastic_train.errors import ConfigError

_FIELD = "scaling_config.use_gpu"
_CPU_ONLY = "cpu"


def device_of_worker(gpus: float) -> str:
    """The type of the device, as torch names it. ConfigError where torch finds none, or one that is not
    trained on in groups.
    """
    if not gpus:
        return _CPU_ONLY
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        raise ConfigError(
            field=_FIELD,
            problem=f"Ray gave this worker {gpus:g} GPU, and torch {torch.__version__} finds no accelerator "
            "there.",
            remedy="Install torch for these GPUs where the workers run, or train on CPUs with use_gpu=False.",
        )
    backend = dist.get_default_backend_for_device(found.type)
    if backend == dist.get_default_backend_for_device(_CPU_ONLY):
        raise ConfigError(
            field=_FIELD,
            problem=f"torch's accelerator here is {found.type}, for which it has no collectives but those "
            f"of the host, {backend}.",
            remedy="Train on CPUs with use_gpu=False, or on an accelerator with collectives of its own.",
        )
    return found.type
