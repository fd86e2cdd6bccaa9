"""Other systems' files for the fuzzer. Most have no checksums, so what is changed in them is believed."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from elastic_train.testing.damage import damaged, json_bytes, other_file, other_json
from elastic_train.testing.fuzzing import Change

MODEL = "pytorch_model.pt"


class SafeTensors:
    """Two files with an index, as Hugging Face writes a large model."""

    def build(self, directory: Path) -> None:
        home = directory / "model"
        home.mkdir()
        arrays = {f"layers.{i}.weight": np.arange(6, dtype=np.float32).reshape(2, 3) + i for i in range(4)}
        files = {name: f"model-0000{1 + i // 2}-of-00002.safetensors" for i, name in enumerate(arrays)}
        for file in sorted(set(files.values())):
            own = {name: arrays[name] for name, at in files.items() if at == file}
            (home / file).write_bytes(_safetensors(own))
        index = {"metadata": {"total_size": 96}, "weight_map": files}
        (home / "model.safetensors.index.json").write_text(json.dumps(index))
        (home / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 3}))

    def url(self, directory: Path) -> str:
        return str(directory / "model")

    def change(self, directory: Path, chance: random.Random, secret: Path) -> Change:
        home = directory / "model"
        path = chance.choice(sorted(home.iterdir()))
        match chance.randrange(5):
            case 0:
                what = f"{path.name} is {other_file(path, chance, secret)}"
            case 1:
                what = _damage(path, chance)
            case _ if path.suffix == ".json":
                made, what = other_json(json.loads(path.read_bytes()), chance)
                if not chance.randrange(4):
                    made, what = (
                        {"weight_map": {"layers.0.weight": f"../../outside/{secret.name}"}},
                        "outside",
                    )
                path.write_bytes(json_bytes(made))
            case _:
                data = path.read_bytes()
                end = 8 + int.from_bytes(data[:8], "little")
                made, what = other_json(json.loads(data[8:end]), chance)
                head = json_bytes(made)
                path.write_bytes(len(head).to_bytes(8, "little") + head + data[end:])
        return Change(what=f"{what} in {path.name}", mended=True)


class TorchFile:
    """What torch.save writes of a model and its optimizer: a pickle in a zip, whose CRCs are mended."""

    def build(self, directory: Path) -> None:
        weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
        state = {"w": weight, "turned": weight.T, "b": torch.ones(3, dtype=torch.bfloat16)}
        adam = {0: {"step": torch.tensor(2.0), "exp_avg": weight * 2, "exp_avg_sq": weight * 3}}
        groups = [{"lr": 0.1, "params": [0]}]
        said = {"model": state, "optimizer": {"state": adam, "param_groups": groups}, "step": 2}
        torch.save(said, directory / MODEL)

    def url(self, directory: Path) -> str:
        return str(directory / MODEL)

    def change(self, directory: Path, chance: random.Random, secret: Path) -> Change:
        path = directory / MODEL
        match chance.randrange(4):
            case 0:
                what = _damage(path, chance)
            case _:
                with zipfile.ZipFile(path) as file:
                    entries = [(info.filename, file.read(info)) for info in file.infolist()]
                at = chance.randrange(len(entries)) if not chance.randrange(3) else 0
                name, data = entries[at]
                made, what = damaged(data, chance, [content for _, content in entries])
                entries[at] = name, made
                with zipfile.ZipFile(path, "w") as file:
                    for name, content in entries:
                        file.writestr(name, content)
                what = f"{what} of {entries[at][0]}"
        return Change(what=what, mended=True)


class Dcp:
    """A torch.distributed.checkpoint of one process."""

    def build(self, directory: Path) -> None:
        weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
        states = {"w": {"exp_avg": weight * 2, "exp_avg_sq": weight * 3, "step": torch.tensor(2.0)}}
        said = {"state": states, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
        dcp.save({"model": {"w": weight}, "optimizer": said}, checkpoint_id=str(directory / "dcp"))

    def url(self, directory: Path) -> str:
        return str(directory / "dcp")

    def change(self, directory: Path, chance: random.Random, secret: Path) -> Change:
        path = chance.choice(sorted((directory / "dcp").iterdir()))
        if not chance.randrange(6):
            return Change(what=f"{path.name} is {other_file(path, chance, secret)}", mended=True)
        return Change(what=f"{_damage(path, chance)} in {path.name}", mended=True)


def _damage(path: Path, chance: random.Random) -> str:
    data = path.read_bytes()
    made, what = damaged(data, chance, [data])
    path.write_bytes(made)
    return what


def _safetensors(arrays: dict[str, np.ndarray]) -> bytes:
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in arrays.items():
        span = [at, at + array.nbytes]
        head[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": span}
        at += array.nbytes
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in arrays.values())
