"""Sources in given proportions, each of whose samples has its number."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.data.identity import identify
from elastic_train.data.mixture import PATTERN, Mixture
from elastic_train.errors import ConfigError

pytestmark = pytest.mark.ring0


@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0.25, 4)), min_size=1, max_size=5),
)
def test_every_source_is_seen_whole_and_shares_are_as_asked(sources: list[tuple[int, float]]) -> None:
    lists = {f"s{i}": [(i, k) for k in range(n)] for i, (n, _) in enumerate(sources)}
    weights = {f"s{i}": w for i, (_, w) in enumerate(sources)}
    mixture = Mixture(lists, weights=weights)
    seen = Counter(mixture[i] for i in range(len(mixture)))
    assert seen.keys() == {sample for source in lists.values() for sample in source}
    for i, (n, w) in enumerate(sources):
        times = [seen[i, k] for k in range(n)]
        assert max(times) - min(times) <= 1, "a source begins again only when it was seen whole"
        assert abs(sum(times) - len(mixture) * w / sum(weights.values())) <= 1 + len(mixture) / PATTERN


def test_by_their_sizes_each_sample_comes_once() -> None:
    mixture = Mixture({"a": range(30), "b": range(100, 110)})
    assert sorted(mixture[i] for i in range(len(mixture))) == [*range(30), *range(100, 110)]


def test_any_prefix_holds_its_share_of_every_source() -> None:
    mixture = Mixture({"a": range(10_000), "b": range(10_000)}, weights={"a": 3, "b": 1}, samples=10_000)
    for stop in (4, 40, 4000, 4096, 9999):
        names = Counter(mixture.place(i)[0] for i in range(stop))
        assert abs(names["a"] - 0.75 * stop) <= 1


def test_a_pickle_and_another_process_number_alike() -> None:
    mixture = Mixture({"a": [1, 2, 3], "b": [4, 5]}, weights={"a": 1, "b": 2})
    again = pickle.loads(pickle.dumps(mixture))
    assert [again[i] for i in range(len(again))] == [mixture[i] for i in range(len(mixture))]
    assert identify(again) == identify(mixture)
    other = Mixture({"a": [1, 2, 3], "b": [4, 5]}, weights={"a": 1, "b": 2.5})
    assert identify(other) != identify(mixture)


@pytest.mark.parametrize(
    ("sources", "weights", "match"),
    [
        ({}, None, "none"),
        ({"a": [1]}, {"b": 1.0}, "one weight to each"),
        ({"a": [1]}, {"a": 0.0}, "positive"),
        ({"a": [1], "b": []}, None, "no samples"),
        ({"a": [1], "b": [2]}, {"a": 1.0, "b": 1e-9}, "less than one sample"),
        ({"a": iter([1])}, None, "Number the samples"),
    ],
)
def test_what_is_no_mixture_is_refused(sources: dict, weights: dict | None, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        len(Mixture(sources, weights=weights))
