"""Streams that tell their place (`state_dict`) by number, as Hugging Face's streamed data sets do.

Read once to be counted, a stream gives its place every so many samples, and a fingerprint of the sample that
follows. A number is then read from the nearest place before it, and what is read there is compared.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from elastic_train.data.identity import digest_of
from elastic_train.data.index_cache import replace_whole
from elastic_train.errors import ConfigError, DataMismatch

_END = object()


class Stateful(Protocol):
    """What can be iterated over, says its place while it is, and resumes from there."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class StatefulStream:
    """Sample i of the stream that `make()` opens, the same samples each time.

    `index` is a path that keeps the number of samples and the places, which have to be JSON then; without it
    every process reads the stream once before it starts. A resume reads at most `every` samples that it
    doesn't train, and each rank skips what others train. What a stream shuffles it gives in the same order in
    each epoch; the run's own shuffling is refused. DataMismatch where a place does not lead to the sample
    that was there: the data changed, or the stream does not keep all that it holds in a buffer.
    """

    sequential = True

    def __init__(
        self, make: Callable[[], Stateful], *, index: str | Path | None = None, every: int = 1000
    ) -> None:
        if every < 1:
            raise ConfigError(field="stream.every", problem=f"must be positive, got {every}.")
        self.make, self.index, self.every = make, index, every
        self._places: _Places | None = None
        self._reading: tuple[int, Iterator[Any]] | None = None

    def __len__(self) -> int:
        return self._counted()[0]

    def __getitem__(self, index: int) -> Any:
        samples, places = self._counted()
        if not 0 <= index < samples:
            raise IndexError(f"sample {index} of {samples}")
        place = index // self.every * self.every
        if self._reading is None or not max(place, self._reading[0]) == self._reading[0] <= index:
            self._reading = (place, self._opened_at(place // self.every, places))
        at, reading = self._reading
        sample = next(itertools.islice(reading, index - at, None), _END)
        self._reading = (index + 1, reading)
        last = index == samples - 1
        if sample is _END or (last and next(reading, _END) is not _END):
            raise DataMismatch(
                field="task.dataset",
                problem=f"the stream has not the {samples} samples that were counted.",
                remedy="Restore its data, or remove the index and start a new run under another name.",
            )
        return sample

    def describe(self) -> Any:
        samples, places = self._counted()
        return (samples, tuple(first for _, first in places))

    def _opened_at(self, number: int, places: list[tuple[Any, str]]) -> Iterator[Any]:
        state, first = places[number]
        stream = _checked(self.make())
        if number:
            stream.load_state_dict(state)
        reading = iter(stream)
        sample = next(reading, _END)
        if sample is _END or digest_of(sample) != first:
            raise DataMismatch(
                field="task.dataset",
                problem=f"from its state at sample {number * self.every} the stream gives another sample "
                "than when it was counted.",
                remedy="Restore its data; or it does not keep what a buffer of its own holds, as some that "
                "shuffle: leave that out, and let data.stream.Stream shuffle.",
            )
        return itertools.chain([sample], reading)

    def _counted(self) -> _Places:
        if self._places is None:
            path = None if self.index is None else Path(self.index).expanduser()
            if path is not None and path.is_file():
                held = json.loads(path.read_text())
                if held["every"] != self.every:
                    raise ConfigError(
                        field="stream.every",
                        problem=f"is {self.every}, the index {path} was made with {held['every']}.",
                        remedy="Give that, or remove the index.",
                    )
                self._places = (held["samples"], [(state, first) for state, first in held["places"]])
                return self._places
            self._places = self._count()
            if path is not None:
                replace_whole(path, self._as_json(path, *self._places))
        return self._places

    def _count(self) -> _Places:
        stream = _checked(self.make())
        samples, places, state = 0, list[tuple[Any, str]](), None
        for sample in stream:
            if samples % self.every == 0:
                places.append((state, digest_of(sample)))
            samples += 1
            if samples % self.every == 0:
                state = stream.state_dict()
        for number in {1, len(places) // 2, len(places) - 1} & set(range(1, len(places))):
            self._opened_at(number, places)  # a run that never stops would not find out
        return samples, places

    def _as_json(self, path: Path, samples: int, places: list[tuple[Any, str]]) -> str:
        try:
            return json.dumps({"every": self.every, "samples": samples, "places": places})
        except TypeError as error:
            raise ConfigError(
                field="stream.index",
                problem=f"the stream's state is no JSON, so {path} can't keep it: {error}.",
                remedy="Leave index out: every process then reads the stream once before it starts.",
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reading": None}


_Places = tuple[int, list[tuple[Any, str]]]
"""Samples, and every so many of them the state before one and the fingerprint of that one."""


def _checked(stream: Any) -> Stateful:
    absent = [name for name in ("state_dict", "load_state_dict", "__iter__") if not hasattr(stream, name)]
    if absent:
        raise ConfigError(
            field="task.dataset",
            problem=f"{type(stream).__name__} has no {' and no '.join(absent)}.",
            remedy="data.stream.Stream numbers a stream that can only be read from its beginning.",
        )
    return stream
