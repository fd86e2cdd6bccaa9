"""The live page over HTTP: a real journal, a real server, a client that reads its stream."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import socket
import struct
import threading
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cli.report_and_ui import Reading, write_report
from elastic_train.errors import ConfigError, StorageNotFound
from elastic_train.observe.journal_records import Record, to_json
from elastic_train.observe.metrics import METRICS, PREFIX, samples
from elastic_train.observe.run_summary import summary_of
from elastic_train.show.page import PARTS, fragments
from elastic_train.show.picture import picture
from elastic_train.show.server import Source, application, news
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.journal import Journal
from tests.show.browser import BINARY, MISSING

pytestmark = pytest.mark.ring1


def written(where: Path, records: list[Record]) -> tuple[str, Journal]:
    store = open_store(str(where))
    RunDirectory(store).create({"max_steps": 60}, {})
    journal = Journal(store, 1)
    for record in records:
        journal.append(to_json(record))
    journal.flush()
    return str(where), journal


@contextmanager
def served(*runs: str, token: str | None = None) -> Iterator[str]:
    """The address of a server of these runs."""
    with serving([Reading(run) for run in runs], token=token) as url:
        yield url


@contextmanager
def serving(sources: Sequence[Source], *, token: str | None = None) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        app = application(sources, token=token, every_s=0.02)
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def got(url: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def test_the_page_lives_while_the_journal_grows_and_its_stream_ends_with_the_run(
    tmp_path: Path, rough: list[Record]
) -> None:
    half = len(rough) // 2
    run, journal = written(tmp_path / "gpt", rough[:half])
    with served(run) as url:
        status, html = got(url)
        assert (status, html.count("<section")) == (200, len(PARTS))
        news: list[dict[str, str]] = []
        with urllib.request.urlopen(f"{url}/run/0/stream", timeout=20) as stream:
            for line in stream:
                said = line.decode().strip()
                if said == "event: over":
                    break
                if said.startswith("data: "):
                    news.append(json.loads(said[6:]))
                if len(news) == 1 and half < len(rough):
                    for record in rough[half:]:
                        journal.append(to_json(record))
                    journal.flush()
                    half = len(rough)
        assert set(news[0]) == set(PARTS)
        assert "finished" in {name: html for one in news for name, html in one.items()}["head"]
        assert got(f"{url}/run/7/")[0] == 404


def test_metrics_are_scraped_with_the_values_of_the_journal(tmp_path: Path, rough: list[Record]) -> None:
    names = {"one": rough, "two": rough[: len(rough) // 2]}
    runs = [written(tmp_path / name, records)[0] for name, records in names.items()]
    with served(*runs) as url:
        _, text = got(f"{url}/metrics")
        _, html = got(url)
    assert html.count('class="card"') == 2
    found = {
        (s.name, frozenset(s.labels.items())): s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
    }
    for name, records in names.items():
        told = summary_of(records)
        for metric in METRICS:
            for labels, value in samples(metric, told, 60):
                said, suffix = dict(zip(metric.labels, labels, strict=True)), ""
                if metric.kind == "summary" and labels[0] in ("count", "sum"):
                    said, suffix = {}, f"_{labels[0]}"
                key = (PREFIX + metric.name + suffix, frozenset({"run": name, **said}.items()))
                assert found.pop(key) == pytest.approx(value), key
    assert not found


def test_runs_of_one_name_are_told_apart_in_metrics_by_their_places(
    tmp_path: Path, rough: list[Record]
) -> None:
    runs = [written(tmp_path / sweep / "gpt", rough)[0] for sweep in ("a", "b")]
    with served(*runs) as url:
        _, text = got(f"{url}/metrics")
    found = [s.labels["run"] for f in text_string_to_metric_families(text) for s in f.samples]
    assert {*found} == {*runs}


def test_who_has_no_token_sees_nothing(tmp_path: Path, rough: list[Record]) -> None:
    run, _ = written(tmp_path / "gpt", rough)
    with served(run, token="a secret") as url:
        for path in ("/", "/metrics", "/run/0/", "/run/0/stream"):
            assert got(url + path)[0] == 401
            assert got(url + path, Authorization="Bearer wrong")[0] == 401
        assert got(f"{url}/metrics", Authorization="Bearer a secret")[0] == 200
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(f"{url}/?token=a+secret", timeout=20) as answer:
            assert (answer.status, answer.url) == (200, f"{url}/")


def test_without_a_token_only_this_machine_by_its_own_names_is_served(
    tmp_path: Path, rough: list[Record]
) -> None:
    run, _ = written(tmp_path / "gpt", rough)
    with served(run) as url:
        assert got(url, Host="elsewhere.example")[0] == 400
        assert got(url, Host="[::1]:8000")[0] == 200
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_a_report_is_written_from_storage_alone(
    tmp_path: Path, rough: list[Record], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run, _ = written(tmp_path / "gpt", rough)
    write_report(run, str(tmp_path / "r.html"), form="html")
    write_report(run, "-", form="svg")
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert capsysbinary.readouterr().out.splitlines()[-1].endswith(b"</svg>")
    with pytest.raises(StorageNotFound, match="no run with a journal"):
        write_report(str(tmp_path / "none"), "-", form="svg")


@pytest.mark.matrix
@pytest.mark.skipif(BINARY is None, reason=MISSING)
def test_the_picture_is_drawn_as_a_png_in_twice_its_size(tmp_path: Path, rough: list[Record]) -> None:
    run, _ = written(tmp_path / "gpt", rough)
    write_report(run, str(tmp_path / "r.png"), form="png")
    made = (tmp_path / "r.png").read_bytes()
    assert made.startswith(b"\x89PNG")
    size = ElementTree.fromstring(picture(Reading(run).look())).attrib
    assert struct.unpack(">II", made[16:24]) == (2 * int(size["width"]), 2 * int(size["height"]))


def test_a_png_without_a_browser_is_refused_with_what_needs_none(
    tmp_path: Path, rough: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = written(tmp_path / "gpt", rough)
    monkeypatch.setenv("CHROMIUM", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="take --svg"):
        write_report(run, str(tmp_path / "r.png"), form="png")
    monkeypatch.setenv("CHROMIUM", "/bin/true")
    with pytest.raises(ConfigError, match="drew nothing"):
        write_report(run, str(tmp_path / "r.png"), form="png")
    assert not (tmp_path / "r.png").exists()


@pytest.mark.matrix
def test_a_page_that_stays_open_while_its_run_goes_on_takes_no_more_memory(
    tmp_path: Path, long_run: Callable[[int], Iterator[Record]]
) -> None:
    records = long_run(9_600)
    run, journal = written(tmp_path / "gpt", list(itertools.islice(records, 9_000)))
    reading = Reading(run)

    async def parts() -> tuple[dict[str, str], bool]:
        for record in itertools.islice(records, 5):
            journal.append(to_json(record))
        journal.flush()
        return fragments(reading.look()), False

    async def held(stream: AsyncIterator[str], looks: int) -> int:
        """Bytes that are held after so many more looks, each of which had news."""
        for _ in range(looks):
            assert "data: " in await anext(stream)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    async def grown() -> int:
        stream = news(parts, 0.0)
        before = await held(stream, 20)
        return await held(stream, 80) - before

    tracemalloc.start()
    try:
        assert asyncio.run(grown()) < 1e6  # a page has some 50 kB
    finally:
        tracemalloc.stop()
