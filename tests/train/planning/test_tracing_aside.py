"""Other processes trace for a search: it finds what they traced, and does without what they did not."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.parallel.planner.hardware import load_hardware, machines_of_kind
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.agreement import broadcast_from_rank0
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.planning import trace_model, tracing_aside
from meshwright.train.planning.predict import search_plans
from tests.support.launch import EAGER
from tests.support.worlds import run_ranks

TINY = [
    *("--model.dim=32", "--model.n_layers=1", "--train.seq_len=64", "--train.micro_batch_size=1"),
    *("--parallel.activation_checkpoint=none", *EAGER),
]


@pytest.mark.parametrize("aside", ["shares", "forks", "dead"])
def test_a_search_traces_what_others_did_not(aside: str, tmp_path: Path, monkeypatch: Any) -> None:
    trace_model.trace_and_keep.cache_clear()
    machines = machines_of_kind(load_hardware()["h100-sxm"], 2, 2)
    search = parse_config([*TINY, f"--parallel.compile.cache_dir={tmp_path}"]).job, machines
    cases = {*tracing_aside.cases_of_search(*search)}
    if aside == "shares":
        parts = [len([*tracing_aside.trace_share(*search, share, 2)]) for share in range(2)]
        assert sum(parts) == len(cases) > max(parts)
    else:
        monkeypatch.setattr(tracing_aside, "usable_cores", lambda: 3)
        if aside == "dead":
            monkeypatch.setattr(tracing_aside, "trace_and_keep", None)
        with tracing_aside.traced_aside(*search):
            while aside == "forks" and len([*tmp_path.glob("work-*")]) < len(cases):
                time.sleep(0.02)
    trace_model.trace_and_keep.cache_clear()
    traced, trace = [], trace_model.trace_case
    monkeypatch.setattr(trace_model, "trace_case", lambda case: traced.append(case) or trace(case))
    assert search_plans(*search).ranked
    assert {*traced} == (cases if aside == "dead" else set())


def until_made(folder: Path) -> int:
    """Return how often rank 1 has done something until rank 0 has made its result, which waits for two."""
    rank, done = dist.get_rank(), 0

    def make() -> str:
        while not (folder / "2").exists():
            time.sleep(0.01)
        return "made"

    def meanwhile() -> Iterator[None]:
        nonlocal done
        while rank:
            done += 1
            (folder / str(done)).touch()
            yield

    assert broadcast_from_rank0(RankInfo(rank, 2, rank, 2, False), make, meanwhile()) == "made"
    return done


def test_a_rank_does_something_else_until_rank_0_has_made_its_result(tmp_path: Path) -> None:
    first, second = run_ranks(2, until_made, tmp_path)
    assert first == 0
    assert second >= 2
