"""Which device a process takes, and ranks that cannot train together: one ConfigError on all of them before
they communicate."""

import dataclasses
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshwright.train.distributed.exit
import meshwright.train.distributed.rendezvous
import meshwright.train.main
from meshwright.parallel.errors import PlanError
from meshwright.train.config import RunConfig
from meshwright.train.distributed import process_group
from meshwright.train.distributed.process_group import ProcessFacts, compare_processes, gpu_index
from meshwright.train.distributed.ranks import RankInfo
from tests.support.launch import EAGER, LIMIT_S, TINY, write_text
from tests.support.worlds import forked, run_ranks, store_of_rank_0

CPU = ProcessFacts("a", "cpu")
GPUS = [ProcessFacts("a" if rank < 4 else "b", "cuda", "H100", f"uuid-{rank}") for rank in range(8)]


def local(rank: int, processes: int) -> RankInfo:
    return RankInfo(rank, processes, rank, processes, under_torchrun=True)


@pytest.mark.parametrize(
    ("requested", "gpus", "rank", "processes", "visible", "index"),
    [
        ("auto", 0, 1, 2, None, None),
        ("cpu", 8, 1, 2, None, None),
        ("auto", 8, 3, 8, None, 3),
        ("cuda", 2, 1, 2, "4,6", 1),
        ("auto", 1, 5, 8, "5", 0),  # srun --gpus-per-task, Ray
    ],
)
def test_the_gpu_of_a_process(
    requested: str, gpus: int, rank: int, processes: int, visible: str | None, index: int | None
) -> None:
    assert gpu_index(requested, gpus, local(rank, processes), visible) == index


@pytest.mark.parametrize(
    ("requested", "gpus", "visible"),
    [("auto", 7, None), ("auto", 1, None), ("cuda", 0, None), ("cuda", 3, "0,1,2"), ("cuda", 0, "")],
)
def test_fewer_gpus_than_local_processes_are_refused(requested: str, gpus: int, visible: str | None) -> None:
    """Before, auto took the CPU: on the one node with a broken GPU, or a thousand times too slow."""
    with pytest.raises(PlanError) as error:
        gpu_index(requested, gpus, local(0, 8), visible)
    facts = [f"run.device={requested}", "8 local processes", f"shows {gpus} GPU", socket.gethostname()]
    facts += [f"start {gpus} process"] * bool(gpus) + ["--run.device=cpu"]
    facts += [f"CUDA_VISIBLE_DEVICES={visible}"] * (visible is not None)
    assert [fact for fact in facts if fact not in str(error.value)] == []


def changed(ranks: Sequence[int], **values: str) -> list[ProcessFacts]:
    """The facts of eight ranks on two hosts, with other values on `ranks`."""
    return [dataclasses.replace(fact, **values) if rank in ranks else fact for rank, fact in enumerate(GPUS)]


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        (
            changed([4, 5, 7], device="cpu", gpu="", gpu_uuid=""),
            ["ranks 4-5, 7 (host b) have the CPU", "ranks 0-3, 6 (hosts a, b) have a GPU", "run.device=cpu"],
        ),
        ([CPU, GPUS[7]], ["rank 1 (host b) has a GPU", "rank 0 (host a) has the CPU"]),  # rank 0 is right
        (
            changed([2], torch="2.11.0"),
            ["rank 2 (host a) has torch 2.11.0", f"(hosts a, b) have torch {torch.__version__}", "install"],
        ),
        (
            changed([2, 3], gpu_uuid="uuid-2"),
            ["ranks 2-3 (host a)", "the same one, H100 uuid-2", "CUDA_VISIBLE_DEVICES"],
        ),
    ],
)
def test_ranks_that_cannot_train_together_are_named(facts: list[ProcessFacts], named: list[str]) -> None:
    error, warning = compare_processes(facts)
    assert [fact for fact in named if fact not in error] == []
    assert warning == ""


def test_gpus_of_different_names_are_a_warning() -> None:
    error, warning = compare_processes(changed([6], gpu="A100"))
    assert error == ""
    assert warning.startswith("warning: ")
    for fact in ("rank 6 (host b) has A100", "ranks 0-5, 7 (hosts a, b) have H100"):
        assert fact in warning


@pytest.mark.parametrize("facts", [GPUS, [CPU] * 4, changed(range(8), gpu_uuid=""), [CPU]])
def test_equal_ranks_pass(facts: list[ProcessFacts]) -> None:
    assert compare_processes(facts) == ("", "")


def main_on_unlike_ranks(arguments: list[str], different: dict[int, ProcessFacts]) -> None:
    """Run train.main on a rank that finds other facts than those of this machine. Rank 1 reads the verdict
    late, when rank 0 would have exited."""
    meshwright.train.distributed.exit.PRINT_FIRST_S = 0.0
    meshwright.train.distributed.rendezvous.READ_S = LIMIT_S
    read = dist.TCPStore.get
    if meshwright.train.main.read_rank_info().rank == 1:
        dist.TCPStore.get = lambda *args: (time.sleep(1.0), read(*args))[1]
    process_group.read_facts = lambda _: different[meshwright.train.main.read_rank_info().rank]  # type: ignore[assignment]
    meshwright.train.main.main(arguments)


def test_all_ranks_end_with_one_message_and_code_2(tmp_path: Path) -> None:
    """Rank 2 has no GPU. No backend exists yet: the ranks with a GPU would wait for it in NCCL."""
    facts = dict(enumerate([*GPUS[:2], CPU]))
    arguments = [*TINY, *EAGER, *write_text(tmp_path), f"--run.dir={tmp_path / 'run'}"]
    arguments += ["--train.global_batch_size=6", "--run.device=cpu"]
    # the store ends with rank 0
    options = {"folder": tmp_path, "keeper": store_of_rank_0, "errors": "err", "LOCAL_WORLD_SIZE": "3"}
    with forked(3, main_on_unlike_ranks, arguments, facts, **options) as forks:
        assert [rank.wait(LIMIT_S) for rank in forks] == [2, 2, 2], (tmp_path / "1.err").read_text()
    messages = [(tmp_path / f"{rank}.err").read_text().strip() for rank in range(3)]
    assert messages[0].startswith("ConfigError: ")
    assert messages[0].count("ConfigError") == 1
    assert "rank 2 (host a) has the CPU" in messages[0]
    assert messages[1:] == [f"rank {rank}: {messages[0]}" for rank in (1, 2)]
    assert not (tmp_path / "run").exists()


def lazy_group() -> int:
    """Return the size of a group that this process alone has joined."""
    dist.destroy_process_group()
    config = RunConfig(device="cpu")
    process_group.start_process(config, RankInfo(0, 1, 0, 1, False), torch.device("cpu"))
    dist.destroy_process_group()
    store = dist.HashStore()  # type: ignore[attr-defined]
    limit = timedelta(seconds=2)
    dist.init_process_group("gloo", store=store, rank=0, world_size=64, timeout=limit)
    size = dist.get_world_size()
    dist.destroy_process_group()
    process_group.start_process(config, RankInfo(0, 1, 0, 1, False), torch.device("cpu"))  # for run_ranks
    return size


def test_gloo_connects_ranks_only_when_they_communicate() -> None:
    """Otherwise the constructor waits for the addresses of all ranks, and connects to each."""
    assert run_ranks(1, lazy_group) == [64]
