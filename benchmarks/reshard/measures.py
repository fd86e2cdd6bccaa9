"""Single measurements of `reshard`: opening, converting, exporting, and throughput beside the raw limits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from benchmarks.reshard.state import Size, State
from elastic_train.checkpoint.exporters.hf import export_hf
from elastic_train.checkpoint.read_plan import read_plan, sharded
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.checkpoint.verify import verify
from elastic_train.geometry.box import Box
from elastic_train.storage.early_writeback import begin_writing
from elastic_train.storage.fsspec_store import Options, open_store

CHUNK = 8 << 20
WRITERS, READERS = 2, 8


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def open_in_place(url: Path, ranks: int) -> dict[str, float]:
    """Seconds from a directory to a checkpoint of which any box can be read, and the bytes that it wrote.

    `planned_s`: until it is known too which ranges of which files that many ranks will read.
    """
    before, began = _tree_bytes(url.parent), time.perf_counter()
    checkpoint = open_checkpoint(str(url))
    seconds = time.perf_counter() - began
    plan = read_plan(checkpoint, sharded(checkpoint, ranks))
    planned = time.perf_counter() - began
    assert all(rank.reads for rank in plan.ranks)
    return {
        "seconds": seconds,
        "planned_s": planned,
        "bytes_written": _tree_bytes(url.parent) - before,
    }


def convert_with_torch(source: Path, target: Path) -> dict[str, float]:
    """torch's own pass over DCP files: one file that `torch.load` reads."""
    seconds = timed(lambda: dcp_to_torch_save(source, target))
    return {"seconds": seconds, "bytes_written": target.stat().st_size}


def export_with_torch(source: Path, target: Path, size: Size) -> float:
    """Seconds of the shortest way of torch and safetensors: the weights alone are loaded and saved."""
    target.mkdir()

    def work() -> None:
        model = {name: torch.empty(shape) for name, shape in size.shapes()}
        _load_state_dict({"model": model}, storage_reader=FileSystemReader(source), no_dist=True)
        cast = {name: tensor.to(torch.bfloat16) for name, tensor in model.items()}
        save_file(cast, target / "model.safetensors", metadata={"format": "pt"})
        sync(target / "model.safetensors")

    return timed(work)


def export_with_converter(source: Path, target: Path) -> float:
    """Seconds of what torch ships: its converter writes the whole state, of which the weights are cast and
    saved.
    """
    target.mkdir()
    whole = target / "whole.pt"

    def work() -> None:
        dcp_to_torch_save(source, whole)
        model = torch.load(whole, mmap=True)["model"]
        cast = {name: tensor.to(torch.bfloat16) for name, tensor in model.items()}
        save_file(cast, target / "model.safetensors", metadata={"format": "pt"})
        sync(target / "model.safetensors")

    return timed(work)


def export_with_us(source: Path, target: Path) -> float:
    """Seconds from the same files to the same file; what we publish is durable."""
    return timed(lambda: export_hf(open_checkpoint(str(source)), open_store(str(target)), dtype="bfloat16"))


def write_raw(directory: Path, state: State) -> float:
    """Seconds of the same bytes in as many files, by as many threads, durable."""
    directory.mkdir(parents=True)
    views = [memoryview(array.reshape(-1).view(np.uint8)) for array in state.values()]

    def one(number: int) -> None:
        with (directory / f"{number}.bin").open("wb", buffering=0) as file:
            for view in views[number::WRITERS]:
                for start in range(0, len(view), CHUNK):
                    at = file.tell()
                    begin_writing(file.fileno(), at, file.write(view[start : start + CHUNK]))
            os.fsync(file.fileno())

    return timed(lambda: _each(one, range(WRITERS)))


def read_ours(url: str, state: State, *, options: Options | None = None) -> float:
    """Seconds to open a checkpoint and read all of it, verified, into memory that is there."""
    memory = [np.ones_like(array) for array in state.values()]
    names = [(*name, Box.whole(array.shape)) for name, array in state.items()]
    seconds = timed(lambda: open_checkpoint(url, options=options).read_many(names, into=memory))
    assert all(np.array_equal(a, b) for a, b in zip(memory, state.values(), strict=True))
    return seconds


def verify_ours(url: str) -> float:
    """Seconds to open a checkpoint and compare every byte with its sums and hashes."""

    def work() -> None:
        assert verify(open_checkpoint(url)).sound

    return timed(work)


def read_raw(directory: Path) -> float:
    """Seconds to read all files of a directory into memory that is there."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    memory = [np.ones(p.stat().st_size, np.uint8) for p in files]
    places = [(i, start) for i, m in enumerate(memory) for start in range(0, len(m), CHUNK)]
    handles = [os.open(p, os.O_RDONLY) for p in files]

    def one(place: tuple[int, int]) -> None:
        number, start = place
        os.preadv(handles[number], [memory[number][start : start + CHUNK]], start)

    try:
        return timed(lambda: _each(one, places))
    finally:
        for handle in handles:
            os.close(handle)


def write_raw_s3(filesystem: Any, url: str, state: State) -> float:
    """Seconds of the same bytes as objects of the client's own multipart upload."""
    views = [memoryview(array.reshape(-1).view(np.uint8)) for array in state.values()]

    def one(number: int) -> None:
        with filesystem.open(f"{url}/{number}", "wb", block_size=16 << 20) as file:
            for view in views[number::WRITERS]:
                file.write(view)

    return timed(lambda: _each(one, range(WRITERS)))


def read_raw_s3(filesystem: Any, url: str) -> float:
    """Seconds to get the same objects by ranges, as many at a time as we ask for."""
    sizes = {number: filesystem.info(f"{url}/{number}")["size"] for number in range(WRITERS)}
    places = [(n, start) for n, size in sizes.items() for start in range(0, size, CHUNK)]

    def one(place: tuple[int, int]) -> None:
        number, start = place
        end = min(start + CHUNK, sizes[number])
        filesystem.cat_file(f"{url}/{number}", start=start, end=end)

    return timed(lambda: _each(one, places))


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _each(work: Callable[[Any], object], over: Iterable[Any]) -> None:
    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(work, over):
            pass


def _tree_bytes(directory: Path) -> int:
    return sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())
