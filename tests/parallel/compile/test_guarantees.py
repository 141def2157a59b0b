"""Guarantees of compiling: one graph per kind of block at any depth, no graph breaks, reported recompiles."""

import copy
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml

from meshwright.models.rope import rope_tables
from meshwright.parallel.compile.stats import count_compiled_graphs
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run
from tests.distributed.parity import Job, check_compiled, run_jobs
from tests.support.launch import EAGER, TINY, read_metrics, read_status, run, write_text
from tests.support.sharded import build_sharded
from tests.support.worlds import run_ranks

AOT = "--parallel.compile.backend=aot_eager"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("data"))


def test_blocks_share_one_graph_whatever_the_depth_and_none_breaks(data):
    """Six blocks have as many graphs as three in test_parity.py."""
    (got,) = run_jobs({"six": Job(1, [AOT, "--model.n_layers=6"], graphs=2)}, data, steps=2).values()
    assert "error" not in got, got["error"]
    check_compiled(got, 2)


SAMPLED = [pytest.mark.slow, pytest.mark.sampled(10)]
MODES = {
    "aot": [AOT],
    "inductor": [],
    "tp-selective": [AOT, "--parallel.tp=2", "--parallel.activation_checkpoint=selective"],
}


@pytest.mark.parametrize(
    "mode",
    [pytest.param(keys, id=name, marks=[] if name == "aot" else SAMPLED) for name, keys in MODES.items()],
)
def test_nothing_is_compiled_after_the_first_step_with_evaluations_in_between(mode, data, tmp_path):
    steps = ["--train.steps=6", "--train.eval_every=2", "--train.eval_sequences=13", "--checkpoint.every=3"]
    result = run(
        2, *TINY, *data, *mode, *steps, f"--run.dir={tmp_path}", "--metrics.tensorboard=false", timeout_s=300
    )
    assert result.returncode == 0, result.stderr
    assert [row["recompiles"] for step, row in read_metrics(tmp_path).items() if step] == [0] * 6
    assert "recompiled" not in result.stdout


def shorten_step_3(data, folder: Path, *more: str, **env: str):
    """A run in which a sequence of another length in step 3 fails the guards of the first graphs."""
    line = [*TINY, *data, "--parallel.compile.backend=eager", "--train.steps=4", f"--run.dir={folder}", *more]
    return run(1, *line, module="tests.support.workers.shortened_step", **env)


def test_a_recompile_is_counted_and_said_with_the_guard_that_failed(data, tmp_path):
    result = shorten_step_3(data, tmp_path)
    assert result.returncode == 0, result.stderr
    assert [read_metrics(tmp_path)[step]["recompiles"] for step in range(1, 5)] == [0, 0, 2, 2]
    assert "2 recompiles" in result.stdout
    warnings = [line for line in result.stdout.splitlines() if "warning: step 3" in line]
    assert len(warnings) == 2, "one for the blocks, one for the head"
    assert all(
        re.search(r"recompiled \w+ \(.*\.py:\d+\): .*expected 32, actual 16", line) for line in warnings
    ), warnings
    assert "warning: step 4" not in result.stdout


def test_a_recompile_ends_the_run_where_the_user_asks_for_that(data, tmp_path):
    result = shorten_step_3(data, tmp_path, "--parallel.compile.on_recompile=error")
    assert result.returncode == 1
    reason = read_status(tmp_path)["reason"]
    assert re.search(
        r"recompiled .*expected 32, actual 16.*parallel.compile.on_recompile=error .*use warn", reason
    )
    assert reason.removeprefix("RecompileError: ") in result.stderr
    assert read_status(tmp_path)["state"] == "failed"
    assert sorted(read_metrics(tmp_path)) == [1, 2], "the step that recompiled does not count"


def test_a_recompile_is_heard_where_the_environment_asks_torch_for_other_logs(data, tmp_path):
    result = shorten_step_3(
        data, tmp_path, "--parallel.compile.on_recompile=error", TORCH_LOGS="graph_breaks"
    )
    assert result.returncode == 1
    assert "recompiled 2 graphs; TORCH_LOGS hides the reason: add recompiles to it" in result.stderr


def test_a_recompile_is_not_said_where_the_user_asks_for_that(data, tmp_path):
    result = shorten_step_3(data, tmp_path, "--parallel.compile.on_recompile=ignore")
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stdout
    assert "recompiled" not in result.stdout + result.stderr


BUDGETS = {"layers.0": 0.0, "layers.1": 0.4, "layers.[2-3]": 0.9}


def test_units_of_a_plan_file_have_budgets_of_their_own(tmp_path):
    """torch has one budget per process; this plan file has three for its blocks."""
    backend = "--parallel.compile.backend=aot_eager_decomp_partition"
    config = parse_config([*TINY, "--model.n_layers=4", "--parallel.activation_checkpoint=budget", backend])
    plan = yaml.safe_load(plan_to_yaml(plan_run(config.job, 1)))
    (blocks,) = [unit for unit in plan["units"] if unit["unit"] == "layers.[0-3]"]
    place = plan["units"].index(blocks)
    plan["units"][place : place + 1] = [
        {**copy.deepcopy(blocks), "unit": name, "activation_budget": budget}
        for name, budget in BUDGETS.items()
    ]
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    ((kept, graphs),) = run_ranks(1, kept_by_blocks, [*TINY, "--model.n_layers=4", f"--parallel.plan={path}"])
    assert kept[0] < kept[1] < kept[2] == kept[3]
    assert graphs == [4, 4], "three kinds of block, and the head"


def kept_by_blocks(arguments: Sequence[str]) -> tuple[list[int], list[int]]:
    """Elements that each compiled block keeps for the backward, and the number of graphs before and after."""
    model = build_sharded(arguments).model
    tokens = torch.arange(64).reshape(2, 32)
    model(tokens, tokens).backward()
    graphs = [count_compiled_graphs()]
    x, kept = model.tok_embeddings(tokens), []
    for block in model.layers:
        x = block(x, *rope_tables(torch.arange(32), model.frequencies))
        kept.append(sum(t.numel() for t in x.grad_fn.saved_tensors))
    return kept, [*graphs, count_compiled_graphs()]


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_a_second_start_finds_the_first_ones_graphs_and_says_so(data, tmp_path):
    """Uses the cache folder that all tests share, because it has the compilers' probes of the machine; no
    other run has a model of this width."""
    matches, cache = [], os.environ["TORCHINDUCTOR_CACHE_DIR"]
    for start in ("cold", "warm"):
        result = run(
            1,
            *TINY,
            "--model.dim=48",
            *data,
            "--train.steps=1",
            f"--run.dir={tmp_path / start}",
            f"--parallel.compile.cache_dir={cache}",
            timeout_s=300,
            TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "not-here"),
        )
        assert result.returncode == 0, result.stderr
        matches += re.findall(
            r"compile cache (\S+): (\d+) graphs loaded from it, (\d+) compiled",
            " ".join(result.stdout.split()),
        )
    (cold_folder, *cold), (warm_folder, *warm) = matches
    assert cold_folder == warm_folder == cache
    assert int(cold[1]) > 0
    assert cold[0] == warm[1] == "0"
    assert int(warm[0]) >= int(cold[1])


def test_recomputing_blocks_keeps_less_memory_for_the_backward(data, tmp_path):
    peaks = {}
    for mode in ("none", "full"):
        folder = tmp_path / mode
        big = [
            "--model.dim=128",
            "--model.ffn_dim=1024",
            "--model.n_layers=8",
            "--train.seq_len=256",
            "--train.steps=1",
            "--train.micro_batch_size=16",
            "--train.global_batch_size=16",
        ]
        result = run(
            1, *TINY, *data, *EAGER, *big, f"--parallel.activation_checkpoint={mode}", f"--run.dir={folder}"
        )
        assert result.returncode == 0, result.stderr
        peaks[mode] = read_metrics(folder)[1]["peak_memory_gib"]
    assert peaks["full"] < peaks["none"] - 0.1
