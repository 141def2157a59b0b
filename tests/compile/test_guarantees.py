"""What compiling promises: one graph per kind of block whatever the depth, no break, and recompiles that are seen."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from parallel.compile_check import count_compiled_graphs
from parallel.mesh import build_mesh
from parallel.plan_file import plan_to_yaml
from tests.distributed.parity import Job, check_compiled, run_jobs
from tests.support.launch import EAGER, ROOT, TINY, environment, read_metrics, read_status, run, write_text
from train.build import build_model
from train.config import parse_config
from train.place import Place
from train.planning import plan_run
from train.runtime import start_process

AOT = "--parallel.compile.backend=aot_eager"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("data"))


def test_blocks_share_one_graph_whatever_the_depth_and_none_breaks(data, tmp_path):
    jobs = {f"{n} layers": Job(1, [AOT, f"--model.n_layers={n}"], graphs=2) for n in (2, 6)}
    for name, got in run_jobs(jobs, data, tmp_path, steps=2).items():
        assert "error" not in got, got["error"]
        check_compiled(got, jobs[name].graphs)


MODES = {"inductor": [], "tp-selective": [AOT, "--parallel.tp=2", "--parallel.activation_checkpoint=selective"]}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_nothing_is_compiled_after_the_first_step_with_evaluations_in_between(mode, data, tmp_path):
    steps = ["--train.steps=6", "--train.eval_every=2", "--train.eval_sequences=13", "--checkpoint.every=3"]
    result = run(2, *TINY, *data, *mode, *steps, f"--run.dir={tmp_path}", "--metrics.tensorboard=false", timeout_s=300)
    assert result.returncode == 0, result.stderr
    assert [row["recompiles"] for step, row in read_metrics(tmp_path).items() if step] == [0] * 6
    assert "recompiled" not in result.stdout


def shorten_step_3(data, folder: Path, *more: str, **env: str):
    """A run in which a sequence of another length in step 3 breaks the first graph's guards."""
    program = (
        "import sys; import train.loop as loop; from train.step import Batch, train_step\n"
        "calls = []\n"
        "def shortened(model, optimizer, batches, *rest):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3:\n"
        "        batches = [Batch(b.tokens[:, :16], b.targets[:, :16]) for b in batches]\n"
        "    return train_step(model, optimizer, batches, *rest)\n"
        "loop.train_step = shortened\n"
        "from train.main import main; main(sys.argv[1:])"
    )
    line = [sys.executable, "-c", program, *TINY, *data, AOT, "--train.steps=4", f"--run.dir={folder}", *more]
    return subprocess.run(line, cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=300, check=False)


def test_a_recompile_is_counted_and_said_with_the_guard_that_failed(data, tmp_path):
    result = shorten_step_3(data, tmp_path)
    assert result.returncode == 0, result.stderr
    assert [read_metrics(tmp_path)[step]["recompiles"] for step in range(1, 5)] == [0, 0, 2, 2]
    assert "2 recompiles" in result.stdout
    said = [line for line in result.stdout.splitlines() if "warning: step 3" in line]
    assert len(said) == 2, "one for the blocks, one for the head"
    assert all(re.search(r"recompiled \w+ \(.*\.py:\d+\): .*expected 32, actual 16", line) for line in said), said
    assert "warning: step 4" not in result.stdout


def test_a_recompile_ends_the_run_where_the_user_asks_for_that(data, tmp_path):
    result = shorten_step_3(data, tmp_path, "--parallel.compile.on_recompile=error")
    assert result.returncode == 1
    reason = read_status(tmp_path)["reason"]
    assert re.search(r"recompiled .*expected 32, actual 16.*parallel.compile.on_recompile=error ends the run", reason)
    assert reason.removeprefix("RecompileError: ") in result.stderr
    assert read_status(tmp_path)["state"] == "failed"
    assert sorted(read_metrics(tmp_path)) == [1, 2], "the step that recompiled does not count"


def test_a_recompile_is_heard_where_the_environment_asks_torch_for_other_logs(data, tmp_path):
    result = shorten_step_3(data, tmp_path, "--parallel.compile.on_recompile=error", TORCH_LOGS="graph_breaks")
    assert result.returncode == 1
    assert "recompiled 2 graphs; TORCH_LOGS keeps the reason back" in result.stderr


def test_a_recompile_is_not_said_where_the_user_asks_for_that(data, tmp_path):
    result = shorten_step_3(data, tmp_path, "--parallel.compile.on_recompile=ignore")
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stdout
    assert "recompiled" not in result.stdout + result.stderr


@pytest.fixture
def one_process():
    start_process(parse_config([]).run, Place(0, 1, 0, 1, False), torch.device("cpu"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # the compiler, which runs in this process here, has several of its own
def test_units_of_a_plan_file_have_budgets_of_their_own(one_process, tmp_path):
    """torch knows one budget for a process: here three blocks are compiled to keep different shares."""
    backend = "--parallel.compile.backend=aot_eager_decomp_partition"
    config = parse_config([*TINY, "--model.n_layers=4", "--parallel.activation_checkpoint=budget", backend])
    plan = yaml.safe_load(plan_to_yaml(plan_run(config, 1)))
    (blocks,) = [unit for unit in plan["units"] if unit["unit"] == "layers.[0-3]"]
    budgets = {"layers.0": 0.0, "layers.1": 0.4, "layers.[2-3]": 0.9}
    place = plan["units"].index(blocks)
    plan["units"][place : place + 1] = [{**copy.deepcopy(blocks), "unit": name, "activation_budget": budget}
                                       for name, budget in budgets.items()]  # fmt: skip
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    config = parse_config([*TINY, "--model.n_layers=4", f"--parallel.plan={path}"])
    model = build_model(config, plan_run(config, 1), build_mesh(plan_run(config, 1).mesh, "cpu"), torch.device("cpu"))

    tokens = torch.arange(64).reshape(2, 32)
    model(tokens, tokens).backward()
    assert count_compiled_graphs() == 4, "three kinds of block, and the head"
    x, kept = model.tok_embeddings(tokens), []
    for block in model.layers:
        x = block(x, model.cos_TH[:32], model.sin_TH[:32])
        kept.append(sum(t.numel() for t in x.grad_fn.saved_tensors))
    assert kept[0] < kept[1] < kept[2] == kept[3]
    assert count_compiled_graphs() == 4


def test_a_second_start_finds_the_first_ones_graphs_and_says_so(data, tmp_path):
    told = []
    for start in ("cold", "warm"):
        result = run(1, *TINY, *data, "--train.steps=1", f"--run.dir={tmp_path / start}",
                     f"--parallel.compile.cache_dir={tmp_path / 'graphs'}", timeout_s=300,
                     TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "not-here"))  # fmt: skip
        assert result.returncode == 0, result.stderr
        told += re.findall(r"compile cache (\S+): (\d+) graphs found there, (\d+) compiled anew", " ".join(result.stdout.split()))
    (cold_folder, *cold), (warm_folder, *warm) = told
    assert cold_folder == warm_folder == str(tmp_path / "graphs")
    assert int(cold[1]) > 0
    assert cold[0] == warm[1] == "0"
    assert int(warm[0]) >= int(cold[1])


def test_recomputing_blocks_keeps_less_memory_for_the_backward(data, tmp_path):
    peaks = {}
    for mode in ("none", "full"):
        folder = tmp_path / mode
        big = ["--model.dim=128", "--model.ffn_dim=1024", "--model.n_layers=8", "--train.seq_len=256",
               "--train.steps=2", "--train.micro_batch_size=16", "--train.global_batch_size=16"]  # fmt: skip
        result = run(1, *TINY, *data, *EAGER, *big, f"--parallel.activation_checkpoint={mode}", f"--run.dir={folder}")
        assert result.returncode == 0, result.stderr
        peaks[mode] = read_metrics(folder)[2]["peak_memory_gib"]
    assert peaks["full"] < peaks["none"] - 0.1
