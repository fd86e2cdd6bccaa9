"""Errors of collectives are told from errors of the user's code by their type."""

from __future__ import annotations

import pytest

from elastic_train.train.collectives.interruptible_group import CollectiveFailed
from elastic_train.train.collectives.process_group import is_collective_error

pytestmark = pytest.mark.ring2


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except type(error) as seen:
        return seen


def handled(error: Exception) -> None:
    """As people write it."""
    try:
        raise error
    except RuntimeError:
        raise KeyError("in the job's own handler")  # noqa: B904


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        ValueError("Connection closed by peer"),
        RuntimeError("HTTP 502 from the tokenizer: connection reset by peer"),
        RuntimeError("no process group of samples is called gloo, nccl or c10d"),
        ConnectionResetError(104, "Connection reset by peer"),
    ],
    ids=lambda error: str(error)[:24],
)
def test_errors_of_user_code_are_not_taken_for_collective_ones_whatever_they_say(error: Exception) -> None:
    assert not is_collective_error(raised(error))
    assert not is_collective_error(raised(KeyError("x"), raised(error)))


def test_what_a_collective_caused_is_told_by_its_type() -> None:
    assert is_collective_error(raised(ValueError("while reducing"), raised(CollectiveFailed("anything"))))
    with pytest.raises(KeyError) as seen:
        handled(CollectiveFailed("anything"))
    assert is_collective_error(seen.value)
