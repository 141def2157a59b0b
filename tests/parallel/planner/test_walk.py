"""The walk through a step gathers, copies out, frees and reduces each unit when FSDP2's own hooks do, in
simulated steps of random plans."""

import dataclasses
import os
import random
from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from meshwright.parallel.plan.schema import ROOT, MicroBatch, Plan, UnitPlan, regathered
from meshwright.parallel.planner.walk import StepSink, StepWalk
from meshwright.tools.simulate import simulate_run
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run
from tests.support.simulated import TINY

Events = list[tuple[str, str]]
SEED = os.environ["MESHWRIGHT_TESTS_SEED"]
SAMPLED = [pytest.mark.slow, pytest.mark.sampled(6)]
WATCHED = {  # what happened if a call has changed the state of a unit
    "unshard": "gather",
    "wait_for_unshard": "copy out",
    "_to_sharded": "free",
    "_to_sharded_post_forward": "free",
}


class RecordingSink(StepSink):
    """The gathers, copies out, frees and reductions of a walk."""

    def __init__(self, trained: set[str]) -> None:
        self.events: Events = []
        self._trained, self._gathered = trained, set[str]()

    def gather(self, unit: UnitPlan, phase: str, again: bool) -> None:
        self.events.append(("gather", unit.name))

    def copy_out(self, unit: UnitPlan, phase: str) -> None:
        self.events.append(("copy out", unit.name))
        self._gathered.add(unit.name)

    def reshard(self, unit: UnitPlan, phase: str) -> None:
        if unit.name in self._gathered:
            self.events.append(("free", unit.name))
            self._gathered.remove(unit.name)

    def reduce(self, unit: UnitPlan, micro_batch: MicroBatch) -> None:
        if not self._trained.isdisjoint(unit.modules):
            self.events.append(("reduce", unit.name))


@pytest.mark.parametrize(
    "seed",
    # 21: tied, frozen; 39: tied, resharded to 2; 54: frozen, whole sums. All have lists, two keep parameters
    [21, 39, 54, *(pytest.param(f"{SEED} {number}", marks=SAMPLED) for number in range(12))],
)
def test_a_walk_does_what_the_real_hooks_do(seed: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    job, plan = random_run(random.Random(seed))
    real = watch_hooks(monkeypatch)
    simulate_run(job, plan)
    frozen = {pattern.removesuffix(".*") for pattern in job.freeze}
    trained = [module for module in plan.modules if module not in frozen]
    with_backward = set(plan.modules[plan.modules.index(trained[0]) :])
    sink = RecordingSink(set(trained))
    StepWalk(plan, sink, lambda modules: not with_backward.isdisjoint(modules)).step()
    assert sink.events == real


def test_a_unit_around_others_is_gathered_first_and_reduced_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of the model itself, and of a module with blocks in it."""
    keys = ["train.seq_len=16", "train.global_batch_size=4", "parallel.compile.enabled=false"]
    factory = "--model.factory=tests.support.factories:rooted"
    job = parse_config([factory, *(f"--{key}" for key in keys)]).job
    plan = plan_run(job, 2)
    assert [unit.name for unit in plan.units][-3:] == ["inside", "logits", "(root)"]
    real = watch_hooks(monkeypatch)
    simulate_run(job, plan)
    sink = RecordingSink(set(plan.modules))
    StepWalk(plan, sink, lambda _: True).step()
    assert sink.events == real


def watch_hooks(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Return the list to which FSDP2's hooks add events from now on."""
    events: Events = []

    def watch(name: str, event: str) -> None:
        method = getattr(FSDPParamGroup, name)

        def watched(group: Any, *args: Any) -> Any:
            before = group._all_gather_result is not None, group.is_unsharded
            result = method(group, *args)
            after = group._all_gather_result is not None, group.is_unsharded
            if before != after or event == "reduce":
                events.append((event, group._module_fqn.replace(", ", "+") or ROOT))
            return result

        monkeypatch.setattr(FSDPParamGroup, name, watched)

    for name, event in WATCHED.items():
        watch(name, event)
    watch("_wait_for_post_backward", "reduce")  # called before each reduction only
    return events


def random_run(rng: random.Random) -> tuple[TrainingJob, Plan]:
    """Return a small run on 8 ranks with a random plan, prefetch lists and frozen modules, most of them the
    first ones."""
    tied, layers = rng.random() < 0.3, rng.randint(2, 3)
    modules = ["tok_embeddings", *(["head"] if tied else []), *(f"layers.{i}" for i in range(layers))]
    first, smaller = rng.choice([0, 0, 1, 2, 3]), rng.random() < 0.3
    frozen = modules[: first + tied if first else 0] + [m for m in modules[first + 2 :] if rng.random() < 0.1]
    keys = {
        "model.n_layers": layers,
        "model.tie_embeddings": tied,
        "train.freeze": [f"{module}.*" for module in frozen[:layers]],
        "train.global_batch_size": rng.choice([8, 16]),
        "parallel.dp_replicate": rng.choice([1, 1, 2]),
        "parallel.reshard_after_forward": 2 if smaller else rng.random() < 0.7,
        "parallel.reshard_after_backward": rng.choice([True, False]),
        "parallel.reduce_gradients": rng.choice(["every_micro_batch", "last_micro_batch"]),
        "parallel.forward_prefetch": rng.randint(0, 3),
        "parallel.backward_prefetch": rng.randint(0, 3),
        "parallel.activation_checkpoint": rng.choice(["none", "none", "full", "offload"]),
        "parallel.unit_min_params": rng.choice([0, 0, 25_000]),
        "parallel.cp" if smaller else "parallel.tp": rng.choice([1, 1, 2]),
    }
    arguments = [f"--{key}={value}".replace("'", "").replace(" ", "").lower() for key, value in keys.items()]
    job = parse_config([*TINY, *arguments]).job
    plan = plan_run(job, 8)
    units = tuple(with_lists(rng, plan, index) for index in range(len(plan.units)))
    return job, dataclasses.replace(plan, units=units)


def with_lists(rng: random.Random, plan: Plan, index: int) -> UnitPlan:
    """Return a unit of the plan, sometimes with random lists of later units to prefetch."""
    unit, order = plan.units[index], plan.forward_order
    if rng.random() < 0.7:
        return unit
    later, earlier = order[order.index(unit) + 1 :], plan.units[:index][::-1]
    return dataclasses.replace(
        unit,
        forward_prefetch=tuple(other.name for other in later if rng.random() < 0.5),
        backward_prefetch=tuple(u.name for u in earlier if regathered(u) and rng.random() < 0.5),
    )
