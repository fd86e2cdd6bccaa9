"""Sources: every token of the files in one window, rows by number, lazy and small."""

from __future__ import annotations

import functools
import http.server
import pickle
import re
import threading
from pathlib import Path

import fsspec
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.data.documents import FileTexts
from elastic_train.data.numbered import numbered
from elastic_train.data.parquet import ParquetText, ParquetTokens
from elastic_train.data.sample_range import SourcePart
from elastic_train.data.stdlib import StandardLibrary
from elastic_train.data.text import TextFiles
from elastic_train.data.tokenizer import BOS, EOS, PAD, decode, encode
from elastic_train.errors import ConfigError, DataMismatch

pytestmark = pytest.mark.ring1


@given(text=st.text())
@settings(max_examples=40, deadline=None)
def test_bytes_decode_to_the_text_they_encode(text: str):
    assert decode(encode(text, bos=True, eos=True)) == text
    assert encode(text, bos=True, eos=True)[[0, -1]].tolist() == [BOS, EOS]


@given(contents=st.lists(st.binary(max_size=30), min_size=1, max_size=6), seq_len=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_windows_hold_the_whole_stream_and_predict_each_token_once(contents: list[bytes], seq_len: int):
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/windows/{i:02}.txt": content for i, content in enumerate(contents)})
    source = TextFiles([f"memory://windows/{i:02}.txt" for i in range(len(contents))], seq_len=seq_len)
    stream = np.concatenate([encode(content, eos=True) for content in contents])
    windows = [source[i] for i in range(len(source))]
    assert all(w.shape == (seq_len + 1,) for w in windows)
    predicted = np.concatenate([w[1:] for w in windows]) if windows else np.zeros(0)
    assert predicted[predicted != PAD].tolist() == stream[1:].tolist()
    inputs = np.concatenate([w[:-1] for w in windows])[: len(stream) - 1] if windows else np.zeros(0)
    assert inputs.tolist() == stream[:-1].tolist()


def test_braces_stand_for_places_where_no_file_has_that_very_name(tmp_path: Path):
    for name in ("s-08.txt", "s-09.txt", "s-10.txt", "x.txt", "y.txt", "s-{1,2}.txt"):
        (tmp_path / name).write_text(name)

    def names(pattern: str) -> list[str]:
        return [name for name, _ in TextFiles(f"{tmp_path}/{pattern}", seq_len=4).describe()]

    assert names("s-{08..10}.txt") == ["s-08.txt", "s-09.txt", "s-10.txt"]
    assert names("{y,x}.{txt,txt}") == ["y.txt", "y.txt", "x.txt", "x.txt"]
    assert names("s-{1,2}.txt") == ["s-{1,2}.txt"]
    with pytest.raises(ConfigError, match=r"no files at .*s-11\.txt"):
        names("s-{10..12}.txt")


def test_directories_patterns_and_files_are_listed_in_one_order(tmp_path: Path):
    for name in ("b.txt", "a/c.txt", "a.txt", "notes.md", ".hidden/x.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    names = [name for name, _ in TextFiles(tmp_path, seq_len=4, suffix=".txt").describe()]
    assert names == ["a.txt", "a/c.txt", "b.txt"]
    assert [n for n, _ in TextFiles(f"{tmp_path}/*.txt", seq_len=4).describe()] == ["a.txt", "b.txt"]
    assert TextFiles([tmp_path / "b.txt", str(tmp_path / "a.txt")], seq_len=4).describe() == (
        ("b.txt", 5),
        ("a.txt", 5),
    )


NAMES = [
    "plain",
    "with space",
    "v[1]",
    "a*b",
    "what?",
    "50%20",
    "~",
    "~user",
    "a#b",
    "a::b",
    "[",
    "naïve",
    "{x}",
    "x://y",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("below", ["", "data/part"])
def test_a_path_is_a_path_whatever_is_in_its_name(tmp_path: Path, name: str, below: str):
    for other in ("v1", "aXb", "whatX", "other"):  # what a pattern would match too
        (tmp_path / other / below).mkdir(parents=True)
        (tmp_path / other / below / "t.txt").write_text("other")
    (tmp_path / name / below).mkdir(parents=True)
    (tmp_path / name / below / f"{name.replace('/', '_')}.txt").write_text("right")
    pq.write_table(
        pa.table({"text": ["a row"]}), tmp_path / name / below / f"{name.replace('/', '_')}.parquet"
    )
    for place in (
        tmp_path / name,
        tmp_path / name / below / f"{name.replace('/', '_')}.txt",
        tmp_path / name / "**/*.txt",
    ):
        texts = FileTexts(str(place), suffix=".txt")
        assert [texts[i] for i in range(len(texts))] == [b"right"], place
        assert decode(TextFiles(place, seq_len=4, suffix=".txt")[0]) == "right"[:5]
    assert decode(ParquetText(tmp_path / name, seq_len=9)[0]) == "a row"


def test_a_tilde_is_the_home_directory_unless_there_is_one_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "home/d").mkdir(parents=True)
    (tmp_path / "home/d/t.txt").write_text("home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for place in ("~/d", "~/d/t.txt", "~/d/*.txt", Path("~/d")):
        assert FileTexts(place)[0] == b"home"
    (tmp_path / "~/d").mkdir(parents=True)
    (tmp_path / "~/d/t.txt").write_text("here")
    assert FileTexts("~/d")[0] == b"here"


def test_links_are_what_they_lead_to(tmp_path: Path):
    """The layout of a snapshot of the Hugging Face hub, and links to directories, one of them in a circle."""
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots/abc/data"
    snapshot.mkdir(parents=True)
    for name in "ab":
        (tmp_path / "blobs" / name).write_text(f"blob {name}")
        (snapshot / f"{name}.txt").symlink_to(f"../../../blobs/{name}")
    (snapshot / "plain.txt").write_text("plain")
    (tmp_path / "snapshots/main").symlink_to("abc")
    (snapshot / "circle").symlink_to("..")
    (snapshot / "again").symlink_to(tmp_path / "blobs")
    for root in ("snapshots/abc", "snapshots/main"):
        texts = FileTexts(tmp_path / root, suffix=".txt")
        assert [name for name, _ in texts.describe()] == ["data/a.txt", "data/b.txt", "data/plain.txt"]
        assert [texts[i] for i in range(3)] == [b"blob a", b"blob b", b"plain"]
    assert FileTexts(snapshot / "a.txt")[0] == b"blob a"
    assert FileTexts(f"{tmp_path}/snapshots/main/*/b.txt")[0] == b"blob b"
    pattern = FileTexts(f"{tmp_path}/snapshots/main/**/[ab].txt")
    assert [name for name, _ in pattern.describe()] == ["data/a.txt", "data/b.txt"]
    names = [name for name, _ in FileTexts(snapshot).describe()]
    assert names == ["a.txt", "again/a", "again/b", "b.txt", "plain.txt"]


def test_a_link_that_leads_nowhere_and_what_cannot_be_listed_are_told(tmp_path: Path):
    (tmp_path / "there.txt").write_text("there")
    (tmp_path / "gone.txt").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"gone\.txt, a link to nowhere, cannot be read"):
        FileTexts(tmp_path)[0]
    with pytest.raises(ConfigError, match=r"gone\.txt"):
        FileTexts(tmp_path / "gone.txt")[0]


def test_names_of_a_remote_store_are_names_first():
    memory = fsspec.filesystem("memory")
    memory.pipe({"/names/v[1]/a*.txt": b"right", "/names/v1/ab.txt": b"other"})
    assert FileTexts("memory://names/v[1]")[0] == b"right"
    assert FileTexts("memory://names/v[1]/a*.txt")[0] == b"right"
    assert FileTexts("memory://names/v?/ab.txt")[0] == b"other"


def test_a_source_opens_at_first_use_and_its_pickle_is_small(tmp_path: Path):
    source = TextFiles(tmp_path / "later", seq_len=8)
    (tmp_path / "later").mkdir()
    for i in range(200):
        (tmp_path / "later" / f"{i:03}.txt").write_text("x" * 100)
    assert len(source) == -(-(200 * 101 - 1) // 8)
    packed = pickle.dumps(source)
    assert len(packed) < 600
    assert np.array_equal(pickle.loads(packed)[17], source[17])


def test_a_file_that_shrank_since_it_was_listed_is_named(tmp_path: Path):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    source = TextFiles(tmp_path, seq_len=200)
    assert len(source) == 1
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataMismatch, match=r"a\.txt had 100 bytes"):
        source[0]


class PlainServer(http.server.SimpleHTTPRequestHandler):
    """A web server that ignores ranges."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_url_is_read_like_a_file_even_where_the_server_knows_no_ranges(tmp_path: Path):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    handler = functools.partial(PlainServer, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        remote = TextFiles(f"http://127.0.0.1:{server.server_port}/a.txt", seq_len=16)
        local = TextFiles(tmp_path / "a.txt", seq_len=16)
        assert [remote[i].tolist() for i in range(len(remote))] == [
            local[i].tolist() for i in range(len(local))
        ]
        assert remote.describe() == local.describe()
        server.shutdown()


def test_places_without_files_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no files at"):
        len(TextFiles(tmp_path / "absent", seq_len=4))
    with pytest.raises(ConfigError, match="no files at"):
        len(TextFiles(tmp_path, seq_len=4))
    with pytest.raises(ConfigError, match=re.escape(f"absent, seen from the working directory {Path.cwd()}")):
        len(TextFiles("absent", seq_len=4))


def test_the_standard_library_is_a_sorted_text_source_up_to_a_size():
    files = StandardLibrary(max_bytes=300_000).files()
    assert 0 < sum(f.size for f in files) <= 300_000
    assert [f.name for f in files] == sorted(f.name for f in files)
    assert "__future__.py" in [f.name for f in files]
    source = TextFiles(StandardLibrary(max_bytes=300_000), seq_len=64)
    assert len(source) > 1000
    assert "import" in "".join(decode(source[i]) for i in range(100))
    parts = {part for f in StandardLibrary().files() for part in f.name.split("/")}
    assert parts.isdisjoint({"test", "site-packages", "__pycache__"})


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Two files of several row groups: ids 0 .. 24, row i holding i % 5 + 1 tokens and a text."""
    values = [[i] * (i % 5 + 1) for i in range(25)]
    for name, part in (("a", values[:12]), ("b", values[12:])):
        texts = [f"row {tokens[0]}" for tokens in part]
        pq.write_table(
            pa.table({"tokens": part, "text": texts}), tmp_path / f"{name}.parquet", row_group_size=5
        )
    return tmp_path


def test_parquet_rows_are_found_across_groups_and_files_in_any_order(rows: Path):
    tokens, text = ParquetTokens(rows, seq_len=3), ParquetText(rows, seq_len=7)
    assert len(tokens) == len(text) == 25
    for i in [24, 0, 11, 12, 4, 5, *range(25)]:
        count = min(i % 5 + 1, 4)
        assert tokens[i].tolist() == [i] * count + [PAD] * (4 - count)
        assert decode(text[i]) == f"row {i}"[:7]
    assert np.array_equal(pickle.loads(pickle.dumps(tokens))[13], tokens[13])
    with pytest.raises(IndexError):
        tokens[25]


def test_a_column_that_is_absent_or_of_another_type_is_refused_by_name(rows: Path):
    with pytest.raises(ConfigError, match=r"no column 'ids'.*tokens, text"):
        len(ParquetTokens(rows, seq_len=3, column="ids"))
    with pytest.raises(ConfigError, match=r"'text' is string, a list of integers is needed"):
        len(ParquetTokens(rows, seq_len=3, column="text"))


class IterableDataset:
    """Named as torch and datasets name theirs."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        raise NotImplementedError


@pytest.mark.parametrize("stream", [(i for i in range(3)), iter([1]), {1: 2}, {1, 2}, IterableDataset()])
def test_streams_are_refused_with_the_way_to_number_them(stream: object):
    with pytest.raises(ConfigError, match=r"data\.stream\.Stream\(make\)|list\("):
        numbered(stream)


class Split:
    """A mapping's value that has `features`, as data sets of Hugging Face have."""

    features = ()


class DataLoader:
    """Named as torch names its own."""


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (pandas.DataFrame({"x": [1]}), r'DataFrame has columns.*to_dict\("records"\)'),
        (pandas.Series([1]), r"Series has columns and labels.*to_numpy"),
        (pa.table({"x": [1]}), r"Table has columns.*to_pylist"),
        ({"train": Split()}, r"Pass one of its data sets: d\['train'\]"),
        (DataLoader(), r"makes batches.*loader\.dataset"),
    ],
)
def test_what_has_no_samples_by_number_is_refused_with_the_way_to_them(given: object, remedy: str):
    with pytest.raises(ConfigError, match=remedy):
        numbered(given)


def test_a_null_among_tokens_is_named(tmp_path: Path):
    pq.write_table(pa.table({"tokens": [[1], [2, None]]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="row 1 of column 'tokens' has a null"):
        ParquetTokens(tmp_path, seq_len=2)[1]


def test_parts_of_a_source_are_disjoint_and_know_which_they_are():
    source = TextFiles(StandardLibrary(max_bytes=20_000), seq_len=64)
    head, tail = SourcePart(source, stop=-5), SourcePart(source, start=-5)
    assert (len(head), len(tail)) == (len(source) - 5, 5)
    assert np.array_equal(tail[0], source[len(source) - 5])
    assert head.describe() != tail.describe()
    with pytest.raises(IndexError):
        head[len(head)]
