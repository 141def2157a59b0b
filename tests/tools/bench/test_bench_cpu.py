"""tools.bench cpu and its comparison with peers: real commands that print BENCH lines, in interleaved rounds,
and the arithmetic of the figures."""

import json
import os
from pathlib import Path

import pytest

from meshwright.models.cost import matmul_parameters
from meshwright.models.llama import LlamaConfig
from meshwright.tools.bench.__main__ import main
from meshwright.tools.bench.speed.cpu import VARIABLES, share_of_allowed
from meshwright.tools.bench.speed.cpu_limits import Allowed, add_up, step_products
from meshwright.tools.bench.speed.peers import OURS, Contender, parse_peers, run_rounds
from tests.support.launch import EAGER, TINY, write_text

pytestmark = [pytest.mark.slow, pytest.mark.sampled(10, together="bench-cpu")]
Output = pytest.CaptureFixture[str]
FIGURES = {"tokens_per_s_per_rank": 1000.0, "peak_memory_gib": 0.5, "startup_s": 10.0}


@pytest.mark.usefixtures("forked_commands")
def test_cpu_compares_with_peers_and_with_what_is_allowed(tmp_path: Path, capsys: Output) -> None:
    """One peer receives the shape, the other fails."""
    received = tmp_path / "received"
    variables = " ".join("$" + name for name in [*VARIABLES, "BENCH_PROCESSES"])
    lines = "echo BENCH startup_to_first_step_s=5; echo BENCH tok/s/rank median=500 peak_rss_GiB=1"
    peers = [f"--peer=good=echo {variables} >> {received}; {lines}", "--peer=bad=echo $BENCH_DIM; exit 3"]
    sizes = ["--shapes=head-dim-16", "--dtypes=bfloat16", "--processes=1", "--rounds=1", "--steps=5"]
    main(["cpu", *sizes, *peers, *TINY, *EAGER, *write_text(tmp_path), "--json"])
    document = json.loads(capsys.readouterr().out)
    cell = document["figures"]["cells"]["head-dim-16 bfloat16"]
    assert received.read_text() == "32 2 4 2 64 2048 32 2 5 bfloat16 0 1\n"
    assert set(cell["median"]) == {OURS, "good"}
    assert "exit code 3" in cell["left_out"]["bad"]
    ours = cell["median"][OURS]["tokens_per_s_per_rank"]
    assert cell["ours_over_peer"]["tokens_per_s_per_rank"]["good"] == ours / 500
    allowed = cell["allowed"]
    assert allowed["total_s"] == allowed["matmul_s"] + allowed["attention_s"] > 0
    assert cell["share_of_allowed"]["good"] == pytest.approx(allowed["total_s"] * 500 / 64)
    assert 0 < cell["share_of_allowed"][OURS] < 1
    assert document["config"]["head-dim-16 bfloat16"]["parallel"]["param_dtype"] == "bfloat16"


def test_allowed_is_the_time_of_a_steps_products_and_attention() -> None:
    model = LlamaConfig(64, 3, 4, 2, 160, 100, 32)
    products = step_products(model, tokens=8)
    assert {tokens for tokens, _, _ in products} == {8}
    elements = sum(inputs * outputs * number for (_, inputs, outputs), number in products.items())
    assert elements == matmul_parameters(model)
    allowed = add_up({(10, 20, 30): 2, (10, 20, 50): 1}, [0.25, 0.5], attention_s=0.125, layers=4)
    assert (allowed.matmul_s, allowed.attention_s, allowed.total_s) == (1.0, 0.5, 1.5)
    assert allowed.matmul_gflop_s == pytest.approx(6 * (10 * 20 * 30 * 2 + 10 * 20 * 50) / 1e9)
    assert share_of_allowed(Allowed(0.5, 0.25, 0.75, 1.0), tokens=100, tokens_per_s=100) == 0.75


def test_rounds_are_interleaved_and_caches_shared_as_requested(tmp_path: Path) -> None:
    """Peers are real shell commands; each writes its name and its cache folder to a file."""
    order = tmp_path / "order"
    note = (
        f"$TORCHINDUCTOR_CACHE_DIR >> {order}; echo BENCH startup_to_first_step_s=$OMP_NUM_THREADS; "
        "echo BENCH tok/s/rank median=500 peak_rss_GiB=1"
    )
    peers = parse_peers([f"a=echo a {note}", f"b=echo b {note}"], threads=4, variables={})
    ours = Contender(OURS, lambda cache: FIGURES)
    for cache, names, folders in (("cold", "abab", 4), ("warm", "ababab", 2), ("keep", "abab", 0)):
        order.unlink(missing_ok=True)
        rounds, left_out = run_rounds([ours, *peers], 2, cache)
        assert not left_out
        lines = [line.split() for line in order.read_text().splitlines()]
        assert "".join(line[0] for line in lines) == names
        inherited = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        assert len({line[1] for line in lines if line[1:] and line[1] != inherited}) == folders
        assert [list(r) for r in rounds] == [[OURS, "a", "b"]] * 2
        assert rounds[0]["a"] == {"tokens_per_s_per_rank": 500, "peak_memory_gib": 1, "startup_s": 4}
