"""The planner against published runs on GPUs: torchtitan on up to 512 H100, Megatron on up to 3072 A100."""

from __future__ import annotations

import pytest

from benchmarks.planner.published import Compared, compare, headline

pytestmark = pytest.mark.ring1


@pytest.fixture(scope="module")
def rows() -> list[Compared]:
    return compare()


def test_memory_and_speed_are_near_what_was_measured(rows: list[Compared]) -> None:
    summary = headline(rows)
    assert summary["memory_error_median"] <= 0.10
    assert summary["memory_error_most"] <= 0.25
    assert summary["throughput_error_median"] <= 0.20
    assert summary["throughput_error_most"] <= 0.30
    assert summary["published_rank_correlation"] >= 0.9


def test_of_two_schedules_the_one_that_was_faster_is_predicted_so(rows: list[Compared]) -> None:
    plain, interleaved = (row for row in rows if row.run.source == "torchtitan" and row.run.mesh.pp == 8)
    assert interleaved.run.virtual == 2
    assert interleaved.tokens_per_s > plain.tokens_per_s
    assert interleaved.memory_gib < plain.memory_gib


def test_fused_kernels_explain_what_compiling_gains(rows: list[Compared]) -> None:
    """Eager and compiled runs have the same rate of matrices: what differs is what other operations touch."""
    eager, compiled = rows[0].rate, rows[1].rate
    assert compiled == pytest.approx(eager, rel=0.03)
