"""Programs of users: each computes what a plain loop of one process does, or is refused before its first
step. Under no plan, and after no move, anything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic_train.testing.gloo_pool import GlooPool
from tests.train import programs_optimizers as of_optimizers
from tests.train.programs import Program, hold

pytestmark = pytest.mark.ring2

TABLE = [
    Program(make=of_optimizers.counter_in_groups),
    Program(make=of_optimizers.counter_on_object),
    Program(make=of_optimizers.counter_under_key),
    Program(make=of_optimizers.tensor_in_group),
    Program(make=of_optimizers.averages_on_object, refused=r"the attribute 'averages' of Averages"),
    Program(make=of_optimizers.schedule_free),
    Program(make=of_optimizers.one_cycle_adamw),
    Program(make=of_optimizers.one_cycle_sgd),
    Program(make=of_optimizers.cyclic_sgd),
    Program(make=of_optimizers.plateau),
    Program(make=of_optimizers.warm_restarts),
    Program(make=of_optimizers.sequential),
    Program(make=of_optimizers.fused_adamw),
    Program(make=of_optimizers.amsgrad),
    Program(make=of_optimizers.nadam),
    Program(make=of_optimizers.asgd),
    Program(make=of_optimizers.adagrad),
    Program(make=of_optimizers.average_by_hook, refused=r"the attribute 'avg' of SGD"),
    Program(make=of_optimizers.counting_hook, refused=r"the hook .*count of SGD.step\(\) keeps state"),
    Program(make=of_optimizers.clamping_hook),
    Program(make=of_optimizers.empty_parameter),
]

QUICK: dict[str, tuple[str, ...]] = {}
"""Ways that every run of the tests takes; the others are of the matrix."""


def _cases() -> Iterator[Any]:
    for program in TABLE:
        for way in program.ways:
            quick = way in QUICK.get(program.name, ("fsdp2", "2-3-1"))
            marks = () if quick else (pytest.mark.matrix,)
            yield pytest.param(program, way, id=f"{program.name}-{way}", marks=marks)


@pytest.mark.parametrize(("program", "way"), list(_cases()))
def test_a_program_is_its_plain_loop_or_is_refused(
    pool: GlooPool, new_generation: Iterator[int], program: Program, way: str
) -> None:
    hold(program, way, pool, new_generation)
