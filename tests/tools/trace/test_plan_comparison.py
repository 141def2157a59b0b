"""The planned step against the measured one: the picture, the figures, and steps that cannot be predicted."""

import re
import shutil
from collections.abc import Iterable
from dataclasses import replace

import pytest

from meshwright.parallel.planner.timeline import MicroBatchTimeline, Timeline, TimelineEvent
from meshwright.parallel.planner.timeline_plot import COLORS
from meshwright.tools.trace.plan_comparison import compare_lanes, draw_against, predict_run
from meshwright.train.errors import DataError
from tests.support.pictures import assert_readable, figure_texts, spans_of, texts_of

UNITS = [f"layers.{i}" for i in range(8)]


def bar(
    lane: str, work: str, unit: str, start_ms: float, end_ms: float, phase: str = "backward"
) -> TimelineEvent:
    return TimelineEvent(lane, work, unit, "", phase, 0, start_ms / 1e3, end_ms / 1e3)


def timeline(events: Iterable[TimelineEvent], step_ms: float) -> Timeline:
    bars = tuple(sorted(events, key=lambda event: event.start_s))
    compute_s, exposed_s = (
        sum(b.seconds for b in bars if b.lane in lanes) for lanes in (("compute",), ("exposed", "tp"))
    )
    step = MicroBatchTimeline(0.0, step_ms / 1e3, bars)
    return Timeline((step,), step_ms / 1e3, compute_s, exposed_s, {"all_gather": exposed_s})


def step(slower: float = 1.0) -> Timeline:
    """8 units of 10 ms forward and 20 ms backward; each backward waits 2 ms for its all-gather; 10 ms for
    the optimizer."""
    events = [
        bar("compute", "forward", unit, 10 * i, 10 * (i + 1), "forward") for i, unit in enumerate(UNITS)
    ]
    for i, unit in enumerate(reversed(UNITS)):
        start = 80 + 22 * i
        events.append(bar("all_gather", "all_gather", unit, start - 3, start + 2))
        events.append(bar("exposed", "all_gather", unit, start, start + 2))
        events.append(bar("compute", "backward", unit, start + 2, start + 22))
    events.append(bar("compute", "optimizer", "", 256, 266, "optimizer"))
    moved = [
        TimelineEvent(e.lane, e.work, e.unit, "", e.phase, 0, slower * e.start_s, slower * e.end_s)
        for e in events
    ]
    return timeline(moved, 266 * slower)


def crowded(count: int) -> Timeline:
    """`count` operators, busy half of the time, and a tenth as many all-gathers."""
    units = [f"layers.{i * 32 // count}" for i in range(count)]
    works = [bar("compute", "backward", units[i], i * 0.01, i * 0.01 + 0.005) for i in range(count)]
    gathers = [
        bar("all_gather", "all_gather", units[i], i * 0.01, i * 0.01 + 0.09) for i in range(0, count, 10)
    ]
    return timeline([*works, *gathers], count * 0.01)


def everything() -> Timeline:
    """All lanes and kinds of work."""
    lanes = ["tp", "all_gather", "reduce_scatter", "all_reduce", "offload", "exposed"]
    works = ["forward", "backward", "copy_in", "sum", "optimizer"]
    return timeline(
        [
            *(bar(lane, lane, "head", 50 + i, 51 + i) for i, lane in enumerate(lanes)),
            *(bar("compute", work, "head", 10 * i, 10 * i + 9) for i, work in enumerate(works)),
        ],
        57,
    )


def tiny() -> Timeline:
    """One event of a microsecond."""
    return timeline([bar("compute", "forward", "layers.0", 0, 0.001, "forward")], 0.001)


def test_both_steps_begin_at_0_and_have_one_scale() -> None:
    figure = draw_against(step(), step(slower=1.5), "a title")
    predicted, measured = figure.axes[:2]
    assert predicted.get_xlim() == measured.get_xlim() == pytest.approx((0, 399))
    for axes, scale in ((predicted, 1.0), (measured, 1.5)):
        assert [start for start, _ in spans_of(axes, COLORS["forward"])] == pytest.approx(
            [10 * scale * unit for unit in range(8)]
        )
    ((_, last),) = spans_of(predicted, COLORS["optimizer"])
    assert last == pytest.approx(266, abs=1), "the shorter step ends where it ends"
    (end,) = [text for text in texts_of(figure) if text.get_text() == "step ends"]
    assert predicted.transData.inverted().transform(end.get_window_extent().p0)[0] == pytest.approx(
        268, abs=2
    )


def test_the_figures_say_the_difference() -> None:
    texts = figure_texts(draw_against(step(), step(slower=1.5), "a title"))
    assert "a title" in texts
    assert "Predicted: step 266 ms; computing 250 ms; exposed 16.0 ms, 6.0% of the step" in texts
    assert (
        "Measured: step 399 ms (+50%); computing 375 ms (+50%); exposed 24.0 ms (+50%), 6.0% of the step"
        in texts
    )
    idle = timeline([bar("compute", "forward", "head", 0, 100, "forward")], 200)
    texts = figure_texts(draw_against(step(), idle, ""))
    assert (
        "Measured: step 200 ms (-25%); computing 100 ms (-60%); exposed 0.00 ms (-100%), 0.0% of the step; "
        "idle 100 ms"
    ) in texts
    assert not any("ackward of" in line for line in texts), "it has no backward"


@pytest.mark.parametrize(
    ("predicted", "measured", "title"),
    [
        (step, lambda: step(1.5), "a title"),
        (everything, lambda: step(20.0), "much slower than it should be"),
        (
            tiny,
            lambda: timeline([bar("compute", "backward", "layers.3", 0, 9e6)], 9e6),
            "two hours and a half",
        ),
        (tiny, lambda: crowded(10_000), "A very long title that has to be shortened. " * 40),
    ],
)
def test_nothing_overlaps_or_is_cut_off(predicted, measured, title) -> None:
    assert_readable(draw_against(predicted(), measured(), title))


def test_lanes_are_compared():
    lanes_ms = {"step": 266, "compute": 250, "forward": 80, "backward": 160, "optimizer": 10, "exposed": 16}
    assert [[*row.values()] for row in compare_lanes(step(), step(slower=1.5))] == [
        [lane, *(pytest.approx(figure) for figure in (ms / 1e3, 1.5 * ms / 1e3, 1.5))]
        for lane, ms in (lanes_ms | {"all_gather": 40}).items()
    ]
    two_at_once = timeline(
        [bar("all_reduce", "all_reduce", "head", 0, 8), bar("all_reduce", "all_reduce", "head", 4, 12)], 20
    )
    rows = {row["lane"]: row for row in compare_lanes(step(), two_at_once)}
    assert rows["all_reduce"]["measured_s"] == pytest.approx(0.012)
    assert (rows["all_reduce"]["ratio"], rows["all_gather"]["ratio"]) == (None, 0)


# Prediction of a run


def test_a_finished_run_is_predicted(sharded_run):
    predicted = predict_run(sharded_run, "CPU (no GPU)", 2).timeline
    assert predicted.step_s == pytest.approx(predicted.compute_s + predicted.exposed_s + predicted.host_s)
    assert {event.unit for event in predicted.events if event.lane == "all_gather"} >= {
        "layers.0",
        "layers.1",
    }
    on_gpus = predict_run(sharded_run, "NVIDIA H200", 8)
    assert on_gpus.timeline.step_s < predicted.step_s / 2
    title = replace(on_gpus, mfu=0.5).title("A run", "H200", 2 * on_gpus.timeline.step_s)
    assert re.fullmatch("A run on 2 H200: .*; predicted MFU 50.0%, measured MFU 25.0%", title)


def test_a_run_with_fewer_threads_is_predicted_slower(tied_run, tmp_path):
    fewer = shutil.copytree(tied_run, tmp_path / "fewer", ignore=shutil.ignore_patterns("checkpoints", "tb"))
    config = (fewer / "config.yaml").read_text()
    (fewer / "config.yaml").write_text(config.replace("threads: 0", "threads: 1"))
    assert "threads: 0" in config
    slower, faster = (predict_run(run, "CPU", 1).timeline.compute_s for run in (fewer, tied_run))
    assert slower > 1.2 * faster


def test_what_cannot_be_predicted_says_why(sharded_run, tmp_path):
    with pytest.raises(
        DataError, match=r"no file in configs/hardware describes 'Grapefruit 9'.*tools.calibrate"
    ):
        predict_run(sharded_run, "Grapefruit 9", 8)
    with pytest.raises(DataError, match=r"has no config\.yaml.*folder of a run"):
        predict_run(tmp_path, "CPU", 1)
    for name in ("config.yaml", "plan.yaml"):
        shutil.copy(sharded_run / name, tmp_path)
    (tmp_path / "plan.yaml").write_text("mesh: 3")
    with pytest.raises(DataError, match=r"cannot be predicted: .*plan\.yaml"):
        predict_run(tmp_path, "CPU", 1)
