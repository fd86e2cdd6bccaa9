"""How far long work is, on the error stream: one line that changes on a terminal, else a line now and then.

What is printed to the output stays what it is without it, with `--json` too.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.language.mapped import Mapped, Readable
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.observe.text_columns import plain
from elastic_train.planner.plan import bytes_text

TERMINAL_S, LOG_S = 0.5, 30.0
"""Seconds between two words, on a terminal and elsewhere."""


@contextmanager
def progress(
    what: str, done: Callable[[], int], total: int | None, *, text: Callable[[int], str] = bytes_text
) -> Iterator[None]:
    """Say how much of `total` is done while the work runs; nothing of work that ends soon."""
    terminal = sys.stderr.isatty()
    over = threading.Event()
    began = time.monotonic()

    def say_now(number: int) -> None:
        number = number if total is None else min(number, total)
        spent = max(time.monotonic() - began, 1e-9)
        line = f"{what} {text(number)}" + ("" if total is None else f" of {text(total)}")
        if total is not None and 0 < number < total:
            line += f", {spent * (total - number) / number:.0f} s left"
        print(
            f"\r{plain(line):<70}" if terminal else plain(line), end="" if terminal else "\n", file=sys.stderr
        )
        sys.stderr.flush()

    def watch() -> None:
        said = False
        while not over.wait(TERMINAL_S if terminal else LOG_S):
            say_now(done())
            said = True
        if said:
            say_now(done())
            if terminal:
                print(file=sys.stderr, flush=True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def reading(what: str, *sources: Readable, total: int | None) -> Iterator[None]:
    """Progress of work that reads these checkpoints, by the bytes that are read."""
    parts = [
        part for source in sources for part in (source.parts if isinstance(source, Mapped) else [source])
    ]
    files = [part.files for part in parts if isinstance(part, Checkpoint)]
    with progress(what, lambda: sum(own.bytes_read for own in files), total):
        yield


def stored_bytes(source: Readable) -> int:
    """The bytes of all its tensors."""
    return sum(math.prod(info.shape) * ELEMENTS[info.dtype].bytes for info in source.tensors.values())
