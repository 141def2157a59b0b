"""Texts, lines and bars of a matplotlib figure or SVG, for tests."""

import re
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
import pytest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.text import Text


def texts_of(figure: "Figure") -> "list[Text]":
    """All visible texts, tick labels included."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    texts = figure.findobj(
        lambda artist: isinstance(artist, Text) and artist.get_visible() and bool(artist.get_text())
    )
    hidden = {text for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for text in _hidden(axis)}
    return [text for text in texts if text not in hidden]  # type: ignore[misc]


def _hidden(axis: object) -> "Sequence[Text]":
    """The labels of ticks beyond the limits, which matplotlib keeps and does not draw."""
    low, high = sorted(axis.get_view_interval())  # type: ignore[attr-defined]
    tolerance = 1e-9 * (high - low)
    ticks = axis.get_major_ticks()  # type: ignore[attr-defined]
    shown = axis.get_visible() and axis.axes.axison  # type: ignore[attr-defined]
    return [
        label
        for tick in ticks
        for label in (tick.label1, tick.label2)
        if not shown or not low - tolerance <= tick.get_loc() <= high + tolerance
    ]


def figure_texts(figure: "Figure") -> list[str]:
    return [text.get_text() for text in texts_of(figure)]


def assert_readable(figure: "Figure", smallest: float = 8.9) -> None:
    """Assert that no text is cut off by the figure's edge, overlaps another text, or is too small."""
    boxes = [(text.get_text(), text.get_window_extent(), text) for text in texts_of(figure)]
    for content, box, text in boxes:
        assert box.x0 >= 0, content
        assert box.y0 >= 0, content
        assert box.x1 <= figure.bbox.width, content
        assert box.y1 <= figure.bbox.height, content
        assert text.get_fontsize() >= smallest, content
    for (first, a, _), (second, b, _) in combinations(boxes, 2):
        apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, f"{first!r} overlaps {second!r}"


def lines_of(axes: "Axes", color: str) -> "list[Line2D]":
    """The lines of a color that have at least one point."""
    from matplotlib.colors import to_hex

    return [line for line in axes.lines if to_hex(line.get_color()) == color and len(line.get_xdata())]  # type: ignore[arg-type]


def spans_of(axes: "Axes", color: str) -> list[tuple[float, float]]:
    """Start and end of bars that are drawn as one line with gaps."""
    return [
        (start, end)
        for line in lines_of(axes, color)
        for start, end, _ in np.asarray(line.get_xdata(), dtype=float).reshape(-1, 3).tolist()
    ]


def svg_texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def assert_alike(kept: str, drawn: str) -> None:
    """Assert that two SVGs have the same texts, and the same paths up to a point: versions of matplotlib
    differ by less."""
    assert svg_texts(kept) == svg_texts(drawn)
    for kept_path, drawn_path in zip(_paths(kept), _paths(drawn), strict=True):
        assert kept_path == pytest.approx(drawn_path, abs=1)


def _paths(svg: str) -> list[list[float]]:
    paths = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")
    return [[float(number) for number in re.findall(r"-?\d+\.?\d*", path.get("d", ""))] for path in paths]
