"""Thrift's compact encoding: what Parquet writes is read, and no length or depth is believed."""

from __future__ import annotations

import io
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_train.checkpoint.validate.thrift import MOST_DEEP, Reader

pytestmark = pytest.mark.ring0


def footer() -> bytes:
    sink = io.BytesIO()
    table = pa.table({"a": pa.array(range(1000)), "b": pa.array([[i, i] for i in range(1000)])})
    pq.write_table(table, sink, row_group_size=300)
    data = sink.getvalue()
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def test_a_footer_is_read_as_arrow_reads_it() -> None:
    reader = Reader(footer())
    found = reader.struct()
    assert reader.at == len(footer())
    assert found[3] == 1000
    assert [group[3] for group in found[4]] == [300, 300, 300, 100]
    assert [column[3][5] for column in found[4][3][1]] == [100, 200]
    assert [b".".join(column[3][3]) for column in found[4][0][1]] == [b"a", b"b.list.element"]


def test_whatever_the_bytes_it_ends_in_a_value_or_an_error() -> None:
    chance, good = random.Random(0), footer()
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            Reader(bytes(data[: chance.choice([len(data), chance.randrange(len(data))])])).struct()
        except (ValueError, IndexError):
            continue


@pytest.mark.parametrize(
    "data",
    [
        b"\x1c" * (MOST_DEEP + 2),  # a struct in a struct in a struct
        b"\x19" + b"\xf9\xff\xff\xff\xff\x0f" * 2,  # a list of four billion lists
        b"\x18\xff\xff\xff\xff\x0f",  # four billion bytes
        b"\x16" + b"\xff" * 11,  # a number without an end
        b"\x1e\x00",  # a kind that there isn't
    ],
)
def test_claims_beyond_the_bytes_are_errors(data: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        Reader(data).struct()
