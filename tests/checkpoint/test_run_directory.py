"""A run's history: once committed it is never forgotten, whoever restarts, dies, or copies the directory."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from elastic_train.checkpoint.checksums import digest
from elastic_train.checkpoint.commit import Assembled, assemble
from elastic_train.checkpoint.document import StateFile
from elastic_train.checkpoint.manifest import Manifest, Row
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.verify import verify
from elastic_train.checkpoint.writer import write_part
from elastic_train.errors import (
    CheckpointDeleted,
    ConfigError,
    Fenced,
    FragmentMissing,
    NoCheckpoint,
    StorageError,
)
from elastic_train.geometry.box import Box
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.testing.azure_server import AzureServer
from elastic_train.testing.faulty_store import Fail, FaultyStore, Hold
from elastic_train.testing.gcs_server import GCSServer
from elastic_train.testing.s3_server import S3Server

pytestmark = pytest.mark.ring1

Cut = Callable[..., Piece]
Save = Callable[..., Stored]


@pytest.fixture
def run() -> RunDirectory:
    return RunDirectory(MemoryStore())


def steps(run: RunDirectory) -> list[int]:
    return [s.step for s in run.commits()]


def directories(run: RunDirectory) -> set[str]:
    paths = [*run.store.list("checkpoints"), *run.store.unfinished("checkpoints")]
    return {"/".join(p.split("/")[:2]) for p in paths}


# -- configuration --


def test_a_run_is_configured_once_and_then_only_compared(run: RunDirectory) -> None:
    assert run.config() is None
    assert run.create({"max_steps": 10}, {"batch": 64, "seed": 0}) == {"max_steps": 10}
    assert run.create({"max_steps": 20}, {"batch": 64, "seed": 0}) == {"max_steps": 10}
    assert run.config() == {"max_steps": 10}
    with pytest.raises(ConfigError, match=r"batch: is 32, and .* was started with 64 \(also: seed\)"):
        run.create({}, {"batch": 32, "seed": 1})


# -- commits --


def test_nothing_is_visible_before_its_commit(run: RunDirectory, cut: Cut) -> None:
    term = run.begin_term("a")
    assert (run.newest(), run.ever_committed()) == (None, False)
    directory = attempt_path(step=2, generation=1)
    assembled = assemble(
        run.store, directory, [write_part(run.store, directory, 0, [cut("w", np.ones(2))])], {}
    )
    assert (run.newest(), run.ever_committed()) == (None, False)
    stored = run.commit(assembled, term=term, generation=1, step=2, lineage=[(1, 0)], metrics=[("loss", 2.5)])
    assert stored == Stored(slot=2, step=2, generation=1, term=1, path="checkpoints/step-0000000002.g1")
    assert RunDirectory(run.store).newest() == stored
    assert run.record(stored).metrics == (("loss", 2.5),)
    assert RunDirectory(run.store).ever_committed()


def test_a_commit_that_is_repeated_changes_nothing(run: RunDirectory, cut: Cut) -> None:
    term = run.begin_term("a")
    directory = attempt_path(step=2, generation=1)
    part = write_part(run.store, directory, 0, [cut("w", np.ones(2))])
    stored = [
        run.commit(
            assemble(run.store, directory, [part], {"lr": 0.1}),
            term=term, generation=1, step=2, lineage=[(1, 0)],
        )
        for _ in range(2)
    ]  # fmt: skip
    assert stored[0] == stored[1]
    assert steps(run) == [2]


def test_a_second_attempt_at_a_step_mixes_nothing_with_the_first(
    run: RunDirectory, cut: Cut, save: Save
) -> None:
    """Writer 1 of generation 1 died; generation 2 saves the same step with another number of writers."""
    term = run.begin_term("a")
    first = attempt_path(step=4, generation=1)
    write_part(run.store, first, 0, [cut("w", np.full((6, 4), -1, np.float32), Box((0, 0), (3, 4)))])
    second = save(run, term=term, step=4, generation=2, lineage=((1, 0), (2, 3)))
    assert steps(run) == [4]
    assert set(Checkpoint.of(run, second).read("w", "param").ravel()) == {4.0}
    run.prune([second.slot], term=term)
    assert directories(run) == {second.path}


def test_a_paused_controller_cannot_commit_after_its_successor_began(run: RunDirectory, save: Save) -> None:
    old = run.begin_term("old")
    save(run, term=old, step=1)
    successor = RunDirectory(run.store)
    new = successor.begin_term("new")
    with pytest.raises(Fenced):
        save(run, term=old, step=2)
    with pytest.raises(Fenced):
        run.prune([], term=old)
    save(successor, term=new, step=3, generation=2, lineage=((1, 0), (2, 1)))
    assert steps(run) == steps(successor) == [1, 3]


def test_a_run_that_lost_its_log_never_starts_again_at_step_0(tmp_path: Path, save: Save) -> None:
    run = RunDirectory(open_store(str(tmp_path)))
    save(run, term=run.begin_term("a"), step=6)
    (tmp_path / "commits").rename(tmp_path / "hidden")
    for ask in (
        RunDirectory.newest,
        RunDirectory.ever_committed,
        RunDirectory.commits,
        lambda r: r.begin_term("b"),
    ):
        with pytest.raises(NoCheckpoint, match="commit log is gone"):
            ask(RunDirectory(open_store(str(tmp_path))))
    (tmp_path / "hidden").rename(tmp_path / "commits")
    assert steps(RunDirectory(open_store(str(tmp_path)))) == [6]


def test_the_way_back_follows_the_lineage(run: RunDirectory, save: Save) -> None:
    """Generation 1 reached 30 and was set back to 10: what it did after 10 is dead."""
    term = run.begin_term("a")
    first = save(run, term=term, step=10)
    dead = save(run, term=term, step=30)
    back = save(run, term=term, step=20, generation=2, lineage=((1, 0), (2, 10)))
    newest = save(run, term=term, step=25, generation=2, lineage=((1, 0), (2, 10)))
    assert run.newest() == newest
    assert [run.before(newest), run.before(back), run.before(first)] == [back, first, None]
    assert run.before(dead) == first


# -- retention --


def test_the_newest_stays_whatever_was_asked_for(run: RunDirectory, save: Save) -> None:
    term = run.begin_term("a")
    stored = [save(run, term=term, step=s) for s in (1, 2, 3, 4)]
    run.prune([stored[1].slot], term=term)  # keep one best
    assert steps(run) == [2, 4]
    run.prune([], term=term)
    assert steps(run) == [4]
    assert directories(run) == {stored[3].path}
    assert verify(open_checkpoint_of(run)).sound


def test_what_was_committed_since_a_prune_was_decided_stays(run: RunDirectory, save: Save) -> None:
    term = run.begin_term("a")
    stored = [save(run, term=term, step=s) for s in (1, 2, 3, 4)]
    run.prune([stored[1].slot], term=term, known=stored[1].slot)
    assert steps(run) == [2, 3, 4]


def test_attempts_of_a_generation_that_began_since_a_prune_was_decided_stay(
    run: RunDirectory, save: Save, cut: Cut
) -> None:
    """A group that went back may write a step below the newest commit."""
    term = run.begin_term("a")
    stored = save(run, term=term, step=6)
    for step, generation in ((4, 2), (7, 2), (5, 1), (7, 1)):
        write_part(run.store, attempt_path(step=step, generation=generation), 0, [cut("w", np.zeros(2))])
    run.prune([stored.slot], term=term, writing=1)
    left = {(4, 2), (7, 2), (7, 1)}
    assert directories(run) == {stored.path, *(attempt_path(step=s, generation=g) for s, g in left)}


def test_a_branch_is_the_newest_checkpoint_and_its_ancestors_with_their_metrics(
    run: RunDirectory, save: Save
) -> None:
    term = run.begin_term("a")
    assert run.branch() == []
    first = save(run, term=term, step=2, metrics=[("loss", 0.5)])
    save(run, term=term, step=5)  # left behind: generation 2 began at step 2
    newest = save(run, term=term, step=4, generation=2, lineage=((1, 0), (2, 2)))
    assert [c.stored for c in run.branch()] == [first, newest]
    assert dict(run.branch()[0].metrics) == {"loss": 0.5}


def open_checkpoint_of(run: RunDirectory) -> Checkpoint:
    newest = run.newest()
    assert newest is not None
    return Checkpoint.of(run, newest)


def test_steps_are_numbers_and_not_texts(run: RunDirectory, save: Save) -> None:
    term = run.begin_term("a")
    stored = [save(run, term=term, step=s) for s in (98, 99, 100, 101, 102)]
    run.prune([s.slot for s in stored[-2:]], term=term)
    assert steps(run) == [101, 102]


def test_a_higher_step_of_a_dead_lineage_takes_no_place(run: RunDirectory, save: Save) -> None:
    term = run.begin_term("a")
    save(run, term=term, step=200)
    save(run, term=term, step=5000)
    own = save(run, term=term, step=300, generation=2, lineage=((1, 0), (2, 200)))
    run.prune([own.slot], term=term)
    assert run.newest() == own
    assert steps(run) == [300]


def test_pruned_checkpoints_are_history_and_count_as_such(run: RunDirectory, save: Save) -> None:
    term = run.begin_term("a")
    first, second = save(run, term=term, step=1), save(run, term=term, step=2)
    pruned = run.prune([second.slot], term=term)
    assert (pruned.slots, pruned.directories) == ((first.slot,), (first.path,))
    with pytest.raises(CheckpointDeleted, match="doesn't keep it"):
        Checkpoint.of(run, first)
    assert run.prune([second.slot], term=term).directories == ()
    assert RunDirectory(run.store).ever_committed()


def test_attempts_in_flight_stay_and_orphans_go(run: RunDirectory, save: Save, cut: Cut) -> None:
    term = run.begin_term("a")
    stored = save(run, term=term, step=1)
    for step, generation in ((2, 1), (2, 3), (3, 3)):
        write_part(run.store, attempt_path(step=step, generation=generation), 0, [cut("w", np.zeros(2))])
    run.prune([stored.slot], in_flight=[(3, 3)], term=term)
    assert directories(run) == {stored.path, attempt_path(step=3, generation=3)}


def test_an_attempt_whose_writers_did_not_report_yet_stays(run: RunDirectory, save: Save, cut: Cut) -> None:
    term = run.begin_term("a")
    stored = save(run, term=term, step=3, generation=3)
    for step, generation in ((2, 3), (4, 2), (4, 3)):
        write_part(run.store, attempt_path(step=step, generation=generation), 0, [cut("w", np.zeros(2))])
    run.prune([stored.slot], term=term, writing=3)
    assert directories(run) == {stored.path, attempt_path(step=4, generation=3)}


def test_what_the_run_deletes_while_it_is_read_is_not_called_damaged(run: RunDirectory, save: Save) -> None:
    term = run.begin_term("a")
    first = save(run, term=term, step=1)
    opened = Checkpoint.of(run, first)
    second = save(run, term=term, step=2)
    run.prune([second.slot], term=term)
    with pytest.raises(CheckpointDeleted, match="its run deleted it"):
        opened.read("w", "param")
    with pytest.raises(CheckpointDeleted):
        verify(opened)
    run.store.delete_tree(second.path)  # nobody said that it may go
    with pytest.raises(FragmentMissing, match="is gone"):
        Checkpoint.of(run, second)


def test_who_opens_the_newest_gets_the_one_that_took_its_place(run: RunDirectory, save: Save) -> None:
    term = run.begin_term("a")
    first = save(run, term=term, step=1)
    counting = FaultyStore(run.store, [])
    log = RunDirectory(counting)
    assert log.newest() == first
    log.record(first)
    manifest = counting.calls["read"] + 1
    hold = Hold(operation="read", call=manifest, reached=threading.Event(), go=threading.Event())
    reader = RunDirectory(FaultyStore(run.store, [hold]))
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(Checkpoint.newest, reader)
        assert hold.reached.wait(60)
        second = save(run, term=term, step=2)
        run.prune([second.slot], term=term)
        hold.go.set()
        opened = opening.result()
    assert opened is not None
    assert opened.document["step"] == 2


def test_a_prune_that_died_half_way_is_finished_by_the_next(run: RunDirectory, save: Save) -> None:
    term = run.begin_term("a")
    stored = [save(run, term=term, step=s) for s in (1, 2, 3)]
    failing = RunDirectory(FaultyStore(run.store, [Fail(operation="delete_tree", call=2)]))
    with pytest.raises(StorageError):
        failing.prune([stored[2].slot], term=term)
    assert steps(run) == [3]
    run.prune([stored[2].slot], term=term)
    assert directories(run) == {stored[2].path}


def test_files_that_a_kept_checkpoint_refers_to_stay(run: RunDirectory, save: Save) -> None:
    term = run.begin_term("a")
    base = save(run, term=term, step=1)
    old = next(r for r in map(Checkpoint.of(run, base).manifest.row, range(3)) if r.tensor == "b")
    directory, state = attempt_path(step=2, generation=1), StateFile(document={}).encode()
    row = Row(
        tensor="b", state="param", dtype=old.dtype, shape=old.shape, box=old.box, hash=old.hash,
        file=f"../{base.path.split('/')[1]}/{old.file}", byte_offset=old.byte_offset, checksums=old.checksums,
    )  # fmt: skip
    manifest = Manifest.of([row], extra={"state_hash": digest(state)}).encode()
    run.store.write(f"{directory}/state.json", state)
    run.store.write(f"{directory}/manifest.parquet", manifest)
    assembled = Assembled(
        directory=directory, manifest_path=f"{directory}/manifest.parquet",
        manifest_hash=digest(manifest), bytes=0,
    )  # fmt: skip
    newer = run.commit(assembled, term=term, generation=1, step=2, lineage=[(1, 0)])
    run.prune([newer.slot], term=term)
    assert run.store.list(base.path) == [f"{base.path}/{old.file}"]
    assert verify(Checkpoint.of(run, newer)).sound
    last = save(run, term=term, step=3)
    run.prune([last.slot], term=term)
    assert directories(run) == {last.path}


# -- places --


def test_file_times_mean_nothing(tmp_path: Path, save: Save) -> None:
    run = RunDirectory(open_store(str(tmp_path / "run")))
    term = run.begin_term("a")
    expected = [save(run, term=term, step=s) for s in (1, 2, 3)]
    for age, path in enumerate(sorted((tmp_path / "run").rglob("*"))):
        os.utime(path, (1e9 - age, 1e9 - age))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert RunDirectory(open_store(str(tmp_path / "copy"))).commits() == expected


def test_checkpoints_open_by_url_and_only_if_committed(tmp_path: Path, save: Save, cut: Cut) -> None:
    url = f"{tmp_path}/ü = 1+2 #3/a b?ç"
    run = RunDirectory(open_store(url))
    with pytest.raises(NoCheckpoint, match="nothing was committed"):
        open_checkpoint(url)
    term = run.begin_term("a")
    first, second = save(run, term=term, step=1), save(run, term=term, step=2)
    assert open_checkpoint(url)["w"]["param"][5, 1:3].tolist() == [2.0, 2.0]
    assert open_checkpoint(f"{url}/{first.path}").document == {"step": 1}
    run.prune([second.slot], term=term)
    directory = attempt_path(step=9, generation=9)
    assemble(run.store, directory, [write_part(run.store, directory, 0, [cut("w", np.ones(2))])], {})
    with pytest.raises(NoCheckpoint, match="never committed"):
        open_checkpoint(f"{url}/{directory}")
    shutil.copytree(f"{url}/{second.path}", tmp_path / "alone")
    assert open_checkpoint(str(tmp_path / "alone")).document == {"step": 2}


def life_of_a_run(run: RunDirectory, save: Save) -> None:
    term = run.begin_term("a")
    run.create({}, {})
    for step in (1, 2, 3):
        save(run, term=term, step=step)
    again = RunDirectory(run.store)
    term = again.begin_term("b")
    newest = save(again, term=term, step=4, generation=2, lineage=((1, 0), (2, 3)))
    again.prune([newest.slot], term=term)
    report = verify(Checkpoint.of(again, newest))
    assert (report.sound, report.fragments, report.tensors) == (True, 3, 2)
    assert directories(again) == {newest.path}


def test_a_run_lives_in_memory(save: Save) -> None:
    life_of_a_run(RunDirectory(open_store(f"memory://{uuid.uuid4()}/run")), save)


def test_a_run_lives_on_gcs(gcs: GCSServer, save: Save) -> None:
    url = f"{gcs.bucket('runs')}/{uuid.uuid4()}/ü = 1+2 #3/a b?ç"
    life_of_a_run(RunDirectory(open_store(url, options=gcs.options)), save)
    assert open_checkpoint(url, options=gcs.options)["w"]["param"][0].tolist() == [4.0] * 4


def test_a_run_lives_on_azure(azure: AzureServer, save: Save) -> None:
    url = f"{azure.container('runs')}/{uuid.uuid4()}/ü = 1+2 #3/a b?ç"
    life_of_a_run(RunDirectory(open_store(url, options=azure.options)), save)
    assert open_checkpoint(url, options=azure.options)["w"]["param"][0].tolist() == [4.0] * 4


def test_a_run_lives_on_s3(s3: S3Server, save: Save) -> None:
    url = f"{s3.bucket('runs')}/{uuid.uuid4()}/ü = 1+2 #3/a b?ç"
    life_of_a_run(RunDirectory(open_store(url, options=s3.options)), save)
    assert open_checkpoint(url, options=s3.options)["w"]["param"][0].tolist() == [4.0] * 4
