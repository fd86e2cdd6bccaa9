"""State of the places of a batch: what each micro-batch gets of it and may set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.errors import ConfigError
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.single_process_run import train_alone
from elastic_train.train.custom.carried_rows import CarriedRows
from elastic_train.train.declaration.declare import declare
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.model.registered_state import Registered
from tests.train.programs import Net, Points
from tests.train.test_artifacts import spec

pytestmark = pytest.mark.ring2
CPU = torch.device("cpu")
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
)


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
    other = iter([torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(4, 12, dtype=torch.uint8)])
    after = made.agreed(lambda table: table + next(other))  # it set its last place to zeros
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
    made.set(torch.zeros(2, 3))
    for value in (torch.zeros(4, 2), torch.zeros(4, 3, dtype=torch.float64)):
        with pytest.raises(
            ConfigError, match=r"carry\('hidden'\)\.value: it was declared with shape \(4, 3\)"
        ):
            made.value = value
    with pytest.raises(ConfigError, match=r"of torch\.float32, got shape \(5, 3\) of torch\.float32"):
        made.load_state_dict({"rows": torch.zeros(5, 3)})
    made.value = torch.ones(4, 3)
    assert made.get().tolist() == [[1.0] * 3] * 2


def row(step: int, dtype: torch.dtype) -> torch.Tensor:
    """Of a step; where there are such numbers, one that no sum leaves as it is."""
    numbers = torch.tensor([float(step), -0.0 if dtype.is_floating_point else float(step % 2)])
    return numbers.to(dtype)


def carries_everything(ctx: Any) -> None:
    """Each place has to get what it set a step ago, to the bit."""
    net = ctx.model("net", lambda: Net(0.0))
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    carried = [ctx.carry(f"of_{dtype}".replace(".", "_"), torch.zeros(12, 2).to(dtype)) for dtype in DTYPES]
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward((net(micro["x"]) - micro["y"]).square().mean())
                for rows, dtype in zip(carried, DTYPES, strict=True):
                    found = rows.get()
                    wanted = row(batch.step - 1, dtype) if batch.step > 1 else torch.zeros(2).to(dtype)
                    assert found.dtype == dtype
                    assert all(torch.equal(f.view(torch.uint8), wanted.view(torch.uint8)) for f in found)
                    rows.set(row(batch.step, dtype).expand(len(found), 2))


def carries_more_later(ctx: Any) -> None:
    net = ctx.model("net", lambda: Net(0.0))
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    rows = ctx.carry("memory", torch.zeros(12, 2))
    for batch in ctx.batches(Points):
        rows.value = torch.zeros(12, batch.step + 1)
        with ctx.step() as step:
            for micro in batch:
                step.backward((net(micro["x"]) - micro["y"]).square().mean())


def test_rows_of_any_dtype_go_from_rank_to_rank_as_they_are(pool: GlooPool, tmp_path: Path) -> None:
    task = LoopTask(carries_everything)
    assert len(train_alone(task, spec(tmp_path, "alone"))) == 7
    gang = Gang(pool, task, spec(tmp_path, "together"))
    gang.form(gang.plan(2, 1), [0, 1])
    gang.pause_at(3)
    gang.form(gang.plan(3, 1), [2, 3, 1], gang.held())
    assert gang.run()[-1].step == 7


def test_a_loop_that_carries_another_shape_later_is_told_so_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"ctx\.carry\('memory'\)\.value: .* \(12, 2\) .*got shape \(12, 3\)"
    ):
        train_alone(LoopTask(carries_more_later), spec(tmp_path, "grows"))


def test_a_dtype_that_no_checkpoint_has_is_refused_before_there_are_batches() -> None:
    def loop(ctx: Any) -> None:
        net = ctx.model("net", lambda: Net(0.0))
        ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
        ctx.carry("phase", torch.zeros(12, 2, dtype=torch.complex128))

    with pytest.raises(
        ConfigError, match=r"ctx\.carry\('phase'\): its tensor 'phase' is .*complex128, which"
    ):
        declare(loop)


class Phases:
    """Registered by a loop."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"now": torch.zeros(2, dtype=torch.complex128)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        return None


def test_what_is_registered_is_refused_likewise() -> None:
    with pytest.raises(ConfigError, match=r"ctx\.register\('phases'\): its tensor 'phases\.now' is"):
        Registered().reserve("phases", Phases())
