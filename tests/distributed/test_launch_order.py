"""In a profile of real processes each all-gather starts where the simulated step says, before the products that hide it."""

import re
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from parallel.mesh import build_mesh, data_parallel_group
from parallel.plan import Plan
from parallel.planner.flow import Task
from parallel.planner.step_times import ModuleTimes, StepTimes, UnitTimes
from parallel.planner.streams import launch_tasks, start_ahead
from tests.support.launch import EAGER
from tests.support.simulated import TINY
from tests.support.worlds import run_ranks
from train.build import build_model
from train.config import parse_config
from train.optim import build_optimizer
from train.planning import plan_run
from train.step import Batch, train_step

CASES = {
    "fsdp": (2, []),
    "no-prefetch": (2, ["--parallel.forward_prefetch=0", "--parallel.backward_prefetch=0"]),
    "fsdp-tp-two-ahead": (4, ["--parallel.tp=2", "--parallel.forward_prefetch=2", "--parallel.backward_prefetch=2"]),
}
SLOW = ("no-prefetch",)
EMBEDDING = "tok_embeddings"
LABEL = re.compile(r"FSDP::(all_gather|all_gather_copy_out|post_backward_reduce) \(([\w.]+)")
WORDS = {"all_gather": "all_gather", "all_gather_copy_out": "copy_out", "post_backward_reduce": "reduce_scatter"}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
Word = tuple[str, str]


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES])
def test_real_processes_launch_in_the_order_of_the_simulated_step(case: str) -> None:
    processes, keys = CASES[case]
    arguments = [*TINY, *EAGER, *keys]
    seen, *_ = run_ranks(processes, profiled_step, arguments)
    assert seen == planned(plan_run(parse_config(arguments), processes))
    first_product = seen.index(("product", ""))
    started = [unit for word, unit in seen[:first_product] if word == "all_gather"]
    ahead = {"fsdp": 1, "no-prefetch": 0, "fsdp-tp-two-ahead": 2}[case]
    assert started == [EMBEDDING, "layers.0", "layers.1", "layers.2"][: 2 + ahead]


def profiled_step(arguments: Sequence[str]) -> list[Word]:
    """What the hooks of FSDP2 launch in the second step, and when products run, in the order of this rank's trace."""
    config, device = parse_config(arguments), torch.device("cpu")
    plan = plan_run(config, dist.get_world_size())
    mesh = build_mesh(plan.mesh, "cpu")
    model = build_model(config, plan, mesh, device)
    optimizer = build_optimizer(model, config.optim)
    tokens = torch.randint(config.model.vocab_size, (plan.micro_batch_size, config.train.seq_len))

    def step() -> None:
        train_step(model, optimizer, [Batch(tokens, tokens)], config.train.grad_clip, data_parallel_group(mesh))

    step()  # FSDP2 sets itself up in the first
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step()
    return words_of(trace)


def words_of(trace: profile) -> list[Word]:
    """What happens and to which unit, by when it starts; "product" alone for any number of them in a row."""
    words: list[Word] = []
    for event in sorted(trace.events() or (), key=lambda event: event.time_range.start):
        if match := LABEL.match(event.name):
            words.append((WORDS[match[1]], match[2]))
        elif event.name in PRODUCTS and words[-1:] != [("product", "")]:
            words.append(("product", ""))
    return words


def planned(plan: Plan) -> list[Word]:
    """The simulated step in the same words. The embedding has no products."""
    unit, module = UnitTimes(1.0, 1.0, 1.0, 1.0, 1.0, 0.0), ModuleTimes(1.0, 0.0, 1.0, 0.0)
    times = StepTimes(dict.fromkeys((u.name for u in plan.units), unit), dict.fromkeys(plan.modules, module), 0, True, 0)
    words: list[Word] = []
    for task in launch_tasks(plan, times, start_ahead(plan), [True]):
        word = _word(task)
        if word and words[-1:] != [word]:
            words.append(word)
    return words


def _word(task: Task) -> Word | None:
    if task.work in ("all_gather", "copy_out", "reduce_scatter"):
        return task.work, task.unit
    return ("product", "") if task.work in ("forward", "backward") and task.module != EMBEDDING else None
