"""The structure of a step's Chrome trace and picture."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.parallel.planner.fsdp_schedule import simulate_step
from meshwright.parallel.planner.timeline import Timeline, chrome_trace
from meshwright.parallel.planner.timeline_plot import (
    COLORS,
    MARK,
    PNG_SCALE,
    color_key,
    draw_timeline,
    facts,
    in_ms,
    to_png,
    to_svg,
    zoom_window,
)
from meshwright.tools.charts import Curve, draw_curves, style_of
from tests.support.forks import ROOT
from tests.support.pictures import assert_readable, figure_texts, spans_of, svg_texts
from tests.support.plans import make_model, plan_of
from tests.support.streams import times_of


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
    compute_only = chrome_trace(simulate_step(plan := plan_of(), times_of(plan, forward=1, backward=1)), "")
    assert list(threads(compute_only).values()) == ["compute"], "no empty lanes"


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
    first, second = (step_of() for _ in range(2))
    assert json.dumps(chrome_trace(first, "t")) == json.dumps(chrome_trace(second, "t"))
    assert to_svg(draw_timeline(first, "t")) == to_svg(draw_timeline(second, "t"))


# Picture


@pytest.mark.parametrize(("n_layers", "micro_batches"), [(1, 1), (8, 1), (126, 2)])
def test_a_picture_has_lanes_legend_and_axes_and_stays_inside(n_layers: int, micro_batches: int) -> None:
    step = step_of(n_layers, micro_batches)
    figure = draw_timeline(step, "70B <on> $8$ & \ud800 \x1b_")
    svg = to_svg(figure)
    texts = svg_texts(svg)
    assert {"70B <on> $8$ & ? ?_", facts(step), "exposed: computing waits", "ms", "0"} <= set(texts)
    for lane in ("compute", "tensor parallel", "all-gather", "reduce-scatter", "all-reduce"):
        assert texts.count(lane) >= 2, "in both panels"
    assert_readable(figure)
    assert len(svg) < 450_000


def test_every_kind_of_work_is_drawn_and_in_the_legend() -> None:
    plan = plan_of(8, 1, 16, dp_replicate=2, tp=2, reduce_gradients="last_micro_batch")
    unit = {"gather_s": 0.004, "sums_copy_in_s": 0.001, "sum_s": 0.002, "first_sum_s": 0.001}
    step = simulate_step(plan, times_of(plan, forward=0.006, backward=0.013, optimizer=0.01, **unit))
    kinds = {color_key(event) for event in step.events}
    assert "sum" in kinds
    assert kinds <= COLORS.keys()
    figure = draw_timeline(step, "")
    assert {"sum", "copy in or out"} <= set(svg_texts(to_svg(figure)))
    assert spans_of(figure.axes[0], COLORS["sum"])


def test_the_window_below_is_in_the_middle_of_the_last_backward() -> None:
    from matplotlib.colors import to_hex

    step = step_of(80, 2)
    start_s, end_s, names = zoom_window(step)
    assert names == "layers.41 to layers.38"
    assert step.rounds[1].start_s < start_s < end_s < step.step_s
    figure = draw_timeline(step, "")
    strip, large = figure.axes
    assert large.get_xlim() == pytest.approx((start_s * 1e3, end_s * 1e3))
    assert strip.get_xlim() == pytest.approx((0, step.step_s * 1e3))
    marked = next(patch for patch in strip.patches if to_hex(patch.get_facecolor()) == MARK)
    assert marked.get_window_extent().x0 == pytest.approx(strip.transData.transform((start_s * 1e3, 0))[0])
    texts = figure_texts(figure)
    assert {"backward layers.41", "backward layers.38"} <= set(texts)
    assert not any(text.endswith("layers.70") for text in texts)


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2,500 ms"), (0.0203, "20.3 ms"), (0.00126, "1.26 ms"), (0, "0.00 ms")]
)
def test_times_have_three_digits_or_more(seconds: float, text: str) -> None:
    assert in_ms(seconds) == text


def test_a_png_has_the_pictures_size_and_colours() -> None:
    from PIL import Image

    figure = draw_timeline(step_of(8), "Words")
    image = Image.open(io.BytesIO(to_png(figure))).convert("RGB")
    assert image.size == tuple(round(72 * PNG_SCALE * inches) for inches in figure.get_size_inches())
    colors = {f"#{red:02x}{green:02x}{blue:02x}" for _, (red, green, blue) in image.getcolors(1 << 24) or ()}
    assert {COLORS["exposed"], COLORS["backward"], "#ffffff"} <= colors


def test_a_users_settings_and_a_picture_do_not_change_each_other(tmp_path: Path) -> None:
    """With an unknown backend, text rendering by a LaTeX that is not installed, and an unwritable home
    folder, where matplotlib uses a temporary font cache."""
    code = (
        "from meshwright.parallel.planner.timeline_plot import to_png, to_svg\n"
        "from meshwright.tools.charts import Curve, draw_curves, style_of\n"
        "figure = draw_curves('a \u8a08', 'x', [Curve([(0, 1), (1, 2)], style_of(0))])\n"
        "open('x.svg', 'w').write(to_svg(figure)), to_png(figure)\n"
        "import sys, logging, matplotlib; kept = matplotlib.rcParams\n"
        "assert (kept['svg.fonttype'], kept['svg.hashsalt']) == ('path', None), kept\n"
        "assert logging.getLogger('matplotlib').level == 0 and 'matplotlib.pyplot' not in sys.modules"
    )
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfont.size: 30\n")
    (tmp_path / "file").touch()
    variables = {"MPLBACKEND": "bogus", "MATPLOTLIBRC": str(tmp_path), "MPLCONFIGDIR": str(tmp_path / "file")}
    environment = os.environ | variables | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    figure = draw_curves("a \u8a08", "x", [Curve([(0, 1), (1, 2)], style_of(0))])
    assert (tmp_path / "x.svg").read_text() == to_svg(figure)
