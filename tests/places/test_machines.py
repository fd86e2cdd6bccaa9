"""Containers and hosts as people have them: read-only, limited, badly named, or used by others too."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.cli.exit_codes import FINISHED, USAGE
from tests.places.conftest import STEPS, Place, few_processes, run_small_job, saved

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(400)]

READ_ONLY = Place(
    name="a read-only root",
    made_by='mount --bind "$STORAGE" /mnt\nmount -o remount,bind,ro /\nmount -t tmpfs tmpfs /tmp\n'
    'mkdir -p "$STORAGE"\nmount --bind /mnt "$STORAGE"',
    spaces=("--mount",),
)
NO_TMP = Place(
    name="a read-only /tmp",
    made_by='mount --bind "$STORAGE" "$STORAGE"\nmount -o remount,bind,ro /\nexport TMPDIR="$STORAGE"',
    spaces=("--mount",),
)
FEW_FILES = Place(name="256 open files", made_by="ulimit -n 256")
NO_NAME = Place(name="a host name that nothing resolves", made_by="hostname no-such-host", spaces=("--uts",))
OTHERS_RAY = Place(
    name="another user's /tmp/ray",
    made_by='mount --bind "$STORAGE" /mnt\nmount -t tmpfs tmpfs /tmp\nmkdir -p "$STORAGE" /tmp/ray\n'
    'mount --bind /mnt "$STORAGE"\nchmod 755 /tmp/ray\nchown 4321 /tmp/ray\n'
    'set -- setpriv --bounding-set -dac_override,-dac_read_search,-fowner,-chown "$@"',
    spaces=("--mount",),
)


def few_of_a_user(most: int) -> Place:
    """Of a user who isn't root, whom no limit binds, and who may read what root keeps to itself."""
    return Place(
        name=f"{most} processes of a user",
        made_by=f'chown 4321 "$STORAGE"\nset -- prlimit --nproc={most} setpriv --reuid 4321 '
        '--inh-caps +dac_override --ambient-caps +dac_override "$@"',
    )


def trains(place: Place, storage: Path) -> None:
    if reason := place.why_not(storage):
        pytest.skip(reason)
    assert run_small_job(place, storage).returncode == FINISHED
    assert saved(storage) == STEPS


@pytest.mark.parametrize("place", [READ_ONLY, FEW_FILES, NO_NAME, OTHERS_RAY], ids=lambda place: place.name)
def test_a_run_trains_on_an_odd_machine(place: Place, tmp_path: Path) -> None:
    trains(place, tmp_path)


def test_a_machine_whose_tmp_cannot_be_written_is_told_what_to_mount(tmp_path: Path) -> None:
    if reason := NO_TMP.why_not(tmp_path):
        pytest.skip(reason)
    done = run_small_job(NO_TMP, tmp_path)
    assert done.returncode == USAGE
    assert "docker run --tmpfs /tmp" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_machine_on_which_few_processes_may_begin_is_refused_and_trains_with_enough(tmp_path: Path) -> None:
    """In 100 of them, which containers may have, Ray waits for itself and says nothing."""
    with few_processes(100) as group:
        done = run_small_job(Place(name="100 processes", made_by=f"echo $$ > {group}/cgroup.procs"), tmp_path)
    assert done.returncode == USAGE
    assert "--pids-limit" in done.stderr
    assert "Traceback" not in done.stderr
    with few_processes(900) as group:
        trains(Place(name="900 processes", made_by=f"echo $$ > {group}/cgroup.procs"), tmp_path)


def test_a_user_who_may_have_few_processes_is_told_what_raises_it_and_trains_with_enough(
    tmp_path: Path,
) -> None:
    few = few_of_a_user(100)
    if reason := few.why_not(tmp_path):
        pytest.skip(reason)
    done = run_small_job(few, tmp_path)
    assert done.returncode == USAGE
    assert "ulimit -u" in done.stderr
    assert "Traceback" not in done.stderr
    trains(few_of_a_user(900), tmp_path)
