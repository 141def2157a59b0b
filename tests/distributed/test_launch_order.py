"""In a profile of real ranks each all-gather starts where the simulated step starts it, before the matrix
products that hide it."""

import re
from collections.abc import Sequence

import pytest
from torch.profiler import ProfilerActivity, profile

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.step_time import Task
from meshwright.train.config_parser import parse_config
from meshwright.train.model.trained_model import loss_of_forward
from meshwright.train.planning.resolve import plan_run
from meshwright.train.step import train_step
from tests.support.launch import EAGER
from tests.support.sharded import build_sharded, random_batches
from tests.support.simulated import TINY, launch_tasks
from tests.support.streams import times_of
from tests.support.worlds import run_ranks

CASES = {
    "fsdp": (2, []),
    "no-prefetch": (2, ["--parallel.forward_prefetch=0", "--parallel.backward_prefetch=0"]),
    "fsdp-tp-two-ahead": (
        4,
        ["--parallel.tp=2", "--parallel.forward_prefetch=2", "--parallel.backward_prefetch=2"],
    ),
}
SLOW = {name: [pytest.mark.slow, pytest.mark.sampled(10)] for name in CASES if name != "fsdp"}
EMBEDDING = "tok_embeddings"
LABEL = re.compile(r"FSDP::(all_gather|all_gather_copy_out|post_backward_reduce) \(([\w.]+)")
EVENTS = {
    "all_gather": "all_gather",
    "all_gather_copy_out": "copy_out",
    "post_backward_reduce": "reduce_scatter",
}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
Event = tuple[str, str]


@pytest.mark.parametrize("case", [pytest.param(case, marks=SLOW.get(case, ())) for case in CASES])
def test_real_processes_launch_in_the_order_of_the_simulated_step(case: str) -> None:
    processes, keys = CASES[case]
    arguments = [*TINY, *EAGER, *keys]
    seen, *_ = run_ranks(processes, profiled_step, arguments)
    assert seen == planned(plan_run(parse_config(arguments).job, processes))
    first_product = seen.index(("product", ""))
    started = [unit for event, unit in seen[:first_product] if event == "all_gather"]
    ahead = {"fsdp": 1, "no-prefetch": 0, "fsdp-tp-two-ahead": 2}[case]
    assert started == [EMBEDDING, "layers.0", "layers.1", "layers.2"][: 2 + ahead]


def profiled_step(arguments: Sequence[str]) -> list[Event]:
    """Return the launches of FSDP2's hooks and the matrix products of the second step, in the order of this
    rank's trace."""
    run = build_sharded(arguments)
    batches = random_batches(run)[:1]
    train_step(
        run.sharded, run.optimizer, batches, 1.0, loss_of_forward
    )  # FSDP2 initializes in the first step
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        train_step(run.sharded, run.optimizer, batches, 1.0, loss_of_forward)
    return events_of(trace)


def events_of(trace: profile) -> list[Event]:
    """Return (event, unit) by start time; consecutive products are one event."""
    events: list[Event] = []
    for event in sorted(trace.events() or (), key=lambda event: event.time_range.start):
        if match := LABEL.match(event.name):
            events.append((EVENTS[match[1]], match[2]))
        elif event.name in PRODUCTS and events[-1:] != [("product", "")]:
            events.append(("product", ""))
    return events


def planned(plan: Plan) -> list[Event]:
    """Return the simulated step as events. The embedding has no products."""
    times = times_of(plan, forward=1, backward=1, gather_s=1, copy_out_s=1, copy_in_s=1, scatter_s=1)
    events: list[Event] = []
    for task in launch_tasks(plan, times):
        event = _event(task)
        if event and events[-1:] != [event]:
            events.append(event)
    return events


def _event(task: Task) -> Event | None:
    if task.work in ("all_gather", "copy_out", "reduce_scatter"):
        return task.work, task.unit
    return ("product", "") if task.work in ("forward", "backward") and task.module != EMBEDDING else None
