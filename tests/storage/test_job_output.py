from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.errors import StorageError
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.job_output import (
    DIRECTORY,
    FILES,
    PART_BYTES,
    PARTS,
    QUIET,
    OutputLine,
    OutputReader,
    OutputWriter,
    output_text,
)
from elastic_train.testing.faulty_store import Fail, FaultyStore

pytestmark = pytest.mark.ring1


def line(number: int, *, worker: str = "w0001", rank: int = 0, text: str = "") -> OutputLine:
    at = f"2026-01-01T00:{number // 60 % 60:02d}:{number % 60:02d}.000+00:00"
    return OutputLine(at=at, worker=worker, rank=rank, stream="out", text=text or f"line {number}")


def test_each_line_is_read_once_in_the_order_of_time(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    one, other = OutputWriter(store, "w0001.7"), OutputWriter(store, "w0002.8")
    reader = OutputReader(store)
    assert not reader.any()
    one.add([line(1), line(3)])
    other.add([line(2, worker="w0002", rank=1)])
    assert one.waiting
    one.flush()
    other.flush()
    assert not one.waiting
    assert [told.text for told in reader.new()] == ["line 1", "line 2", "line 3"]
    one.add([line(4)])
    one.flush()
    assert [told.text for told in reader.new()] == ["line 4"]
    assert reader.new() == []
    assert reader.any()
    assert [told.text for told in OutputReader(store).new()] == [f"line {n}" for n in (1, 2, 3, 4)]
    assert OutputReader(store, only_new=True).new() == []
    assert output_text(line(3)) == "[00:00:03] rank 0 | line 3"


def test_a_process_that_prints_without_end_keeps_its_first_part_and_the_newest(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    writer, reader, told = OutputWriter(store, "w0001.7"), OutputReader(store), 0
    text = "x" * 1000
    for number in range(PARTS * 3 * PART_BYTES // 1000):
        writer.add([line(number, text=f"{number} {text}")])
        if number % 500 == 0:
            writer.flush()
            told += len(reader.new())
    writer.flush()
    told += len(reader.new())
    assert told == number + 1
    names = store.list(DIRECTORY)
    kept = sorted(names)
    assert PARTS <= len(kept) <= PARTS + 2
    assert kept[0].endswith("-000001.jsonl")
    assert sum(store.size(name) for name in kept) < (PARTS + 2) * (PART_BYTES + 2000)


def test_lines_wait_while_storage_fails(tmp_path: Path) -> None:
    store = FaultyStore(open_store(str(tmp_path)), [Fail(operation="write", call=1)])
    writer = OutputWriter(store, "w0001.7")
    writer.add([line(1)])
    with pytest.raises(StorageError):
        writer.flush()
    assert writer.waiting
    writer.add([line(2)])
    writer.flush()
    assert [told.text for told in OutputReader(store).new()] == ["line 1", "line 2"]


def test_what_processes_long_ago_printed_makes_room(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for number in range(FILES + 3):
        store.write(f"{DIRECTORY}/w{number:05d}.1-000001.jsonl", b"")
    OutputWriter(store, "w99999.1").make_room()
    assert len(list(store.list(DIRECTORY))) == FILES
    assert not store.exists(f"{DIRECTORY}/w00002.1-000001.jsonl")


def test_a_silent_process_is_read_more_rarely_and_never_lost(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    writer, reader = OutputWriter(store, "w0001.7"), OutputReader(store)
    writer.add([line(1)])
    writer.flush()
    assert len(reader.new()) == 1
    for _ in range(QUIET):
        assert reader.new() == []
    writer.add([line(2)])
    writer.flush()
    assert [told.text for told in reader.new(every=True)] == ["line 2"]
    writer.add([line(3)])
    writer.flush()
    assert [told.text for _ in range(2 * QUIET) for told in reader.new()] == ["line 3"]
