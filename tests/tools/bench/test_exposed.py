"""tools.bench exposed: what it makes of its profiles. The profiles themselves are a benchmark, with a
record."""

from pathlib import Path

import pytest

from meshwright.tools.bench.planner.exposed import ProfileMedians, exposed_text, launches_ns, summarise
from meshwright.tools.trace.analysis import find_steps
from meshwright.tools.trace.events import load_store
from tests.tools.trace.test_profiled_steps import CPU_EVENTS, write_trace


def test_exposed_time_is_held_against_what_a_round_differs_by() -> None:
    gloo = [
        ProfileMedians(1.0, 0.46, 0.01, 0.02),
        ProfileMedians(1.3, 0.5, 0.01, 0.02),
        ProfileMedians(1.1, 0.48, 0.01, 0.02),
    ]
    figures = summarise(gloo, [ProfileMedians(0.5, 0.0, 0.0, 0.1)] * 3)
    assert (figures["exposed_s"], figures["difference_s"]) == pytest.approx((0.48, 0.6))
    assert figures["error"] == pytest.approx(-0.2)
    assert not figures["within"]
    assert summarise(gloo, [ProfileMedians(0.6, 0.0, 0.0, 0.1)] * 3)["within"]
    assert "exposed 480.0 ms against 600.0 ms longer: -20.0%, NOT within 10%" in exposed_text(
        figures | {"load_average": 0.0}
    )


def test_launches_of_a_step_are_added_up(tmp_path: Path) -> None:
    store = load_store(write_trace(tmp_path / "cpu.json", CPU_EVENTS))
    (step,) = find_steps(store)
    assert launches_ns(store, step) == (30 + 30 + 10 + 50 + 20) * 1000
