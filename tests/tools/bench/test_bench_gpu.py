"""tools.bench gpu on a CPU with --tiny: a call continues the record of the last one, a failure costs one
case, and the planner can plan every case."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.tools.bench import harness
from meshwright.tools.bench.__main__ import main
from meshwright.tools.bench.gpu import CASES, gpu_text, make_setup
from meshwright.tools.processes import BenchError
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run
from tests.support.launch import EAGER, write_text

Output = pytest.CaptureFixture[str]
SUITE = ["gpu", "--tiny", "--record=x", "--run.device=cpu"]
BLOCKS = "--parallel.activation_checkpoint_blocks=1"
LINES = "echo BENCH startup_to_first_step_s=5; echo BENCH tok/s/rank median=500 peak_rss_GiB=1"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(harness, "RECORDS", tmp_path / "records")
    return tmp_path / "records"


def run_of(rate: float, step_s: float) -> dict[str, Any]:
    return {
        "tokens_per_s_per_rank": rate,
        "spread": 0.5,
        "peak_memory_gib": 1.0,
        "mfu": None,
        "mfu_causal": None,
        "step_times_s": [9.0, step_s],
    }


def in_record(records: Path) -> dict[str, Any]:
    (path,) = records.iterdir()
    cases: dict[str, Any] = json.loads(path.read_text())["figures"]["cases"]
    return cases


@pytest.mark.usefixtures("forked_commands")
def test_the_suite_goes_on_where_it_was(tmp_path: Path, records: Path, capsys: Output) -> None:
    """A run on one rank and on two, one without a valid plan, and a peer that receives the shape; then the
    same again, and with a key that fixes the failed case."""
    only = ["--only", "8 layers", "tp", "half recomputed"]
    keys = [*EAGER, *write_text(tmp_path), "--model.n_layers=2"]
    peer = f"--peer=titan=echo $BENCH_DIM $BENCH_LAYERS > {tmp_path / 'received'}; {LINES}"
    main([*SUITE, *only, peer, *keys, "--json"])
    output = capsys.readouterr()
    cases = json.loads(output.out)["figures"]["cases"]
    assert in_record(records) == cases
    assert list(cases) == ["8 layers", "half recomputed", "tp", "peer titan"]
    assert (tmp_path / "received").read_text() == "32 2\n"
    for name in ("8 layers", "tp"):
        run = cases[name]["run"]
        assert run["tokens_per_s_per_rank"] > 0
        assert len(run["step_times_s"]) == 5
        assert cases[name]["predicted"]["step_s"] > 0
        assert cases[name]["config"]["optim"]["state_dtype"] == "bfloat16"
    assert cases["tp"]["config"]["parallel"]["tp"] == 2
    assert "activation_checkpoint_blocks" in cases["half recomputed"]["reason"]
    assert output.err.count("done, ") == 3

    main([*SUITE, *only, *keys])
    output = capsys.readouterr()
    started = [line for line in output.err.splitlines() if line.endswith(" ...")]
    assert started == ["half recomputed ..."]
    assert "predicted step time: mean error" in output.out
    main([*SUITE, *only[:1], only[-1], *keys, "--parallel.activation_checkpoint=full", BLOCKS])
    now = in_record(records)
    assert "reason" not in now["half recomputed"]
    assert all("run" in case for case in now.values())
    assert now["8 layers"] == cases["8 layers"]


def test_a_record_of_another_shape_is_not_gone_on_with(records: Path) -> None:
    records.mkdir()
    (records / "2026-01-01-x.json").write_text(
        json.dumps(harness.make_document("gpu", [], None, {"shape": "8b", "cases": {}}))
    )
    with pytest.raises(BenchError, match=r"--record x: 2026-01-01-x\.json has shape 8b.*tiny: use another"):
        main([*SUITE, "--only", "8 layers"])


def test_when_time_is_over_nothing_is_begun(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    moments = iter([0.0])
    monkeypatch.setattr("meshwright.tools.bench.gpu.time.monotonic", lambda: next(moments, 61.0))
    main(["gpu", "--tiny", "--minutes=1", "--only", "8 layers", "--json"])
    output = capsys.readouterr()
    assert "--minutes" in output.err
    assert "same command again" in output.err
    assert json.loads(output.out)["figures"]["cases"] == {}


def test_mistakes_end_before_anything_runs(capsys: Output) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["gpu", "--tiny", "--only", "nothing like it"])
    assert "invalid choice: 'nothing like it' (choose from '8 layers', " in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"model\.dmi"):
        main(["gpu", "--tiny", "--model.dmi=3"])
    with pytest.raises(BenchError, match=r"needs a GPU.*--tiny"):
        main(["gpu", "--model.dmi=3"])  # raised before the error of the key


def test_the_help_names_every_case(capsys: Output) -> None:
    with pytest.raises(SystemExit):
        main(["gpu", "-h"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in CASES)


def planned(name: str, tiny: bool) -> Sequence[Any]:
    setup = make_setup(name, tiny, 1, [])
    config = parse_config(setup.command_line(), "test")
    return config.model, config.optim, config.parallel.compile, plan_run(config.job, setup.processes)


@pytest.mark.parametrize("tiny", [False, True])
def test_every_case_has_a_legal_plan_of_its_own(tiny: bool) -> None:
    """Plans do not distinguish all cases of loss chunks and recomputed blocks; they distinguish all
    others."""
    plans = [planned(name, tiny) for name in CASES]
    assert sum(plan in plans[:i] for i, plan in enumerate(plans)) <= 3
    first = parse_config(make_setup("8 layers", tiny, 1, []).command_line(), "test")
    assert (first.model.n_layers, first.model.dim) == (8, 32 if tiny else 4096)


def test_the_table_has_figures_errors_and_reasons() -> None:
    cases = {
        "8 layers": {
            "run": run_of(100.0, 2.0),
            "config": {},
            "predicted": {"step_s": 1.5, "peak_gib": 2.0},
        },
        "eager": {"run": run_of(50.0, 1.0), "config": {}, "predicted": None},
        "peer titan": {"run": {"tokens_per_s_per_rank": 7.0, "peak_memory_gib": 3.0, "startup_s": 1.0}},
        "4 layers": {"reason": "PlanError: first\n  the reason"},
    }
    rows = {
        line.partition("  ")[0]: line.split()
        for line in gpu_text({"shape": "8b", "cases": cases}, [*cases, "tp"]).splitlines()
    }
    assert rows["8 layers"][-8:] == ["100", "50.0%", "-", "-", "2.000", "1.500", "1.0", "2.0"]
    assert rows["eager"][1:] == ["50", "50.0%", "-", "-", "1.000", "-", "1.0", "-"]
    assert rows["peer titan"][-8:] == ["7", "-", "-", "-", "-", "-", "3.0", "-"]
    (summary,) = [row for row in rows if row.startswith("predicted step time")]
    assert re.findall(r"[\d.]+%", summary) == ["25.0%", "5%", "25.0%", "10%"]  # mean, target, worst, target
    assert "failed: 4 layers: the reason" in rows
    assert "not measured: tp (2 GPUs)" in rows
