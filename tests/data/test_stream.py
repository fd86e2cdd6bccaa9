"""A stream by number: what a number means is the same for whoever reads it, in whatever order."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.config import Batch
from elastic_train.data.identity import check_repeatable, identify, spread
from elastic_train.data.loader import Loader
from elastic_train.data.mixture import Mixture
from elastic_train.data.numbered import numbered, read_in_order
from elastic_train.data.order import SampleOrder
from elastic_train.data.sample_range import SourcePart
from elastic_train.data.stream import Stream
from elastic_train.data.weighted import Weighted
from elastic_train.errors import ConfigError, DataMismatch

pytestmark = pytest.mark.ring1

opened: Counter[int] = Counter()


def shard(sizes: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """(number of the shard, its samples) -> (number, position)."""
    opened[sizes[0]] += 1
    yield from ((sizes[0], at) for at in range(sizes[1]))


def shards(sizes: list[int]) -> list[tuple[int, int]]:
    return list(enumerate(sizes))


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    shuffle=st.booleans(),
    window=st.integers(1, 5),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_each_sample_has_one_number_in_each_epoch(
    sizes: list[int], shuffle: bool, window: int, epoch: int, seed: int
):
    stream = Stream(shard, shards(sizes), shuffle=shuffle, window=window, seed=seed)
    stream.set_epoch(epoch)
    found = [stream[i] for i in range(len(stream))]
    assert sorted(found) == [(s, at) for s, size in enumerate(sizes) for at in range(size)]
    again = pickle.loads(pickle.dumps(stream))
    assert [again[i] for i in reversed(range(len(stream)))] == found[::-1]
    if not shuffle:
        assert found == sorted(found)


def test_reading_in_order_opens_each_shard_once_and_epochs_differ():
    stream = Stream(shard, shards([40, 30, 50]), counts=[40, 30, 50], shuffle=True, window=16)
    orders = []
    for epoch in range(3):
        opened.clear()
        stream.set_epoch(epoch)
        orders.append([stream[i] for i in range(120)])
        assert dict(opened) == {0: 1, 1: 1, 2: 1}
    assert orders[0] != orders[1] != orders[2]
    check_repeatable(stream)
    assert identify(stream) == identify(Stream(shard, shards([40, 30, 50]), shuffle=True, window=16))


def test_ranks_and_resumed_runs_read_what_one_reader_reads():
    order = SampleOrder(50, Batch(global_size=12, micro_size=4, shuffle=False))
    micros = [micro for step in range(1, 11) for micro in order.micro_batches(step)]

    def stream() -> Stream:
        return Stream(shard, shards([13, 20, 17]), shuffle=True, window=8, seed=2)

    with Loader(stream(), seed=0) as alone:
        expected = {(m.step, m.index): alone.load(m) for m in micros}
    for ranks, start in ((2, 0), (3, 7)):
        for rank in range(ranks):
            with Loader(stream(), seed=0, workers=rank % 2) as loader:
                own = micros[start:][rank::ranks]
                assert [loader.load(m) for m in own] == [expected[m.step, m.index] for m in own]


class Lines(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[str]:
        return (f"line {i}" for i in range(11))


def test_a_data_set_that_iterates_is_refused_with_the_way_and_numbered_that_way(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"Lines is a stream.*data\.stream\.Stream"):
        numbered(Lines())
    for stream in (Stream(Lines), Stream(Lines())):
        assert [stream[i] for i in (0, 10, 3)] == ["line 0", "line 10", "line 3"]
    with pytest.raises(ConfigError, match="generator can be read once only"):
        len(Stream(iter_once := (i for i in range(3))))
    assert list(iter_once) == [0, 1, 2]
    kept = tmp_path / "counts.json"
    assert len(Stream(Lines, counts=kept)) == 11
    assert json.loads(kept.read_text()) == {"counts": [11]}
    assert len(Stream(shard, counts=kept)) == 11  # nothing was read


@pytest.mark.parametrize("counts", [[5, 4], [3, 4]])
def test_a_shard_that_changed_since_it_was_counted_is_told(counts: list[int]):
    stream = Stream(shard, shards([4, 4]), counts=counts)
    with pytest.raises(DataMismatch, match=rf"shard 0 has not the {counts[0]} samples that were counted"):
        [stream[i] for i in range(5)]


def test_what_is_made_of_a_stream_is_read_in_order_too():
    stream = Stream(shard, shards([40, 30]))
    made = [SourcePart(stream, -20), torch.utils.data.Subset(stream, range(20)), Mixture({"a": stream})]  # type: ignore[arg-type]
    assert all(map(read_in_order, (stream, *made)))
    assert spread(made[0]) == list(range(16))
    assert not read_in_order(SourcePart([1, 2], 1))
    with pytest.raises(ConfigError, match="Stream is read in the order of its numbers"):
        Weighted(stream, [1.0] * 70)


def test_counts_that_belong_to_others_are_refused():
    with pytest.raises(ConfigError, match="there are 1 counts for 2 shards"):
        len(Stream(shard, shards([4, 4]), counts=[8]))
