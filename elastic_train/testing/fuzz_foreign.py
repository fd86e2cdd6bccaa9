"""Other systems' formats for the fuzzer: what torch and safetensors write here, and any that is there.

Sums are mended where a format has some: a changed pickle goes into a zip that is right in itself. Metadata of
torch.distributed and headers of safetensors have no sums at all, so that any change of them is believed.
"""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from elastic_train.testing.damage_files import change_files
from elastic_train.testing.fuzzing import Damage


class Foreign:
    """A checkpoint in a directory of its own; `opened` is what of it is named to open it."""

    opened = ""

    def build(self, directory: Path) -> None:
        raise NotImplementedError

    def url(self, directory: Path) -> str:
        return str(directory / self.opened)

    def change(self, directory: Path, chance: random.Random, secret: Path) -> Damage:
        files = sorted(p for p in directory.rglob("*") if p.is_file())
        return change_files(directory, files, chance, secret)


class Given(Foreign):
    """A checkpoint that some system wrote: `module:Given:PATH` names its directory, or a file."""

    def __init__(self, source: str) -> None:
        self._source = Path(source)
        self.opened = self._source.name

    def build(self, directory: Path) -> None:
        to = directory / self.opened
        if self._source.is_dir():
            shutil.copytree(self._source, to, symlinks=True)
        else:
            shutil.copy(self._source, to)


class TorchFileFormat(Foreign):
    """One file with a model and its optimizer by name."""

    opened = "x.pt"

    def build(self, directory: Path) -> None:
        model, optimizer = _states(full=True)
        rest = {"step": 3, "note": ("ü", [1.5, None]), "extra": {"mask": torch.ones(2).bool()}}
        torch.save({"model": model, "optimizer": optimizer, **rest}, directory / "x.pt")


class Distributed(Foreign):
    """What torch.distributed.checkpoint writes of a model and its optimizer."""

    opened = "dcp"

    def build(self, directory: Path) -> None:
        model, optimizer = _states()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = {"model": model, "optimizer": optimizer, "train_state": {"step": torch.tensor(3)}}
            save(state, checkpoint_id=str(directory / "dcp"))


class Safetensors(Foreign):
    """A Hugging Face directory of two parts, with an index and what Trainer keeps beside them."""

    def build(self, directory: Path) -> None:
        model, _ = _states(full=True)
        names = sorted(model)
        parts = {f"model-{n}.safetensors": names[n - 1 :: 2] for n in (1, 2)}
        for file, own in parts.items():
            save_file({name: model[name] for name in own}, directory / file)
        listed = {name: file for file, own in parts.items() for name in own}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
        (directory / "config.json").write_text(json.dumps({"model_type": "x", "layers": [1, 2]}))
        (directory / "trainer_state.json").write_text(json.dumps({"global_step": 3, "epoch": 1.5}))


def _states(*, full: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.arange(4)).sum().backward()
    optimizer.step()
    model, states = get_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=full))
    return model, states
