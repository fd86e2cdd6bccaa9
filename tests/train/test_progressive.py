"""A step that broke off between two parameters: every mixture of survivors goes on to the bit, or back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_train.checkpoint.merging import merged
from elastic_train.config import Batch, RunSpec
from elastic_train.errors import ConfigError
from elastic_train.geometry.coverage import whole
from elastic_train.geometry.exact import exact_first
from elastic_train.geometry.fragments import Fragments
from elastic_train.planner.plan import Mesh, Plan
from elastic_train.recovery.choose_recovery import Choice, Evidence, choose, holders
from elastic_train.recovery.evidence import Fresh, Live, LocalState, Vote
from elastic_train.train.assemble import assemble
from elastic_train.train.model.build import initialise
from elastic_train.train.model.seeded_sections import module_init
from elastic_train.train.parallel.gradient_presence import Presence
from elastic_train.train.state.fragment_index import FragmentIndex
from elastic_train.train.state.live_fragments import cut_into, parts
from elastic_train.train.state.scalar_state import describe
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.optimizer_in_backward import InBackward
from elastic_train.train.step.roll_forward import roll
from elastic_train.train.step.update import finish, update
from elastic_train.train.step.vote import StepStatistics
from elastic_train.train.user_code_guard import UserCodeGuard
from tests.tasks.tiny import TinyTask

pytestmark = pytest.mark.ring2

K = 3
NAMES = ("a", "b", "c")
STATES = ("k", "k, gradient", "k+1")
PLAN = Plan(mesh=Mesh(dp_replicate=2), workers=("w0", "w1"), nodes=("n0", "n1"), shares=((0,), (1,)))
UNDO = 32 * torch.finfo(torch.float32).eps  # of a tensor's largest element, for AdamW's parameters


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, nn.Parameter(torch.empty(4, 3)))

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)


@dataclass
class ThreeTask(TinyTask):
    groups: bool = False

    def model(self) -> nn.Module:
        return Three()


def spec() -> RunSpec:
    return RunSpec(
        name="three",
        storage_path="/nowhere",
        batch=Batch(global_size=2, micro_size=1),
        max_steps=9,
        min_workers=1,
        max_workers=2,
        optimizer_in_backward=True,
    )


def vote(step: int) -> Vote:
    return Vote(step=step, values=StepStatistics(squares=-1.0, loss=1.0, count=3.0).values)


def gradient(step: int, name: str) -> torch.Tensor:
    """The reduced one, the same on both ranks."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step * 10 + NAMES.index(name)))


class Survivor:
    """One of two replicas, without its group: what a rank holds, and a step broken off where a test says."""

    def __init__(self, rank: int) -> None:
        device = torch.device("cpu")
        guard = UserCodeGuard(worker="w", node="n", rank=rank, generation=1, broken=lambda: False)
        self.shards: Shards = assemble(
            ThreeTask(),
            spec(),
            generation=1,
            rank=rank,
            plan=PLAN,
            mesh=None,
            device=device,
            guard=guard,
        )
        shards = self.shards
        assert shards.blueprint is not None
        initialise(
            shards.blueprint,
            ThreeTask(),
            precision="fp32",
            device=device,
            shapes=shards.whole.shapes,
            seeded=lambda fqn: module_init(1, fqn, device),
            cut=cut_into,
        )
        shards.step = 0
        presence = Presence(shards.blueprint)
        self.updates = InBackward(shards, spec(), presence, buffers=(), mark=lambda step, ahead: None)

    def step(self, step: int) -> None:
        self.break_off(step, dict.fromkeys(NAMES, "k+1"))
        finish(self.shards, vote(step))

    def break_off(self, step: int, states: dict[str, str]) -> None:
        self.shards.drop_gradients()
        self.updates.begin(step, vote(step))
        for name, state in states.items():
            if state != "k":
                self.shards.parameters[name].grad = gradient(step, name)
        update(self.shards, [name for name, state in states.items() if state == "k+1"], spec())
        self.updates.broken([name for name, state in states.items() if state == "k, gradient"])

    def tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        return {(part.tensor, part.state): part.view.clone() for part in parts(self.shards)}

    def keep(self) -> Any:
        shards = self.shards
        assert shards.schedule is not None
        rates = [dict(group, params=None) for group in shards.optimizer.param_groups]
        state = {n: deepcopy(shards.optimizer.state[p]) for n, p in shards.parameters.items()}
        values = {n: p.detach().clone() for n, p in shards.parameters.items()}
        return shards.step, shards.applied, values, state, shards.schedule.kept(), rates

    def restore(self, kept: Any) -> None:
        shards = self.shards
        assert shards.schedule is not None
        shards.step, shards.applied, values, state, schedule, rates = deepcopy(kept)
        for name, parameter in shards.parameters.items():
            parameter.detach().copy_(values[name])
            shards.optimizer.state[parameter] = state[name]
        shards.schedule.restore(schedule, rates)
        shards.absent = shards.undone = frozenset()
        shards.drop_gradients()


@pytest.fixture(scope="module")
def survivors() -> tuple[Survivor, Survivor]:
    made = Survivor(0), Survivor(1)
    for survivor in made:
        for step in range(1, K + 1):
            survivor.step(step)
    return made


def assembled(survivors: tuple[Survivor, ...], origin: Live, serving: tuple[str, ...]) -> Any:
    """What a new group would be given: every tensor, and the document. Holders of one row have the same."""
    chosen = [s.shards for n, s in enumerate(survivors) if f"w{n}" in serving]
    for shards in chosen:
        roll(shards, origin.step, origin.vote, spec(), undo=origin.undo)
        assert shards.step == origin.step
    indices = [FragmentIndex(parts(shards)) for shards in chosen]
    tables = exact_first([index.table() for index in indices], [shards.undone for shards in chosen])
    found: dict[tuple[str, str], bytes] = {}
    for index, table in zip(indices, tables, strict=True):
        for row, data in enumerate(index.read(table)):
            name = table.names[int(table.key[row])]
            assert found.setdefault(name, bytes(data)) == bytes(data), f"the holders differ in {name}"
    whole(Fragments.concat(tables))
    return found, merged([describe(shards) for shards in chosen])


def evidence(held: list[LocalState]) -> Evidence:
    return Evidence(
        lineage=((1, 0),),
        plans={1: PLAN},
        local_states=tuple((f"w{h.rank}", (h,)) for h in held),
        step=K,
        seen=None,
        stored=None,
        ever_stored=False,
    )


def cases() -> Iterator[tuple[tuple[tuple[str, ...], ...], bool]]:
    each = list(itertools.product(STATES, repeat=len(NAMES)))
    for pair in itertools.combinations_with_replacement(each, 2):
        for undoable in (False, True):
            yield pair, undoable


def test_every_mixture_of_parameters_goes_forward_to_the_bit_or_back_within_the_bound(
    survivors: tuple[Survivor, Survivor],
) -> None:
    """Each of three parameters of two survivors at k, at k with its gradient, or at k + 1: 756 cases."""
    at_k = [survivor.keep() for survivor in survivors]
    before = survivors[0].tensors()
    survivors[0].step(K + 1)
    after, document_after = survivors[0].tensors(), describe(survivors[0].shards)
    survivors[0].restore(at_k[0])
    document_before = describe(survivors[0].shards)
    seen = {"forward": 0, "back": 0, "undo": 0, "nothing": 0}
    for pair, undoable in cases():
        held: list[LocalState] = []
        for survivor, kept, states in zip(survivors, at_k, pair, strict=True):
            survivor.restore(kept)
            survivor.break_off(K + 1, dict(zip(NAMES, states, strict=True)))
            assert survivor.shards.pending.progressive is not None
            survivor.shards.pending.progressive.undoable = undoable
            local_state = survivor.shards.local_state()
            assert local_state is not None
            assert local_state.ahead == tuple(n for n, s in zip(NAMES, states, strict=True) if s == "k+1")
            held.append(local_state)
        given = evidence(held)
        choice = choose(given)
        assert isinstance(choice, Choice)
        if isinstance(choice.origin, Fresh):
            seen["nothing"] += 1
            assert not undoable
            continue
        assert isinstance(choice.origin, Live)
        found, document = assembled(survivors, choice.origin, holders(given, choice.origin))
        forward = choice.step == K + 1
        expected, said = (after, document_after) if forward else (before, document_before)
        seen["forward" if forward else "undo" if choice.origin.undo else "back"] += 1
        assert found.keys() == expected.keys(), (pair, undoable)
        for name, value in expected.items():
            got = np.frombuffer(found[name], dtype=np.float32).reshape(value.shape)
            if choice.origin.undo:
                limit = UNDO * 8 * max(float(value.abs().max()), 1e-3)
                assert np.abs(got - value.numpy()).max() <= limit, (pair, name)
            else:
                assert np.array_equal(got, value.numpy()), (pair, name)
        for part in ("step", "optimizer", "schedule"):
            assert document[part] == said[part], (pair, undoable, part)
    assert all(seen.values()), seen
    for survivor, kept in zip(survivors, at_k, strict=True):
        survivor.restore(kept)


def test_what_was_rolled_forward_in_part_can_still_go_back_elsewhere(
    survivors: tuple[Survivor, Survivor],
) -> None:
    """The group that it was rolled for never formed, and the choice was made again."""
    survivor = survivors[0]
    kept, before = survivor.keep(), survivor.tensors()
    survivor.break_off(K + 1, {"a": "k+1", "b": "k, gradient", "c": "k"})
    reported = describe(survivor.shards)["schedule"]
    roll(survivor.shards, K + 1, vote(K + 1), spec())
    local_state = survivor.shards.local_state()
    assert local_state is not None
    assert (local_state.step, local_state.ahead, local_state.behind) == (K, ("a", "b"), ("c",))
    assert {name for name, _ in survivor.tensors()} == {"a", "b"}
    roll(survivor.shards, K, None, spec())
    assert {name for name, _ in survivor.tensors()} == {"c"}
    assert describe(survivor.shards)["schedule"] == reported
    roll(survivor.shards, K, None, spec(), undo=True)
    for name, value in survivor.tensors().items():
        torch.testing.assert_close(value, before[name], rtol=1e-5, atol=1e-6)
    survivor.restore(kept)


def test_a_committed_step_is_undone_with_its_schedule_as_long_as_its_gradient_is_kept(
    survivors: tuple[Survivor, Survivor],
) -> None:
    survivor = survivors[0]
    kept, before, reported = survivor.keep(), survivor.tensors(), describe(survivor.shards)
    survivor.step(K + 1)
    local_state = survivor.shards.local_state()
    assert local_state is not None
    assert (local_state.step, local_state.undoable) == (K + 1, True)
    roll(survivor.shards, K, None, spec(), undo=True)
    for name, value in survivor.tensors().items():
        torch.testing.assert_close(value, before[name], rtol=1e-5, atol=1e-6)
    again = describe(survivor.shards)
    assert (again["step"], again["schedule"], again["vote"]) == (K, reported["schedule"], reported["vote"])
    survivor.shards.drop_gradients()
    local_state = survivor.shards.local_state()
    assert local_state is not None
    assert not local_state.undoable
    survivor.restore(kept)


def test_a_step_without_a_finite_gradient_is_taken_back_where_the_vote_skips_it(
    survivors: tuple[Survivor, Survivor],
) -> None:
    survivor = survivors[0]
    kept, before = survivor.keep(), survivor.tensors()
    survivor.break_off(K + 1, {"a": "k+1", "b": "k+1", "c": "k"})
    shards = survivor.shards
    shards.parameters["c"].grad = torch.full((4, 3), float("inf"))
    update(shards, ["c"], spec())
    assert shards.pending.progressive is not None
    assert shards.pending.progressive.behind == {"c"}
    finish(shards, Vote(step=K + 1, values=StepStatistics(loss=1.0, count=3.0, nonfinite=1.0).values))
    assert (shards.step, shards.pending.progressive) == (K + 1, None)
    for name, value in survivor.tensors().items():
        torch.testing.assert_close(value, before[name], rtol=1e-5, atol=1e-6)
    survivor.restore(kept)


def test_clipping_and_optimizers_that_cannot_be_undone_are_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer_in_backward.*norm of the whole gradient.*clip_norm=None"
    ):
        RunSpec(
            name="three",
            storage_path="/nowhere",
            batch=Batch(global_size=2, micro_size=1),
            max_steps=9,
            min_workers=1,
            max_workers=2,
            clip_norm=1.0,
            optimizer_in_backward=True,
        )
    survivor = Survivor(0)
    shards = survivor.shards
    assert shards.blueprint is not None
    presence = Presence(shards.blueprint)
    shards.optimizer = torch.optim.NAdam(list(shards.parameters.values()))
    with pytest.raises(ConfigError, match="a step of NAdam cannot be undone"):
        InBackward(shards, spec(), presence, buffers=(), mark=lambda step, ahead: None)
