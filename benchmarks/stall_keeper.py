"""The other process of "ours" in benchmarks/stall.py: it has what a keeper and its buddy have to do."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from elastic_train.checkpoint.engine.arena import Arena
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.writer import write_part
from elastic_train.geometry.box import Box
from elastic_train.storage.fsspec_store import open_store


def keep(pipe: Connection, path: str, size: int, slots: int, storage: str | None, rank: int) -> None:
    """Copy each snapshot that is announced into memory of this process, and write it if asked to."""
    arena = Arena.attach(Path(path), size, slots=slots)
    copies = np.zeros((2, size), np.uint8)  # touched: what the buddy holds is reused
    store = open_store(storage) if storage is not None else None
    pipe.send("ready")
    number = 0
    while (word := pipe.recv()) is not None:
        step, slot, places = word
        memory = np.frombuffer(arena.slot(slot), np.uint8)
        copies[number % 2, : len(memory)] = memory
        if store is not None:
            pieces = [
                Piece(
                    tensor=key.partition(":")[0],
                    state="param",
                    dtype="uint8",
                    shape=(nbytes,),
                    box=Box.whole((nbytes,)),
                    data=memory[offset : offset + nbytes],
                )
                for key, offset, nbytes in places
            ]
            write_part(store, f"attempt-{number % 2}", rank, pieces)
        number += 1
        pipe.send(step)
