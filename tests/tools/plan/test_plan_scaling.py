"""`tools.plan --sweep`: a row for each number of GPUs, with a plan or with the reason why there is none."""

import json
import re
from typing import Any

import pytest

from meshwright.parallel.errors import PlanError
from meshwright.parallel.planner.hardware import load_hardware
from meshwright.tools.plan.__main__ import main, read_options
from meshwright.tools.plan.report import most_rate
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
H100 = load_hardware()["h100-sxm"]
AUTO = [*RUN, "--parallel.plan=auto"]


def swept(capsys: Output, *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_sweep_doubles_and_must_go_up() -> None:
    assert read_sweep("gpus=8..64") == [8, 16, 32, 64]
    assert read_sweep("gpus=3..13") == [3, 6, 12]
    assert read_sweep("gpus=5..5") == [5]
    for bad in ("gpus=8..4", "gpus=0..4", "gpus=8", "8..16", "gpus=8...16", "gpus=8..x", "gpus=8..100000000"):
        with pytest.raises(ConfigError, match=rf"^--sweep={re.escape(bad)}: .*gpus=8\.\.4096"):
            read_sweep(bad)
    with pytest.raises(ConfigError, match=r"^--sweep=tp=1\.\.8: .*gpus"):
        read_sweep("tp=1..8")


def test_every_count_has_a_row_and_what_cannot_be_a_reason(capsys: Output) -> None:
    keys = ["--train.global_batch_size=8", "--parallel.tp=1"]
    rows = swept(capsys, *AUTO, "--sweep=gpus=4..16", *keys, "--tokens=1e9", "--price=3")["sweep"]
    assert [(row["gpus"], row["fits"]) for row in rows] == [(4, True), (8, True), (16, False)]
    for row in rows[:2]:
        choices = row["choices"]
        assert choices["tp"] * choices["dp_replicate"] * choices["dp_shard"] == row["gpus"]
        assert choices["micro_batch_size"] * choices["accumulation"] * row["gpus"] == 8
        assert row["reason"] is None
        assert row["tokens_per_s_per_gpu"] == pytest.approx(8 * 48 / row["gpus"] / row["step_time_s"])
        assert row["days"] == pytest.approx(1e9 / row["tokens_per_s_per_gpu"] / row["gpus"] / 86400)
        assert row["cost"] == pytest.approx(row["days"] * row["gpus"] * 24 * 3)
    assert "must be a multiple" in rows[2]["reason"]
    assert rows[2]["choices"] is rows[2]["step_time_s"] is None
    alone = swept(capsys, *AUTO, "--gpus=4", *keys)
    assert rows[0]["step_time_s"] == alone["predicted"]["step_time_s"]
    assert rows[0]["reserved_gib"] == alone["predicted"]["reserved_gib"]
    assert rows[0]["choices"]["dp_shard"] == alone["plan"]["mesh"]["dp_shard"]


def test_the_configs_own_plan_is_swept_too(capsys: Output) -> None:
    document = swept(
        capsys, *RUN, "--sweep=gpus=1..4", "--parallel.dp_replicate=2", "--train.global_batch_size=-1"
    )
    rows = document["sweep"]
    assert "2 processes" in rows[0]["reason"]
    assert [row["choices"]["dp_shard"] for row in rows[1:]] == [1, 2]
    model = ["--model.dim=16384", "--model.n_heads=128", "--model.ffn_dim=32768"]
    arguments = [*RUN, "--sweep=gpus=1..64", "--train.global_batch_size=-1", *model]
    large = swept(capsys, *arguments)["sweep"]
    assert large[0]["reason"].startswith("does not fit: needs ")
    assert large[-1]["fits"]
    main(arguments)
    table, reasons, trust = capsys.readouterr().out.strip().split("\n\n")
    bars = [line.count("#") for line in table.splitlines()[1:]]
    assert max(bars) == 30
    assert min(bars) >= 1
    assert len(bars) + len(reasons.splitlines()) == 7
    assert trust.startswith("errors: h100-sxm: ")
    assert "\nfrom the data sheet: an upper bound; " in trust
    assert document["source"] == "data sheet, an upper bound"


def test_nothing_possible_is_an_error_with_every_reason() -> None:
    with pytest.raises(PlanError, match=r"none of these numbers of GPUs.\n  16: .*\n  32: "):
        main([*AUTO, "--sweep=gpus=16..32", "--train.global_batch_size=8", "--parallel.tp=1"])


def test_the_fewest_gpus_that_train_in_so_many_days(capsys: Output) -> None:
    keys = [*RUN, "--train.global_batch_size=-1", "--tokens=1e12"]  # twice the GPUs, twice the tokens/s
    alone = swept(capsys, *keys, "--gpus=1")
    days = 0.3 * alone["time_to_train"]["days"]
    answer = swept(capsys, *keys, f"--days={days}")
    assert (answer["min_gpus"], answer["plan"]["mesh"]["dp_shard"]) == (4, 4)
    assert answer["time_to_train"]["days"] <= days < alone["time_to_train"]["days"] / 2
    main([*keys, f"--days={days}"])
    assert f"fewest GPUs for 1e+12 tokens in {days:g} days: 4\n" in capsys.readouterr().out
    for tokens in ("1e12", "1e30"):  # the batch allows two; the peak of two is too slow too
        at_most_two = [*keys, f"--days={days}", "--train.global_batch_size=2", f"--tokens={tokens}"]
        with pytest.raises(PlanError, match=r"^--days=.* 2, need [\d,.]+ days .*global_batch_size"):
            main(at_most_two)
    # the bound that the search begins at: no run exceeds the peak
    most, predicted = most_rate(read_options([*keys, "--gpus=1"])[1], H100), alone["predicted"]
    bound = H100.reached * predicted["tokens_per_s_per_gpu"] / predicted["mfu_causal"]
    assert most == pytest.approx(bound)
