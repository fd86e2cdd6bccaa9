"""Lose a node, gain a node, end with the same losses: `make demo`.

Trains the small language model twice on one local Ray cluster: undisturbed, and with a node killed (SIGKILL
of everything on it) and another one joining. Prints what happened to the second run and compares the losses.
The samples come slowly, as from a slow disk, so that the newcomer arrives before the run is over.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time

import elastic_train as et
from elastic_train.cluster.driver.launch import fit, prepare_local_environment
from elastic_train.cluster.driver.result import Result
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.control.fault_schedule import AddNode, FaultSchedule, KillNode, Moment
from elastic_train.testing.slow_samples import SlowSamples
from jobs.pretrain_lm import Pretrain, trainer

STEPS, KILL_AT, JOIN_AT, TOLERANCE, SECONDS_PER_SAMPLE = 40, 12, 24, 1e-5, 0.6
SCHEDULE = FaultSchedule(
    faults=(
        KillNode(when=Moment(step=KILL_AT, phase="backward"), node="n1"),
        AddNode(when=Moment(step=JOIN_AT), node="n3"),
    ),
    seed=0,
)


class SlowPretrain(Pretrain):
    def dataset(self) -> SlowSamples:
        return SlowSamples(super().dataset(), SECONDS_PER_SAMPLE)


def train(storage: str, name: str, chaos: Chaos | None) -> Result:
    job = trainer(max_steps=STEPS, workers="1:3", dropout=0.1, storage=storage, name=name)
    task = SlowPretrain(**vars(job.task))
    spec = dataclasses.replace(
        job.spec, checkpoints=et.Checkpoints(every=10, keep=2), timing=et.Timing(join_window_s=1.0)
    )
    return fit(task, spec, address=None, local_nodes=3, quiet=False, chaos=chaos)


def main() -> int:
    prepare_local_environment()
    print(f"fault schedule, seed {SCHEDULE.seed}: {', '.join(map(str, SCHEDULE.faults))}\n")
    with tempfile.TemporaryDirectory(prefix="elastic-demo-") as storage:
        print("starting a local Ray cluster: a head and 3 nodes of 1 CPU")
        with LocalCluster(3) as cluster:
            print("\n== undisturbed run, dp 3")
            calm = train(storage, "undisturbed", None)
            print("\n== the same run; a node is killed and another one joins")
            began = time.monotonic()
            rough = train(storage, "disturbed", Chaos(cluster, SCHEDULE, print))
            seconds = time.monotonic() - began
    return report(calm, rough, seconds)


def report(calm: Result, rough: Result, seconds: float) -> int:
    print(f"\nwhat happened in {seconds:.0f} s\n{rough.summary}\n")
    a, b = calm.ledger.losses, rough.ledger.losses
    print("step  undisturbed  disturbed")
    for step in sorted({1, KILL_AT - 1, KILL_AT, KILL_AT + 1, JOIN_AT, JOIN_AT + 6, STEPS}):
        print(f"{step:4}  {a[step]:11.7f}  {b[step]:9.7f}")
    worst = max(abs(a[step] - b[step]) / abs(a[step]) for step in a)
    same_samples = all(
        x.ids_digest == y.ids_digest for x, y in zip(calm.ledger.kept, rough.ledger.kept, strict=True)
    )
    changes = rough.summary.count("\n")
    if set(a) != set(range(1, STEPS + 1)) or set(a) != set(b) or not same_samples or changes < 2:
        print("\nFAILED: a step, a sample or a change of the group is missing")
        return 1
    if worst > TOLERANCE:
        print(f"\nFAILED: losses differ by up to {worst:.1e} relative, allowed are {TOLERANCE:.0e}")
        return 1
    print(f"\nlosses equal the undisturbed run (max relative difference {worst:.1e})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
