"""How many processes and threads may begin: by the control groups around a process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_train.cluster.process_room import (
    WORKER,
    ProcessRoom,
    check_local_room,
    process_room,
    room_of,
    room_of_user,
    too_narrow,
)
from elastic_train.errors import ConfigError

pytestmark = pytest.mark.ring1


def room(left: int) -> ProcessRoom:
    return ProcessRoom(used=7, most=7 + left, bound="/sys/fs/cgroup/pids.max")


@pytest.mark.parametrize(("most", "left"), [("120", 20), ("90", 0), ("max", None)])
def test_a_group_says_how_many_are_left(tmp_path: Path, most: str, left: int | None) -> None:
    assert room_of(tmp_path) is None
    (tmp_path / "pids.max").write_text(f"{most}\n")
    (tmp_path / "pids.current").write_text("100\n")
    found = room_of(tmp_path)
    assert (found and found.left) == left


def test_a_local_cluster_that_has_no_room_is_refused_with_the_limit_and_what_raises_it() -> None:
    check_local_room(2, None)
    check_local_room(2, room(570))
    with pytest.raises(
        ConfigError, match=r"2 nodes .*569 more .* by /sys/fs/cgroup/pids\.max\..*--pids-limit"
    ):
        check_local_room(2, room(569))


def test_a_node_that_has_no_room_for_a_worker_is_told() -> None:
    assert too_narrow(None) is None
    assert too_narrow(room(WORKER)) is None
    assert "podPidsLimit" in (too_narrow(room(WORKER - 1)) or "")


def test_what_a_user_may_have_is_told_with_what_raises_it() -> None:
    if room_of_user() is not None:
        pytest.skip("this user is bound already")
    ask = "from elastic_train.cluster.process_room import *; room = process_room(); print(room)"
    capable = ["--inh-caps", "+dac_override", "--ambient-caps", "+dac_override"]  # to read what is root's
    as_another = ["prlimit", f"--nproc={WORKER}", "setpriv", "--reuid", "4321", *capable]
    said = subprocess.run(
        [*as_another, sys.executable, "-c", f"{ask}; print(too_narrow(room))"],
        capture_output=True,
        text=True,
        check=False,
    )
    if said.returncode:
        pytest.skip(f"no other user can be made here: {said.stderr}")
    room, why = said.stdout.splitlines()
    assert re.fullmatch(r"\d+ more processes and threads may begin, by ulimit -u", room)
    assert "limits.conf" in why


def test_this_process_has_room() -> None:
    assert too_narrow(process_room()) is None
