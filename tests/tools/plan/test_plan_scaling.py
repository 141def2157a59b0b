"""`tools.plan --sweep`: a row for each number of GPUs, with a plan or with the reason why there is none."""

import json
import re
from typing import Any

import pytest

from meshwright.parallel.errors import PlanError
from meshwright.tools.plan.__main__ import main
from meshwright.tools.plan.scaling import read_sweep
from meshwright.train.errors import ConfigError
from tests.support.simulated import TINY

Output = pytest.CaptureFixture[str]
RUN = [
    "--config=llama_debug",
    *TINY,
    "--train.micro_batch_size=auto",
    "--parallel.compile.enabled=false",
    "--gpu=h100-sxm",
]
AUTO = [*RUN, "--parallel.plan=auto"]


def swept(capsys: Output, *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_doublings() -> None:
    assert read_sweep("gpus=8..64") == [8, 16, 32, 64]
    assert read_sweep("gpus=3..13") == [3, 6, 12]
    assert read_sweep("gpus=5..5") == [5]


@pytest.mark.parametrize(
    "bad", ["gpus=8..4", "gpus=0..4", "gpus=8", "8..16", "gpus=8...16", "gpus=8..x", "gpus=8..100000000"]
)
def test_a_range_must_go_up(bad: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--sweep={re.escape(bad)}: .*gpus=8\.\.4096"):
        read_sweep(bad)


def test_only_gpus_are_swept() -> None:
    with pytest.raises(ConfigError, match="only gpus can be swept"):
        read_sweep("tp=1..8")


def test_every_count_has_a_row_and_what_cannot_be_a_reason(capsys: Output) -> None:
    document = swept(
        capsys, *AUTO, "--sweep=gpus=2..16", "--train.global_batch_size=8", "--tokens=1e9", "--parallel.tp=1"
    )
    rows = document["sweep"]
    assert [row["gpus"] for row in rows] == [2, 4, 8, 16]
    assert [row["fits"] for row in rows] == [True, True, True, False]
    for row in rows[:3]:
        choices = row["choices"]
        assert choices["tp"] * choices["dp_replicate"] * choices["dp_shard"] == row["gpus"]
        assert choices["micro_batch_size"] * choices["accumulation"] * row["gpus"] == 8
        assert row["reason"] is None
        assert row["tokens_per_s_per_gpu"] == pytest.approx(8 * 48 / row["gpus"] / row["step_time_s"])
        assert row["days"] == pytest.approx(1e9 / row["tokens_per_s_per_gpu"] / row["gpus"] / 86400)
    assert "must be a multiple" in rows[3]["reason"]
    assert rows[3]["choices"] is rows[3]["step_time_s"] is None


def test_a_row_is_what_gpus_says(capsys: Output) -> None:
    row = swept(capsys, *AUTO, "--sweep=gpus=4..4", "--train.global_batch_size=8")["sweep"][0]
    alone = swept(capsys, *AUTO, "--gpus=4", "--train.global_batch_size=8")
    assert row["step_time_s"] == alone["predicted"]["step_time_s"]
    assert row["reserved_gib"] == alone["predicted"]["reserved_gib"]
    assert row["choices"]["dp_shard"] == alone["plan"]["mesh"]["dp_shard"]


def test_people_get_bars(capsys: Output) -> None:
    main([*AUTO, "--sweep=gpus=1..32", "--train.global_batch_size=8"])
    table, reasons = capsys.readouterr().out.strip().split("\n\n")
    bars = [line.count("#") for line in table.splitlines()[1:]]
    assert max(bars) == 30
    assert min(bars) >= 1
    assert len(bars) + len(reasons.splitlines()) == 6


def test_the_configs_own_plan_is_swept_too(capsys: Output) -> None:
    document = swept(
        capsys, *RUN, "--sweep=gpus=1..4", "--parallel.dp_replicate=2", "--train.global_batch_size=-1"
    )
    rows = document["sweep"]
    assert "2 processes" in rows[0]["reason"]
    assert [row["choices"]["dp_shard"] for row in rows[1:]] == [1, 2]
    large = swept(
        capsys,
        *RUN,
        "--sweep=gpus=1..64",
        "--train.global_batch_size=-1",
        "--model.dim=16384",
        "--model.n_heads=128",
        "--model.ffn_dim=32768",
    )["sweep"]
    assert large[0]["reason"].startswith("does not fit: needs ")
    assert large[-1]["fits"]


def test_nothing_possible_is_an_error_with_every_reason() -> None:
    with pytest.raises(PlanError, match=r"none of these numbers of GPUs.\n  16: .*\n  32: "):
        main([*AUTO, "--sweep=gpus=16..32", "--train.global_batch_size=8", "--parallel.tp=1"])
