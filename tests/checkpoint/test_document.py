"""Scalars come back equal, with the same bytes for equal values, and nothing unknown is guessed at."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.checkpoint.document import StateFile, decode, encode
from elastic_train.checkpoint.validate import state
from elastic_train.checkpoint.validate.state import MOST_DEEP
from elastic_train.errors import ChecksumMismatch, ConfigError, FormatUnsupported

pytestmark = pytest.mark.ring1

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$float", "$tuple", "$bytes", "$map"]), inner, max_size=1)
    ),
    max_leaves=8,
)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that is reached with few containers."""
    monkeypatch.setattr(state, "FREE_CONTAINERS", 1000)


@given(VALUES)
def test_what_goes_in_comes_out(value: object) -> None:
    assert exactly_equal(decode(encode(value), url="x"), value)


def exactly_equal(a: object, b: object) -> bool:
    """Equal, of the same types throughout: 1 is not True, 0.0 is not -0.0, a tuple is no list."""
    match a, b:
        case dict(), dict():
            return a.keys() == b.keys() and all(exactly_equal(a[k], b[k]) for k in a)
        case (list(), list()) | (tuple(), tuple()):
            return len(a) == len(b) and all(map(exactly_equal, a, b))
        case _:
            return type(a) is type(b) and repr(a) == repr(b)


def test_the_values_of_a_run_come_back_exactly() -> None:
    value = {"epoch": 7, "cfg": {"a": None, "s": "ü\u2028", "n": 2**70}, "l": [1, 2.5], "betas": (0.9, 0.95)}
    assert decode(encode(value), url="x") == value


def test_numbers_that_json_has_no_word_for_come_back() -> None:
    back = decode(encode([math.nan, math.inf, -math.inf]), url="x")
    assert math.isnan(back[0])
    assert back[1:] == [math.inf, -math.inf]


def test_equal_mappings_have_equal_bytes() -> None:
    assert encode({"b": 1, "a": [2]}) == encode({"a": [2], "b": 1}) == b'{"a":[2],"b":1}'


def test_what_cannot_be_stored_is_named_with_its_place(few: None) -> None:
    for value, said in (
        ({"groups": [{"x": object()}]}, r"document\.groups\[0\]\.x: a object"),
        ({"a": "\ud800"}, r"document\.a: text that is no Unicode"),
        ({"\udfff": 1}, r"document: text"),
        ({"n": 10**4300}, r"document\.n: a number of more than"),
        ({"few": [1], "many": [[]] * 1_200}, r"many: a value of 1203 lists"),
        (nested(MOST_DEEP + 1), "something inside more than"),
        (endless(), "something inside more than"),
    ):
        with pytest.raises(ConfigError, match=said):
            encode(value)


def test_what_is_stored_at_the_bounds_is_read(few: None) -> None:
    for value in (nested(MOST_DEEP), [[]] * 999, {"n": 10**3999}, {1: {(2, "x"): []}}):
        assert decode(encode(value), url="x") == value


def nested(deep: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(deep - 1):
        value = [value]
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def test_an_unknown_version_or_required_feature_is_refused() -> None:
    good = StateFile(document={"step": 1}, aliases={"a": "b"})
    assert StateFile.decode(good.encode(), url="x") == good
    newer = good.encode().replace(b'"version":1', b'"version":2')
    with pytest.raises(FormatUnsupported, match="version 2"):
        StateFile.decode(newer, url="x")
    with pytest.raises(FormatUnsupported, match="requires magic"):
        StateFile.decode(StateFile(document={}, requires=("magic",)).encode(), url="x")
    with pytest.raises(FormatUnsupported, match="doesn't say"):
        StateFile.decode(b"{}", url="x")
    with pytest.raises(ChecksumMismatch):
        StateFile.decode(b'{"format', url="x")
