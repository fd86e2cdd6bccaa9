"""Our own format for the fuzzer: a run of two checkpoints, changed where its readers look."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.checkpoint.checksums import digest
from elastic_train.checkpoint.commit import MANIFEST, STATE, assemble
from elastic_train.checkpoint.manifest import SCHEMA
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.references import References
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.views import View
from elastic_train.checkpoint.writer import write_part
from elastic_train.geometry.box import Box
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.damage import INTS, TEXTS, damaged, json_bytes, other_file, other_json
from elastic_train.testing.fuzzing import Damage

LAST = attempt_path(step=2, generation=1)
DOCUMENT: dict[str, Any] = {
    "step": 2,
    "trainable": ["w", "low"],
    "schedule": {"class": "LinearLR", "settings": {}, "state": {"last_epoch": 2}, "driven": []},
    "optimizer": {
        "class": "AdamW",
        "groups": [{"params": ["w"], "hyperparameters": {"lr": 0.1, "betas": (0.9, 0.95)}}],
        "scalars": {"w": {"step": {"value": 2.0, "dtype": "float32"}}},
        "states": [["w", "exp_avg"], ["w", "absmax"]],
        "reshard": {"w": {"absmax": ["block", 4, 1]}},
    },
    "key": b"\x00\xff",
    "odd": {1: "one"},
}


class Native:
    """Views, aliases, references, a state in blocks, a 0-dim tensor, two writers."""

    def build(self, directory: Path) -> None:
        run = RunDirectory(open_store(str(directory / "run")))
        term = run.begin_term("fuzzer")
        references = References(run, full_every=100)
        for step in (1, 2):
            path = attempt_path(step=step, generation=1)
            parts = [
                write_part(run.store, path, i, pieces, unchanged=references.unchanged({"base"}))
                for i, pieces in enumerate(_pieces(step))
            ]
            views = {"q": View(of="w", dim=0, spans=((0, 2), (4, 6))).json()}
            assembled = assemble(
                run.store, path, parts, DOCUMENT | {"step": step}, aliases={"tied": "w"}, views=views
            )
            metrics = [("loss", 0.5)]
            run.commit(assembled, term=term, generation=1, step=step, lineage=[(1, 0)], metrics=metrics)

    def url(self, directory: Path) -> str:
        return str(directory / "run")

    def change(self, directory: Path, chance: random.Random, secret: Path) -> Damage:
        run = directory / "run"
        match chance.randrange(8):
            case 0 | 1:
                return Damage(what=_damage(run, chance), mended=False)
            case 2 | 3 | 4:
                what = _manifest(run, chance, secret)
            case 5:
                what = _state(run, chance)
            case 6:
                what = _log(run, chance)
            case _:
                files = sorted(p for p in run.rglob("*") if p.is_file())
                path = chance.choice(files)
                return Damage(
                    what=f"{path.relative_to(run)} is {other_file(path, chance, secret)}", mended=True
                )
        return Damage(what=what, mended=True)


def _pieces(step: int) -> list[list[Piece]]:
    w = np.arange(24, dtype=np.float32).reshape(6, 4) + step
    absmax = np.arange(6, dtype=np.float32)
    base, low = np.arange(40, dtype=np.int16), np.array(step, dtype=np.float64)

    def cut(name: str, array: np.ndarray, box: Box | None = None, state: str = "param") -> Piece:
        box = box or Box.whole(array.shape)
        return Piece(
            tensor=name, state=state, dtype=array.dtype.name, shape=array.shape, box=box,
            data=np.ascontiguousarray(array[box.slices]),
        )  # fmt: skip

    top, rest = Box((0, 0), (4, 4)), Box((4, 0), (2, 4))
    return [
        [cut("w", w, top), cut("w", w * 2, top, "exp_avg"), cut("base", base), cut("low", low)],
        [cut("w", w, rest), cut("w", w * 2, rest, "exp_avg"), cut("w", absmax, state="absmax")],
    ]


def _damage(run: Path, chance: random.Random) -> str:
    files = sorted(p for p in run.rglob("*") if p.is_file())
    path = chance.choice(files)
    made, what = damaged(path.read_bytes(), chance, [p.read_bytes() for p in files])
    path.write_bytes(made)
    return f"{what} in {path.relative_to(run)}"


def _manifest(run: Path, chance: random.Random, secret: Path) -> str:
    path = run / LAST / MANIFEST
    table = pq.read_table(path)
    words = {k.decode(): v.decode() for k, v in (pq.read_metadata(path).metadata or {}).items()}
    rows = table.select(SCHEMA.names).to_pylist()
    row = chance.choice(rows)
    schema = pa.schema([f.with_nullable(True) for f in SCHEMA])
    match chance.randrange(9):
        case 0:
            made, what = damaged(path.read_bytes(), chance, [path.read_bytes()])
            path.write_bytes(made)
            _commit(run)
            return f"{what} in the manifest, its hash mended"
        case 1:
            other = chance.choice(rows)
            rows.append(dict(other))
            what = f"a row of {other['tensor']} doubled"
        case 2:
            rows.remove(row)
            what = f"a row of {row['tensor']} removed"
        case 3:
            name = chance.choice(SCHEMA.names)
            row[name] = chance.choice(rows)[name]
            what = f"{name} of {row['tensor']} is another row's"
        case 4:
            name = chance.choice(["shape", "offsets", "sizes", "byte_strides", "checksums"])
            most = 2**32 if name == "checksums" else 2**64
            own = [n if n is not None else 0 for n in row[name] or []]
            own = chance.choice([own[1:], [*own, 1], own * 20, own[::-1], [i for i in INTS if 0 <= i < most]])
            row[name] = chance.choice([own, None, []])
            what = f"{name} of {row['tensor']} has {len(row[name] or [])} numbers"
        case 5:
            name = chance.choice(["shape", "offsets", "sizes", "byte_strides"])
            own = list(row[name] or [4] * len(row["shape"]))
            if own:
                own[chance.randrange(len(own))] = chance.choice(INTS)
            row[name] = own
            what = f"{name} of {row['tensor']} is {own}"
        case 6:
            name = chance.choice(["tensor", "state", "dtype", "file", "logical"])
            places = (
                str(secret),
                f"file://{secret}",
                "../../../outside/secret",
                "state.json",
                "memory://x/y",
            )
            row[name] = chance.choice([*TEXTS, *places, None, "float64", "uint8"])
            if name == "file":
                row["checksums"] = row["hash"] = None
            what = f"{name} of {row['tensor']} is {row[name]!r:.60}"
        case 7:
            row["byte_offset"] = chance.choice([*INTS, None])
            row["checksums"] = row["hash"] = None
            what = f"byte_offset of {row['tensor']} is {row['byte_offset']}"
        case _:
            name = chance.choice([*words, "elastic_train.index", "elastic_train.roots"])
            index: Any = [["w", "param", "float32", [6, 4], 0, len(rows)]]
            if name.endswith("roots"):
                index = {"run": chance.choice([str(run), "/"]), "roots": [str(secret.parent), "/", 5]}
            index, _ = other_json(index, chance)
            words[name] = chance.choice(
                [*TEXTS[:5], "7", "2", "-1", json_bytes(index).decode(), "[" * 100_000]
            )
            what = f"{name} is {words[name]:.60}"
    _write(path, pa.Table.from_pylist(rows, schema=schema), words)
    _commit(run)
    return what


def _state(run: Path, chance: random.Random) -> str:
    path = run / LAST / STATE
    made, what = other_json(json.loads(path.read_bytes()), chance)
    data = json_bytes(made)
    path.write_bytes(data)
    manifest = run / LAST / MANIFEST
    words = {k.decode(): v.decode() for k, v in (pq.read_metadata(manifest).metadata or {}).items()}
    _write(manifest, pq.read_table(manifest), words | {"elastic_train.state_hash": digest(data)})
    _commit(run)
    return f"{what} in the state file"


def _write(path: Path, table: pa.Table, words: dict[str, str]) -> None:
    with pq.ParquetWriter(path, table.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({k: v for k, v in words.items() if k.startswith("elastic_train.")})


def _commit(run: Path) -> None:
    """The newest record names the manifest as it is now."""
    path = max((run / "commits").iterdir())
    record = json.loads(path.read_bytes())
    record["manifest_hash"] = digest((run / LAST / MANIFEST).read_bytes())
    path.write_bytes(json.dumps(record).encode())


def _log(run: Path, chance: random.Random) -> str:
    """A record changed, and those after it made to follow it."""
    if not chance.randrange(6):
        stray = run / "commits" / chance.choice(["99999999.json", "00000000.json", "00000009.json", "x.json"])
        stray.write_bytes(b"x")
        return f"{stray.name} in the log"
    paths = sorted((run / "commits").iterdir())
    at = chance.randrange(len(paths))
    made, what = other_json(json.loads(paths[at].read_bytes()), chance)
    paths[at].write_bytes(json_bytes(made))
    for before, path in zip(paths[at:], paths[at + 1 :], strict=False):
        record = json.loads(path.read_bytes())
        record["after_hash"] = digest(before.read_bytes())
        path.write_bytes(json.dumps(record).encode())
    return f"{what} in slot {at + 1}"
