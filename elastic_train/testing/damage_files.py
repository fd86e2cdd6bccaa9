"""A checkpoint's directory with one thing in it changed: a file by its kind, or which files there are."""

from __future__ import annotations

import json
import random
import shutil
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path

from elastic_train.testing.damage import INTS, TEXTS, damaged, json_bytes, other_file, other_json
from elastic_train.testing.damage_pickle import other_pickle
from elastic_train.testing.damage_zip import other_pickle_in_zip, other_zip
from elastic_train.testing.fuzzing import Damage

DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F4", "C64", "f32", "")
ODD_NAMES = (
    "zero_pp_rank_99999999999_mp_rank_00_optim_states.pt", "mp_rank_99_model_states.pt", "__1_0.distcp",
    "model-00001-of-99999.safetensors", "x.safetensors", "pytorch_model.bin", "latest", "\x1b[2J.pt",
    "ü .safetensors", ".metadata", "zero", "optimizer.pt", "0000000001", "latest_checkpointed_iteration.txt",
)  # fmt: skip


def change_files(directory: Path, files: Sequence[Path], chance: random.Random, secret: Path) -> Damage:
    """Change one of the files, or what is there."""
    path = chance.choice(files)
    where = path.relative_to(directory)
    match chance.randrange(12):
        case 0:
            return Damage(what=f"{where} is {other_file(path, chance, secret)}", mended=True)
        case 1:
            other = chance.choice(files)
            shutil.copy(other, path) if other != path else path.unlink()
            return Damage(what=f"{where} is {other.relative_to(directory)}", mended=True)
        case 2:
            to = path.parent / chance.choice([*ODD_NAMES, *(f.name for f in files)])
            if to.is_dir() or to == path:
                path.unlink()
                return Damage(what=f"{where} is gone", mended=True)
            move = chance.choice([shutil.move, shutil.copy])
            move(path, to)
            return Damage(what=f"{where} is {move.__name__} to {to.name!r}", mended=True)
        case 3 | 4:
            made, what = damaged(path.read_bytes(), chance, [path.read_bytes()])
            proved = path.suffix == ".distcp" or zipfile.is_zipfile(path)
            path.write_bytes(made)
            return Damage(what=f"{what} in {where}", mended=not proved)
        case _:
            made, what, mended = _by_kind(path, chance)
            path.write_bytes(made)
            return Damage(what=f"{what} in {where}", mended=mended)


def _by_kind(path: Path, chance: random.Random) -> tuple[bytes, str, bool]:
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        return *other_header(data, chance), True
    if path.suffix == ".json":
        value, what = other_json(json.loads(data), chance)
        return json_bytes(value), what, True
    if path.name == ".metadata":
        return *other_pickle(data, chance), True
    if zipfile.is_zipfile(path):
        return other_zip(data, chance) if chance.randrange(2) else (*other_pickle_in_zip(data, chance), True)
    if path.suffix != ".distcp" and len(data) < 100:
        return chance.choice(TEXTS).encode(), "another text", True
    return *damaged(data, chance, [data]), path.suffix != ".distcp"


def other_header(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """A file of safetensors with another header."""
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    one, other = chance.choice(names), chance.choice(names)
    own = header[one]
    match chance.randrange(9):
        case 0:
            own["data_offsets"] = chance.choice(
                [[0, 0], [-4, 4], own["data_offsets"][::-1], header[other]["data_offsets"], [0, len(rest)]]
            )
            what = f"{one} lies at {own['data_offsets']}"
        case 1:
            own["shape"] = chance.choice(
                [[], [-1], [0], [2**62, 4], [1] * 70, own["shape"][::-1], [2**32, 2**32]]
            )
            what = f"{one} has the shape {own['shape'][:3]}"
        case 2:
            own["dtype"] = chance.choice(DTYPES)
            what = f"{one} is of {own['dtype']}"
        case 3:
            header[chance.choice(TEXTS)] = header.pop(one)
            what = f"{one} is called otherwise"
        case 4:
            text = json.dumps(header)[:-1] + f", {json.dumps(one)}: {json.dumps(header[other])}}}"
            return _with(text.encode(), rest), f"{one} is there twice"
        case 5:
            text = json_bytes(header)
            wrong = chance.choice([*INTS[1:], len(text) + 1, len(data), len(data) - 8])
            return struct.pack("<Q", wrong & (2**64 - 1)) + text + rest, f"a header of {wrong} bytes"
        case 6:
            header["__metadata__"] = chance.choice(
                [{"DCP_SHARDING_INFO": t} for t in ("{}", "[]", '{"a": {"saved_offsets": [1]}}', "\0")]
                + [{"format": 5}, [], None, {"x": "y" * 200_000}]
            )
            what = "other words about it"
        case 7:
            return _with(json_bytes(header), rest[: chance.randrange(len(rest) + 1)]), "it is cut off"
        case _:
            header, what = other_json(header, chance)
    return _with(json_bytes(header), rest), what


def _with(header: bytes, rest: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + rest
