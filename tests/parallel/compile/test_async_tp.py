"""Async tensor parallelism: the compiled code has the fused operators, they compute the same, and the run
reports it."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch._inductor.codecache import PyCodeCache

from meshwright.parallel.compile.async_tp import (
    check_async_tp,
    describe_async_tp,
    describe_fusion,
    enable_async_tp,
    missing_peer_access,
)
from meshwright.parallel.errors import PlanError
from tests.support.launch import EAGER, TINY, read_metrics, run, write_text

TP = [
    "--parallel.tp=2",
    "--model.n_layers=1",
    "--train.global_batch_size=2",
    "--train.steps=3",
    "--metrics.tensorboard=false",
]
ASYNC = [*TP, "--parallel.async_tp=true"]
# lines of compiled code
GATHER = "        buf3 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf2, 2, '0')\n"
SCATTER = "        buf9 = torch.ops._c10d_functional.reduce_scatter_tensor.default(buf8, 'sum', 2, '0')\n"
FUSED = "        buf1 = torch.ops.symm_mem.fused_all_gather_matmul.default(buf0, [permute_13], 1, '0')\n"
NOISE = (
    "        # Original ATen: [_c10d_functional.all_gather_into_tensor]\n"
    "        assert_size_stride(buf2, (2, 8), (8, 1), 'torch.ops.symm_mem.fused_all_gather_matmul.default')\n"
)
NO_COLLECTIVES = "async tp: NOT fused, because the compiled code has no gathers and no scatters"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("data"))


def trained(folder: Path) -> list[float]:
    """Losses and gradient norms of a run of three steps."""
    rows = read_metrics(folder)
    return [rows[step][key] for key in ("loss", "grad_norm") for step in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_a_compiled_run_is_fused_says_so_and_trains_the_same(data, tmp_path) -> None:
    """A block has two gathers and two scatters in the forward and as many in the backward, the head has one
    of each. The backward's scatters follow sums unless projections are fused, and the head's are not
    fused."""
    plain = run(2, *TINY, *data, *TP, *EAGER, f"--run.dir={tmp_path / 'plain'}")
    assert plain.returncode == 0, plain.stderr
    for joined, fused in (("false", 6), ("true", 8)):
        keys = [f"--parallel.fused_projections={joined}", f"--run.dir={tmp_path / joined}"]
        module = "tests.support.workers.async_tp"
        result = run(2, *TINY, *data, *ASYNC, *keys, module=module, timeout_s=300)
        assert result.returncode == 0, result.stderr
        printed = " ".join(result.stdout.split())
        assert f"async tp: fused {fused} of 10 gathers and scatters" in printed
        assert printed.count("async tp:") == 1
        assert "micro_pipeline_tp" not in result.stderr + printed
        assert trained(tmp_path / joined) == pytest.approx(trained(tmp_path / "plain"), rel=1e-5)


def test_a_run_on_a_cpu_is_refused_before_anything_is_made(data, tmp_path) -> None:
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    env = {"RANK": "0", "LOCAL_RANK": "0", **world}
    result = run(1, *TINY, *data, *ASYNC, f"--run.dir={tmp_path / 'run'}", **env)
    assert result.returncode == 2
    assert "parallel.async_tp=true sends pieces through memory that GPUs share (NVLink)" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_torch_without_nccl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(PlanError, match=r"needs a torch with NCCL.*use parallel\.async_tp=false"):
        check_async_tp(2, "cuda", 2)


def test_gpus_of_a_tp_group_must_reach_each_other() -> None:
    pairs = {(0, 1), (2, 3)}
    for tp, gpus, reachable, missing in (
        (2, 4, pairs, ""),
        (4, 4, pairs, "GPU 0 of this node cannot read that of GPU 2"),
        (2, 4, {(0, 1)}, "GPU 2 of this node cannot read that of GPU 3"),
        (4, 6, {*itertools.product(range(6), repeat=2)}, "tp=4 does not divide its 6 processes"),
    ):
        reason = missing_peer_access(tp, gpus, lambda a, b, of=reachable: (min(a, b), max(a, b)) in of)
        assert missing in reason
        assert bool(missing) == bool(reason)


def test_calls_are_counted_without_comments_and_checks_or_it_is_said_why_there_are_none() -> None:
    line = describe_fusion([NOISE + GATHER + SCATTER, FUSED + SCATTER])
    assert line == "async tp: fused 1 of 4 gathers and scatters"
    assert describe_fusion([NOISE]) == NO_COLLECTIVES
    line = describe_fusion([NOISE + GATHER, SCATTER])
    for words in (
        "async tp: NOT fused, because ",
        "none of the 2 gathers and scatters",
        "TORCH_LOGS=+torch.",
        "parallel.compile.cache_dir",
    ):
        assert words in line


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone, and a compiler in its initial state."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "graphs"))
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    forget()
    with inductor.patch(_micro_pipeline_tp=False):
        yield dist.group.WORLD  # type: ignore[misc]
    forget()
    symmetric_memory._group_name_to_store.clear()
    dist.destroy_process_group()


def forget() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    PyCodeCache.modules.clear()


@pytest.mark.filterwarnings("ignore")  # the compiler runs in this process and has its own warnings
def test_code_that_comes_from_the_cache_is_searched_as_well(alone: dist.ProcessGroup) -> None:
    """Inductor's pass does not run for a cache hit. Under tensor parallelism torch 2.11 has cache hits, 2.13
    has none."""
    enable_async_tp(alone.group_name)
    assert inductor._micro_pipeline_tp
    assert symmetric_memory.is_symm_mem_enabled_for_group(alone.group_name)

    def gathered(x: torch.Tensor) -> torch.Tensor:
        full = torch.ops._c10d_functional.all_gather_into_tensor(x, 1, alone.group_name)
        return torch.ops._c10d_functional.wait_tensor(full)

    assert describe_async_tp() == NO_COLLECTIVES
    for hits in (0, 1):
        forget()
        torch.compile(gathered, fullgraph=True)(torch.ones(4))
        assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == hits
        assert describe_async_tp() != NO_COLLECTIVES
