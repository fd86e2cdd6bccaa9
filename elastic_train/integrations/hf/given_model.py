"""A model that is there already, as one that is built: its structure pickled, its values in files."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from ray import cloudpickle
from safetensors.torch import save
from torch import nn

from elastic_train import open_checkpoint
from elastic_train.storage.fsspec_store import open_store

FILE_BYTES = 1 << 30


def structure_of(model: nn.Module) -> bytes:
    """The model pickled without the memory of its parameters. Buffers are in it."""
    bare: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    for parameter in model.parameters():
        if parameter.grad is not None:  # a copy would take it along
            parameter.grad = None
    return cloudpickle.dumps(copy.deepcopy(model, bare))  # pyright: ignore[reportPrivateImportUsage]


def built_from(structure: bytes) -> nn.Module:
    """A new module of that structure, its parameters without memory."""
    with torch.device("cpu"):  # buffers have values, whatever is being built around this
        return pickle.loads(structure)


def write_values(model: nn.Module, url: str) -> None:
    """The parameters by name, each once, as safetensors. A file's bytes are in memory beside the model."""
    store = open_store(url)
    files: dict[str, str] = {}
    for number, part in enumerate(_parts(model)):
        name = f"part-{number:05d}.safetensors"
        store.write(name, save(part, metadata={"format": "pt"}))
        files |= dict.fromkeys(part, name)
    names = sorted(set(files.values()))
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    if len(names) == 1:
        return
    index = {"metadata": {"total_size": total}, "weight_map": files}
    store.write("model.safetensors.index.json", json.dumps(index).encode())


def _parts(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, parameter in model.named_parameters():
        nbytes = parameter.numel() * parameter.element_size()
        if part and size + nbytes > FILE_BYTES:
            yield part
            part, size = {}, 0
        part[name] = parameter.detach().cpu().contiguous()
        size += nbytes
    if part:
        yield part


class Values:
    """Where the parameters were written to; a worker reads them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._held: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_url": self._url, "_held": None}

    def give(self, module: nn.Module, fqn: str) -> None:
        """Fill the parameters that a module itself owns. They are whole."""
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{fqn}.{name}" if fqn else name
            parameter.copy_(self._read(full))

    def _read(self, name: str) -> torch.Tensor:
        if self._held is None:
            self._held = open_checkpoint(self._url)
        if (name, "param") not in self._held.tensors:
            return torch.zeros(())  # a tied one, which has the value of its first name
        return tensor_of(self._held, name)


def give_values(model: nn.Module, checkpoint: str) -> None:
    """Give a model, in place, what a run's checkpoint holds of it."""
    held = open_checkpoint(checkpoint)
    with torch.no_grad():
        for state, named in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in named:
                if (name, state) in held.tensors:
                    tensor.copy_(tensor_of(held, name, state))


def tensor_of(held: Any, name: str, state: str = "param") -> torch.Tensor:
    """A tensor of a checkpoint, bit by bit: numpy does not know all dtypes."""
    info = held.info(name, state)
    values = np.ascontiguousarray(held.read(name, state)).reshape(-1)
    bits = torch.from_numpy(values.view(np.uint8).copy())
    return bits.view(getattr(torch, info.dtype)).reshape(tuple(info.shape))
