"""Guarantees of compiling: one graph per kind of block at any depth, no graph breaks, reported recompiles."""

import copy
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import meshwright as mw
from meshwright.models.rope import rope_tables
from meshwright.parallel.compile.stats import RecompileGuard, count_compiled_graphs
from meshwright.parallel.config import CompileConfig
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run
from tests.support.launch import EAGER, TINY, read_metrics, read_status, run, write_text
from tests.support.sharded import build_sharded, sharded_alone
from tests.support.worlds import run_ranks

AOT = "--parallel.compile.backend=aot_eager"
ONLY_DYNAMO = "--parallel.compile.backend=eager"  # captures graphs and makes guards, as all backends do
TOKENS = torch.arange(64).reshape(2, 32)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("data"))


def graphs_and_breaks(arguments: Sequence[str]) -> tuple[int, dict[str, int]]:
    """Those of two micro batches."""
    model = build_sharded(arguments).model
    for _ in range(2):
        model(TOKENS, TOKENS).backward()
    return count_compiled_graphs(), dict(torch._dynamo.utils.counters["graph_break"])


def test_blocks_share_one_graph_whatever_the_depth_and_none_breaks() -> None:
    """Six blocks have one, and the head another."""
    assert run_ranks(1, graphs_and_breaks, [*TINY, ONLY_DYNAMO, "--model.n_layers=6"]) == [(2, {})]


class Deep(nn.Module):
    """A block that scales its branch by its depth."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth, self.linear = depth, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) / (1 + self.depth)


def fail(_graph: torch.fx.GraphModule, _inputs: Sequence[torch.Tensor]) -> Any:
    raise ValueError("no such instruction")


def graphs_of(
    blocks: int, lengths: int, dynamic: bool | None, backend: str = "eager"
) -> tuple[int, list[str]]:
    """Graphs and warnings of an own loop, or the error's text."""
    if backend == "fail":
        torch._dynamo.register_backend(fail)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.config.recompile_limit = 1
    model, example = nn.Sequential(*map(Deep, range(blocks))), (torch.zeros(2, 6, 4),)
    config = mw.ParallelConfig(compile=mw.CompileConfig(backend=backend, dynamic=dynamic))
    plan = mw.make_plan(config, mw.describe(model, example), mw.RunShape(1, 1, seq_len=6))
    sharded = mw.apply_plan(model.to("meta"), plan, mw.build_mesh(plan.mesh, "cpu"), gradients="sum")
    mw.materialize(sharded, seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for length in range(2, 2 + lengths):
                sharded.model(torch.zeros(2, length, 4))
        except mw.PlanError as error:
            return count_compiled_graphs(), [str(error)]
    return count_compiled_graphs(), [str(each.message) for each in caught if each.category is UserWarning]


def graphs_of_each(cases: list[tuple[Any, ...]]) -> list[tuple[int, list[str]]]:
    return [graphs_of(*case) for case in cases]


def test_depths_and_lengths_are_few_graphs_or_named_and_never_a_crash_of_dynamo() -> None:
    (found,) = run_ranks(
        1, graphs_of_each, [(4, 1, None), (1, 4, None), (9, 1, False), (1, 4, False), (1, 1, None, "fail")]
    )
    *found, (_, (of_backend,)) = found
    assert "0 cannot be compiled by fail: no such instruction. Change the module, or" in of_backend
    assert [graphs for graphs, _ in found] == [2, 2, 9, 3]
    assert [len(texts) for _, texts in found] == [0, 0, 1, 1]
    for (_, (text,)), guard in zip(found[2:], ("depth", "size mismatch"), strict=True):
        assert "Deep" in text
        assert guard in text
        assert "compile.dynamic=true" in text


MODES = {
    "inductor": [],
    "tp-selective": [AOT, "--parallel.tp=2", "--parallel.activation_checkpoint=selective"],
}


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_nothing_is_compiled_after_the_first_step_with_evaluations_in_between(mode, data, tmp_path):
    steps = ["--train.steps=6", "--train.eval_every=2", "--train.eval_sequences=13", "--checkpoint.every=3"]
    line = [*TINY, *data, *mode, *steps, f"--run.dir={tmp_path}", "--metrics.tensorboard=false"]
    result = run(2, *line, timeout_s=300)
    assert result.returncode == 0, result.stderr
    assert [row["recompiles"] for step, row in read_metrics(tmp_path).items() if step] == [0] * 6
    assert "recompiled" not in result.stdout


def shorten_step_3(data, folder: Path, *more: str, **env: str) -> Any:
    """A run in which a sequence of another length in step 3 fails the guards of the first graphs."""
    line = [*TINY, *data, ONLY_DYNAMO, "--train.steps=4", f"--run.dir={folder}", *more]
    return run(1, *line, module="tests.support.workers.shortened_step", **env)


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_a_recompile_is_counted_and_said_with_the_guard_that_failed(data, tmp_path):
    """An evaluation recompiles nothing."""
    result = shorten_step_3(data, tmp_path, "--train.eval_every=2", "--train.eval_sequences=13")
    assert result.returncode == 0, result.stderr
    assert [read_metrics(tmp_path)[step]["recompiles"] for step in range(1, 5)] == [0, 0, 2, 2]
    assert "2 recompiles" in result.stdout
    warnings = [line for line in result.stdout.splitlines() if "warning: step 3" in line]
    assert len(warnings) == 2, "one for the blocks, one for the head"
    expected = r"recompiled \w+ \(.*\.py:\d+\): .*expected 32, actual 16"
    assert all(re.search(expected, line) for line in warnings), warnings
    assert "warning: step 4" not in result.stdout


def test_a_recompile_ends_the_run_where_the_user_asks_for_that(data, tmp_path):
    """It is noticed even if the environment asks torch for other logs."""
    wanted = "--parallel.compile.on_recompile=error"
    result = shorten_step_3(data, tmp_path, wanted, TORCH_LOGS="graph_breaks")
    assert result.returncode == 1
    assert read_status(tmp_path)["state"] == "failed"
    reason = read_status(tmp_path)["reason"].removeprefix("RecompileError: ")
    assert reason in result.stderr
    for fact in (
        "recompiled 2 graphs; TORCH_LOGS hides the reason: add recompiles to it",
        wanted[2:],
        "use warn",
    ):
        assert fact in reason
    assert sorted(read_metrics(tmp_path)) == [1, 2], "the step that recompiled does not count"


def test_a_recompile_is_not_said_where_the_user_asks_for_that() -> None:
    guard, compiled = (
        RecompileGuard(CompileConfig(on_recompile="ignore")),
        torch.compile(torch.sin, backend="eager"),
    )
    compiled(torch.ones(2))
    guard.arm()
    graphs = count_compiled_graphs()
    compiled(torch.ones(2, 2))
    assert count_compiled_graphs() == graphs + 1
    assert guard.new_messages() == []


BUDGETS = {"layers.0": 0.0, "layers.[1-2]": 0.9}


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_units_of_a_plan_file_have_budgets_of_their_own(tmp_path):
    """torch has one budget per process; this plan file has two for its blocks."""
    layers = "--model.n_layers=3"
    backend = "--parallel.compile.backend=aot_eager_decomp_partition"
    config = parse_config([*TINY, layers, "--parallel.activation_checkpoint=budget", backend])
    plan = yaml.safe_load(plan_to_yaml(plan_run(config.job, 1)))
    (blocks,) = [unit for unit in plan["units"] if unit["unit"] == "layers.[0-2]"]
    place = plan["units"].index(blocks)
    plan["units"][place : place + 1] = [
        {**copy.deepcopy(blocks), "unit": name, "activation_budget": budget}
        for name, budget in BUDGETS.items()
    ]
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    ((kept, graphs),) = run_ranks(1, kept_by_blocks, [*TINY, layers, f"--parallel.plan={path}"])
    assert kept[0] < kept[1] == kept[2]
    assert graphs == 3, "two kinds of block, and the head"


def kept_by_blocks(arguments: Sequence[str]) -> tuple[list[int], int]:
    """Elements that each compiled block keeps for the backward, and the number of graphs."""
    model = build_sharded(arguments).model
    model(TOKENS).detach()  # FSDP begins with the forward of the whole model
    graphs, x, kept = count_compiled_graphs(), model.tok_embeddings(TOKENS), []
    for block in model.layers:
        x = block(x, *rope_tables(torch.arange(32), model.frequencies))
        kept.append(sum(t.numel() for t in x.grad_fn.saved_tensors))
    assert count_compiled_graphs() == graphs
    return kept, graphs


def saved_bytes(mode: str) -> int:
    """Bytes that autograd saves for the backward, without parameters."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with sharded_alone([*TINY, *EAGER, f"--parallel.activation_checkpoint={mode}"]) as alone:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = alone.model(TOKENS, TOKENS)
        loss.backward()
        return sum(storages.values())


def test_recomputing_blocks_keeps_less_memory_for_the_backward() -> None:
    assert saved_bytes("full") < saved_bytes("none") / 2


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_a_second_start_finds_the_first_ones_graphs_and_says_so(data, tmp_path):
    """Uses the cache folder that all tests share, because it has the compilers' probes of the machine; no
    other run has a model of this width."""
    matches, cache = [], os.environ["TORCHINDUCTOR_CACHE_DIR"]
    line = [*TINY, *data, "--model.dim=48", "--train.steps=1", f"--parallel.compile.cache_dir={cache}"]
    for start in ("cold", "warm"):
        elsewhere = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "not-here")}
        result = run(1, *line, f"--run.dir={tmp_path / start}", timeout_s=300, **elsewhere)
        assert result.returncode == 0, result.stderr
        report = r"compile cache (\S+): (\d+) graphs loaded from it, (\d+) compiled"
        matches += re.findall(report, " ".join(result.stdout.split()))
    (cold_folder, *cold), (warm_folder, *warm) = matches
    assert cold_folder == warm_folder == cache
    assert int(cold[1]) > 0
    assert cold[0] == warm[1] == "0"
    assert int(warm[0]) >= int(cold[1])
