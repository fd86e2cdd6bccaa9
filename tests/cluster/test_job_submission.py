"""Runs that are Ray jobs: progress, stop, resubmission, exit codes, lost drivers and a lost head."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from elastic_train.control.events import StepCommitted, TermBegan
from elastic_train.control.states import Ended
from elastic_train.observe.ledger import Ledger
from elastic_train.testing.ray_processes import commands_below
from elastic_train.testing.single_process_run import train_alone
from tests.cluster.conftest import Jobs, eventually
from tests.cluster.small_job import EVERY, trainer

pytestmark = [pytest.mark.ring3, pytest.mark.timeout(900)]
SLOW = ("--seconds-per-sample", "0.2")  # what has to meet a run that goes on has minutes for it
FAST = ("--seconds-per-sample", "0.001")  # the same samples


@pytest.mark.matrix
def test_a_stopped_job_is_marked_and_goes_on_when_it_is_submitted_again(jobs: Jobs) -> None:
    steps = 120
    same = ("--name", "stops", "--max-steps", str(steps))
    jobs.submit("first", *same, *SLOW)
    eventually("step 5", lambda: jobs.reached("stops", 5))
    first = stopped(jobs, "first")
    patient = jobs.submit("second", *same, *SLOW, stop_wait_s=60)
    eventually("more steps", lambda: jobs.reached("stops", max(first.losses) + 5))
    second = stopped(jobs, patient)
    assert "is kept" in jobs.log(patient), "with more than 3 s there is always time for a checkpoint"
    jobs.submit("third", *same, *FAST)
    assert jobs.end("third") == "SUCCEEDED", jobs.log("third")
    assert f"step {steps}/{steps}" in jobs.log("third")
    assert "on steps that were kept" in jobs.log("third"), "the summary at its end"
    after = jobs.ledger("stops")
    assert after.losses == pytest.approx(undisturbed(steps), rel=1e-4)
    assert after.kept[: max(second.losses)] == second.kept
    assert len(after.superseded) <= EVERY, "where 3 s are too few, it goes on from the checkpoint before"


def stopped(jobs: Jobs, key: str) -> Ledger:
    """What is kept of a run whose job was stopped."""
    jobs.cli("stop", key)
    assert jobs.end(key) == "STOPPED"
    end = jobs.records("stops")[-1]
    assert end.ended is not None
    assert end.ended[0] == "stopped"
    assert end.phase == Ended.__name__.lower()
    eventually("the end of its processes", lambda: not jobs.left(), 60.0)
    return jobs.ledger("stops")


@pytest.mark.matrix
def test_a_job_file_is_submitted_as_it_is_and_a_finished_run_is_complete(jobs: Jobs) -> None:
    command = ("python", "jobs/pretrain_lm.py", "--size", "nano", "--max-steps", "12", "--storage")
    for text in ("step 12/12", "already complete"):
        done = jobs.cli("submit", "--working-dir", ".", "--", *command, str(jobs.storage))
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"run {jobs.storage}/pretrain_lm" in done.stdout
        assert text in done.stdout
    assert sorted(jobs.ledger("pretrain_lm").losses) == list(range(1, 13))


@pytest.mark.matrix
def test_how_a_run_ended_is_the_exit_code_of_its_job(jobs: Jobs) -> None:
    keys = {
        1: jobs.submit("bug", "--name", "bug", "--raises"),
        2: jobs.submit("wrong", "--name", "wrong/name"),
        4: jobs.submit("many", "--name", "many", "--workers", "5:6"),
    }
    assert {key: jobs.code(key) for key in keys.values()} == {key: code for code, key in keys.items()}
    assert "a bug of the job's own" in jobs.log("bug")
    assert "for 5 workers" in jobs.log("many")


@pytest.mark.matrix
def test_a_run_is_refused_while_it_is_driven_and_taken_over_when_its_driver_is_lost(jobs: Jobs) -> None:
    steps = 260
    same = ("--name", "driven", "--max-steps", str(steps))
    jobs.submit("driven", *same, *SLOW)
    eventually("step 5", lambda: jobs.reached("driven", 5))
    assert jobs.code(jobs.submit("intruder", *same)) == 2
    assert "already active" in jobs.log("intruder")
    os.kill(driver_of(jobs, "driven"), signal.SIGKILL)
    jobs.submit("heir", *same, *FAST)
    assert jobs.end("heir") == "SUCCEEDED", jobs.log("heir")
    after = jobs.ledger("driven")
    assert after.losses == pytest.approx(undisturbed(steps), rel=1e-4)
    assert after.superseded == (), "the orphan was stopped with a checkpoint"
    eventually("the end of its processes", lambda: not jobs.left(), 60.0)


@pytest.mark.matrix
def test_a_run_whose_driver_never_comes_back_ends_itself(jobs: Jobs) -> None:
    jobs.submit("lonely", "--name", "lonely", "--max-steps", "100000")
    eventually("step 5", lambda: jobs.reached("lonely", 5))
    os.kill(driver_of(jobs, "lonely"), signal.SIGKILL)
    eventually("the end of its processes", lambda: not jobs.left(), 200.0)
    end = jobs.records("lonely")[-1]
    assert end.ended is not None
    assert end.ended[0] == "stopped"
    assert "the driver has been silent" in end.ended[1]


@pytest.mark.matrix
def test_a_run_survives_the_loss_of_the_head_by_its_storage(jobs: Jobs) -> None:
    steps = 60
    same = ("--name", "headless", "--max-steps", str(steps))
    jobs.submit("doomed", *same, *SLOW)
    eventually("step 25", lambda: jobs.reached("headless", 25))
    jobs.cluster.kill_head()
    jobs.cluster.start_head()
    jobs.submit("reborn", *same, *FAST)
    assert jobs.end("reborn") == "SUCCEEDED", jobs.log("reborn")
    book = jobs.ledger("headless")
    assert book.losses == pytest.approx(undisturbed(steps), rel=1e-4)
    assert "from step 0" not in jobs.log("reborn"), "it went on from a checkpoint"
    lost = [entry.step for entry in book.superseded]
    assert len(lost) <= 2 * EVERY


@pytest.mark.parametrize("drivers", [1, pytest.param(5, marks=pytest.mark.matrix)])
def test_drivers_are_lost_in_turn_and_the_run_has_the_losses_of_an_undisturbed_one(
    jobs: Jobs, drivers: int
) -> None:
    name, steps = f"orphan-{drivers}", 60 + 40 * drivers
    same = ("--name", name, "--max-steps", str(steps))
    for number in range(1, drivers + 1):
        key = jobs.submit(f"{name}-{number}", *same, *SLOW)
        eventually(f"progress of {key}", lambda number=number: steps_in_term(jobs, name, number))
        os.kill(driver_of(jobs, name), signal.SIGKILL)
    last = jobs.submit(f"{name}-last", *same, *FAST)
    assert jobs.end(last) == "SUCCEEDED", jobs.log(last)
    book = jobs.ledger(name)
    assert book.superseded == (), "each orphan was stopped with a checkpoint"
    assert steps_in_term(jobs, name, drivers + 1)
    assert not steps_in_term(jobs, name, drivers + 2)
    assert book.losses == pytest.approx(undisturbed(steps), rel=1e-4)


def steps_in_term(jobs: Jobs, name: str, number: int) -> int:
    """Steps that the run committed under its n-th controller: what an orphan goes on with is no progress of
    the driver that comes after it.
    """
    begun = steps = 0
    for record in jobs.records(name):
        begun += isinstance(record.event, TermBegan)
        steps += isinstance(record.event, StepCommitted) and begun == number
    return steps


def undisturbed(steps: int) -> dict[int, float]:
    """The losses of the small job in one process."""
    made = trainer(max_steps=steps)
    return {report.step: report.loss for report in train_alone(made.task, made.spec)}


def driver_of(jobs: Jobs, name: str) -> int:
    """The process of a run's driver: the python that runs the job's file."""
    assert jobs.cluster.head is not None
    for pid, command in commands_below(jobs.cluster.head).items():
        if command[:1] != ["/bin/sh"] and "--name" in command and name in command:
            return pid
    raise psutil.NoSuchProcess(0, name)
