"""Other systems' formats for the fuzzer: a file of torch.save, a directory of torch.distributed, safetensors.

Sums are mended where a format has some: a changed pickle goes into a zip that is right in itself. Metadata of
torch.distributed and headers of safetensors have no sums at all, so that any change of them is believed.
"""

from __future__ import annotations

import io
import json
import random
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from elastic_train.testing.damage import damaged, json_bytes, other_file, other_json
from elastic_train.testing.fuzzing import Change

INSTRUCTIONS = (
    b"()]}0NJKMTUXBC\x85\x86\x87\x88\x89tRbdesuahijqrlopQcI.\x80\x81\x82\x8a\x8b\x8c\x8e\x8f\x90\x91\x92\x93"
    b"\x94\x95\x96\x97\x98G2"
)
"""The first bytes of a pickle's instructions."""


class TorchFile:
    """One file with a model and its optimizer by name."""

    def build(self, directory: Path) -> None:
        model, optimizer = _states(full=True)
        rest = {"step": 3, "note": ("ü", [1.5, None]), "extra": {"mask": torch.ones(2).bool()}}
        torch.save({"model": model, "optimizer": optimizer, **rest}, directory / "x.pt")

    def url(self, directory: Path) -> str:
        return str(directory / "x.pt")

    def change(self, directory: Path, chance: random.Random, secret: Path) -> Change:
        path = directory / "x.pt"
        match chance.randrange(8):
            case 0 | 1:
                made, what = damaged(path.read_bytes(), chance, [path.read_bytes()])
                path.write_bytes(made)
                return Change(what=what, mended=False)
            case 2:
                return Change(what=f"the file is {other_file(path, chance, secret)}", mended=True)
            case 3:
                return Change(what=_other_entries(path, chance), mended=True)
            case _:
                return Change(what=_other_pickle(path, chance), mended=True)


class Distributed:
    """What torch.distributed.checkpoint writes of a model and its optimizer."""

    def build(self, directory: Path) -> None:
        model, optimizer = _states()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = {"model": model, "optimizer": optimizer, "train_state": {"step": torch.tensor(3)}}
            save(state, checkpoint_id=str(directory / "dcp"))

    def url(self, directory: Path) -> str:
        return str(directory / "dcp")

    def change(self, directory: Path, chance: random.Random, secret: Path) -> Change:
        metadata = directory / "dcp" / ".metadata"
        (data,) = (directory / "dcp").glob("*.distcp")
        match chance.randrange(8):
            case 0 | 1:
                made, what = damaged(data.read_bytes(), chance, [data.read_bytes()])
                data.write_bytes(made)
                return Change(what=f"{what} in the data", mended=False)
            case 2:
                path = chance.choice([metadata, data])
                return Change(what=f"{path.name} is {other_file(path, chance, secret)}", mended=True)
            case 3:
                made, what = damaged(metadata.read_bytes(), chance, [metadata.read_bytes()])
                metadata.write_bytes(made)
                return Change(what=f"{what} in the metadata", mended=True)
            case _:
                made, what = _changed_pickle(metadata.read_bytes(), chance)
                metadata.write_bytes(made)
                return Change(what=f"{what} in the metadata", mended=True)


class Safetensors:
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

    def url(self, directory: Path) -> str:
        return str(directory)

    def change(self, directory: Path, chance: random.Random, secret: Path) -> Change:
        paths = sorted(p for p in directory.iterdir() if p.is_file())
        path = chance.choice(paths)
        match chance.randrange(6):
            case 0:
                made, what = damaged(path.read_bytes(), chance, [p.read_bytes() for p in paths])
            case 1:
                return Change(what=f"{path.name} is {other_file(path, chance, secret)}", mended=True)
            case _ if path.suffix == ".json":
                value, what = other_json(json.loads(path.read_bytes()), chance)
                made = json_bytes(value)
            case _:
                data = path.read_bytes()
                length = int.from_bytes(data[:8], "little")
                value, what = other_json(json.loads(data[8 : 8 + length]), chance)
                header = json_bytes(value)
                made = struct.pack("<Q", len(header)) + header + data[8 + length :]
        path.write_bytes(made)
        return Change(what=f"{what} in {path.name}", mended=True)


def _states(*, full: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.arange(4)).sum().backward()
    optimizer.step()
    model, states = get_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=full))
    return model, states


def _changed_pickle(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Instructions changed, put in, removed or repeated, and numbers set."""
    made = bytearray(data)
    said: list[str] = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        at = chance.randrange(len(made))
        match chance.randrange(6):
            case 0:
                made[at] = chance.choice(INSTRUCTIONS)
                what = "another instruction"
            case 1:
                made[at] ^= 1 << chance.randrange(8)
                what = "a bit flipped"
            case 2:
                made[at:at] = bytes([chance.choice(INSTRUCTIONS)])
                what = "one more instruction"
            case 3:
                del made[at : at + chance.randrange(1, 12)]
                what = "instructions removed"
            case 4:
                start = chance.randrange(len(made))
                made[at:at] = made[start : start + chance.randrange(1, 40)]
                what = "instructions repeated"
            case _:
                made[at : at + 4] = struct.pack("<i", chance.choice([-1, -(2**31), 2**31 - 1, 0, 1, 7]))
                what = "a number set"
        said.append(f"{what} at byte {at}")
        if not made:
            break
    return bytes(made), " and ".join(said)


def _other_pickle(path: Path, chance: random.Random) -> str:
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = next(n for n in entries if n.endswith("/data.pkl"))
    entries[name], what = _changed_pickle(entries[name], chance)
    _write(path, list(entries.items()))
    return f"{what} in the pickle"


def _other_entries(path: Path, chance: random.Random) -> str:
    """An entry removed, doubled, renamed, or with another's contents."""
    with zipfile.ZipFile(path) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    at, other = chance.randrange(len(entries)), chance.choice(entries)
    name, data = entries[at]
    match chance.randrange(5):
        case 0:
            del entries[at]
            what = "is gone"
        case 1:
            entries.append((name, other[1]))
            what = "is there twice"
        case 2:
            entries[at] = (chance.choice(["../x", "/x", "x/data/0", "y/data/0", "x/data.pkl"]), data)
            what = f"is called {entries[at][0]}"
        case 3:
            entries[at] = (name, other[1])
            what = f"has the contents of {other[0]}"
        case _:
            entries[at] = (name, data[: chance.randrange(len(data) + 1)] + b"\0" * chance.randrange(9))
            what = "has another length"
    _write(path, entries)
    return f"{name} {what}"


def _write(path: Path, entries: list[tuple[str, bytes]]) -> None:
    sink = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        warnings.simplefilter("ignore")
        for name, data in entries:
            archive.writestr(name, data)
    path.write_bytes(sink.getvalue())
