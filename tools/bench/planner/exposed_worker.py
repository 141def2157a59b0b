"""A rank of `tools.bench exposed`: profiles steps over gloo, or over torch's "fake" process group, which
sends nothing.

Started by torchrun. Arguments: `gloo` or `fake`, a folder, steps, then config keys. Each rank leaves its
trace in the folder.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.parallel.mesh import build_mesh, data_parallel_group
from meshwright.parallel.profiler_annotations import name_units
from meshwright.tools.bench.train_run import PROG
from meshwright.train.build_model import build_model
from meshwright.train.config import Config, RunConfig
from meshwright.train.config_parser import parse_config
from meshwright.train.data.batch import Batch
from meshwright.train.distributed.exit import end_process
from meshwright.train.distributed.process_group import start_process
from meshwright.train.distributed.ranks import RankInfo, read_rank_info
from meshwright.train.optim.optimizer import build_optimizer
from meshwright.train.planning.resolve import plan_run
from meshwright.train.step import train_step

WARM_UP_STEPS = 3
CPU = torch.device("cpu")


def join_group(kind: str, config: RunConfig, ranks: RankInfo) -> None:
    """The real process group, or one in which every collective is over at once."""
    if kind == "gloo":
        start_process(config, ranks, CPU)
        return
    torch.set_num_threads(config.threads)
    dist.init_process_group("fake", store=FakeStore(), rank=ranks.rank, world_size=ranks.world_size)
    torch.manual_seed(config.seed)


def profile_steps(config: Config, ranks: RankInfo, steps: int, path: Path) -> None:
    """Warm up, then write a trace of so many steps on one batch of random tokens."""
    plan = plan_run(config.job, ranks.world_size, ranks.local_world_size)
    mesh = build_mesh(plan.mesh, "cpu")
    model = build_model(config.model, config.train, plan, mesh, CPU, config.run.seed)
    optimizer = build_optimizer(model, config.optim)
    tokens = torch.randint(config.model.vocab_size, (plan.micro_batch_size, config.train.seq_len))
    group = data_parallel_group(mesh)

    def step() -> None:
        train_step(
            model, optimizer, [Batch(tokens, tokens)] * plan.accumulation, config.train.grad_clip, group
        )

    for _ in range(WARM_UP_STEPS):
        step()
    name_units(model, plan)
    with profile() as trace:
        for number in range(1, steps + 1):
            with record_function(f"ProfilerStep#{number}"):
                step()
    trace.export_chrome_trace(str(path))


if __name__ == "__main__":
    kind, folder, steps, *keys = sys.argv[1:]
    ranks = read_rank_info()
    config = parse_config(keys, PROG)
    join_group(kind, config.run, ranks)
    profile_steps(config, ranks, int(steps), Path(folder) / f"rank-{ranks.rank}.json.gz")
    end_process(0)
