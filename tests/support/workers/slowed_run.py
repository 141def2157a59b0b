"""A run of train.main with a slow unit and a late all-gather, for test_trace_run.py. Arguments: those of
train.main.

The forward of SLOW takes SLEEP_S longer: rank 0 sleeps, rank 1 computes. All-gathers are asynchronous, as on
a GPU (over gloo FSDP2 waits in each launch), and each unit starts the next unit's all-gather in its forward,
except the unit before LATE. Rank 0 starts the one of the unit after SLOW when rank 1 has computed: on rank 1
that all-gather overlaps computation, however busy the machine is.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

import meshwright.train.phases
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.exit import exit_process
from meshwright.train.distributed.ranks import read_rank_info
from meshwright.train.training import Training, build_training

SLOW, LATE, BEFORE_LATE = "layers.2", "layers.4", "layers.3"
SLEEP_S = 0.4


def wait_for_rank_1(calls: Iterator[int], folder: Path) -> None:
    """Wait until rank 1 has computed in this forward of SLOW."""
    file, deadline_s = folder / f"computed-{next(calls)}", time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)


def compute(calls: Iterator[int], folder: Path) -> None:
    """Compute for SLEEP_S, then let rank 0 continue."""
    end_s, matrix = time.monotonic() + SLEEP_S, torch.ones(64, 64)
    while time.monotonic() < end_s:
        matrix @ matrix
    (folder / f"computed-{next(calls)}").touch()


def build_slowed(*arguments: Any) -> Training:
    """Build the model of the plan, with the slow unit and the late all-gather."""
    training = build_training(*arguments)
    model = training.sharded.model
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._set_unshard_async_op(True)
    before = model.get_submodule(BEFORE_LATE)
    assert isinstance(before, FSDPModule)
    before.set_modules_to_forward_prefetch([])
    calls, attention = itertools.count(), model.get_submodule(f"{SLOW}.attention")
    if ranks.is_main:
        attention.register_forward_pre_hook(lambda module, inputs: time.sleep(SLEEP_S))
        # before FSDP2's hook, which launches the next unit's all-gather
        model.get_submodule(SLOW).register_forward_pre_hook(
            lambda module, inputs: wait_for_rank_1(calls, FOLDER), prepend=True
        )
    else:
        attention.register_forward_pre_hook(lambda module, inputs: compute(calls, FOLDER))
    return training


if __name__ == "__main__":
    ranks, config = read_rank_info(), parse_config(sys.argv[1:])
    FOLDER = Path(config.run.dir)
    meshwright.train.phases.build_training = build_slowed
    meshwright.train.phases.run(config, ranks)
    exit_process(ranks, 0)
