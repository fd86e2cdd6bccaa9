"""A group of members in pool processes, driven as the controller drives workers, without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic_train.checkpoint.merging import merged
from elastic_train.config import RunSpec
from elastic_train.geometry.coverage import whole
from elastic_train.geometry.digest import combine
from elastic_train.geometry.exact import exact_first
from elastic_train.geometry.fragments import Fragments
from elastic_train.geometry.transfer import Transfers, plan_transfer
from elastic_train.planner.plan import Mesh, Plan, Recompute, even_shares
from elastic_train.recovery.evidence import LocalState, Vote
from elastic_train.testing.gang_member import (
    abort,
    ask_for_pause_at,
    call,
    has_come_to,
    run,
    set_first_step,
    stand_at,
    stands,
    start,
    waits_for_others,
)
from elastic_train.testing.gloo_pool import ANSWER_S, GlooPool, Pending, PerRank
from elastic_train.train.member import StepReport
from elastic_train.train.rank_assignment import RankAssignment
from elastic_train.train.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class From:
    """A local state to go on from."""

    generation: int
    step: int
    holders: tuple[int, ...]  # processes
    vote: Vote | None = None
    undo: bool = False


class Gang:
    """Forms generations on processes of a pool and runs them."""

    def __init__(self, pool: GlooPool, task: Task, spec: RunSpec) -> None:
        self.pool, self.spec = pool, spec
        pool.run(start, task, spec)
        self.generation = 0
        self.processes: tuple[int, ...] = ()

    def plan(
        self, dp_replicate: int, dp_shard: int, shares: tuple[tuple[int, ...], ...] | None = None
    ) -> Plan:
        """A data-parallel plan on that many processes, each a node of its own."""
        return self.plan_on(Mesh(dp_replicate=dp_replicate, dp_shard=dp_shard), shares=shares)

    def plan_on(
        self,
        mesh: Mesh,
        *,
        shares: tuple[tuple[int, ...], ...] | None = None,
        stages: tuple[tuple[int, int], ...] = (),
        recompute: Recompute = "none",
        sequence_parallel: bool = False,
        groups: tuple[tuple[int, int], ...] = (),
    ) -> Plan:
        """A plan on as many processes as the mesh has ranks. `stages` are needed where pp is above 1."""
        names = tuple(f"w{i}" for i in range(mesh.size))
        return Plan(
            mesh=mesh,
            workers=names,
            nodes=names,
            shares=shares or even_shares(self.spec.batch.micro_batches, mesh.dp),
            stages=stages,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
            groups=groups,
        )

    def form(self, plan: Plan, processes: Sequence[int] | None = None, origin: From | None = None) -> int:
        """Form a generation, fresh or from a local state; the digest of its state."""
        processes = tuple(processes or range(plan.world_size))
        document, transfers, expected = None, None, None
        haves: list[Fragments] = []
        computed: dict[int, tuple[int, ...]] = {}
        if origin is not None:
            undone = self._all(
                origin.holders, "roll", origin.generation, origin.step, origin.vote, origin.undo
            )
            haves = exact_first(self._all(origin.holders, "held.table", origin.generation), undone)
            document = merged(self._all(origin.holders, "document", origin.generation))
            computed = self._computed(plan, processes, origin)
        self.join(plan, processes)
        if origin is None:
            self._all(processes, "forming.initialise")
        else:
            states = haves[0] if document is None else Fragments.concat(haves)
            needs = self._all(processes, "forming.needs", states)
            transfers = _transfers(needs, haves, plan, processes, origin)
            self._move(transfers, origin, processes)
            self._all(processes, "load", document)
            self.pool.run(set_first_step, frozenset[int](), computed, origin.generation, ranks=processes)
            expected = self._digest_of(origin, haves)
        digests = set(self._all(processes, "forming.digest"))
        assert len(digests) == 1, "the ranks see different states"
        assert expected is None or digests == {expected}, "the holders had another state"
        self._all(processes, "go")
        return digests.pop()

    def join(self, plan: Plan, processes: Sequence[int], by_module: bool | None = None) -> None:
        """Ranks taken, nothing filled."""
        assignments = self.assignments(plan, processes, by_module)
        self.pool.run(call, "join", PerRank(assignments), ranks=processes)

    def assignments(
        self, plan: Plan, processes: Sequence[int], by_module: bool | None = None
    ) -> list[RankAssignment]:
        """The ranks of a new generation, which none of them has taken yet."""
        self.generation, self.processes = next(self.pool.generations), tuple(processes)
        return [
            RankAssignment(
                generation=self.generation,
                rank=rank,
                plan=plan,
                store_host=self.pool.store_host,
                store_port=self.pool.store_port,
                address="127.0.0.1",
                by_module=by_module,
            )
            for rank in range(plan.world_size)
        ]

    def begin(self) -> Pending:
        """Let all ranks train."""
        return self.pool.call_async(run, ranks=self.processes)

    def begin_until(self, process: int, phase: str, step: int, number: int = -1) -> Pending:
        """Let all ranks train until one stands still at a phase of a step, and the others have come as far.

        The outcome of a vote reaches each rank at a time of its own: some might lack the step before.
        """
        self.pool.run(stand_at, phase, step, number, ranks=[process])
        running = self.begin()
        self.wait_for([process], stands)
        others = [other for other in self.processes if other != process]
        self.wait_for(others, has_come_to, phase, step)
        return running

    def abort(self, processes: Sequence[int] | None = None) -> None:
        """Break the generation, in all of its processes or in some."""
        for process in self.processes if processes is None else processes:
            self.pool.control(process, abort, self.generation)

    def wait_for(self, processes: Sequence[int], condition: Callable[..., bool], *args: Any) -> None:
        """Until a condition holds in each of these processes, while they train."""
        until = time.monotonic() + ANSWER_S
        for process in processes:
            while not self.pool.control(process, condition, *args):
                assert time.monotonic() < until, f"process {process}: no {condition.__name__}{args}"
                time.sleep(0.005)

    def run(self) -> list[StepReport]:
        """Train to an end; the reports of rank 0, which all ranks share."""
        outcomes = self.begin().results()
        for end_, error, _ in outcomes:
            assert end_ is not None, error
        # As text: what is not finite is not equal to itself.
        reports = [[repr((r.step, r.loss, r.vote)) for r in found] for _, _, found in outcomes]
        assert all(each == reports[0] for each in reports)
        return outcomes[0][2]

    def pause_at(self, step: int) -> list[StepReport]:
        """Train until a step at which rank 0 asks for a pause."""
        self.pool.run(ask_for_pause_at, step, ranks=self.processes[:1])
        return self.run()

    def held(self) -> From:
        """The state of the present generation, at the step where all its ranks are."""
        local_states = [h for found in self._all(self.processes, "held.local_states") for h in found]
        steps = {h.step for h in local_states if h.generation == self.generation}
        assert len(steps) == 1
        return From(generation=self.generation, step=steps.pop(), holders=self.processes)

    def local_states(self) -> list[LocalState]:
        return [h for found in self._all(self.processes, "held.local_states") for h in found]

    def whole(self) -> dict[tuple[str, str], np.ndarray]:
        """Every logical tensor of the present state, put together from all ranks; replicas are compared."""
        at = self.held()
        tables = self._all(at.holders, "held.table", at.generation)
        found: dict[tuple[str, str], np.ndarray] = {}
        filled: dict[tuple[str, str], np.ndarray] = {}
        for process, table in zip(at.holders, tables, strict=True):
            data = self.pool.run(call, "held.read", at.generation, at.step, table, ranks=[process])[0]
            for row, raw in enumerate(data):
                key = int(table.key[row])
                name, box = table.names[key], table.box(row)
                values = raw.view(table.dtypes[key]).reshape(box.sizes)
                whole = found.setdefault(name, np.zeros(table.shapes[key], dtype=table.dtypes[key]))
                seen = filled.setdefault(name, np.zeros(table.shapes[key], dtype=bool))
                same = np.where(seen[box.slices], whole[box.slices].view(f"u{whole.itemsize}"), 0)
                bits = np.where(seen[box.slices], values.view(f"u{whole.itemsize}"), 0)
                assert np.array_equal(same, bits), f"replicas of {name} differ"
                whole[box.slices] = values
                seen[box.slices] = True
        assert all(seen.all() for seen in filled.values()), "some elements are held by nobody"
        return found

    def run_while_filling(
        self, plan: Plan, processes: Sequence[int], origin: From, late: frozenset[int]
    ) -> list[StepReport]:
        """Form a generation whose `late` ranks are filled while the others run its first step; train to an
        end. The reports of rank 0, which is not late.
        """
        haves = self._all(origin.holders, "held.table", origin.generation)
        document = merged(self._all(origin.holders, "document", origin.generation))
        computed = self._computed(plan, processes, origin, late)
        self.join(plan, processes)
        needs = self._all(processes, "forming.needs", Fragments.concat(haves))
        transfers = _transfers(needs, haves, plan, processes, origin)
        there = [rank for rank in range(plan.world_size) if rank not in late]
        self._move(transfers, origin, processes, there)
        self._all(processes, "load", document)
        self.pool.run(set_first_step, late, computed, origin.generation, ranks=processes)
        first, then = [processes[rank] for rank in there], [processes[rank] for rank in sorted(late)]
        self._all(first, "go")
        running = self.pool.call_async(run, ranks=first)
        self.wait_for(first, waits_for_others, origin.step + 1)
        self._move(transfers, origin, processes, sorted(late))
        self._all(then, "go")
        rest = self.pool.call_async(run, ranks=then)
        outcomes = [*running.results(), *rest.results()]
        for end_, error, _ in outcomes:
            assert end_ is not None, error
        return outcomes[0][2]

    def _computed(
        self, plan: Plan, processes: Sequence[int], origin: From, late: frozenset[int] = frozenset()
    ) -> dict[int, tuple[int, ...]]:
        """The micro-batches of the next step that are not run again, by rank."""
        if plan.mesh.dp_replicate < plan.world_size:
            return {}
        found = self._all(origin.holders, "computed", origin.generation, origin.step)
        there = dict(zip(origin.holders, found, strict=True))
        return {
            rank: own for rank, p in enumerate(processes) if rank not in late and (own := there.get(p, ()))
        }

    def _move(
        self,
        transfers: Transfers,
        origin: From,
        processes: Sequence[int],
        ranks: Sequence[int] | None = None,
    ) -> None:
        for rank, process in enumerate(processes):
            if ranks is not None and rank not in ranks:
                continue
            rows = transfers.rows_of(rank)
            for number, holder in enumerate(origin.holders):
                chosen = [row for row in rows if int(transfers.holder[row]) == number]
                if not chosen:
                    continue
                boxes = transfers.boxes(np.array(chosen))
                if holder == process:
                    self.pool.run(call, "fill_local", origin.generation, boxes, ranks=[process])
                else:
                    data = self.pool.control(holder, call, "held.read", origin.generation, origin.step, boxes)
                    self.pool.run(call, "forming.fill", boxes, data, ranks=[process])

    def _digest_of(self, origin: From, haves: Sequence[Fragments]) -> int:
        """The digest of what the holders have between them."""
        everything, nodes = whole(Fragments.concat(haves)), [str(h) for h in origin.holders]
        cover = plan_transfer([everything], haves, need_nodes=[""], have_nodes=nodes, same={})
        assert isinstance(cover, Transfers), cover
        return combine(
            self.pool.control(
                process,
                call,
                "held.digest_of",
                origin.generation,
                origin.step,
                cover.boxes(cover.holder == number),
            )
            for number, process in enumerate(origin.holders)
        )

    def _all(self, processes: Sequence[int], method: str, *args: Any) -> list[Any]:
        return self.pool.run(call, method, *args, ranks=processes)


def _transfers(
    needs: Sequence[Fragments], haves: Sequence[Fragments], plan: Plan, processes: Sequence[int], origin: From
) -> Transfers:
    """What moves from the holders to the ranks of a plan; what a process has it keeps."""
    found = plan_transfer(
        needs,
        haves,
        need_nodes=plan.nodes,
        have_nodes=[str(h) for h in origin.holders],
        same={r: origin.holders.index(p) for r, p in enumerate(processes) if p in origin.holders},
    )
    assert isinstance(found, Transfers), found
    return found
