"""Curves as SVG paths, from the buckets of a series."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from elastic_train.observe.bounded_series import Bucket
from elastic_train.observe.timeline import ActivitySpan
from elastic_train.show.scale import Scale

Place = Callable[[float, float], str]
"""A point of the picture, as text, for a time and a value."""


def pieces(buckets: Sequence[Bucket], spans: Sequence[ActivitySpan]) -> Iterator[list[Bucket]]:
    """Buckets between which the run trained without a break."""
    breaks = [span.began for span in spans if span.doing != "training"]
    piece: list[Bucket] = []
    at = 0
    for bucket in buckets:
        while at < len(breaks) and piece and breaks[at] < piece[-1][1]:
            at += 1
        if piece and at < len(breaks) and breaks[at] < bucket[0]:
            yield piece
            piece = []
        piece.append(bucket)
    if piece:
        yield piece


def mean(bucket: Bucket) -> float:
    return bucket[5] / bucket[4]


def line(found: Sequence[Sequence[Bucket]], place: Place) -> str:
    """The means; a piece of one bucket is a short dash."""
    parts: list[str] = []
    for piece in found:
        points = [place((b[0] + b[1]) / 2, mean(b)) for b in piece]
        parts.append("M" + "L".join(points) + ("h.01" if len(points) == 1 else ""))
    return "".join(parts)


def band(found: Sequence[Sequence[Bucket]], place: Place) -> str:
    """Between the least and the largest of each bucket; empty where no bucket has more than one value."""
    parts: list[str] = []
    for piece in found:
        if all(b[6] == b[7] for b in piece):
            continue
        there = [place((b[0] + b[1]) / 2, b[7]) for b in piece]
        back = [place((b[0] + b[1]) / 2, b[6]) for b in reversed(piece)]
        parts.append("M" + "L".join((*there, *back)) + "Z")
    return "".join(parts)


def placed(x: Scale, y: Scale, width: float, height: float) -> Place:
    """Places in a picture of a size, the larger values above."""

    def place(time: float, value: float) -> str:
        return f"{x(time) * width:.2f} {(1 - y(value)) * height:.2f}"

    return place
