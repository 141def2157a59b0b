"""tools.sweep's report: its contents for every kind of run; the page is self-contained."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from meshwright.parallel.planner.timeline_plot import to_svg
from meshwright.tools.charts import COLORS, Curve, Style, draw_curves
from meshwright.tools.run_reader import Figures, Rate, figures_of, read_run, training_s
from meshwright.tools.sweep.__main__ import main
from meshwright.tools.sweep.html_report import make_page
from meshwright.tools.sweep.results import ReportRow, SweepReport
from tests.support.pictures import assert_readable, lines_of
from tests.support.sweeps import Page, row, write_run, write_spec

BLUE = Style(COLORS[0], "o")


def report_of(folder: Path, capsys: pytest.CaptureFixture[str], **spec: Any) -> tuple[Page, dict[str, Any]]:
    main([str(write_spec(folder, **spec)), "--report"])
    printed = capsys.readouterr().out
    assert printed == f"report: {folder / 'study' / 'report.html'}\n"
    return Page((folder / "study" / "report.html").read_text()), json.loads(
        (folder / "study" / "report.json").read_text()
    )


@pytest.fixture
def five(tmp_path: Path) -> dict[str, Any]:
    """Runs of every kind: finished, diverged to NaN, failed, without any row, and not started."""
    study = tmp_path / "study"
    rates = [100.0, *([900.0, 1000.0, 1100.0] * 6)]
    last = row(
        20, tokens_per_s=1000.0, predicted_step_time_s=0.192, predicted_peak_memory_gib=0.55, eval_loss=2.5
    )
    write_run(study / "good", [*(row(step, tokens_per_s=rates[step - 1]) for step in range(1, 20)), last])
    write_run(
        study / "nan",
        [row(step, math.nan if step > 5 else None) for step in range(1, 9)],
        "failed",
        reason="NonFiniteError: <b>layers.1</b> & more",
    )
    (study / "rowless").mkdir(parents=True)
    (study / "rowless" / "attempt.json").write_text(
        json.dumps({"state": "failed", "reason": "DataError: no text"})
    )
    (study / "rowless" / "output.txt").write_text("device: CPU (no GPU), 2 processes\nDataError: no text\n")
    write_run(study / "going", [row(step) for step in range(1, 4)], "running")
    return {
        "runs": {
            name: {"optim.lr": lr}
            for name, lr in [("good", 0.1), ("nan", 0.2), ("rowless", 0.3), ("going", 0.4), ("waits", 0.5)]
        }
    }


def test_every_kind_of_run_is_a_row_with_its_state_reason_and_figures(
    five: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    """Rates are medians after the warm-up. The parser fails on scripts, links and unclosed elements."""
    page, document = report_of(tmp_path, capsys, **five)
    assert {run["name"]: (run["state"], run["step"], run["reason"]) for run in document["runs"]} == {
        "good": ("finished", 20, ""),
        "nan": ("failed", 8, "NonFiniteError: <b>layers.1</b> & more"),
        "rowless": ("failed", 0, "DataError: no text"),
        "going": ("running", 3, ""),
        "waits": ("waiting", 0, ""),
    }
    good = document["runs"][0]
    assert good["tokens_per_s"] == {"median": 1000.0, "low": 900.0, "high": 1100.0, "reports": 16}
    assert (good["loss"], good["eval_loss"], good["peak_memory_gib"]) == (2.0, 2.5, 0.5)
    assert good["predicted"]["step_time_s"] == {"value": 0.192, "error": pytest.approx(-0.25)}
    assert document["runs"][1]["loss"] is None

    assert page.rows[0][:4] == ["run", "optim.lr", "state", "step"]
    cells = {cells[0]: dict(zip(page.rows[0], cells, strict=True)) for cells in page.rows[1:]}
    shown = {
        ("good", "loss"): "2.0000",
        ("good", "tokens/s"): "1,000 ± 10%",
        ("good", "predicted step time"): "0.192 (-25%)",
        ("good", "predicted memory"): "0.55 (+10%)",
        ("nan", "optim.lr"): "0.2",
        ("nan", "loss"): "not finite",
        ("nan", "step"): "8/20",
        ("rowless", "loss"): "",
        ("going", "state"): "running",
    }
    assert {place: cells[place[0]][place[1]] for place in shown} == shown
    text = "".join(page.words)
    assert "5 runs of llama_debug.yaml: 1 finished, 2 failed, 1 running, 1 waiting" in text
    assert "Devices: CPU (no GPU)." in text
    assert "nan failed: NonFiniteError: <b>layers.1</b> & more" in text, "the reason is escaped"
    assert "http" not in text
    charts = [attrs for tag, attrs in page.elements if tag == "figure" and attrs.get("role") == "img"]
    assert [attrs["aria-label"] for attrs in charts] == [
        "Loss against tokens",
        "Loss against time",
        "Tokens/s, of all processes: median and quartiles",
        "Peak memory per process, GiB",
        "Predicted against measured",
    ]


def test_names_that_are_html_or_mathematics_are_shown_as_they_are() -> None:
    name = "<script>alert('$x^2$')</script> _\"&"
    found = Figures(1, 2.0, None, Rate(9.0, 8.0, 10.0, 3), None, 0.5, None, {"peak_memory_gib": 0.6})
    row = ReportRow(name, {name: name}, "failed", name, 1, None, found, name, 0)
    text = make_page(SweepReport(name, name, "", (name,), (row,)))
    page = Page(text)
    assert page.rows[0][1] == page.rows[1][0] == page.rows[1][1] == name
    assert "".join(page.words).count(name) >= 9, "title, heading, config, key, device, table and charts"
    assert "<script" not in text


def test_the_last_row_of_a_step_counts_and_half_a_line_is_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [row(1, 5.0), row(2, 4.0), row(3, 3.5), row(2, 4.5), row(3, 3.0)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": 4, "lo')
    run = read_run(folder)
    assert {step: one["loss"] for step, one in run.rows.items()} == {1: 5.0, 2: 4.5, 3: 3.0}
    assert run.unreadable == 2
    assert figures_of(run).loss == 3.0


def test_training_time_counts_all_steps_between_reports(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run",
        [{"step": 0, "eval_loss": 6.0}, *(row(step, step_time_s=2.0) for step in (10, 20, 25))],
    )
    assert training_s(read_run(folder).rows) == {10: 20.0, 20: 40.0, 25: 50.0}


def test_a_curve_leaves_gaps_and_spikes_and_says_what_is_not_finite() -> None:
    points = [(float(i), math.nan if i == 50 else 100.0 if i == 777 else 1.0) for i in range(1000)]
    figure = draw_curves("t", "x", [Curve(points, BLUE)])
    (axes,) = figure.axes
    line, crosses = lines_of(axes, BLUE.color)
    assert [x for x, y in zip(*line.get_data(), strict=True) if not math.isfinite(y)] == [50]
    assert (list(crosses.get_xdata()), crosses.get_marker()) == ([50], "x")
    assert axes.get_ylim()[0] < 1 < 100 < axes.get_ylim()[1], "the spike is visible"
    assert axes.get_xlim()[0] == 0
    assert_readable(figure)
    assert len(to_svg(figure)) < 100_000
