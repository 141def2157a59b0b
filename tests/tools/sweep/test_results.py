"""tools.sweep's results: the page for every kind of run, which is self-contained, and the winner."""

import json
import math
from pathlib import Path
from typing import Any

from meshwright.parallel.planner.timeline_plot import to_svg
from meshwright.tools.charts import COLORS, Curve, Style, draw_curves
from meshwright.tools.run_reader import figures_of, read_run, training_s
from meshwright.tools.sweep.__main__ import main
from meshwright.tools.sweep.results import read_sweep
from meshwright.tools.sweep.spec import make_runs, read_spec
from tests.support.pictures import assert_readable, lines_of
from tests.support.sweeps import Page, row, write_run, write_spec
from tests.support.tables import try_each

BLUE = Style(COLORS[0], "o")


def test_every_kind_of_run_is_a_row_and_the_best_is_first(tmp_path: Path, capsys: Any) -> None:
    """Rates are medians after the warm-up. The parser fails on scripts, links and unclosed elements."""
    study, names = tmp_path / "study", ["waits", "going", "refused", "rowless", "nan", "slow", "good"]
    rates = [100.0, *([900.0, 1000.0, 1100.0] * 6), 1000.0]
    write_run(study / "good", [row(n, tokens_per_s=rate, eval_loss=2.5) for n, rate in enumerate(rates, 1)])
    write_run(study / "slow", [row(20, tokens_per_s=9.0)])
    bad, markup = (
        [row(n, math.nan if n > 5 else None) for n in range(1, 9)],
        "NonFiniteError: <b>layers.1</b> & $x^2$",
    )
    write_run(study / "nan", bad, "failed", reason=markup)
    write_run(study / "rowless", [], "failed", reason="DataError: no text")
    (study / "rowless" / "output.txt").write_text("device: CPU (no GPU), 2 processes\nDataError: no text\n")
    write_run(study / "refused", [], "failed", reason="PlanError: no")
    write_run(study / "going", [row(n) for n in range(1, 4)], "running")
    path = write_spec(tmp_path, runs={name: {"optim.lr": 0.1 + i} for i, name in enumerate(names)})
    main([str(path), "--report", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((study / "report.json").read_text())
    assert [(run["name"], run["state"], run["step"], run["reason"]) for run in document["runs"]] == [
        ("good", "finished", 20, ""),
        ("slow", "finished", 20, ""),
        ("waits", "waiting", 0, ""),
        ("going", "running", 3, ""),
        ("refused", "refused", 0, "PlanError: no"),
        ("rowless", "failed", 0, "DataError: no text"),
        ("nan", "failed", 8, markup),
    ]
    good = document["runs"][0]
    assert good["tokens_per_s"] == {"median": 1000.0, "low": 900.0, "high": 1100.0, "reports": 16}
    assert (good["loss"], good["eval_loss"], good["peak_memory_gib"]) == (2.0, 2.5, 0.5)
    assert document["runs"][-1]["loss"] is None
    assert document["winner"] is None

    page = Page((study / "report.html").read_text())
    assert page.rows[0][:4] == ["run", "optim.lr", "state", "step"]
    cells = {cells[0]: dict(zip(page.rows[0], cells, strict=True)) for cells in page.rows[1:]}
    shown = {
        ("good", "loss"): "2.0000",
        ("good", "tokens/s"): "1,000 ± 10%",
        ("slow", "tokens/s"): "9",
        ("nan", "optim.lr"): "4.1",
        ("nan", "loss"): "not finite",
        ("nan", "step"): "8/20",
        ("rowless", "loss"): "",
    }
    assert {place: cells[place[0]][place[1]] for place in shown} == shown
    text = "".join(page.words)
    assert "No winner yet: 2 of 7 runs have not finished." in text
    assert "7 runs of llama_debug.yaml, by tokens/s: 2 finished, 1 waiting, 1 running" in text
    assert "Devices: CPU (no GPU)." in text
    assert f"nan failed: {markup}" in text, "the reason is escaped"
    assert "http" not in text
    charts = [attrs for tag, attrs in page.elements if tag == "figure" and attrs.get("role") == "img"]
    assert len(charts) == 4


def test_a_variant_wins_only_if_chance_and_the_spread_do_not_explain_its_lead(tmp_path: Path) -> None:
    """Three runs of two equal variants are in the best order by chance in 2 of 20 orders."""

    def check(best: str, a: list[float], b: list[float], winner: str | None, *parts: str) -> None:
        folder = tmp_path / f"{best}{a}{b}"
        folder.mkdir()
        path = write_spec(folder, runs={"a": {}, "b": {}}, repeat=len(a), best=best)
        for name, figures in (("a", a), ("b", b)):
            for turn, figure in enumerate(figures, 1):
                place = folder / "study" / (name if turn == 1 else f"{name}_turn={turn}")
                write_run(place, [row(20, **{best: figure})])
        spec = read_spec(path, {}, {})
        results = read_sweep("study", spec, make_runs(path, spec))
        assert results.winner == winner, results.verdict
        assert not [part for part in parts if part not in results.verdict], results.verdict

    speed, nan = "tokens_per_s", math.nan
    rows = [
        (
            speed,
            [5.0, 6.0, 7.0],
            [8.0, 9.0, 8.0],
            "b",
            "Winner",
            "b with tokens/s 8 (8 to 9 in 3 runs)",
            "10%",
        ),
        (speed, [5.0, 6.0, 7.0], [7.0, 9.0, 8.0], None, "No winner: ", "b with tokens/s 8", "overlap"),
        (speed, [5.0, 6.0], [8.0, 9.0], None, "No winner yet", "33%", "--repeat"),
        (speed, [5.0], [8.0], None, "No winner yet", "8 (one run), ahead of a", "100%"),
        ("loss", [1.0, 1.1, 1.2], [2.0, 2.1, 2.2], "a", "1.1000 (1.0000 to 1.2000"),
        ("loss", [1.0, nan, 1.2], [2.0, 2.1, 2.2], None, "fewer than two"),
    ]
    try_each(rows, check)


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
