"""A fuzzer of checkpoints: change one thing in a small one, open it, look at everything.

What is changed and mended afterwards (hashes, checksums, lengths) is a Format's business, one class for
each system's files. What must come out is the same for all:

- nothing was mended: the same bytes as before, a typed error, or a line of what is not restored;
- hashes were mended, so that the change is believed: a typed error, or a checkpoint of which every element is
  defined, none of them from a file outside;
- always: within SECONDS of work and BYTES beyond the checkpoint's own size, in a process that lives on.

To add a format, write a class like Native in fuzz_native.py and hand its place to `fuzz`.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from elastic_train.checkpoint.document import decode, encode
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.read_plan import read_plan, sharded
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.verify import verify
from elastic_train.errors import ElasticTrainError
from elastic_train.geometry.box import Box

SECONDS = 10
BYTES = 256 << 20
SECRET = b"what lies outside of the checkpoint "
BATCH = 250
"""Cases of one process."""
SMALL = 1 << 20
HARD = 3 << 30
"""Address space beyond which a case fails by itself, so that the machine lives on."""
PATTERNS = (0x55, 0xAA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What was changed, in words, and whether hashes were mended so that it is believed."""

    what: str
    mended: bool


class Format(Protocol):
    """One system's checkpoints. `secret` is a file outside that holds SECRET, for names to lead to."""

    def build(self, directory: Path) -> None:
        """Write a small checkpoint into a directory that is there."""
        ...

    def url(self, directory: Path) -> str:
        """What is opened."""
        ...

    def change(self, directory: Path, chance: random.Random, secret: Path) -> Damage:
        """Change one thing in a copy of it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`verdict` is "same", "typed" or "sound"; anything else is a fault, and `detail` says what happened."""

    seed: int
    what: str
    verdict: str
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict in ("same", "typed", "sound")


def fuzz(place: str, seeds: Sequence[int], root: Path) -> list[Case]:
    """The cases of these seeds for the format at `place` (module:Class, or module:Class:argument), in
    processes of their own.
    """
    found: list[Case] = []
    rest = list(seeds)
    while rest:
        batch = rest[:BATCH]
        command = [sys.executable, "-m", __name__, place, str(root), *map(str, batch)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        found += [Case(**json.loads(line)) for line in lines]
        rest = rest[len(lines) :]
        if len(lines) < len(batch):
            detail = f"the process ended with {done.returncode}: {done.stderr[-2000:]}"
            found.append(Case(seed=rest[0], what="", verdict="died", detail=detail))
            rest = rest[1:]
    return found


def cases(place: str, seeds: Sequence[int], root: Path) -> Iterator[Case]:
    """The cases of these seeds, in this process."""
    module, name, *words = place.split(":", 2)
    form: Format = getattr(importlib.import_module(module), name)(*words)
    home = root / f"{name}-{os.getpid()}"
    secret = home / "outside" / "secret"
    secret.parent.mkdir(parents=True)
    secret.write_bytes(SECRET * 100)
    good, bad = home / "good", home / "bad"
    good.mkdir()
    form.build(good)
    shutil.copytree(good, bad, symlinks=True)
    truth = contents(form.url(bad))
    _limit()
    try:
        for seed in seeds:
            shutil.rmtree(bad)
            shutil.copytree(good, bad, symlinks=True)
            change = form.change(bad, random.Random(seed), secret)
            yield _case(seed, change, form.url(bad), truth)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def contents(url: str) -> dict[str, Any]:
    """Everything that can be had of a checkpoint."""
    checkpoint = open_checkpoint(url)
    found: dict[str, Any] = {"document": encode(checkpoint.document), "aliases": dict(checkpoint.aliases)}
    checkpoint.kinds()
    for tensor in checkpoint:
        for state in checkpoint[tensor]:
            found[f"{tensor}:{state}"] = _read(checkpoint, tensor, state)
    found["problems"] = verify(checkpoint).problems
    read_plan(checkpoint, sharded(checkpoint, 2))
    return found


def _read(checkpoint: Checkpoint, tensor: str, state: str) -> tuple[str, tuple[int, ...], bytes, bytes]:
    """All elements, over two different patterns: what isn't written shows."""
    info = checkpoint.info(tensor, state)
    kind = ELEMENTS[info.dtype].numpy
    size = int(np.prod([float(n) for n in info.shape])) * kind.itemsize
    if size > SMALL:
        data = checkpoint.read(tensor, state).tobytes()
        return info.dtype, info.shape, data, data
    both: list[bytes] = []
    for pattern in PATTERNS:
        into = np.full(size, pattern, dtype=np.uint8).view(kind).reshape(info.shape)
        request = (tensor, state, Box.whole(info.shape))
        both.append(checkpoint.read_many([request], into=[into])[0].tobytes())
    return info.dtype, info.shape, both[0], both[1]


def _case(seed: int, change: Damage, url: str, truth: dict[str, Any]) -> Case:
    def verdict(name: str, detail: str = "") -> Case:
        return Case(seed=seed, what=change.what, verdict=name, detail=detail)

    before, began = _peak(reset=True), time.process_time()  # of all threads, whatever else the machine does
    signal.setitimer(signal.ITIMER_REAL, 3 * SECONDS)
    try:
        found = contents(url)
        done = judge(found, truth, mended=change.mended)
    except ElasticTrainError as error:
        done = ("typed", f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001 - whatever it is, it is a fault and is told
        done = ("untyped", traceback.format_exc()[-1500:])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took, used = time.process_time() - began, _peak() - before
    if took > SECONDS:
        done = ("slow", f"{took:.1f} s, {done[0]}: {done[1]}")
    elif used > BYTES:
        done = ("large", f"{used} bytes, {done[0]}: {done[1]}")
    return verdict(*done)


def judge(found: dict[str, Any], truth: dict[str, Any], *, mended: bool) -> tuple[str, str]:
    """The verdict on what was found, where `truth` was before, and its detail."""
    if found == truth:
        return "same", ""
    tensors = {k: v for k, v in found.items() if isinstance(v, tuple) and len(v) == 4}
    for name, (_, _, one, other) in tensors.items():
        if one != other:
            return "undefined", f"{name} has elements that nobody wrote"
        if SECRET in one:
            return "outside", f"{name} holds bytes of a file outside"
    if not mended and not found["problems"] and not _accounted(found) - _accounted(truth):
        differ = sorted(k for k in {*found, *truth} if found.get(k) != truth.get(k))
        return "silent", f"{', '.join(differ)} changed and nothing is said"
    return "sound", ""


def _accounted(found: dict[str, Any]) -> set[str]:
    """What the document says of another system's checkpoint that isn't restored."""
    foreign = decode(found["document"], url="").get("foreign") or {}
    return set(foreign.get("not_restored", ()))


def _limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + HARD, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a case that hangs ends its process


def _peak(*, reset: bool = False) -> int:
    """The most memory that this process had, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def main() -> None:
    place, root, *seeds = sys.argv[1:]
    for case in cases(place, [int(s) for s in seeds], Path(root)):
        sys.stdout.write(json.dumps(asdict(case)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
