"""Hugging Face directories: safetensors files and their index, which `transformers` loads.

Parameters and buffers, no optimizer states. Tied tensors are there once, as `transformers` has them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from elastic_train.checkpoint.account import Name
from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.exporters.blocks import BLOCK, blocks, written_dtype
from elastic_train.checkpoint.exporters.target import Exported, check_empty
from elastic_train.checkpoint.language.mapped import Readable
from elastic_train.errors import ConfigError, TensorMismatch
from elastic_train.storage.store import Store

STATES = ("param", "buffer")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
WRITERS = 2


def export_hf(
    source: Readable,
    store: Store,
    *,
    dtype: str | None = None,
    max_file_bytes: int = 5 << 30,
    config: Mapping[str, Json] | None = None,
    limit: int = BLOCK,
) -> Exported:
    """Write the tensors of `source` to the root of `store`; floating ones as `dtype` if one is given.

    `config` becomes config.json. Two blocks of `limit` bytes per writer are in memory.
    """
    check_empty(store)
    names = [n for n in source.tensors if n[1] in STATES]
    _check(source, names, dtype)
    sizes = {n: _bytes(source, n, dtype) for n in names}
    files = _files(sizes, max_file_bytes)
    with ThreadPoolExecutor(WRITERS) as pool:
        jobs = [pool.submit(_write, source, store, file, own, dtype, limit) for file, own in files.items()]
        total = sum(job.result() for job in jobs)
    written = list(files)
    if config is not None:
        store.write("config.json", json.dumps(config, indent=2).encode())
        written.append("config.json")
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {tensor: file for file, own in files.items() for tensor, _ in own},
        }
        store.write("model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True).encode())
        written.append("model.safetensors.index.json")
    return Exported(files=tuple(written), bytes=total)


def _check(source: Readable, names: Sequence[Name], dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES.values():
        raise ConfigError(field="--dtype", problem=f"{dtype!r} is none of {', '.join(DTYPES)}.")
    if not names:
        raise TensorMismatch(url=source.url, problem="it has no parameters to export.")
    seen: set[str] = set()
    for tensor, _ in names:
        if tensor in seen:
            raise TensorMismatch(url=source.url, problem=f"{tensor} is both a parameter and a buffer.")
        seen.add(tensor)


def _bytes(source: Readable, name: Name, dtype: str | None) -> int:
    info = source.tensors[name]
    return math.prod(info.shape) * ELEMENTS[written_dtype(info.dtype, dtype)].bytes


def _files(sizes: Mapping[Name, int], most: int) -> dict[str, list[Name]]:
    """Tensors into files of at most `most` bytes, in their order; a larger tensor has a file of its own."""
    groups: list[list[Name]] = [[]]
    full = 0
    for name, size in sizes.items():
        if groups[-1] and full + size > most:
            groups.append([])
            full = 0
        groups[-1].append(name)
        full += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": own for i, own in enumerate(groups, start=1)}


def _write(
    source: Readable, store: Store, file: str, names: Sequence[Name], dtype: str | None, limit: int
) -> int:
    """One file: larger elements first, so that all are aligned. Returns its bytes."""

    def element_bytes(name: Name) -> int:
        return ELEMENTS[written_dtype(source.tensors[name].dtype, dtype)].bytes

    order = sorted(names, key=lambda n: (-element_bytes(n), n))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        info = source.tensors[name]
        size = _bytes(source, name, dtype)
        code = ELEMENTS[written_dtype(info.dtype, dtype)].code
        header[name[0]] = {"dtype": code, "shape": list(info.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with store.stream(file) as sink:
        sink.write(len(text).to_bytes(8, "little") + text)
        for block in blocks(source, order, dtype=dtype, limit=limit):
            sink.write(block.bytes)
    return 8 + len(text) + at
