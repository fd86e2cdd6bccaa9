"""The other process of "ours" in benchmarks/stall: it has what a peer store and its buddy have to do."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from elastic_train.checkpoint.engine.arena import Arena
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.writer import write_part
from elastic_train.geometry.box import Box
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.store import Store

Places = list[tuple[str, int, int]]
"""Name, offset and bytes of each tensor in the slot."""


def keep(pipe: Connection, path: str, size: int, slots: int, storage: str | None, rank: int) -> None:
    """Copy each snapshot that is announced into memory of this process, and write those that are to be."""
    arena = Arena.attach(Path(path), size, slots=slots)
    copies = np.ones((2, size), np.uint8)  # touched: what the buddy holds is reused
    store = open_store(storage) if storage is not None else None
    saying = threading.Lock()
    pipe.send(("ready", 0))

    def say(word: str, step: int) -> None:
        with saying:
            pipe.send((word, step))

    number = 0
    while (announced := pipe.recv()) is not None:
        step, slot, places, flush = announced
        memory = np.frombuffer(arena.slot(slot), np.uint8)
        copies[number % 2, : len(memory)] = memory
        number += 1
        say("copied", step)
        if flush and store is not None:
            arguments = (store, rank, number, memory, places, lambda step=step: say("flushed", step))
            threading.Thread(target=_write, args=arguments).start()


def _write(store: Store, rank: int, number: int, memory: np.ndarray, places: Places, done: object) -> None:
    pieces = [
        Piece(
            tensor=name,
            state="param",
            dtype="uint8",
            shape=(nbytes,),
            box=Box.whole((nbytes,)),
            data=memory[offset : offset + nbytes],
        )
        for name, offset, nbytes in places
    ]
    write_part(store, f"attempt-{number % 2}", rank, pieces)
    assert callable(done)
    done()
