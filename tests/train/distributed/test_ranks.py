"""Ranks that were started with different settings: one error on all of them, before anything is built."""

from pathlib import Path

import pytest
import torch.distributed as dist

import meshwright.train.main
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import ConfigError
from tests.support.launch import EAGER, TINY, write_text
from tests.support.worlds import run_ranks


def start(arguments: list[str], of_rank: dict[int, list[str]], local_world_sizes: list[int]) -> str:
    """The error message of a rank that was started with additional arguments of its own."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = parse_config([*arguments, *of_rank.get(rank, [])])
    ranks = RankInfo(rank, world_size, rank % local_world_sizes[rank], local_world_sizes[rank], True)
    try:
        meshwright.train.main.run(config, ranks)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("own", "difference"),
    [
        ("--optim.lr=0.5", "optim.lr is 0.001 on rank 0, 0.5 on rank 1 (1 of 2 ranks differ from rank 0)"),
        ("--parallel.plan=auto", "parallel.plan is 'manual' on rank 0, 'auto' on rank 1"),
        ("--data.cache_dir={}/node", ""),
    ],
)
def test_another_key_on_one_rank_is_named_on_all(own: str, difference: str, tmp_path: Path) -> None:
    """Except cache folders, which may differ between nodes."""
    keys = ["--optim.lr=0.001", "--train.steps=1", "--train.eval_every=0", "--checkpoint.every=0"]
    arguments = [*TINY, *EAGER, *write_text(tmp_path), f"--run.dir={tmp_path / 'run'}", *keys]
    results = run_ranks(2, start, arguments, {1: [own.format(tmp_path)]}, [2, 2])
    assert results[0] == results[1]
    assert bool(results[0]) == bool(difference)
    facts = (difference, "different settings", "rank 0", "the same command", "same files")
    assert [fact for fact in facts if difference and fact not in results[0]] == []


def test_nodes_of_unlike_sizes_that_make_unlike_plans_are_refused(tmp_path: Path) -> None:
    """hybrid_shard shards within a node, so the plans differ."""
    own = [f"--run.dir={tmp_path / 'run'}", "--parallel.strategy=hybrid_shard"]
    arguments = [*TINY, *EAGER, *write_text(tmp_path), *own]
    results = run_ranks(4, start, arguments, {}, [2, 2, 1, 1])
    assert set(results) == {results[0]}
    assert (
        "of the plan is '  dp_replicate: 2' on rank 0, '  dp_replicate: 4' on rank 2 (2 of 4 ranks differ"
        in results[0]
    )
