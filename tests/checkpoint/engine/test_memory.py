"""What bounds the memory of a process: its control groups, of either version, and the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.checkpoint.engine.machine_memory import bound_of, memory_now
from elastic_train.control_groups import control_groups

pytestmark = pytest.mark.ring1
MIB = 2**20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_every_group_around_the_process_counts_without_what_the_kernel_gives_back(
    tmp_path: Path, version: int
) -> None:
    if version == 1:
        write(tmp_path, {"self/cgroup": "9:cpu:/elsewhere\n8:memory:/pod/box\n"})
        root, limit, used, stat = (
            "groups/memory",
            "limit_in_bytes",
            "usage_in_bytes",
            "total_cache {}\ntotal_shmem {}",
        )
        write(tmp_path, {f"{root}/memory.limit_in_bytes": str(2**63 - 4096)})
        unlimited = str(2**62)
    else:
        write(tmp_path, {"self/cgroup": "0::/pod/box\n", "groups/cgroup.controllers": "memory\n"})
        root, limit, used, stat = "groups", "max", "current", "file {}\nshmem {}"
        unlimited = "max"
    for group, most in (("pod/box", unlimited), ("pod", str(512 * MIB))):
        write(
            tmp_path,
            {
                f"{root}/{group}/memory.{limit}": f"{most}\n",
                f"{root}/{group}/memory.{used}": f"{490 * MIB}\n",
                f"{root}/{group}/memory.stat": stat.format(30 * MIB, 20 * MIB) + "\n",
            },
        )
    found = list(control_groups("memory", tmp_path / "self", tmp_path / "groups"))
    assert [group.name for group in found] == ["box", "pod", Path(root).name]
    assert [bound_of(group) for group in found] == [None, (480 * MIB, 512 * MIB), None]


def test_a_group_that_cannot_be_seen_from_inside_is_the_root(tmp_path: Path) -> None:
    write(tmp_path, {"self/cgroup": "0::/../outside\n", "groups/cgroup.controllers": "memory\n"})
    assert list(control_groups("memory", tmp_path / "self", tmp_path / "groups")) == [tmp_path / "groups"]


def test_this_process_is_weighed() -> None:
    found = memory_now()
    assert 0 < found.held <= found.room
    assert 0 < found.used <= found.room
