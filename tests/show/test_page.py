"""What is drawn of a run, and that it stays small, whole and safe."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import FailStorage, FaultSchedule, Moment
from elastic_train.observe.journal_records import Record
from elastic_train.observe.run_summary import summary_of
from elastic_train.show.model import SILENT_S, Shown
from elastic_train.show.page import page
from elastic_train.show.picture import picture
from elastic_train.show.scale import Scale, duration, fitted, number, ticks, time_ticks
from elastic_train.show.several import several
from elastic_train.testing.simulator import Simulation, simulated_policy

pytestmark = pytest.mark.ring0
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Tags(HTMLParser):
    """Elements with their attributes; raises AssertionError where they are not nested well."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(html)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def shown(records: list[Record], **more: Any) -> Shown:
    return Shown(name="gpt", url="/runs/gpt", told=summary_of(records), config={"max_steps": 60}, **more)


def test_a_report_is_one_file_that_loads_nothing(rough: list[Record]) -> None:
    html = page(shown(rough))
    tags = Tags(html).found
    assert not [a for _, a in tags if {"src", "srcset"} & a.keys()]
    assert all((a.get("href") or "#").startswith("#") for _, a in tags)
    assert not re.search(r"@import|url\(|https?://", html)


def test_the_page_says_what_the_journal_says(rough: list[Record]) -> None:
    told = summary_of(rough)
    html = page(shown(rough))
    for change in told.changes.all:
        assert f"{change.before} → {change.after}" in html
    for happening in told.timeline.happenings:
        if happening.kind != "saved":
            assert f'id="h{happening.number}"' in html
    assert f"{told.account.told().share:.1%}" in html
    for lane in told.timeline.lanes:
        assert f'aria-label="Node {lane.node}"' in html


def test_marks_lead_to_their_events_and_everything_has_a_name(rough: list[Record]) -> None:
    tags = Tags(page(shown(rough))).found
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    marks = [a for tag, a in tags if tag == "a" and (a.get("class") or "").startswith("mark")]
    assert {"mark kill", "mark drain", "mark join"} == {a["class"] for a in marks}
    assert all(a.get("aria-label") and (a["href"] or "")[1:] in ids for a in marks)
    assert all(a.get("aria-label") or a.get("aria-labelledby") for _, a in tags if a.get("tabindex") == "0")


def test_names_of_others_are_text_and_never_markup(rough: list[Record]) -> None:
    evil = '<script>alert(1)</script>"&\x1b[2J'
    told = summary_of(rough)
    told.timeline.lanes[0].node = evil
    one = Shown(name=evil, url=evil, told=told, config={"max_steps": 60})
    for made in (page(one), picture(one), "".join(several({"/run/0/": one}).values())):
        assert "<script>alert" not in made
        assert "\x1b" not in made


def test_the_picture_is_an_svg_document_with_a_title(rough: list[Record]) -> None:
    root = ElementTree.fromstring(picture(shown(rough)))
    assert root.tag.endswith("svg")
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert "60 steps" in (title.text or "")
    assert len(root.findall(".//{http://www.w3.org/2000/svg}circle")) >= 4


def test_a_page_does_not_grow_with_the_age_of_its_run(long_run: Callable[[int], Iterator[Record]]) -> None:
    sizes = [len(page(shown(list(long_run(count))))) for count in (2100, 8400)]
    assert sizes[1] < 1.1 * sizes[0]
    assert max(sizes) < 5e6


@pytest.mark.parametrize("until", [0, 1, 3, 8])
def test_a_run_that_has_hardly_begun_can_be_shown(rough: list[Record], until: int) -> None:
    one = shown(rough[:until], now=rough[until].seconds)
    Tags(page(one))
    ElementTree.fromstring(picture(one))
    Tags("".join(several({"/run/0/": one, "/run/1/": one}).values()))


def test_a_run_that_says_nothing_any_more_is_silent(rough: list[Record]) -> None:
    last = rough[-30].seconds
    assert shown(rough[:-29], now=last + 1).silent_s == 0.0
    late = shown(rough[:-29], now=last + 10 * SILENT_S)
    assert late.status == "silent"
    assert late.end == last
    assert shown(rough, now=last + 1e6).status == "finished"


def test_axes_name_round_values_and_outliers_do_not_flatten_the_rest() -> None:
    assert ticks(Scale(0.0, 10.0)) == [0.0, 2.5, 5.0, 7.5, 10.0]
    assert time_ticks(800.0) == [0, 120, 240, 360, 480, 600, 720]
    assert len(time_ticks(70 * 86400.0)) <= 11
    assert fitted([1.0] * 500 + [2.0] * 500 + [1e9]).high < 3.0
    assert Scale(0.0, 1.0)(7.0) == 1.0
    assert fitted([])(0.5) == 0.5


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.047, "0.05 s"),
        (1.34, "1.3 s"),
        (59, "59 s"),
        (250, "4 min 10 s"),
        (3599.9, "1 h"),
        (7200, "2 h"),
        (183600, "2 d 3 h"),
    ],
)
def test_durations_have_at_most_two_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0"), (9999.0, "9999"), (12345.0, "12.35k"), (3.2e6, "3.2M"), (1e-4, "0.0001"), (math.nan, "nan")],
)
def test_numbers_have_four_digits_and_a_unit(value: float, words: str) -> None:
    assert number(value) == words


def test_trouble_with_storage_is_said_first_while_it_lasts_and_drawn_afterwards() -> None:
    schedule = FaultSchedule(faults=(FailStorage(when=Moment(step=12), seconds=40.0),), seed=3)
    policy = simulated_policy(replicas=2, max_steps=60, every=10)
    simulation = Simulation(policy=policy, schedule=schedule, nodes=tuple("abcd"), records=[])
    simulation.run()
    records = simulation.records or []
    began = next(n for n, r in enumerate(records) if r.change and r.change.kind == "storage_trouble")
    during = page(shown(records[: began + 1], now=records[began].seconds + 30.0))
    assert "Storage has been failing for 30 s" in during
    beside = several({"/run/0/": shown(records), "/run/1/": shown(records[: began + 1])})["runs"]
    assert beside.count("storage failing") == 1
    after = page(shown(records))
    assert "Storage has been failing" not in after
    assert 'aria-label="Storage trouble"' in during
    assert 'aria-label="Storage trouble"' in after


def test_a_first_recovery_is_not_called_nothing(rough: list[Record]) -> None:
    lost = next(n for n, r in enumerate(rough) if r.change and r.change.kind == "node_lost")
    early = next(n for n, r in enumerate(rough) if isinstance(r.event, StepCommitted))
    assert "Nothing has interrupted" in page(shown(rough[: early + 1]))
    while_it_lasts = page(shown(rough[: lost + 1]))
    assert "Its first recovery is under way" in while_it_lasts
    assert "the first is under way" in while_it_lasts


def test_runs_of_one_name_are_told_apart_by_their_places(rough: list[Record]) -> None:
    runs = {f"/run/{n}/": replace(shown(rough), url=f"/{where}/gpt") for n, where in enumerate("ab")}
    said = "".join(several(runs).values())
    assert said.count("/a/gpt") == said.count("/b/gpt") == 2
