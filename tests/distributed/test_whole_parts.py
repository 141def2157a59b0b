"""Parts that tensor parallelism does not split: every tp rank has a copy, and the copies stay equal."""

import pytest
import torch
import torch.distributed as dist

from meshwright.tools.plan.check import check_run
from meshwright.train.config_parser import parse_config
from meshwright.train.model.llama import loss_of_llama
from meshwright.train.planning.resolve import plan_run
from meshwright.train.step import train_step
from tests.support.launch import EAGER, TINY
from tests.support.sharded import build_sharded, random_batches
from tests.support.worlds import run_ranks


def train_with_other_roundings(arguments: list[str]) -> list[str]:
    """Train three steps in which the last rank's gradients of attention differ slightly, as if summed in
    another order. Return the parameters whose copies then differ between the tp ranks."""
    run = build_sharded([*TINY, *EAGER, *arguments])
    off = 1.001 if dist.get_rank() == dist.get_world_size() - 1 else 1.0
    for block in run.model.layers:
        for module in (block.attention.wq, block.attention_norm):
            module.register_forward_hook(
                lambda _module, _inputs, out: out.register_hook(lambda grad: grad * off) and None
            )
    for _ in range(3):
        train_step(
            run.model, run.plan.units, run.optimizer, random_batches(run), 1.0, run.group, loss_of_llama
        )
    replicated = {
        name: p.to_local() for name, p in run.model.named_parameters() if p.placements[-1].is_replicate()
    }
    copies: list[dict[str, torch.Tensor]] = [{}] * run.mesh["tp"].size()
    dist.all_gather_object(copies, replicated, group=run.mesh["tp"].get_group())
    return [
        name for name in replicated if not all(torch.equal(copy[name], replicated[name]) for copy in copies)
    ]


NORMS_ALONE = "--train.freeze=[layers.*.attention.w*, tok_embeddings.weight, head.output.weight]"
WHOLE_TOKENS = "--parallel.sequence_parallel=false"


@pytest.mark.parametrize(
    "keys",
    [
        ["--parallel.tp=2"],
        ["--parallel.tp=4"],
        ["--parallel.tp=2", WHOLE_TOKENS],
        ["--parallel.tp=2", WHOLE_TOKENS, NORMS_ALONE],
    ],
)
def test_copies_of_whole_parts_do_not_drift_apart(keys: list[str]) -> None:
    for different in run_ranks(
        4, train_with_other_roundings, ["--parallel.tp_modules=[feed_forward]", *keys]
    ):
        assert different == []


def test_what_that_sends_is_predicted() -> None:
    config = parse_config([*TINY, *EAGER, "--parallel.tp_modules=[feed_forward]", "--parallel.tp=2"])
    rows = {row.name: row for row in check_run(config.job, plan_run(config.job, 4)).collectives}
    assert rows["all_reduce tp, count"].agrees
    assert rows["all_reduce tp, bytes"].agrees
