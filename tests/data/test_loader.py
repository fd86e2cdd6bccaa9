"""The loader: what is asked for, read ahead, whatever is not asked for forgotten; no process left behind."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import random
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import pytest

from elastic_train.config import Batch
from elastic_train.data.loader import Loader
from elastic_train.data.order import MicroBatch, SampleOrder
from elastic_train.errors import ConfigError, LoaderLost, SampleFailed

pytestmark = pytest.mark.ring1

USER_MODULE = """
import contextlib, os, random, threading

class Squares:
    def __init__(self, length): self.length = length
    def __len__(self): return self.length
    def __getitem__(self, i): return (i, i * i, os.getpid())

class Quiet(Squares):
    draws_nothing = True
    def __getitem__(self, i): return (i, i * i, threading.current_thread().name)

class Noisy(Squares):
    def __getitem__(self, i): return random.random()

class Broken(Squares):
    def __getitem__(self, i):
        if i == 3:
            raise KeyError(f"sample {i} is damaged")
        return i

class Odd(Exception):
    def __init__(self, a, b): super().__init__(a)

class Oddly(Squares):
    def __getitem__(self, i): raise Odd("cannot", "travel")

class Dying(Squares):
    def __getitem__(self, i):
        if i == 3 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os.kill(os.getpid(), 9)
        return i

class Stuck(Squares):
    def __getitem__(self, i):
        open(self.mark, "w").close()
        threading.Event().wait()

@contextlib.contextmanager
def seeded(seed, epoch, sample):
    state = random.getstate()
    random.seed(f"{seed} {epoch} {sample}")
    yield
    random.setstate(state)
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A user's module that only sys.path leads to."""
    (tmp_path / "user_data.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("user_data")
    del sys.modules["user_data"]


def steps(length: int, count: int, *, micro_size: int = 2) -> list[MicroBatch]:
    order = SampleOrder(length, Batch(global_size=4, micro_size=micro_size, seed=1))
    return [micro for step in range(1, count + 1) for micro in order.micro_batches(step)]


def gone(pid: int) -> bool:
    """Whether no process has this id; our own children are reaped, so no zombie hides one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_come_for_the_ids_asked_in_their_order(user: ModuleType, workers: int):
    micros = steps(9, 6)
    with Loader(user.Squares(9), seed=0, workers=workers) as loader:
        for at, micro in enumerate(micros):
            samples = loader.load(micro, micros[at + 1 :])
            assert [s[:2] for s in samples] == [(i, i * i) for i in micro.ids]
            assert (samples[0][2] != os.getpid()) == bool(workers)
    assert any(len(m.ids) < 2 for m in micros)


def test_a_source_that_draws_nothing_is_read_ahead_in_a_thread(user: ModuleType):
    micros = steps(9, 2)
    with Loader(user.Quiet(9), seed=0) as loader:
        assert loader.load(micros[0], micros[1:])[0][2].startswith("loader")
        assert loader.load(micros[1])[1][:2] == (micros[1].ids[1], micros[1].ids[1] ** 2)


@pytest.mark.parametrize(("workers", "ahead"), [(0, 1), (0, 4), (2, 4)])
def test_a_stop_at_any_micro_batch_leaves_the_samples_of_an_undisturbed_run(
    user: ModuleType, workers: int, ahead: int
):
    micros = steps(12, 9)
    with Loader(user.Quiet(12), seed=0, workers=workers, ahead=ahead) as loader:
        for stop in range(len(micros)):
            seen = [loader.load(m, micros[at + 1 :])[0][0] for at, m in enumerate(micros[:stop])]
            # What was read ahead is still in flight here; the resumed run asks from `stop` on.
            seen += [loader.load(m, micros[stop + at + 1 :])[0][0] for at, m in enumerate(micros[stop:])]
            assert seen == [m.ids[0] for m in micros]


@pytest.mark.parametrize("workers", [0, 2])
def test_random_samples_depend_on_seed_epoch_and_id_alone(user: ModuleType, workers: int):
    micros = steps(8, 4)
    with Loader(user.Noisy(8), seed=5, seeding=user.seeded, workers=workers) as loader:
        random.seed(0)
        drawn = {
            (m.epoch, i): s for m in reversed(micros) for i, s in zip(m.ids, loader.load(m), strict=True)
        }
        here = random.random()
    assert here == random.Random(0).random()
    expected = {(e, i): random.Random(f"5 {e} {i}").random() for e in (0, 1) for i in range(8)}
    assert drawn == expected


def test_an_error_of_the_data_set_comes_back_as_itself_with_its_traceback(user: ModuleType):
    micros = sorted(steps(8, 2), key=lambda m: 3 in m.ids)
    with Loader(user.Broken(8), seed=0, workers=1) as loader:
        assert loader.load(micros[0], micros[1:]) == list(micros[0].ids)
        with pytest.raises(KeyError, match="sample 3 is damaged") as caught:
            loader.load(micros[-1])
        assert "user_data.py" in caught.value.__notes__[0]
        assert "in __getitem__" in caught.value.__notes__[0]
        assert loader.load(micros[1]) == list(micros[1].ids)


def test_an_error_that_cannot_travel_is_told_with_its_traceback(user: ModuleType):
    with (
        Loader(user.Oddly(8), seed=0, workers=1) as loader,
        pytest.raises(SampleFailed, match="Odd: cannot") as caught,
    ):
        loader.load(steps(8, 1)[0])
    assert "user_data.py" in pickle.loads(pickle.dumps(caught.value)).traceback


def test_a_process_that_dies_is_named_and_replaced(user: ModuleType, tmp_path: Path):
    micros = steps(8, 2)
    (fatal,) = (m for m in micros if 3 in m.ids)
    dataset = user.Dying(8)
    dataset.mark = str(tmp_path / "died")
    with Loader(dataset, seed=0, workers=1) as loader:
        with pytest.raises(LoaderLost, match=f"exit code -{signal.SIGKILL.value}"):
            loader.load(fatal)
        assert loader.load(fatal) == list(fatal.ids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_said_to_the_whole_process_group_is_left_to_the_parent(user: ModuleType, number: int):
    first, second = steps(8, 4)[:2]
    with Loader(user.Squares(8), seed=0, workers=1) as loader:
        (pid,) = {reported for *_, reported in loader.load(first)}
        os.kill(pid, number)
        assert loader.load(second) == [(i, i * i, pid) for i in second.ids]


def test_closing_ends_every_process_even_one_that_hangs(user: ModuleType, tmp_path: Path):
    dataset = user.Stuck(8)
    dataset.mark = str(tmp_path / "stuck")
    loader = Loader(dataset, seed=0, workers=2)
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            loader.load(steps(8, 1)[0])
        except LoaderLost as error:
            failed.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    waited = threading.Event()
    while not Path(dataset.mark).exists():
        assert not waited.wait(0.02)
    pids = [process.pid for process in loader._processes._all]  # type: ignore[union-attr]
    assert len(pids) == 2
    loader.close()
    asker.join()
    assert len(failed) == 1
    assert all(map(gone, pids))
    loader.close()


def test_a_process_ends_when_its_parent_is_killed(user: ModuleType, tmp_path: Path):
    reader, writer = multiprocessing.get_context("spawn").Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    parent = context.Process(target=hold_a_loader, args=(writer, pickle.dumps(user.Squares(8))))
    parent.start()
    writer.close()
    assert reader.poll(150)
    pid = reader.recv()
    parent.kill()
    parent.join()
    with suppress(ProcessLookupError):  # it is gone already
        descriptor = os.pidfd_open(pid)
        assert select.select([descriptor], [], [], 100)[0], "the loader process outlived its parent"
        os.close(descriptor)


def hold_a_loader(pipe: multiprocessing.connection.Connection, dataset: bytes) -> None:
    loader = Loader(pickle.loads(dataset), seed=0, workers=1)
    loader.load(steps(8, 1)[0])
    pipe.send(loader._processes._all.copy().pop().pid)  # type: ignore[union-attr]
    threading.Event().wait()


def test_a_data_set_that_does_not_pickle_is_refused_before_anything_starts():
    class Local:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ConfigError, match="does not pickle"):
        Loader(Local(), seed=0, workers=1)
    with Loader(Local(), seed=0) as loader:
        assert loader.load(steps(4, 1)[0])


class Quiet:
    """Draws nothing, so it may be read ahead in a thread."""

    draws_nothing = True

    def __len__(self) -> int:
        return 8

    def __getitem__(self, sample: int) -> int:
        return sample


def test_reading_ahead_in_a_thread_leaves_the_generators_alone() -> None:
    @contextmanager
    def touching(seed: int, epoch: int, sample: int) -> Iterator[None]:
        raise AssertionError("seeded beside the training thread")
        yield

    order = SampleOrder(8, Batch(global_size=8, micro_size=2))
    first, *rest = order.micro_batches(1)
    with Loader(Quiet(), seed=0, seeding=touching) as loader:
        assert loader.load(first, rest) == list(first.ids)
