"""See that each call of a job's `model()` builds new modules.

A model is built several times: without memory, for its initial values, and for each group that forms. One
that is handed out again was divided, or is being trained, by then.
"""

from __future__ import annotations

import weakref

from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.train.model.tensor_names import canonical

_SEEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_new(model: nn.Module) -> None:
    """ConfigError where an earlier call gave a module of this model that owns tensors."""
    own = {path: module for path, module in model.named_modules() if _owns_tensors(module)}
    for path, module in own.items():
        if module in _SEEN:
            name = repr(canonical(path)) if path else "the model"
            raise ConfigError(
                field="task.model",
                problem=f"{name} ({type(module).__name__}) is the module that an earlier call gave too, and "
                "each call has to build its own.",
                remedy="Build it within model(). Values that it has already can be loaded there, with "
                "load_state_dict; arguments and defaults that hold modules are made there as well.",
            )
    _SEEN.update(own.values())


def _owns_tensors(module: nn.Module) -> bool:
    return any(t is not None for kind in (module._parameters, module._buffers) for t in kind.values())
