"""A checkpoint of very many fragments: what its verbs take, each in a process of its own.

python -m benchmarks.reshard.fragments DIRECTORY VERB prints one verb's seconds and peak of memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_train.checkpoint.checksums import content_hash, crc, digest
from elastic_train.checkpoint.differences import differences
from elastic_train.checkpoint.document import StateFile
from elastic_train.checkpoint.manifest import SCHEMA, Manifest
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.checkpoint.verify import verify

VERBS = ("open", "diff", "verify")
OF_A_TENSOR, BYTES = 1000, 16
"""Fragments of a tensor, and bytes of a fragment."""


def write(directory: Path, fragments: int) -> None:
    """A checkpoint of so many fragments, all of zeros, in one file."""
    tensors = fragments // OF_A_TENSOR
    count = tensors * OF_A_TENSOR
    tensor = np.repeat(np.arange(tensors), OF_A_TENSOR)
    same = np.zeros(count, dtype=np.int64)

    def text(values: list[str], of: Any) -> pa.Array:
        return pa.array(values).take(pa.array(of))

    def ones(values: Any) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), pa.array(values))

    page, content = crc(bytes(BYTES)), content_hash(bytes(BYTES))
    columns = {
        "tensor": text([f"layers.{n:06d}.weight" for n in range(tensors)], tensor),
        "state": text(["param"], same),
        "dtype": text(["float32"], same),
        "shape": ones(np.full(count, OF_A_TENSOR * BYTES // 4)),
        "offsets": ones(np.tile(np.arange(OF_A_TENSOR), tensors) * BYTES // 4),
        "sizes": ones(np.full(count, BYTES // 4)),
        "logical": pa.nulls(count, pa.string()),
        "file": text(["w00000.safetensors"], same),
        "byte_offset": pa.array(np.arange(count) * BYTES),
        "byte_strides": pa.nulls(count, pa.list_(pa.int64())),
        "checksums": ones(np.full(count, page, dtype=np.uint32)),
        "hash": pa.array([content], pa.binary(16)).take(pa.array(same)),
    }
    directory.mkdir()
    state = StateFile(document={"step": 1}, aliases={}).encode()
    (directory / "state.json").write_bytes(state)
    table = pa.table(columns).cast(SCHEMA)
    manifest = Manifest.from_table(table, url=str(directory), extra={"state_hash": digest(state)})
    (directory / "manifest.parquet").write_bytes(manifest.encode())
    with (directory / "w00000.safetensors").open("wb") as file:
        file.truncate(count * BYTES)


def measured(directory: Path, verb: str) -> dict[str, float]:
    """Seconds, CPU seconds and memory beyond that before, of one verb in a new process."""
    command = [sys.executable, "-m", "benchmarks.reshard.fragments", str(directory), verb]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(said.splitlines()[-1])


def _main(directory: str, verb: str) -> None:
    before, began, cpu = _peak_mb(), time.perf_counter(), time.process_time()
    checkpoint = open_checkpoint(directory)
    if verb == "diff":
        assert not list(differences(checkpoint, open_checkpoint(directory)))
    elif verb == "verify":
        assert verify(checkpoint).sound
    found = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    print(json.dumps(found | {"memory_mb": _peak_mb() - before}))


def _peak_mb() -> float:
    """Of this program's memory; getrusage would count what its parent had."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    _main(*sys.argv[1:])
