"""tools.bench gpu on a CPU with --tiny: a call continues the record of the last one, a failure costs one
case, and the planner can plan every case."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.tools.bench import harness
from meshwright.tools.bench.__main__ import main
from meshwright.tools.bench.gpu import CASES, make_setup
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run
from tests.support.launch import EAGER, write_text

pytestmark = [pytest.mark.slow, pytest.mark.sampled(10, together="bench-gpu")]
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


def in_record(records: Path) -> dict[str, Any]:
    (path,) = records.iterdir()
    cases: dict[str, Any] = json.loads(path.read_text())["figures"]["cases"]
    return cases


@pytest.mark.usefixtures("forked_commands")
def test_the_suite_continues_its_record(tmp_path: Path, records: Path, capsys: Output) -> None:
    """A run on one rank and on two, one without a valid plan, and a peer that receives the shape; then the
    same again, and with a key that fixes the failed case."""
    only = ["--only", "8 layers", "tp", "half recomputed"]
    keys = [*EAGER, *write_text(tmp_path), "--model.n_layers=2"]
    peer = f"--peer=titan=echo $BENCH_DIM $BENCH_LAYERS > {tmp_path / 'received'}; {LINES}"
    main([*SUITE, *only, peer, *keys, "--json"])
    cases = json.loads(capsys.readouterr().out)["figures"]["cases"]
    assert in_record(records) == cases
    assert list(cases) == ["8 layers", "half recomputed", "tp", "peer titan"]
    assert (tmp_path / "received").read_text() == "32 2\n"
    for name in ("8 layers", "tp"):
        assert cases[name]["run"]["tokens_per_s_per_rank"] > 0
        assert cases[name]["predicted"]["step_s"] > 0
    assert cases["tp"]["config"]["parallel"]["tp"] == 2
    assert "activation_checkpoint_blocks" in cases["half recomputed"]["reason"]

    main([*SUITE, *only, *keys])
    output = capsys.readouterr()
    started = [line for line in output.err.splitlines() if line.endswith(" ...")]
    assert started == ["half recomputed ..."]
    assert "predicted step time: mean error" in output.out
    main([*SUITE, *only[:1], only[-1], *keys, "--parallel.activation_checkpoint=full", BLOCKS])
    now = in_record(records)
    assert all("run" in case for case in now.values())
    assert now["8 layers"] == cases["8 layers"]


@pytest.mark.parametrize("tiny", [False, True])
def test_every_case_has_a_legal_plan_of_its_own(tiny: bool) -> None:
    """Plans do not distinguish all cases of loss chunks and recomputed blocks."""
    plans: list[Any] = []
    for name in CASES:
        setup = make_setup(name, tiny, 1, [])
        config = parse_config(setup.command_line(), "test")
        plan = plan_run(config.job, setup.processes)
        plans.append((config.model, config.optim, config.parallel.compile, plan))
    assert sum(plan in plans[:i] for i, plan in enumerate(plans)) <= 3
