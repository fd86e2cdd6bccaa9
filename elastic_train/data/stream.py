"""Streams by number: shards that can be opened again, each read from its beginning, in one order.

What a number means is fixed once: the samples of each shard are counted, in this process or in a file that is
kept. Sample i is then the k-th of a shard, and reading the numbers one after the other reads each shard once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elastic_train.data.index_cache import replace_whole
from elastic_train.data.numbered import tell_epoch
from elastic_train.data.permutation import Permutation
from elastic_train.errors import ConfigError, DataMismatch

_END = object()


class Stream:
    """Samples of `shards`, opened by `read`: from a shard to what gives its samples, the same each time.

    `Stream(make)` numbers a single stream, which `make()` opens, or an IterableDataset. `counts` are the
    samples of each shard, where they are known, or the path of a file that keeps them; else every process
    reads everything once to count. With `shuffle` the shards, and samples within `window` of one another, are
    permuted anew in each epoch, by `seed`; `window` samples are held in memory then.

    Every rank reads each shard, and skips what others train, so a stream costs as many readings as there are
    ranks. A run that resumes reads the shard it stopped in from its beginning.
    """

    sequential = True

    def __init__(
        self,
        read: Callable[..., Iterable[Any]] | Iterable[Any],
        shards: Sequence[Any] | None = None,
        *,
        counts: Sequence[int] | str | Path | None = None,
        shuffle: bool = False,
        window: int = 1024,
        seed: int = 0,
    ):
        if window < 1:
            raise ConfigError(field="stream.window", problem=f"must be positive, got {window}.")
        if shards is not None and not shards:
            raise ConfigError(field="stream.shards", problem="there are none.")
        self.read, self.shards, self.counts = read, None if shards is None else tuple(shards), counts
        self.shuffle, self.window, self.seed = shuffle, window, seed
        self._epoch = 0
        self._known: list[int] | None = None
        self._forget()

    def set_epoch(self, epoch: int) -> None:
        """From here on samples are those of this epoch."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._forget()

    def __len__(self) -> int:
        return sum(self._counted())

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        place = int(np.searchsorted(self._ends(), index, side="right"))
        first = int(self._ends()[place - 1]) if place else 0
        shard, at = self._order()[place], index - first
        if not self.shuffle:
            return self._sample(shard, at)
        block = at // self.window
        if self._held != (shard, block):
            size = min(self.window, self._counted()[shard] - block * self.window)
            self._block = [self._sample(shard, block * self.window + i) for i in range(size)]
            self._held = (shard, block)
        digest = hashlib.blake2b(f"{self.seed} {shard} {block}".encode(), digest_size=8).digest()
        within = Permutation(len(self._block), int.from_bytes(digest, "little"), self._epoch)
        return self._block[int(within(at % self.window))]

    def describe(self) -> Any:
        return (len(self.shards or ()), tuple(self._counted()), self.shuffle, self.window, self.seed)

    # -- reading -------------------------------------------------------------------------------------------

    def _sample(self, shard: int, at: int) -> Any:
        """The sample at a position of a shard; behind the last one that was read it goes on from there."""
        if self._reading is None or self._reading[0] != shard or self._reading[1] > at:
            self._reading = (shard, 0, self._opened(shard))
        _, position, samples = self._reading
        found = list(itertools.islice(samples, at - position, at - position + 1))
        self._reading = (shard, at + 1, samples)
        last = at == self._counted()[shard] - 1
        if not found or (last and next(samples, _END) is not _END):
            raise DataMismatch(
                field="task.dataset",
                problem=f"shard {shard} has not the {self._counted()[shard]} samples that were counted.",
                remedy="Restore it, or count again and start a new run under another name.",
            )
        return found[0]

    def _opened(self, shard: int) -> Iterator[Any]:
        given = () if self.shards is None else (self.shards[shard],)
        made = self.read(*given) if callable(self.read) else self.read
        tell_epoch(made, self._epoch)
        samples = iter(made)
        if samples is self.read:
            raise ConfigError(
                field="task.dataset",
                problem=f"a {type(samples).__name__} can be read once only.",
                remedy="Give the function that makes it.",
            )
        return samples

    def _order(self) -> Sequence[int]:
        """The shards in the order of this epoch."""
        if self._shards_now is not None:
            return self._shards_now
        number = len(self._counted())
        places = np.arange(number)
        order = Permutation(number, self.seed, self._epoch)(places) if self.shuffle else places
        self._shards_now = [int(shard) for shard in order]
        return self._shards_now

    def _ends(self) -> Any:
        if self._ends_now is None:
            counts = self._counted()
            self._ends_now = np.cumsum([counts[shard] for shard in self._order()], dtype=np.int64)
        return self._ends_now

    def _counted(self) -> list[int]:
        if self._known is None:
            self._known = self._count()
            number = 1 if self.shards is None else len(self.shards)
            if len(self._known) != number:
                raise ConfigError(
                    field="stream.counts",
                    problem=f"there are {len(self._known)} counts for {number} shards.",
                    remedy="Remove the file, or give the samples of each shard in their order.",
                )
        return self._known

    def _count(self) -> list[int]:
        if self.counts is not None and not isinstance(self.counts, str | Path):
            return [int(count) for count in self.counts]
        kept = None if self.counts is None else Path(self.counts).expanduser()
        if kept is not None and kept.is_file():
            return [int(count) for count in json.loads(kept.read_text())["counts"]]
        number = 1 if self.shards is None else len(self.shards)
        counts = [sum(1 for _ in self._opened(shard)) for shard in range(number)]
        if kept is not None:
            replace_whole(kept, json.dumps({"counts": counts}))
        return counts

    def _forget(self) -> None:
        self._reading: tuple[int, int, Iterator[Any]] | None = None
        self._held: tuple[int, int] | None = None
        self._block: list[Any] = []
        self._shards_now: list[int] | None = None
        self._ends_now: Any = None

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        empty = {"_reading": None, "_held": None, "_block": [], "_shards_now": None, "_ends_now": None}
        return state | empty
