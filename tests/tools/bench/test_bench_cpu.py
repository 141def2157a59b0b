"""tools.bench cpu at a tiny size, and the arithmetic of its figures."""

import json
from pathlib import Path

import pytest
import torch

from meshwright.models.cost import matmul_parameters
from meshwright.models.llama import LlamaConfig
from meshwright.tools.bench.__main__ import main
from meshwright.tools.bench.speed.cpu import DTYPES, SHAPES, VARIABLES, share_of_allowed
from meshwright.tools.bench.speed.cpu_limits import Allowed, add_up, measure_in_process, step_products
from meshwright.tools.bench.speed.peers import OURS, Contender, make_spreads, run_rounds
from meshwright.tools.processes import BenchError
from meshwright.train.calibration.timing import AttentionShape
from meshwright.train.config_parser import parse_config
from tests.support.launch import EAGER, TINY, write_text

Output = pytest.CaptureFixture[str]
LINES = "echo BENCH startup_to_first_step_s=5; echo BENCH tok/s/rank median=500 peak_rss_GiB=1"


@pytest.mark.usefixtures("forked_commands")
def test_cpu_compares_with_peers_and_with_what_is_allowed(tmp_path: Path, capsys: Output) -> None:
    """One peer receives the shape, the other fails."""
    received = tmp_path / "received"
    variables = " ".join("$" + name for name in [*VARIABLES, "BENCH_PROCESSES"])
    peers = [
        f"good=echo {variables} >> {received}; {LINES}",
        "bad=echo $BENCH_DIM; exit 3",
    ]
    keys = [*TINY, *EAGER, *write_text(tmp_path)]
    main(
        [
            "cpu",
            "--shapes=head-dim-16",
            "--dtypes=bfloat16",
            "--processes=1",
            "--rounds=1",
            "--steps=5",
            *(f"--peer={peer}" for peer in peers),
            *keys,
            "--json",
        ]
    )
    document = json.loads(capsys.readouterr().out)
    cell = document["figures"]["cells"]["head-dim-16 bfloat16"]
    assert received.read_text() == "32 2 4 2 64 2048 32 2 5 bfloat16 0 1\n"
    assert set(cell["median"]) == {OURS, "good"}
    assert "exit code 3" in cell["left_out"]["bad"]
    assert (
        cell["ours_over_peer"]["tokens_per_s_per_rank"]["good"]
        == cell["median"][OURS]["tokens_per_s_per_rank"] / 500
    )
    allowed = cell["allowed"]
    assert allowed["total_s"] == allowed["matmul_s"] + allowed["attention_s"] > 0
    assert cell["share_of_allowed"]["good"] == pytest.approx(allowed["total_s"] * 500 / 64)
    assert 0 < cell["share_of_allowed"][OURS] < 1
    assert document["config"]["head-dim-16 bfloat16"]["parallel"]["param_dtype"] == "bfloat16"


def test_the_two_shapes_have_the_head_dims_of_their_names() -> None:
    models = {name: parse_config(list(keys)).model for name, keys in SHAPES.items()}
    assert {name: model.head_dim for name, model in models.items()} == {"head-dim-16": 16, "head-dim-64": 64}
    assert models["head-dim-64"] == LlamaConfig(512, 6, 8, 8, 1536, 2048, 512)
    assert DTYPES == ("float32", "bfloat16")


def test_a_steps_products_are_those_of_the_models_cost() -> None:
    model = LlamaConfig(64, 3, 4, 2, 160, 100, 32)
    products = step_products(model, tokens=8)
    assert sum(
        inputs * outputs * number for (_, inputs, outputs), number in products.items()
    ) == matmul_parameters(model)
    assert {tokens for tokens, _, _ in products} == {8}


def test_allowed_adds_up() -> None:
    allowed = add_up({(10, 20, 30): 2, (10, 20, 50): 1}, [0.25, 0.5], attention_s=0.125, layers=4)
    assert (allowed.matmul_s, allowed.attention_s, allowed.total_s) == (1.0, 0.5, 1.5)
    assert allowed.matmul_gflop_s == pytest.approx(6 * (10 * 20 * 30 * 2 + 10 * 20 * 50) / 1e9)
    assert share_of_allowed(Allowed(0.5, 0.25, 0.75, 1.0), tokens=100, tokens_per_s=100) == 0.75


def test_rates_of_this_process() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = measure_in_process(
            [(8, 16, 4), (256, 128, 128)], AttentionShape(1, 2, 1, 8, 64), "float32", torch.device("cpu")
        )
    finally:
        torch.set_num_threads(before)
    small_s, large_s = rates["products"]  # the second has 8,000 times as many operations
    assert 0 < small_s < large_s
    assert rates["attention_s"] > 0


def test_a_contender_that_fails_is_left_out_of_all_rounds_unless_it_is_needed() -> None:
    calls = []

    def fails_at_second(cache: dict[str, str]) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 2:
            raise BenchError("no")
        return {"tokens_per_s_per_rank": 1.0, "peak_memory_gib": 1.0, "startup_s": 1.0}

    fine = Contender(
        OURS, lambda cache: {"tokens_per_s_per_rank": 2.0, "peak_memory_gib": 1.0, "startup_s": 1.0}
    )
    rounds, left_out = run_rounds([fine, Contender("a", fails_at_second)], 3, "keep")
    assert [set(r) for r in rounds] == [{OURS}] * 3
    assert left_out == {"a": "no"}
    assert len(calls) == 2
    assert make_spreads(rounds)[OURS]["tokens_per_s_per_rank"] == 0
    calls.clear()
    with pytest.raises(BenchError):
        run_rounds([Contender(OURS, fails_at_second)], 3, "keep")
