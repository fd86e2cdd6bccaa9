"""Data of WebDataset, MosaicML and Hugging Face, by number: what their own libraries give."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from elastic_train.data.arrow import ArrowRows
from elastic_train.data.identity import check_repeatable, digest_of, identify
from elastic_train.data.mds import MDSRows
from elastic_train.data.stateful_stream import StatefulStream
from elastic_train.data.webdataset import TarSamples
from elastic_train.errors import ConfigError, DataMismatch

pytestmark = pytest.mark.ring1
WRITTEN = Path(__file__).parent.parent / "fixtures" / "sources_tiny.tar.gz"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("written")
    with tarfile.open(WRITTEN) as archive:
        archive.extractall(directory, filter="data")
    return directory


def write_shard(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def test_samples_of_tar_shards_are_those_of_webdataset(written: Path, tmp_path: Path) -> None:
    index = tmp_path / "index.json"
    for places in (written / "webdataset", f"{written}/webdataset/part-{{000..002}}.tar"):
        samples = TarSamples(places, index=index)
        found = [samples[i] for i in range(len(samples))]
        assert [dict(s, __url__=Path(s["__url__"]).name) for s in found] == [
            {
                "__key__": f"a/k{i}",
                "__url__": f"part-{i // 3:03}.tar",
                "cls": b"%d" % (i % 3),
                "seg.txt": f"é{i}".encode(),
            }
            for i in range(7)
        ]
        assert pickle.loads(pickle.dumps(samples))[6] == found[6]
    decoded = TarSamples(written / "webdataset", decode=lambda s: (s["__key__"], int(s["cls"])))
    assert (decoded[5], decoded.draws_nothing) == (("a/k5", 2), False)
    with pytest.raises(DataMismatch, match=r"index\.json is of other shards than the 1"):
        len(TarSamples(written / "webdataset/part-001.tar", index=index))


ODD = [
    ("__x__/kept.txt", b"0"),
    ("a/one.JPG", b"1"),
    ("a/one.seg.png", b"2"),
    ("no_extension", b"3"),
    ("a/one.txt", b"4"),
    ("./b.txt", b"5"),
    (".hidden", b"6"),
    ("x" * 150 + "/é.txt", b"7" * 2000),
    ("a/one.txt", b"8"),
    ("c.d/e.f.txt", b"9"),
    ("z.txt", b""),
]


def test_odd_members_are_grouped_as_the_library_groups_them(tmp_path: Path) -> None:
    write_shard(tmp_path / "odd.tar", ODD)
    samples = TarSamples(tmp_path)
    found = [{k: v for k, v in samples[i].items() if k != "__url__"} for i in range(len(samples))]
    assert found == [
        {"__key__": "a/one", "jpg": b"1", "seg.png": b"2", "txt": b"4"},
        {"__key__": "./b", "txt": b"5"},
        {"__key__": "x" * 150 + "/é", "txt": b"7" * 2000},
        {"__key__": "a/one", "txt": b"8"},
        {"__key__": "c.d/e", "f.txt": b"9"},
        {"__key__": "z", "txt": b""},
    ]


@pytest.mark.parametrize("shard", ["odd.tar", "part-000.tar", "part-001.tar"])
def test_webdataset_itself_gives_the_same(written: Path, tmp_path: Path, shard: str) -> None:
    wds = pytest.importorskip("webdataset", reason="the library that is compared with")
    write_shard(written / "webdataset-odd.tar", ODD)
    path = str(written / "webdataset-odd.tar" if shard == "odd.tar" else written / "webdataset" / shard)
    expected = [
        {k: v for k, v in sample.items() if k != "__local_path__"}
        for sample in wds.WebDataset(path, shardshuffle=False)
    ]
    samples = TarSamples(path)
    assert [samples[i] for i in range(len(samples))] == expected


def test_shards_that_cannot_be_numbered_are_named(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", [("a.txt", b"1"), ("a.TXT", b"2")])
    with pytest.raises(ConfigError, match=r"a\.tar is no shard.*sample 'a' has two files 'txt'"):
        len(TarSamples(tmp_path))
    write_shard(tmp_path / "a.tar", [("a.txt", b"1" * 3000), ("b.txt", b"2" * 3000)])
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[:5000])
    with pytest.raises(ConfigError, match=r"a\.tar is no shard.*unexpected end"):
        len(TarSamples(tmp_path))
    (tmp_path / "a.tar").write_bytes(whole)
    samples = TarSamples(tmp_path)
    assert len(samples) == 2
    (tmp_path / "a.tar").write_bytes(b"\0" * len(whole))
    with pytest.raises(DataMismatch, match=r"no sample at bytes 0 to 3584"):
        samples[0]
    (tmp_path / "b.tar.gz").write_bytes(b"")
    for places in (tmp_path, tmp_path / "b.tar.gz"):
        with pytest.raises(ConfigError, match=r"b\.tar\.gz is compressed.*data\.stream\.Stream"):
            len(TarSamples(places))


def test_rows_of_mds_are_those_that_were_written(written: Path) -> None:
    rows = MDSRows(written / "mds", columns=["n", "s", "any", "typed", "fixed", "j", "u", "d"])
    assert len(rows) == 7
    for i, row in enumerate(rows[i] for i in range(7)):
        assert (row["n"], row["s"], row["j"], row["u"], row["d"]) == (
            i,
            f"é{i}",
            {"x": [i]},
            i,
            Decimal(i) / 4,
        )
        assert row["u"].dtype == np.uint8
        np.testing.assert_array_equal(row["any"], np.arange(2 * i + 2.0).reshape(2, -1), strict=True)
        np.testing.assert_array_equal(row["typed"], np.full((1, i + 1), i, "f4"), strict=True)
        np.testing.assert_array_equal(row["fixed"], np.full((2, 3), i, "i2"), strict=True)
    twice = MDSRows([written / "mds", written / "mds"], columns=["n"])
    assert [twice[i]["n"] for i in range(14)] == [*range(7), *range(7)]
    trusted = MDSRows(written / "mds", columns=["p"], decoders={"pkl": pickle.loads})
    assert pickle.loads(pickle.dumps(trusted))[3] == {"p": {3}}
    image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")
    decoded = MDSRows(written / "mds", columns=["i"])[5]["i"]
    assert (decoded.size, decoded.getpixel((1, 2))) == ((2, 3), (5, 0, 9))
    assert isinstance(decoded, image.Image)


def test_mosaicml_itself_gives_the_same(written: Path) -> None:
    streaming = pytest.importorskip("streaming", reason="the library that is compared with")
    theirs = streaming.StreamingDataset(
        local=str(written / "mds"), shuffle=False, batch_size=1, allow_unsafe_types=True
    )
    ours = MDSRows(written / "mds", decoders={"pkl": pickle.loads})
    assert [digest_of(ours[i]) for i in range(len(ours))] == [
        digest_of(theirs[i]) for i in range(len(theirs))
    ]


def _edit(entry: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda shard: shard.__setitem__(entry, value)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (_edit("version", 1), "is of format mds 1, not mds 2"),
        (_edit("column_encodings", ["lzma"]), "column 'n' is lzma, which is not known"),
        (_edit("column_encodings", ["pkl"]), "column 'n' is pickled, and reading it runs code"),
        (_edit("raw_data", {"basename": "s.mds", "bytes": 99}), "has 32 bytes, its index says 99"),
        (_edit("raw_data", {"basename": "t.mds", "bytes": 32}), "t.mds is not there"),
        (lambda s: s.pop("samples"), "is no index of MDS: KeyError"),
        (_edit("samples", 3), "has not the 3 samples"),
        (
            lambda s: s.update(
                compression="zstd",
                raw_data={"basename": "t.mds", "bytes": 32},
                zip_data={"basename": "t.mds.zstd"},
            ),
            r"compressed with zstd.*Decompress t\.mds\.zstd to t\.mds",
        ),
    ],
)
def test_an_index_is_compared_with_what_is_there(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], problem: str
) -> None:
    (tmp_path / "s.mds").write_bytes(np.array([2, 16, 24, 32], "<u4").tobytes() + bytes(16))
    shard: dict[str, Any] = {
        "format": "mds",
        "version": 2,
        "samples": 2,
        "compression": None,
        "zip_data": None,
    }
    shard |= {"column_names": ["n"], "column_encodings": ["int"], "column_sizes": [8]}
    shard |= {"raw_data": {"basename": "s.mds", "bytes": 32}}
    edit(shard)
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    with pytest.raises(ConfigError, match=problem):
        MDSRows(tmp_path)[0]


def test_directories_of_datasets_give_the_rows_that_were_saved(written: Path) -> None:
    rows = ArrowRows(written / "datasets/chosen")
    for at, i in enumerate((6, 0, 5, 1, 4, 2, 3)):
        row = rows[at]
        image = row.pop("image")
        assert (image["path"], image["bytes"][:4]) == (None, b"\x89PNG")
        assert row.pop("tokens").tolist() == list(range(i))
        np.testing.assert_array_equal(row.pop("grid"), np.array([[1, 2], [3, i]], "f4"), strict=True)
        boxes = row.pop("boxes")
        assert [box.tolist() for box in boxes] == [[0.5] * k for k in range(i % 3)]
        assert list(row.pop("maybe")) == [1, None][: 1 + i % 2]
        assert row == {"n": i, "label": i % 2, "pair": {"x": i, "y": ["t"] * (i % 2)}}
    formatted = ArrowRows(written / "datasets/format")
    assert {name: list(np.atleast_1d(v)) for name, v in formatted[3].items()} == {
        "n": [3],
        "tokens": [0, 1, 2],
    }
    assert "boxes" in ArrowRows(written / "datasets/format", columns=["n", "boxes"])[0]


def test_datasets_itself_gives_the_same(written: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the library that is compared with")
    for name in ("chosen", "format"):
        theirs = datasets.load_from_disk(str(written / "datasets" / name))
        theirs = theirs.select_columns(theirs.format["columns"]).with_format(None)
        if "image" in theirs.column_names:
            theirs = theirs.cast_column("image", datasets.Image(decode=False))
        ours = ArrowRows(written / "datasets" / name)
        assert [_plain(ours[i]) for i in range(len(ours))] == [_plain(theirs[i]) for i in range(len(theirs))]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray | list):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, np.generic) else value


def test_chosen_rows_of_older_releases_are_chosen_and_a_cache_is_no_data_set(tmp_path: Path) -> None:
    for name, columns in (
        ("data", {"n": [10, 11, 12, 13]}),
        ("indices", {"indices": pa.array([3, 0, 3], "u8")}),
    ):
        table = pa.table(columns)
        with (
            pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as w,
        ):
            w.write_table(table, max_chunksize=2)
    said = {
        "_data_files": [{"filename": "data.arrow"}],
        "_indices_data_files": [{"filename": "indices.arrow"}],
    }
    (tmp_path / "state.json").write_text(json.dumps(said))
    rows = pickle.loads(pickle.dumps(ArrowRows(tmp_path)))
    assert [rows[i]["n"] for i in range(len(rows))] == [13, 10, 13]
    (tmp_path / "state.json").rename(tmp_path / "dataset_info.json")
    with pytest.raises(ConfigError, match="is a cache of datasets"):
        ArrowRows(tmp_path)


class Numbers:
    """A stream that keeps its place, and with `buffered` holds one number that its state doesn't tell."""

    def __init__(self, samples: int, buffered: bool = False) -> None:
        self.samples, self.buffered, self.at = samples, buffered, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        held = None
        while self.at < self.samples:
            self.at += 1
            given, held = (held, self.at) if self.buffered else (self.at, None)
            if given is not None:
                yield {"n": given}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.at = state_dict["at"]


@pytest.mark.parametrize("samples", [1, 9, 10, 11])
def test_a_stream_with_a_state_is_read_from_the_nearest_place(tmp_path: Path, samples: int) -> None:
    index = tmp_path / "index.json"
    first = StatefulStream(lambda: Numbers(samples), index=index, every=5)
    assert [first[i]["n"] for i in range(len(first))] == list(range(1, samples + 1))
    again = StatefulStream(lambda: Numbers(samples), index=index, every=5)
    assert [again[i]["n"] for i in reversed(range(samples))] == list(range(samples, 0, -1))
    check_repeatable(again)
    assert identify(first) == identify(again)
    with pytest.raises(IndexError):
        again[samples]
    with pytest.raises(DataMismatch, match=f"has not the {samples} samples"):
        StatefulStream(lambda: Numbers(samples + 1), index=index, every=5)[samples - 1]
    with pytest.raises(ConfigError, match=r"is 4, the index .* was made with 5"):
        len(StatefulStream(lambda: Numbers(samples), index=index, every=4))


def test_a_stream_whose_state_is_not_all_of_it_is_refused_when_it_is_counted() -> None:
    with pytest.raises(DataMismatch, match="state at sample 5 the stream gives another sample"):
        len(StatefulStream(lambda: Numbers(9, buffered=True), every=5))
    with pytest.raises(
        ConfigError, match=r"list has no state_dict and no load_state_dict.*data\.stream\.Stream"
    ):
        len(StatefulStream(lambda: [1, 2]))  # type: ignore[arg-type, return-value]


def test_streamed_data_sets_of_datasets_are_numbered(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the streams that are numbered")
    for k in range(3):
        (tmp_path / f"{k}.jsonl").write_text("".join(json.dumps({"i": k * 7 + i}) + "\n" for i in range(7)))
    files = [str(tmp_path / f"{k}.jsonl") for k in range(3)]

    def opened() -> Any:
        return datasets.load_dataset("json", data_files=files, split="train", streaming=True)

    makers: list[Callable[[], Any]] = [
        opened,
        lambda: opened().map(lambda row: {"j": row["i"] * 2}).filter(lambda row: row["i"] % 3),
        lambda: datasets.interleave_datasets([opened(), opened()], probabilities=[0.3, 0.7], seed=3),
        lambda: opened().batch(4),
    ]
    for number, make in enumerate(makers):
        stream = StatefulStream(make, index=tmp_path / f"index{number}.json", every=4)
        expected = [digest_of(sample) for sample in make()]
        assert [digest_of(stream[i]) for i in range(len(stream))] == expected
        assert [digest_of(stream[i]) for i in reversed(range(len(stream)))] == expected[::-1]
    with pytest.raises(DataMismatch, match="some that shuffle"):
        len(StatefulStream(lambda: opened().shuffle(seed=1, buffer_size=5), every=4))
