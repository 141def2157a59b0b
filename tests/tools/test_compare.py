"""tools.compare: whether two runs are the same training, on synthetic and on real runs."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.tools.charts import style_of
from meshwright.tools.cli import to_json
from meshwright.tools.compare.__main__ import as_json, as_text, main
from meshwright.tools.compare.comparison import (
    BFLOAT16,
    BITWISE,
    FLOAT32,
    RunComparison,
    compare_runs,
    custom_band,
)
from meshwright.tools.compare.plot import draw_comparisons
from meshwright.tools.run_reader import read_run
from meshwright.train.errors import ConfigError
from tests.support.launch import EAGER, TINY, run, write_text
from tests.support.plans import check_facts
from tests.support.sweeps import row, write_run
from tests.support.tables import try_each

MIXED = {"parallel": {"param_dtype": "bfloat16"}}


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return write_run(tmp_path / "a", [row(step) for step in range(1, 11)], config={"optim": {"lr": 0.1}})


def compare_with(
    first: Path,
    rows: Sequence[dict[str, Any]],
    config: dict[str, Any] | None = None,
    state: str = "finished",
    **status: Any,
) -> RunComparison:
    other = write_run(first.with_name("b"), rows, state, config, **status)
    return compare_runs(read_run(first), read_run(other))


def moved(step: int, loss: float = 0.0, norm: float = 0.0, **more: Any) -> list[dict[str, Any]]:
    """Return the first run's rows, with loss and gradient norm changed from a step on."""
    rows = [row(n) for n in range(1, 11)]
    return [
        one | {"loss": one["loss"] + loss, "grad_norm": one["grad_norm"] * (1 + norm), **more}
        if one["step"] >= step
        else one
        for one in rows
    ]


def without(key: str) -> list[dict[str, Any]]:
    """Return the first run's rows without one of their keys."""
    return [{name: value for name, value in one.items() if name != key} for one in moved(11)]


def test_equal_runs_are_the_same_bit_for_bit(first: Path) -> None:
    comparison = compare_with(first, moved(11))
    assert (comparison.same, comparison.band, comparison.steps) == (True, BITWISE, tuple(range(1, 11)))
    assert comparison.verdict == "the same training bit for bit, at 10 steps"
    assert [curve.first for curve in comparison.curves] == [None, None]
    assert re.search(r"same sequences at all 10 .*data_hash", comparison.data)


def test_the_narrowest_band_that_explains_the_difference(first: Path) -> None:
    def check(loss: float, norm: float, config: Any, band: Any) -> None:
        comparison = compare_with(first, moved(4, loss, norm), config)
        assert (comparison.band, comparison.same) == (band, band is not None)
        changed = next(curve for curve in comparison.curves if curve.first)
        assert changed.first is not None
        assert (changed.key, changed.first[0]) == ("loss" if loss else "grad_norm", 4)
        assert changed.beyond == (None if band else 4)

    rows = [
        (1e-15, 0, None, FLOAT32),
        (4.9e-5, 0, None, FLOAT32),
        (0, 0.9e-5, None, FLOAT32),
        (5.1e-5, 0, None, None),
        (0, 1.1e-5, None, None),
        (5.1e-5, 0, MIXED, BFLOAT16),
        (0, 0.04, MIXED, BFLOAT16),
        (0.021, 0, MIXED, None),
        (0, 0.043, MIXED, None),
    ]
    try_each(rows, check)


def test_the_largest_difference_and_the_step_from_which_the_band_is_left_are_exact(first: Path) -> None:
    rows = moved(11)
    rows[2]["loss"] += 2**-20
    rows[6]["loss"] -= 0.25
    comparison = compare_with(first, rows)
    (loss, norm) = comparison.curves
    assert loss.first == (3, rows[2]["loss"] - 2**-20, rows[2]["loss"])
    assert loss.largest == (7, pytest.approx(0.25, abs=1e-15))
    assert (loss.beyond, norm.beyond, norm.first) == (7, None, None)
    check_facts(comparison.verdict, "different: at step 7 loss ... float32 ... 5e-05 ... 0.25")
    check_facts(" ".join(comparison.notes), "6 steps, up to step 6 ... Rounding ... float32")


def test_other_data_is_another_training_however_alike_the_curves_are(first: Path) -> None:
    comparison = compare_with(first, moved(5, data_hash="ff"))
    assert (comparison.same, comparison.band, comparison.other_data) == (False, None, 5)
    check_facts(comparison.verdict, "different: ... data at step 5")
    assert "sequences at step 5" in comparison.data
    assert compare_with(first, without("data_hash")).same


def test_a_loss_that_is_not_finite_is_alike_only_where_both_are(first: Path) -> None:
    rows = [one | ({"loss": None} if one["step"] > 7 else {}) for one in moved(11)]
    comparison = compare_with(first, rows)
    assert not comparison.same
    assert comparison.curves[0].largest == (8, math.inf)
    text = as_text(comparison)
    check_facts(text, "not finite at 3 steps ... step 8")
    assert not re.search(r"\binf\b|Rounding", text), "a NaN in one run only is not rounding"
    assert json.loads(to_json(as_json(comparison)))["curves"][0]["largest"] == [8, None]
    check_facts(comparison.verdict, "at step 8 only one ... finite")
    again = write_run(first.with_name("c"), rows)
    assert compare_runs(read_run(again), read_run(first.with_name("b"))).same


def test_a_curve_that_only_one_run_has_is_named_and_nothing_is_said_of_it(first: Path) -> None:
    comparison = compare_with(first, without("grad_norm"))
    check_facts(comparison.verdict, "the same training bit for bit in loss, at 10 steps ... grad_norm")
    check_facts(as_text(comparison), f"grad_norm is not compared ... {first}")
    assert list(as_json(comparison)["missing"]) == ["grad_norm"]


def test_only_steps_in_both_are_compared_and_the_last_row_of_a_step_counts(first: Path) -> None:
    rows = [row(2), row(4), row(6, 99.0), row(6), row(8), row(12)]
    comparison = compare_with(first, rows, state="running", resumed_from=4)
    assert (comparison.same, comparison.steps) == (True, (2, 4, 6, 8))
    text = as_text(comparison)
    assert "b is running at step 12" in text
    assert re.search("b .*checkpoint of step 4", text)
    assert "a has 6 reported steps that are not compared" in text


def test_runs_without_a_common_step_are_a_mistake(first: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no common step: .*10 steps, 1 to 10, .*no step.*metrics\.every"):
        compare_runs(read_run(first), read_run(write_run(tmp_path / "b", [])))
    with pytest.raises(ConfigError, match=r"nowhere: no such folder.*runs/"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is a file: .*run's folder, such as .*a$"):
        read_run(first / "metrics.jsonl")


def test_a_band_of_ones_own_and_a_last_step_to_look_at(
    first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = moved(6, loss=0.01)
    write_run(first.with_name("b"), rows)
    a, b = str(first), str(first.with_name("b"))
    assert custom_band(0.01, 0).tolerances["loss"].width(-3.0) == pytest.approx(0.03)
    main([a, b, "--atol=0.011"])
    assert capsys.readouterr().out.startswith("the same training within rtol 0, atol 0.011, at 10 steps")
    main([a, b, "--until=5"])
    assert capsys.readouterr().out.startswith("the same training bit for bit, at 5 steps")
    with pytest.raises(SystemExit) as ended:
        main([a, b, "--rtol=1e-3"])
    assert ended.value.code == 1


def test_each_of_several_runs_is_compared_with_the_first(
    first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same, other = (
        write_run(first.with_name("same"), moved(11)),
        write_run(first.with_name("other"), moved(3, loss=1.0)),
    )
    with pytest.raises(SystemExit) as ended:
        main([str(first), str(same), str(other), "--json"])
    assert ended.value.code == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["same"], [each["same"] for each in document["comparisons"]]) == (False, [True, False])
    other_loss = document["comparisons"][1]["curves"][0]
    assert (other_loss["key"], other_loss["first"][0]) == ("loss", 3)
    assert [each["figures"][1]["step"] for each in document["comparisons"]] == [10, 10]
    with pytest.raises(ConfigError, match="at least two"):
        main([str(first)])


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_the_picture_has_the_curves_the_band_and_the_differences(first: Path, tmp_path: Path) -> None:
    from tests.support.pictures import assert_readable, figure_texts, lines_of

    comparison = compare_with(first, moved(4, loss=0.5, norm=1e-6))
    figure = draw_comparisons([comparison])
    texts = figure_texts(figure)
    assert any(text.startswith(comparison.verdict[:40]) for text in texts)
    assert {"loss: difference from the first", "grad_norm: difference from the first"} <= {*texts}
    assert_readable(figure)
    loss, _, loss_apart, _ = figure.axes[2:]
    (line,) = lines_of(loss, style_of(0).color)
    assert list(line.get_ydata()) == [row(step)["loss"] for step in range(1, 11)], "the first run's curve"
    (line,) = lines_of(loss_apart, style_of(1).color)
    assert list(line.get_ydata()) == pytest.approx([0, 0, 0, *[0.5] * 7])
    main([str(first), str(first), "--picture", str(tmp_path / "same.svg")])
    assert "no difference" in (tmp_path / "same.svg").read_text()
    main([str(first), str(first), "--picture", str(tmp_path / "same.png")])
    assert (tmp_path / "same.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_real_runs_on_two_meshes_are_the_same_training_and_another_seed_is_not(tmp_path: Path) -> None:
    arguments = [*TINY, *EAGER, *write_text(tmp_path), "--train.steps=3", "--train.eval_every=0"]
    arguments += ["--checkpoint.every=0", "--parallel.param_dtype=float32", "--metrics.tensorboard=false"]
    for name, more in (("one", []), ("two", ["--parallel.tp=2"]), ("seed", ["--run.seed=1"])):
        done = run(
            2 if name == "two" else 1,
            "--config=llama_debug.yaml",
            *arguments,
            *more,
            f"--run.dir={tmp_path / name}",
        )
        assert done.returncode == 0, done.stdout + done.stderr
    one, two, seed = (read_run(tmp_path / name) for name in ("one", "two", "seed"))
    comparison = compare_runs(one, two)
    assert (comparison.same, comparison.band) == (True, FLOAT32), comparison.verdict
    assert "mesh.tp: 1 -> 2" in comparison.plan
    assert "parallel.tp: auto -> 2" in comparison.config
    assert compare_runs(one, one).band == BITWISE
    check_facts(compare_runs(one, seed).verdict, "different ... data at step 1")
    assert re.search(r"tokens/s +[\d,]+ +[\d,]+ +\d", as_text(comparison))
