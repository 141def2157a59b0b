"""In a profile of real processes each all-gather starts where the simulated step says, before the products that hide it."""

import json

import pytest

from parallel.plan import Plan
from parallel.planner.flow import Task
from parallel.planner.step_times import ModuleTimes, StepTimes, UnitTimes
from parallel.planner.streams import launch_tasks, start_ahead
from tests.support.launch import EAGER, run
from tests.support.simulated import TINY
from train.config import parse_config
from train.planning import plan_run

CASES = {
    "fsdp": (2, []),
    "no-prefetch": (2, ["--parallel.forward_prefetch=0", "--parallel.backward_prefetch=0"]),
    "fsdp-tp-two-ahead": (4, ["--parallel.tp=2", "--parallel.forward_prefetch=2", "--parallel.backward_prefetch=2"]),
}
SLOW = ("no-prefetch", "fsdp-tp-two-ahead")
EMBEDDING = "tok_embeddings"


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES])
def test_real_processes_launch_in_the_order_of_the_simulated_step(case, tmp_path):
    processes, keys = CASES[case]
    arguments, out = [*TINY, *EAGER, *keys], tmp_path / "order.json"
    result = run(processes, str(out), *arguments, module="tests.distributed.launch_order_worker")
    assert result.returncode == 0, result.stderr
    seen = [tuple(word) for word in json.loads(out.read_text())]
    assert seen == planned(plan_run(parse_config(arguments), processes))
    first_product = seen.index(("product", ""))
    started = [unit for word, unit in seen[:first_product] if word == "all_gather"]
    ahead = {"fsdp": 1, "no-prefetch": 0, "fsdp-tp-two-ahead": 2}[case]
    assert started == [EMBEDDING, "layers.0", "layers.1", "layers.2"][: 2 + ahead]


def planned(plan: Plan) -> list[tuple[str, str]]:
    """The simulated step in the same words. The embedding has no products."""
    unit, module = UnitTimes(1.0, 1.0, 1.0, 1.0, 1.0, 0.0), ModuleTimes(1.0, 0.0, 1.0, 0.0)
    times = StepTimes(dict.fromkeys((u.name for u in plan.units), unit), dict.fromkeys(plan.modules, module), 0, True, 0)
    words: list[tuple[str, str]] = []
    for task in launch_tasks(plan, times, start_ahead(plan), [True]):
        word = _word(task)
        if word and words[-1:] != [word]:
            words.append(word)
    return words


def _word(task: Task) -> tuple[str, str] | None:
    if task.work in ("all_gather", "copy_out", "reduce_scatter"):
        return task.work, task.unit
    return ("product", "") if task.work in ("forward", "backward") and task.module != EMBEDDING else None
