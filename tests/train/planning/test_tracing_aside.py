"""Other processes trace for a search: it finds what they traced, and does without those that fail."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.parallel.planner.hardware import Machines, load_hardware, machines_of_kind
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.agreement import broadcast_from_rank0
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.planning import trace_model, tracing_aside
from meshwright.train.planning.predict import cases_of_search, search_plans
from meshwright.train.planning.trace_model import trace_and_keep
from meshwright.train.planning.tracing_aside import trace_share, traced_aside
from tests.support.launch import EAGER
from tests.support.worlds import run_ranks

TINY = [
    *("--model.dim=32", "--model.n_layers=1", "--train.seq_len=64", "--train.micro_batch_size=1"),
    *("--parallel.activation_checkpoint=none", *EAGER),
]


def search_of(folder: Path) -> tuple[TrainingJob, Machines, int]:
    """A search that has traced nothing, and the number of its cases."""
    trace_and_keep.cache_clear()
    job = parse_config([*TINY, f"--parallel.compile.cache_dir={folder}"]).job
    machines = machines_of_kind(load_hardware()["h100-sxm"], 4, 4)
    return job, machines, len([*cases_of_search(job, machines)])


def test_shares_together_trace_what_a_search_asks_for(tmp_path: Path, monkeypatch: Any) -> None:
    job, machines, count = search_of(tmp_path)
    parts = [sum(1 for _ in trace_share(job, machines, share, 3)) for share in range(3)]
    assert sum(parts) == count == len(list(tmp_path.iterdir())), parts
    assert min(parts) > 0
    search_of(tmp_path)
    monkeypatch.setattr(trace_model, "trace_case", pytest.fail)
    assert search_plans(job, machines).ranked


@pytest.mark.parametrize("fails", [False, True])
def test_forked_processes_trace_for_a_search(fails: bool, tmp_path: Path, monkeypatch: Any) -> None:
    job, machines, count = search_of(tmp_path)
    monkeypatch.setattr(tracing_aside, "usable_cores", lambda: 3)
    if fails:
        monkeypatch.setattr(tracing_aside, "trace_and_keep", None)
    with traced_aside(job, machines):
        while not fails and len(list(tmp_path.glob("work-*"))) < count:
            time.sleep(0.02)
    assert not fails or not list(tmp_path.iterdir())
    with traced_aside(job, machines):  # all is known: no process
        assert fails or not tracing_aside.multiprocessing.active_children()


def until_made(folder: Path) -> int:
    """Rank 1 takes steps until rank 0 has made its result, which it does after the third."""
    import torch.distributed as dist

    rank, steps = dist.get_rank(), 0

    def make() -> str:
        while not (folder / "2").exists():
            time.sleep(0.01)
        return "made"

    def count() -> Iterator[None]:
        nonlocal steps
        while True:
            (folder / str(steps)).touch()
            steps += 1
            time.sleep(0.01)
            yield

    assert broadcast_from_rank0(RankInfo(rank, 2, rank, 2, False), make, count() if rank else ()) == "made"
    return steps


def test_ranks_do_something_else_until_rank_0_has_made_its_result(tmp_path: Path) -> None:
    idle, steps = run_ranks(2, until_made, tmp_path)
    assert idle == 0
    assert steps >= 3
