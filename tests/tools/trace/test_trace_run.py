"""tools.trace on a real profile of two gloo ranks, with one slow unit and one late all-gather on purpose."""

import json
from pathlib import Path

import pytest
import torch

from meshwright.tools.trace.__main__ import main
from tests.support.launch import EAGER, run, write_text
from tests.support.workers.slowed_run import LATE, SLEEP_S, SLOW

NEWER_THAN_2_11 = torch.__version__ >= "2.12"
SHAPE = [
    "--model.dim=384",
    "--model.n_layers=6",
    "--model.n_heads=4",
    "--model.n_kv_heads=4",
    "--model.ffn_dim=1024",
    "--train.seq_len=128",
    "--train.micro_batch_size=1",
    "--train.global_batch_size=2",
    "--train.eval_every=0",
    "--checkpoint.every=0",
    "--metrics.every=1",
]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled")
    window = ["--train.steps=5", "--profile.start=3", "--profile.steps=3", "--profile.all_ranks=true"]
    done = run(
        2,
        *SHAPE,
        *EAGER,
        *write_text(folder),
        *window,
        f"--run.dir={folder / 'run'}",
        module="tests.support.workers.slowed_run",
        timeout_s=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_the_slow_unit_and_the_late_gather_are_named(
    profiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(profiled), "--json"])
    found = json.loads(capsys.readouterr().out)
    slow = {(unit["unit"], unit["rank"]): unit for unit in found["slow_units"] if unit["phase"] == "forward"}
    for rank in range(2):
        unit = slow[SLOW, rank]
        assert SLEEP_S < unit["seconds"] < unit["equals_s"] + 3 * SLEEP_S
    (forward,) = [phase for phase in found["prefetch"] if phase["phase"] == "forward"]
    assert not forward["launches_block"]
    gathers = {gather["unit"]: gather for gather in forward["gathers"]}
    assert {unit: gather["ahead"] for unit, gather in gathers.items()} == {
        "tok_embeddings": 0,
        **{f"layers.{i}": 1 for i in range(6)},
        "head": 1,
        LATE: 0,
    }
    assert gathers[LATE]["late"]
    assert gathers[LATE]["finished_s"] > gathers[LATE]["needed_s"]
    assert gathers[LATE]["waited_s"] > 0
    # torch 2.11 does not write the host's name into a trace
    expected = "one host's clock" if NEWER_THAN_2_11 else "clocks of unnamed hosts"
    assert found["clock"].startswith(expected)


def test_shares_of_a_real_step_sum_to_one_and_the_plan_is_compared(
    profiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(profiled), "--rank=1", "--json", f"--picture={profiled / 'step.svg'}"])
    found = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in found["steps"]] == [3, 4, 5]
    for step in found["steps"]:
        assert sum(step["shares"].values()) == 1.0
        assert all(share >= 0 for share in step["shares"].values())
        assert step["shares"]["overlapped"] > 0, "gathers are launched a unit ahead"
    counts = {(c["collective"], c["axis"]): c["count"] for c in found["communication"]}
    # tokens, norm, and the agreement to stop, which nobody waits for and may run in the next step
    assert counts.pop(("all_reduce", "")) in (2, 3, 4)
    assert counts == {("all_gather", "dp_shard"): 14, ("reduce_scatter", "dp_shard"): 8}
    assert {row["lane"] for row in found["plan"]["lanes"]} >= {
        "step",
        "compute",
        "exposed",
        "all_gather",
        "reduce_scatter",
    }
    assert "<svg" in (profiled / "step.svg").read_text()
    main([str(profiled)])
    assert "What to do" in capsys.readouterr().out
