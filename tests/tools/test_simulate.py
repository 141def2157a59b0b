"""Output of tools/simulate.py and `tools.plan --compare`; an 8B on thousands of ranks fits a laptop."""

import json
from functools import partial

import pytest

from meshwright.parallel.errors import PlanError
from meshwright.tools import generate
from meshwright.tools.cli import run_tool
from meshwright.tools.plan.__main__ import main as plan_main
from meshwright.tools.simulate import NO_BUDGET, main
from meshwright.train.errors import ConfigError
from tests.support.launch import run
from tests.support.simulated import TINY, simulated

Output = pytest.CaptureFixture[str]
KINDS = ["params", "grads", "optimizer", "unsharded", "activations", "logits", "buffers"]
DEBUG = ("--config=llama_debug", *TINY, "--train.global_batch_size=-1")


@pytest.mark.sampled(3, day=0)
def test_json_is_the_contract(capsys: Output) -> None:
    main([*DEBUG, "--world-size", "4", "--parallel.tp=2", "--json"])
    document = json.loads(capsys.readouterr().out)
    simulation = simulated(4, *DEBUG, "--parallel.tp=2")
    assert len(document["collectives"]) == len(simulation.collectives)
    place = {"axis": "dp_shard", "unit": "tok_embeddings", "phase": "forward"}
    assert document["collectives"][1] == {"op": "all_gather", **place, "bytes": 264 * 32 * 4 // 2}
    for total in document["totals"]:
        kind = total["op"], total["axis"]
        added = [c["bytes"] for c in document["collectives"] if (c["op"], c["axis"]) == kind]
        assert (total["count"], total["bytes"]) == (len(added), sum(added))
    assert sum(total["count"] for total in document["totals"]) == len(document["collectives"])
    assert list(document["memory"]) == list(document["memory_at_peak"]) == KINDS
    assert document["memory"]["params"] * 2**30 == simulation.memory.params
    assert document["peak_memory_gib"] == pytest.approx(sum(document["memory_at_peak"].values()))


def test_what_a_simulation_does_not_show_is_said(capsys: Output) -> None:
    main([*DEBUG, "--world-size=1", "--parallel.activation_checkpoint=budget"])
    shown = capsys.readouterr().out
    assert "no collectives" in shown
    assert NO_BUDGET in shown
    main([*DEBUG, "--world-size=16", "--gpus-per-node=4", "--parallel.strategy=hybrid_shard"])
    shown = capsys.readouterr().out
    assert "dp_replicate 4 x dp_shard 4" in shown
    assert NO_BUDGET not in shown


def test_what_cannot_be_is_refused_before_anything_is_simulated() -> None:
    with pytest.raises(ConfigError, match="--rank=4 must be less than --world-size=4"):
        main([*DEBUG, "--world-size=4", "--rank=4"])
    with pytest.raises(PlanError, match="tp=3"):
        main([*DEBUG, "--world-size=4", "--parallel.tp=3"])


def test_a_misspelt_option_of_a_tool_is_no_config_key(capsys: Output) -> None:
    for tool, option, of_model in ((main, "--rnak", "--world-size=4"), (generate.main, "--promt", "--run=x")):
        with pytest.raises(SystemExit, match=r"^2$"):
            run_tool(partial(tool, [of_model, f"{option}=1"]))
        assert f"unknown option {option}. Did you mean" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_compare_puts_three_strategies_side_by_side(capsys: Output) -> None:
    arguments = [*DEBUG, "--model.n_layers=1", "--gpus=16", "--gpus-per-node=4", "--compare"]
    arguments.append("--parallel.compile.enabled=false")
    plan_main([*arguments, "--json"])
    document = json.loads(capsys.readouterr().out)
    meshes = {
        name: (side["mesh"]["dp_replicate"], side["mesh"]["dp_shard"]) for name, side in document.items()
    }
    assert meshes == {"no_shard": (16, 1), "full_shard": (1, 16), "hybrid_shard": (4, 4)}
    unsharded = document["no_shard"]["measured"]
    for name, shards in (("full_shard", 16), ("hybrid_shard", 4)):
        for side in ("predicted", "measured"):
            memory = document[name][side]["memory"]
            assert list(memory) == KINDS
            for kind in ("params", "grads"):
                assert memory[kind] == pytest.approx(unsharded["memory"][kind] / shards, rel=0.1)
    assert unsharded["peak_memory_gib"] > document["full_shard"]["measured"]["peak_memory_gib"]
    assert {c["op"] for c in document["no_shard"]["collectives"]} == {"all_reduce"}
    plan_main(arguments)
    text = capsys.readouterr().out
    for heading in ("DDP predicted", "DDP measured", "FSDP measured", "dp_replicate 4, dp_shard 4"):
        assert heading in text


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("ranks", "keys"),
    [(8, []), (4096, ["--parallel.dp_replicate=512"]), (4096, ["--parallel.tp=8"])],
)
def test_8b_on_any_number_of_ranks_fits_a_laptop(ranks: int, keys: list[str]) -> None:
    command = ("tools.simulate", "--config=llama_8b", f"--world-size={ranks}", "--json", *keys)
    result = run(1, *command, module="tests.support.workers.peak_memory", timeout_s=500)
    assert result.returncode == 0, result.stderr
    kib = int(result.stderr.splitlines()[-1])
    assert kib * 1024 < 2e9, f"{kib / 2**20:.2f} GiB"
    document = json.loads(result.stdout)
    gathered = [
        c["unit"] for c in document["collectives"] if c["op"] == "all_gather" and c["axis"] == "dp_shard"
    ]
    assert gathered[:2] == ["tok_embeddings", "layers.0"]
    # In the forward all 34 units, in the backward the 32 blocks: the head stays, the embedding is not needed.
    assert len(gathered) == 34 + 32
