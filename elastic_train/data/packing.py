"""Documents of different lengths in windows of one length, with as little padding as may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_train.data.numbered import NumberedSamples, numbered
from elastic_train.data.tokenizer import PAD
from elastic_train.errors import ConfigError

Int64 = npt.NDArray[np.int64]


class Packed:
    """Windows of `seq_len` predictions, filled with whole documents of token ids.

    Window i is {"tokens": int64 [seq_len + 1], "documents": int64 [seq_len + 1], "positions": int64
    [seq_len + 1]}: `documents` counts the documents of a window from 1, 0 is padding; `positions` begin anew
    in each document. Attention must not cross a change of `documents`, nor must a prediction: of such a
    target, and of padding, `targets` makes `ignore`.

    A document that is longer than a window is cut into pieces of window size; no other one is cut. Pieces go
    where the least room is left over (best-fit decreasing, as in Ding et al., Fewer Truncations Improve
    Language Modeling, 2024, section 3). The lengths are read once at first use, in each process; memory is a
    few numbers per document.
    """

    def __init__(self, documents: NumberedSamples, *, seq_len: int, pad: int = PAD):
        if seq_len < 1:
            raise ConfigError(field="seq_len", problem=f"must be positive, got {seq_len}.")
        self.documents, self.seq_len, self.pad = numbered(documents), seq_len, pad
        self.draws_nothing = bool(getattr(documents, "draws_nothing", False))
        self._plan: tuple[Int64, Int64] | None = None

    def __len__(self) -> int:
        return len(self._planned()[1]) - 1

    def __getitem__(self, index: int) -> dict[str, Int64]:
        pieces, first = self._planned()
        if not 0 <= index < len(first) - 1:
            raise IndexError(f"window {index} of {len(first) - 1}")
        length = self.seq_len + 1
        tokens = np.full(length, self.pad, dtype=np.int64)
        documents, positions = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.int64)
        at = 0
        for number, (document, start, size) in enumerate(pieces[first[index] : first[index + 1]], start=1):
            tokens[at : at + size] = np.asarray(self.documents[int(document)])[start : start + size]
            documents[at : at + size] = number
            positions[at : at + size] = np.arange(size)
            at += size
        return {"tokens": tokens, "documents": documents, "positions": positions}

    def describe(self) -> Any:
        describe = getattr(self.documents, "describe", None)
        return (describe() if callable(describe) else None, self.seq_len)

    def _planned(self) -> tuple[Int64, Int64]:
        """Pieces as (document, start, size) in the order of windows, and where each window's begin."""
        if self._plan is None:
            lengths = np.array([len(self.documents[i]) for i in range(len(self.documents))], dtype=np.int64)
            pieces = _pieces(lengths, self.seq_len + 1)
            window = best_fit(pieces[:, 2], self.seq_len + 1)
            # Windows in the order of their first document, documents of a window in their own order.
            order = np.lexsort((pieces[:, 1], pieces[:, 0], window))
            pieces, window = pieces[order], window[order]
            starts = np.flatnonzero(np.diff(window, prepend=-1))
            sizes = np.diff(np.append(starts, len(pieces)))
            by_first = np.argsort(pieces[starts, 0], kind="stable") if len(starts) else starts
            taken = [np.arange(starts[w], starts[w] + sizes[w]) for w in by_first]
            first = np.concatenate([[0], np.cumsum(sizes[by_first])]).astype(np.int64)
            self._plan = (pieces[np.concatenate(taken)] if taken else pieces, first)
        return self._plan

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}


def targets(tokens: Any, documents: Any, *, ignore: int) -> Any:
    """What each of the first `seq_len` tokens has to predict: [..., seq_len], numpy or torch, as `tokens`.

    `ignore` stands where the next token belongs to another document, or to none.
    """
    here, following = documents[..., :-1], documents[..., 1:]
    same = (here == following) & (following > 0)
    return tokens[..., 1:] * same + ignore * (1 - same * 1)


def best_fit(sizes: Int64, capacity: int) -> Int64:
    """The bin of each item: the fullest one that still has room, the largest items first."""
    bins = np.empty(len(sizes), dtype=np.int64)
    open_bins: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room that is left
    rooms = np.zeros(capacity + 1, dtype=bool)
    used = 0
    for item in np.argsort(-sizes, kind="stable"):
        size = int(sizes[item])
        room = size + int(np.argmax(rooms[size:])) if rooms[size:].any() else -1
        if room < 0:
            found, room, used = used, capacity, used + 1
        else:
            found = open_bins[room].pop()
            rooms[room] = bool(open_bins[room])
        bins[item] = found
        open_bins[room - size].append(found)
        rooms[room - size] = True
    return bins


def _pieces(lengths: Int64, capacity: int) -> Int64:
    """(document, start, size) of every piece: empty documents have none."""
    counts = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = within * capacity
    return np.stack([document, start, np.minimum(capacity, lengths[document] - start)], axis=1)
