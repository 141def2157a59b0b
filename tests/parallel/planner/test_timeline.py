"""The structure of a step's Chrome trace and picture."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_rgb

from meshwright.parallel.planner import timeline_plot as plot
from meshwright.parallel.planner.step_time import simulate_step
from meshwright.parallel.planner.timeline import Timeline, chrome_trace
from meshwright.parallel.planner.timeline_plot import COLORS, color_key, draw_timeline, facts, to_svg
from meshwright.tools.charts import Curve, draw_curves, style_of
from tests.support.forks import ROOT
from tests.support.pictures import assert_readable, spans_of, svg_texts
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
    assert total["exposed: computing waits"] == pytest.approx(step.exposed_s)
    assert max(ends.values()) == pytest.approx(step.step_s * 1e6)


# Picture


@pytest.mark.parametrize(("n_layers", "micro_batches"), [(1, 1), (8, 1), (126, 2)])
def test_a_picture_has_lanes_legend_and_axes_and_stays_inside(n_layers: int, micro_batches: int) -> None:
    step = step_of(n_layers, micro_batches)
    figure = draw_timeline(step, "70B <on> $8$ & \ud800 \x1b_")
    svg = to_svg(figure)
    texts = svg_texts(svg)
    assert {"70B <on> $8$ & ? ?_", facts(step), "exposed: computing waits", "ms", "0"} <= set(texts)
    for lane in ("compute", "tensor parallel", "all-gather", "reduce-scatter", "all-reduce"):
        assert texts.count(lane) == 2, "in both panels"
    assert_readable(figure)
    assert len(svg) < 450_000


@pytest.mark.parametrize(("host_s", "is_drawn"), [(1e-6, False), (0.02, True)])
def test_the_host_has_a_lane_only_where_the_step_waits_for_it(host_s: float, is_drawn: bool) -> None:
    step = step_of(other_forwards={"layers.0": {"host_s": host_s}})
    texts = svg_texts(to_svg(draw_timeline(step, "")))
    assert ("host" in texts, "host-bound: computing waits" in texts) == (is_drawn, is_drawn)


def luminance(color: str) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-relative-luminance"""
    channels = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color))
    return sum(share * channel for share, channel in zip((0.2126, 0.7152, 0.0722), channels, strict=True))


def test_texts_have_contrast_on_bars_and_on_the_pictures_own_background() -> None:
    """On pages of any color: W3C's minimum for text is 4.5."""
    pairs = [("white" if kind in plot.DARK else plot.INK, color) for kind, color in COLORS.items()]
    for text, paper in [*pairs, *product((plot.INK, plot.FAINT), ("white", plot.PAPER, plot.MARK))]:
        low, high = sorted(map(luminance, (text, paper)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, paper)
    svg = ElementTree.fromstring(to_svg(draw_timeline(step_of(), "")))
    background = next(svg.iter("{http://www.w3.org/2000/svg}path"))
    corner = "L {2} {3}".format(*svg.get("viewBox", "").split())
    assert (background.get("style"), corner in background.get("d", "")) == ("fill: #ffffff", True)


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
