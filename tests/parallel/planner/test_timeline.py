"""The step as a Chrome trace and as a picture, by structure."""

import io
import json
import struct
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from PIL import Image

from meshwright.parallel.planner.fsdp_schedule import simulate_step
from meshwright.parallel.planner.plot.shapes import SCALE, Picture, Polygon, Text, rectangle, to_png, to_svg
from meshwright.parallel.planner.plot.timeline import (
    COLORS,
    draw_timeline,
    facts,
    in_ms,
    nice_step,
    timeline_svg,
    zoom_window,
)
from meshwright.parallel.planner.timeline import Timeline, chrome_trace
from tests.support.plans import make_model, plan_of
from tests.support.streams import times_of

SVG = "{http://www.w3.org/2000/svg}"


def step_of(n_layers: int = 4, micro_batches: int = 1, **keys: Any) -> Timeline:
    plan = plan_of(
        8, 1, 4 * micro_batches, model=make_model(n_layers), dp_replicate=2, tp=2, backward_prefetch=0
    )
    unit = {
        "gather_s": 0.004,
        "scatter_s": 0.005,
        "copy_in_s": 0.0002,
        "copy_out_s": 0.0002,
        "all_reduce_s": 0.003,
    }
    return simulate_step(
        plan, times_of(plan, forward=0.006, backward=0.013, tp=(0.001, 0.002), optimizer=0.01, **unit, **keys)
    )


def threads(trace: dict[str, Any]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def painted(picture: Picture, kind: str) -> list[Polygon]:
    """What is painted in a colour above the panel below, whose bars say what they are."""
    return [
        shape
        for shape in picture.shapes
        if isinstance(shape, Polygon) and shape.color == COLORS[kind] and not shape.about
    ]


# Chrome trace


def test_a_trace_has_a_named_thread_for_every_lane_in_order():
    trace = chrome_trace(step_of(), "a title")
    assert list(threads(trace).values()) == [
        "compute",
        "exposed: compute waits",
        "tensor parallel",
        "all-gather",
        "reduce-scatter",
        "all-reduce",
    ]
    order = {
        e["tid"]: e["args"]["sort_index"] for e in trace["traceEvents"] if e["name"] == "thread_sort_index"
    }
    assert order == {tid: tid for tid in threads(trace)}
    assert [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"] == ["a title"]
    few = chrome_trace(simulate_step(plan := plan_of(), times_of(plan, forward=1, backward=1)), "")
    assert list(threads(few).values()) == ["compute"], "no empty lanes"


def test_bars_of_a_thread_follow_each_other_and_add_up():
    step = step_of(micro_batches=2)
    trace = chrome_trace(step, "")
    names = threads(trace)
    total: dict[str, float] = {}
    ends: dict[str, float] = {}
    for bar in sorted(complete(trace), key=lambda event: event["ts"]):
        lane = names[bar["tid"]]
        assert bar["dur"] > 0
        assert bar["ts"] >= ends.get(lane, 0.0) - 1e-6
        ends[lane] = bar["ts"] + bar["dur"]
        total[lane] = total.get(lane, 0.0) + bar["dur"] / 1e6
    assert total["compute"] == pytest.approx(step.compute_s)
    assert total["exposed: compute waits"] + total["tensor parallel"] == pytest.approx(step.exposed_s)
    assert max(ends.values()) == pytest.approx(step.step_s * 1e6)
    assert trace["otherData"]["step_s"] == step.step_s


def test_bars_say_what_they_are():
    bars = complete(chrome_trace(step_of(micro_batches=2), ""))
    assert {bar["args"]["micro_batch"] for bar in bars if bar["args"]["phase"] != "optimizer"} == {0, 1}
    waits = [bar for bar in bars if bar["cat"] == "exposed"]
    assert {bar["cname"] for bar in waits} == {"terrible"}
    assert "wait: all gather embed" in {bar["name"] for bar in waits}
    assert {"forward layers.0", "copy in layers.0", "all gather layers.0", "optimizer"} <= {
        bar["name"] for bar in bars
    }


def test_the_same_step_gives_the_same_bytes():
    one, two = (step_of() for _ in range(2))
    assert json.dumps(chrome_trace(one, "t")) == json.dumps(chrome_trace(two, "t"))
    assert timeline_svg(one, "t") == timeline_svg(two, "t")
    assert to_png(draw_timeline(one, "t")) == to_png(draw_timeline(two, "t"))


# Picture


@pytest.mark.parametrize(("n_layers", "micro_batches"), [(1, 1), (8, 1), (80, 1), (126, 4)])
def test_a_picture_has_lanes_legend_and_axes_and_stays_inside(n_layers, micro_batches):
    step = step_of(n_layers, micro_batches)
    root = ElementTree.fromstring(timeline_svg(step, "70B <on> 8 & more"))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    words = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert words[0] == "70B <on> 8 & more"
    assert words[1] == facts(step)
    for lane in ("compute", "tensor parallel", "all-gather", "reduce-scatter", "all-reduce"):
        assert words.count(lane) >= 2, "in both panels"
    assert {"exposed: computing waits", "ms", "0"} <= set(words)
    for rect in root.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert x >= 0
        assert y >= 0
        assert x + float(rect.attrib["width"]) <= width + 0.01
        assert y + float(rect.attrib["height"]) <= height + 0.01
    assert len(timeline_svg(step, "")) < 300_000


def test_the_strip_shows_a_bar_for_every_unit_of_80_layers():
    picture = draw_timeline(step_of(80), "")
    for lane in ("backward", "reduce_scatter", "all_reduce"):
        assert len(painted(picture, lane)) == 82 + 1, "and the legend's"


def test_exposed_time_is_as_wide_as_it_is_long():
    step = step_of(8)
    # less the legend's
    wide = sum(s.corners[1][0] - s.corners[0][0] for s in painted(draw_timeline(step, ""), "exposed")[1:])
    waits_s = step.exposed_s - step.exposed_by_lane["tp"]
    # less a white edge each
    assert wide / (1240 - 118 - 24) == pytest.approx(waits_s / step.step_s, rel=0.15)


def test_the_window_below_is_in_the_middle_of_the_last_backward():
    step = step_of(80, 2)
    start_s, end_s, names = zoom_window(step)
    assert names == "layers.41 to layers.38"
    assert step.rounds[1].start_s < start_s < end_s < step.step_s
    named = {s.words for s in draw_timeline(step, "").shapes if isinstance(s, Text)}
    assert {"backward layers.41", "backward layers.38"} <= named
    assert not any(words.endswith("layers.70") for words in named)


def test_a_model_of_one_block_is_shown_whole():
    assert zoom_window(step_of(1))[2] == "head to embed"


@pytest.mark.parametrize(
    ("seconds", "words"), [(2.5, "2,500 ms"), (0.0203, "20.3 ms"), (0.00126, "1.26 ms"), (0, "0.00 ms")]
)
def test_times_have_three_digits_or_more(seconds, words):
    assert in_ms(seconds) == words


@pytest.mark.parametrize("length_s", [0.0007, 0.004, 0.0123, 0.1, 0.99, 1.0, 7.3, 120.0])
def test_an_axis_has_four_to_twelve_ticks(length_s):
    assert 4 <= length_s / nice_step(length_s) <= 12


def test_a_png_has_the_pictures_size_and_colours():
    picture = Picture(
        40, 30, (rectangle(10, 5, 20, 10, "#d55e00"), Text(2, 28, "Words", 9, "#1a1a1a", bold=True))
    )
    data = to_png(picture)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (40 * SCALE, 30 * SCALE)
    assert 'fill="#d55e00"' in to_svg(picture)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    inside = [(x, y) for x in range(80) for y in range(60) if image.getpixel((x, y)) == (0xD5, 0x5E, 0)]
    assert (min(inside), max(inside)) == ((20, 10), (59, 29))
    assert any(sum(image.getpixel((x, y))) < 200 for x in range(80) for y in range(36, 60)), "words"
