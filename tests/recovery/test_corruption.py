"""Replicas that hold other bits: the outvoted one is named, and two alone can't tell."""

from __future__ import annotations

import pytest

from elastic_train.recovery.replica_corruption import Verdict, judge

pytestmark = pytest.mark.ring0


def reported(*digests: int, name: str = "all") -> dict[int, dict[str, int]]:
    return {rank: {name: digest} for rank, digest in enumerate(digests)}


def test_equal_replicas_and_ranks_without_replicas_are_left_alone() -> None:
    assert judge(reported(7, 7, 7)) == Verdict()
    assert judge({0: {}, 1: {}}) == Verdict()


def test_more_than_half_outvote_the_others() -> None:
    assert judge(reported(7, 8, 7)) == Verdict(wrong=(1,))
    assert judge(reported(7, 8, 7, 9, 7)) == Verdict(wrong=(1, 3))


def test_among_two_or_in_a_tie_nobody_can_tell() -> None:
    assert judge(reported(7, 8)) == Verdict(doubtful=(0, 1))
    assert judge(reported(7, 8, 8, 7)) == Verdict(doubtful=(0, 1, 2, 3))
    assert judge(reported(7, 8, 9)) == Verdict(doubtful=(0, 1, 2))


@pytest.mark.parametrize(
    ("digests", "late", "verdict"),
    [
        ((7, 8), {1}, Verdict(wrong=(1,))),
        ((7, 8, 8), {1, 2}, Verdict(wrong=(1, 2))),
        ((7, 7, 8, 7), {2}, Verdict(wrong=(2,))),
        ((7, 7, 7), {2}, Verdict()),
        ((7, 8, 8), {2}, Verdict(doubtful=(0, 1, 2))),
        ((7, 8, 8), {0, 1, 2}, Verdict(doubtful=(0, 1, 2))),
        ((7, 8, 9), {2}, Verdict(doubtful=(0, 1, 2))),
    ],
)
def test_who_was_given_its_bits_a_moment_ago_outvotes_no_giver(
    digests: tuple[int, ...], late: set[int], verdict: Verdict
) -> None:
    assert judge(reported(*digests), late) == verdict


def test_each_set_of_replicas_is_judged_alone() -> None:
    """Two shards with three replicas each: one is outvoted in its own set."""
    ranks = {rank: {f"shard {rank % 2}": 5 + rank % 2} for rank in range(6)}
    ranks[3]["shard 1"] = 9
    assert judge(ranks) == Verdict(wrong=(3,))
