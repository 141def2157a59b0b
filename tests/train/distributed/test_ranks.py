"""The launcher's variables, and ranks that were started with different settings: one error on all of them,
before anything is built."""

import os
import random
from pathlib import Path

import pytest
import torch.distributed as dist

import meshwright.train.phases
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.ranks import ALONE, NUMBERS, TASKS, RankInfo, read_rank_info
from meshwright.train.errors import ConfigError
from tests.support.launch import EAGER, TINY, run, write_text
from tests.support.worlds import run_ranks


def start(arguments: list[str], of_rank: dict[int, list[str]], local_world_sizes: list[int]) -> str:
    """The error message of a rank that was started with additional arguments of its own."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = parse_config([*arguments, *of_rank.get(rank, [])])
    ranks = RankInfo(rank, world_size, rank % local_world_sizes[rank], local_world_sizes[rank], True)
    try:
        meshwright.train.phases.run(config, ranks)
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


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
LAUNCHED |= {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "run"}


def test_variables_with_which_no_run_can_start_are_refused_by_name() -> None:
    draws = random.Random(os.environ["MESHWRIGHT_TESTS_SEED"])
    for name in (*NUMBERS, *TASKS, "MASTER_PORT"):
        wrong = draws.choice(["", " ", "-1", "1.5", "one", "\u0663", "tcp://10.0.0.1:29500"])
        for others in (LAUNCHED, {}) if name != "MASTER_PORT" else (LAUNCHED,):
            with pytest.raises(ConfigError, match=name):
                read_rank_info({**others, name: wrong})
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        for env in ({**LAUNCHED, name: ""}, {key: text for key, text in LAUNCHED.items() if key != name}):
            with pytest.raises(ConfigError, match=name):
                read_rank_info(env)
    with pytest.raises(ConfigError, match=r"RANK=2 .*WORLD_SIZE=2"):
        read_rank_info({**LAUNCHED, "RANK": "2"})


def test_several_tasks_without_a_launcher_are_refused_and_a_batch_script_is_one_process() -> None:
    for name, launcher in TASKS.items():
        with pytest.raises(
            ConfigError, match=rf"{launcher}.* 4 tasks .*torchrun --nproc-per-node=4 -m train.main"
        ):
            read_rank_info({name: "4"})
        assert read_rank_info({name: "1", "SLURM_NTASKS": "4"}) == ALONE
        assert read_rank_info({name: "4", **LAUNCHED}).world_size == 2


@pytest.mark.parametrize("module", ["train.main", "tools.eval"])
def test_a_command_ends_with_2_and_one_sentence(module: str, tmp_path: Path) -> None:
    done = run(1, "nowhere", module=module, RANK="")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("ConfigError: RANK='' must be a number")
