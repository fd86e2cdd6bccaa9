"""State of the places of a batch: what each micro-batch gets of it and may set."""

from __future__ import annotations

import pytest
import torch

from elastic_train.errors import ConfigError
from elastic_train.train.custom.carried_rows import CarriedRows

pytestmark = pytest.mark.ring2
CPU = torch.device("cpu")


def rows(dim: int = 0) -> CarriedRows:
    return CarriedRows.of("hidden", torch.arange(12.0).view(4, 3).movedim(0, dim), dim, 4, CPU)


def alone(table: torch.Tensor) -> torch.Tensor:
    return table


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_places_that_were_set_change_when_the_step_ends_and_others_stay(dim: int) -> None:
    made = rows(dim)
    before = made.value.movedim(dim, 0).clone()
    made.places = lambda: (range(1, 3), True)
    assert torch.equal(made.get().movedim(dim, 0), before[1:3])
    made.set(made.get() + 1)
    assert torch.equal(made.get().movedim(dim, 0), before[1:3])  # until the step ends
    after = made.agreed(alone).movedim(dim, 0)
    assert torch.equal(after, torch.stack([before[0], before[1] + 1, before[2] + 1, before[3]]))
    assert torch.equal(made.agreed(alone).movedim(dim, 0), before)  # nothing was set since


def test_a_micro_batch_that_another_rank_counts_sets_nothing_and_ranks_are_put_together() -> None:
    made, filler = rows(), rows()
    made.places, filler.places = lambda: (range(2), True), lambda: (range(2), False)
    made.set(torch.ones(2, 3))
    filler.set(torch.ones(2, 3))
    other = iter([torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(4, 3)])  # it set its last place to zeros
    after = made.agreed(lambda table: table + next(other))
    assert after.tolist() == [[1.0] * 3, [1.0] * 3, [6.0, 7.0, 8.0], [0.0] * 3]
    assert torch.equal(filler.agreed(alone), filler.value)


def test_a_tensor_without_a_row_for_each_place_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ctx\.carry\('h'\): must be a tensor with 8 rows along dim 1"):
        CarriedRows.of("h", torch.zeros(2, 4), 1, 8, CPU)
    with pytest.raises(ConfigError, match=r"got list"):
        CarriedRows.of("h", [0.0], 0, 1, CPU)


def test_rows_are_those_of_a_micro_batch() -> None:
    made = rows()
    with pytest.raises(ConfigError, match=r"ctx\.carry\('hidden'\)\.get: there is no micro-batch"):
        made.get()
    made.places = lambda: (range(2), True)
    with pytest.raises(ConfigError, match=r"has rows of shape \(2, 3\), got \(3,\)"):
        made.set(torch.zeros(3))
