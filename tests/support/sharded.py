"""A planned and sharded model with its optimizer, as train.main builds it, for tests that train step by
step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.train.config import Config
from meshwright.train.config_parser import parse_config
from meshwright.train.data.sequences import Batch
from meshwright.train.data.training_data import BatchShape, make_batch_shape
from meshwright.train.distributed.process_group import start_process
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.planning.resolve import plan_run
from meshwright.train.training import Training, build_training

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sharded:
    """This rank's part of a run. `shape`: of its batches."""

    config: Config
    training: Training
    shape: BatchShape

    @property
    def sharded(self) -> ShardedModel:
        return self.training.sharded

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.training.optimizer

    @property
    def plan(self) -> Plan:
        return self.sharded.plan

    @property
    def mesh(self) -> DeviceMesh:
        return self.sharded.mesh

    @property
    def model(self) -> Any:
        """The Llama."""
        return self.sharded.model

    @property
    def group(self) -> dist.ProcessGroup:
        return self.sharded.data_group


def build_sharded(overrides: Sequence[str] | Config) -> Sharded:
    """Build the run of these config overrides, or of a parsed config, on the ranks of the existing process
    group."""
    config = overrides if isinstance(overrides, Config) else parse_config(overrides)
    plan = plan_run(config.job, dist.get_world_size())
    mesh = build_mesh(plan.mesh, "cpu")
    return Sharded(config, build_training(config, plan, mesh), make_batch_shape(plan, mesh))


@contextmanager
def sharded_alone(arguments: Sequence[str]) -> Iterator[Sharded]:
    """`build_sharded` in this process, with a process group of one rank that is destroyed afterwards."""
    start_process(parse_config(arguments).run, RankInfo(0, 1, 0, 1, False), CPU)
    try:
        yield build_sharded(arguments)
    finally:
        dist.destroy_process_group()


def random_batches(run: Sharded) -> list[Batch]:
    """The micro batches of one step: random tokens, the same on all ranks of a cp or tp group."""
    generator = torch.Generator().manual_seed(run.shape.data_rank)
    size = (run.shape.micro_batch_size, run.config.train.seq_len + 1)
    rows = [
        torch.randint(run.config.model.vocab_size, size, generator=generator)
        for _ in range(run.shape.accumulation)
    ]
    return [
        run.shape.local_tokens(Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        for tokens in rows
    ]
