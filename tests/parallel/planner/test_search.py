"""The search for a plan: the plans that it tries, the keys that it keeps, its choice, and its reasons."""

import dataclasses
import itertools
import random
import re
from typing import Any

import pytest

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.make import RunShape
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.planner.bounds import Bounds, make_chosen
from meshwright.parallel.planner.cost_model import StepTimes, step_times
from meshwright.parallel.planner.explain import give_reasons
from meshwright.parallel.planner.hardware import Machines, load_hardware, reserved_bytes
from meshwright.parallel.planner.memory_model import host_memory, least_step_memory, predict_step_memory
from meshwright.parallel.planner.search import EQUAL, Candidate, SearchResult, search, with_none
from meshwright.parallel.planner.search_space import combinations
from meshwright.parallel.planner.step_time import simulate_step, step_load
from meshwright.parallel.planner.workload import (
    Linear,
    ModelWorkload,
    ModuleWorkload,
    MuonWorkload,
    Operation,
    Phase,
)

BLOCKS, PARAMETERS, TOKENS = 6, 400_000_000, 4096
# saved bytes of a block, per sequence
KEPT = {"none": 4 * GIB, "selective": 2 * GIB, "full": GIB // 8, "offload": 4 * GIB}
RECOMPUTED = {"none": 0.0, "selective": 0.1, "full": 1.0, "offload": 0.0}  # share of the forward


def module(plan: Plan, parameters: int, mode: str) -> ModuleWorkload:
    """A module with a matmul, and with tp a collective."""
    tp = plan.mesh.tp
    flops = Linear(0.0, 2.0 * parameters * TOKENS / tp)
    sent = Linear(0.0, TOKENS * 8192 * 2.0)
    product = Operation("matmul", "mm", flops, Linear(2.0 * parameters / tp, 0.0), "bfloat16")
    tp_sum = [Operation("collective", "all_reduce", Linear(), sent, "bfloat16", axis="tp")] * (tp > 1)
    backward = dataclasses.replace(product, flops=flops.times(2 + RECOMPUTED[mode]))
    keeps, output = Linear(0.0, KEPT[mode] / tp), Linear(0.0, TOKENS * 8192 * 2.0)
    forward_live, backward_live = (
        Linear(0.0, KEPT["none"] / tp),
        Linear(2.0 * parameters / tp, KEPT["none"] / tp),
    )
    return ModuleWorkload(
        parameters // tp,
        Phase((product, *tp_sum), (forward_live,)),
        Phase((backward, *tp_sum), (backward_live,)),
        keeps,
        output,
    )


def trace(plan: Plan) -> ModelWorkload:
    unit_of = {name: unit for unit in plan.units for name in unit.modules}
    modules = {name: module(plan, PARAMETERS, unit_of[name].activation_checkpoint) for name in plan.modules}
    return ModelWorkload(modules, {}, TOKENS, "head", 0)


NAMES = ["tok_embeddings", *(f"layers.{i}" for i in range(BLOCKS)), "head"]
MODEL = ModelUnits(
    dict.fromkeys(NAMES, PARAMETERS),
    [(name,) for name in NAMES],
    frozenset(NAMES[1:]),
    frozenset(NAMES[1:-1]),
    styles={"attention": {"layers.*": "colwise"}},
    tp_divides={"attention": {"model.n_heads": 8}},
    attention_ops=("aten.mm",),
)
BF16 = {"param_dtype": "bfloat16", "plan": "auto", "tp_modules": ("attention",)}


def machines(gib: float = 79.1, per_node: int = 8) -> Machines:
    return Machines(8, per_node, int(gib * GIB), load_hardware()["h100-sxm"], 200 * GIB)


FOUND: dict[str, SearchResult] = {}  # of this file's tests, which ask several times for the same


def find(
    gpus: int, cluster: Machines | None = None, batch: int = -1, micro: Any = "auto", **keys: Any
) -> SearchResult:
    cluster = cluster or machines()
    asked = repr((gpus, cluster, batch, micro, sorted(keys.items())))
    if asked not in FOUND:
        job = RunShape(gpus, min(gpus, cluster.per_node), TOKENS, micro, batch)
        config = ParallelConfig(**BF16 | keys)  # type: ignore[arg-type]
        FOUND[asked] = search(config, MODEL, job, cluster, trace)
    return FOUND[asked]


def tried_in(choice: SearchResult) -> list[Candidate]:
    return [*choice.ranked, *choice.does_not_fit, *choice.pruned]


def times_of(plan: Plan, cluster: Machines) -> StepTimes:
    return step_times(plan, trace(plan), cluster.kind, cluster.per_node)


def test_what_is_chosen_fits_and_nothing_that_was_timed_is_faster_than_a_tie() -> None:
    cluster = machines()
    choice = find(8)
    best = choice.best
    assert best.memory == predict_step_memory(best.plan, trace(best.plan))
    assert best.needed_bytes == reserved_bytes(best.memory, cluster.kind) <= cluster.available_bytes
    assert max(c.rate() for c in choice.ranked) * (1 - EQUAL) <= choice.best.rate()
    assert all(c.needed_bytes > cluster.available_bytes for c in choice.does_not_fit)
    rest = [c.rate() for c in choice.ranked[1:]]
    assert rest == sorted(rest, reverse=True)


@pytest.mark.sampled(3, day=1)
def test_nothing_that_was_left_untimed_would_have_been_faster() -> None:
    """The lower bound that prunes plans is correct: a random part of them, timed one by one, holds no better
    plan."""
    choice, seed = find(16, batch=64), random.randrange(2**32)
    print(f"seed {seed}")
    assert len(choice.pruned) > 50
    config, shape = ParallelConfig(**BF16), RunShape(16, 8, TOKENS, "auto", 64)  # type: ignore[arg-type]
    for pruned in random.Random(seed).sample(choice.pruned, 40):
        plan = make_chosen(config, MODEL, shape, pruned.choices)
        timed, memory = (
            simulate_step(plan, times_of(plan, machines())),
            predict_step_memory(plan, trace(plan)),
        )
        if not pruned.at_least:
            assert pruned.needed_bytes <= machines().needed_bytes(memory, pruned.host), pruned.choices
        assert pruned.lower_bound_s <= timed.step_s * (1 + 1e-9), pruned.choices
        assert choice.best.rate() >= pruned.plan.global_batch_size / timed.step_s * (1 - EQUAL)

    for large in random.Random(seed).sample(choice.does_not_fit, 10):
        plan = make_chosen(config, MODEL, shape, large.choices)
        memory = predict_step_memory(plan, trace(plan))
        assert machines().needed_bytes(memory, large.host) > machines().available_bytes, large.choices
    assert simulate_step(choice.best.plan, times_of(choice.best.plan, machines())) == choice.best.timeline


def test_a_shortened_model_has_the_bounds_of_the_whole() -> None:
    """With 30 blocks of one kind, of which a few stand for all; Muon updates half of each."""
    names = [NAMES[0], *(f"layers.{i}" for i in range(30)), NAMES[-1]]
    of_kinds = {"modules": dict.fromkeys(names, PARAMETERS), "units": [(name,) for name in names]}
    model = dataclasses.replace(
        MODEL, **of_kinds, compiled=frozenset(names[1:]), checkpointed=frozenset(names[1:-1])
    )
    kinds = dict[Any, ModuleWorkload]()
    muon = MuonWorkload(dict.fromkeys(names[1:-1], 0.5), (((512, 2048),) * 3,) * 30)

    def trace_kinds(plan: Plan) -> ModelWorkload:
        modes = [unit.activation_checkpoint for unit in plan.units]
        works = (kinds.setdefault((plan.mesh.tp, mode), module(plan, PARAMETERS, mode)) for mode in modes)
        modules = dict(zip(plan.modules, works, strict=True))
        return ModelWorkload(modules, {}, TOKENS, "head", 0, muon=muon)

    config, shape = ParallelConfig(**BF16), RunShape(8, 8, TOKENS, "auto", 64)  # type: ignore[arg-type]
    bounds = Bounds(config, model, shape, machines(), trace_kinds)
    seed, every = random.randrange(2**32), [*combinations(config, shape, 30)]
    print(f"seed {seed}")
    for choices in random.Random(seed).sample(every, 40):
        try:
            plan = make_chosen(config, model, shape, choices)
        except PlanError:
            continue
        work = trace_kinds(plan)
        assert len(bounds.plan(choices).modules) < 10 < len(plan.modules)
        times = step_times(plan, work, machines().kind, 8)
        load = bounds.load(choices)
        assert vars(load) == pytest.approx(vars(step_load(plan, times, {}))), choices
        assert bounds.memory(choices) == pytest.approx(least_step_memory(plan, work), rel=1e-6), choices
        assert bounds.host(choices) == host_memory(plan, work)


def test_more_memory_never_makes_the_choice_slower() -> None:
    sizes = (20, 40, 140)
    rates = [find(8, machines(gib), micro=1).best.rate() for gib in sizes]
    assert all(more >= less * (1 - EQUAL) for less, more in itertools.pairwise(rates)), rates
    assert rates[-1] > rates[0] * 1.1


def test_recomputing_is_chosen_only_where_memory_asks_for_it() -> None:
    plenty, little = (
        find(8, machines(gib), micro=1, tp=1).best.choices.activation_checkpoint for gib in (140, 24)
    )
    assert (plenty, little) == ("none", "full")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tp", 4),
        ("dp_replicate", 2),
        ("dp_shard", 2),
        ("activation_checkpoint", "full"),
        ("reshard_after_forward", False),
        ("reduce_gradients", "last_micro_batch"),
        ("reshard_after_backward", False),
    ],
)
def test_a_key_with_a_value_stays_as_it_is(key: str, value: Any) -> None:
    choice = find(8, machines(500), micro=1, **{key: value})
    assert {getattr(c.choices, key) for c in tried_in(choice)} == {value}
    plan = choice.best.plan
    assert getattr(plan.mesh, key, value) == value
    if key == "activation_checkpoint":  # the number of blocks is open; the fewest are the fastest
        assert [u.activation_checkpoint for u in plan.units[1:-1]] == [value] + ["none"] * (BLOCKS - 1)


def slow_network(gib: float = 79.1) -> Machines:
    """Nodes with 10 GB/s, as 8 processes per node on 80 Gb/s have."""
    fast = machines(gib)
    network = dataclasses.replace(fast.hardware.network, gb_s=10.0)
    return dataclasses.replace(fast, hardware=dataclasses.replace(fast.hardware, network=network))


def find_accumulating(cluster: Machines, **keys: Any) -> SearchResult:
    """Search on 16 GPUs, with 16 micro batches per step."""
    keys |= {"dp_replicate": 1, "tp": 1, "activation_checkpoint": "full"}
    return find(16, cluster, batch=256, micro=1, **keys)


def test_micro_batches_are_reduced_once_if_the_network_is_slow_and_memory_is_free() -> None:
    choice = find_accumulating(slow_network(500))
    assert {u.reduce_gradients for u in choice.best.plan.units} == {"last_micro_batch"}
    assert {u.reshard_after_backward for u in choice.best.plan.units} == {False}
    assert choice.best.memory is not None
    parameters = sum(work.parameters for work in trace(choice.best.plan).modules.values())
    assert choice.best.memory.memory.grads >= 4 * parameters, "whole gradients, in float32"
    line = reason(choice, slow_network(500), "reduce_gradients")
    other = dataclasses.replace(choice.best.choices, reduce_gradients="every_micro_batch")
    (compared,) = [c for c in choice.pruned if c.choices == other]
    slower = 1 - compared.rate() / choice.best.rate()
    assert slower > 0.05, "else the test shows nothing"
    assert line.endswith(f": every_micro_batch is at least {slower:.1%} slower")


def test_whole_gradients_are_not_chosen_where_they_do_not_fit() -> None:
    keys = {"reshard_after_forward": True, "reshard_after_backward": True}
    plenty = find_accumulating(slow_network(500), **keys)
    whole = [c for c in plenty.ranked if c.choices.reduce_gradients == "last_micro_batch"]
    too_little = min(c.needed_bytes for c in whole) / GIB - 0.1
    little = find_accumulating(slow_network(too_little), **keys)
    assert {u.reduce_gradients for u in little.best.plan.units} == {"every_micro_batch"}
    assert "last_micro_batch" in {c.choices.reduce_gradients for c in little.does_not_fit}
    line = reason(little, slow_network(too_little), "reduce_gradients")
    assert re.search(r"last_micro_batch does not fit \((at least )?[\d.]+ GiB of [\d.]+ GiB\)", line)


def reasons(choice: SearchResult, cluster: Machines) -> list[str]:
    return give_reasons(choice, cluster, times_of(choice.best.plan, cluster))


def reason(choice: SearchResult, cluster: Machines, key: str) -> str:
    (line,) = [line for line in reasons(choice, cluster) if line.startswith(f"{key}=")]
    return line


def test_with_one_micro_batch_there_is_nothing_to_choose() -> None:
    for choice in (find(8), find(16, batch=16, tp=1), find(8, dp_shard=1, tp=1, batch=64, micro=1)):
        ways = {(c.choices.reduce_gradients, c.choices.reshard_after_backward) for c in tried_in(choice)}
        assert ways == {("every_micro_batch", True)}


def test_a_strategy_stays_as_it_is_and_leaves_the_rest_open() -> None:
    tried = tried_in(find(16, machines(500), strategy="hybrid_shard"))
    assert {(c.plan.mesh.dp_replicate, c.plan.mesh.dp_shard * c.plan.mesh.tp) for c in tried} == {(2, 8)}
    assert {c.choices.activation_checkpoint for c in tried} == set(KEPT)


def test_prefetch_and_micro_batch_can_be_fixed_too() -> None:
    ranked = find(8, micro=2, forward_prefetch=3, backward_prefetch=0).ranked
    assert {c.plan.micro_batch_size for c in ranked} == {2}
    assert {(u.forward_prefetch, u.backward_prefetch) for c in ranked for u in c.plan.units} == {(3, 0)}


@pytest.mark.sampled(3, day=2)
def test_every_candidate_is_a_legal_plan_of_all_processes_and_the_whole_batch() -> None:
    tried = tried_in(find(16, batch=64))
    assert {c.plan.mesh.world_size for c in tried} == {16}
    assert {c.plan.global_batch_size for c in tried} == {64}
    assert len({c.choices for c in tried}) == len(tried)
    assert {c.plan.mesh.tp for c in tried} == {1, 2, 4, 8}
    assert {c.plan.mesh.tp for c in tried_in(find(8, machines(500, per_node=2), micro=1))} == {1, 2}, (
        "tp stays within a node"
    )


def test_a_tie_goes_to_the_simpler_plan() -> None:
    """On one GPU resharding and prefetching have no effect."""
    best = find(1, machines(500), micro=1).best
    assert dataclasses.asdict(best.choices) == {
        "tp": 1,
        "cp": 1,
        "cp_exchange": "auto",
        "dp_replicate": 1,
        "dp_shard": 1,
        "activation_checkpoint": "none",
        "activation_checkpoint_blocks": 0,
        "reshard_after_forward": True,
        "reduce_gradients": "every_micro_batch",
        "reshard_after_backward": True,
        "prefetch": 1,
        "micro_batch_size": 1,
    }


def test_none_fits() -> None:
    choice = find(1, machines(10))
    assert not choice.ranked
    least = choice.does_not_fit[0]
    assert least.needed_bytes == min(c.needed_bytes for c in choice.does_not_fit)
    assert least.choices.activation_checkpoint == "full"


@pytest.mark.parametrize(
    ("gpus", "keys", "message"),
    [
        (8, {"tp": 3}, r"parallel\.tp=3 must divide model\.n_heads=8"),
        (8, {"tp": 1, "batch": 12}, r"train\.global_batch_size=12 must be a multiple"),
        (8, {"tp": 0}, "of at least 1"),
        (16, {"strategy": "full_shard", "reshard_after_forward": False}, r"contradicts parallel\.strategy"),
        (16, {"strategy": "hybrid_shard", "dp_replicate": 4}, r"contradicts parallel\.strategy"),
        (8, {"selective_policy": "foo"}, "selective_policy: 'foo'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_simplest_plans_mistake(
    gpus: int, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        find(gpus, **keys)


def test_micro_batches_are_divisors_of_a_ranks_share() -> None:
    choice = find(1, machines(5000), batch=6)
    assert {c.plan.micro_batch_size for c in tried_in(choice)} == {1, 2, 3, 6}
    assert choice.best.plan.micro_batch_size > 1


def test_what_is_frozen_costs_neither_backward_nor_reduction() -> None:
    cluster, job = machines(500), RunShape(8, 8, TOKENS, 1, -1)

    def frozen(plan: Plan) -> ModelWorkload:
        return dataclasses.replace(trace(plan), trained=dict.fromkeys(NAMES[:-1], 0.0))

    steps = [
        search(ParallelConfig(**BF16, tp=1), MODEL, job, cluster, tracer).best.timeline
        for tracer in (trace, frozen)
    ]  # type: ignore[arg-type]
    assert steps[1].step_s < 0.55 * steps[0].step_s  # type: ignore[union-attr]


def test_a_batch_too_small_for_the_ranks_makes_them_share_sequences() -> None:
    assert find(8, machines(500), batch=4).best.plan.mesh.tp >= 2


@pytest.mark.parametrize("gib", [20, 30, 44])
@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
def test_the_fewest_blocks_that_fit_are_those_that_trying_every_number_finds(mode: str, gib: float) -> None:
    """With all other keys set, the search tries the fewest blocks that fit and all blocks, and its choice
    ties with the fastest number of blocks."""
    cluster = machines(gib)
    closed = {"tp": 1, "cp": 1, "cp_exchange": "auto", "dp_replicate": 1, "reshard_after_forward": True}
    closed |= {"forward_prefetch": 1, "backward_prefetch": 1, "activation_checkpoint": mode}
    by_count = {
        count: find(8, cluster, micro=1, **closed, activation_checkpoint_blocks=count)
        for count in range(1, BLOCKS + 1)
    }
    fits = [count for count, choice in by_count.items() if choice.ranked]
    found = find(8, cluster, micro=1, **closed)
    assert bool(found.ranked) == bool(fits)
    if fits:
        assert fits == list(range(fits[0], BLOCKS + 1)), "more blocks never need more memory"
        assert fits[0] in {c.choices.activation_checkpoint_blocks for c in found.ranked}
        assert {c.choices.activation_checkpoint_blocks for c in tried_in(found)} == {fits[0], BLOCKS}
        assert found.best.rate() >= max(by_count[count].best.rate() for count in fits) * (1 - EQUAL)


def test_part_of_the_blocks_is_chosen_where_it_is_faster_than_all_of_them() -> None:
    cluster = machines(28)
    choice = find(8, cluster, micro=1, tp=1, dp_replicate=1)
    count = choice.best.choices.activation_checkpoint_blocks
    assert 0 < count < BLOCKS
    treated = [unit.activation_checkpoint != "none" for unit in choice.best.plan.units[1:-1]]
    assert treated == [True] * count + [False] * (BLOCKS - count)
    whole = dataclasses.replace(choice.best.choices, activation_checkpoint_blocks=BLOCKS)
    (all_blocks,) = [c for c in tried_in(choice) if c.choices == whole]
    assert choice.best.rate() > all_blocks.rate() * (1 + EQUAL)
    line = reason(choice, cluster, "activation_checkpoint_blocks")
    slower = f"{1 - all_blocks.rate() / choice.best.rate():.1%} slower"
    assert re.search(rf"fewer .*not fit; {BLOCKS} .*{slower}", line)


def test_offload_needs_host_memory() -> None:
    """5 of 6 blocks are copied to host memory, 20 GiB: too much for 16 GiB, as is every number of blocks that
    frees enough device memory."""
    closed = {"micro": 1, "tp": 1, "activation_checkpoint": "offload"}

    def cluster(gib: float, host_gib: float) -> Machines:
        return dataclasses.replace(machines(gib), host_bytes=int(host_gib * GIB))

    all_blocks = find(8, cluster(40, 21.0), **closed, activation_checkpoint_blocks=BLOCKS).best
    assert all_blocks.host.activations == (BLOCKS - 1) * KEPT["offload"]
    with pytest.raises(PlanError, match=r"parallel\.activation_checkpoint=offload") as error:
        find(8, cluster(40, 16.0), **closed, activation_checkpoint_blocks=BLOCKS)
    message = str(error.value)
    assert re.search(r"20\.0 GiB of host memory per process.* 16\.0 GiB", message)
    assert re.search(r"fewer blocks \(parallel\.activation_checkpoint_blocks\), or use full$", message)
    some = find(8, cluster(500, 16.0), **closed, activation_checkpoint_blocks=5).best
    assert some.host.activations == 4 * KEPT["offload"]


def test_offloading_that_hides_is_chosen_and_that_does_not_is_not() -> None:
    for rate, offloaded in ((5000.0, True), (5.0, False)):
        cluster = dataclasses.replace(
            machines(26), hardware=dataclasses.replace(machines().hardware, host_gb_s=rate)
        )
        choice = find(8, cluster, micro=1, tp=1, dp_replicate=1)
        assert (choice.best.choices.activation_checkpoint == "offload") == offloaded
        text = "\n".join(reasons(choice, cluster))
        assert bool(re.search(r"^offload: .* GiB .*host memory", text, re.MULTILINE)) == offloaded


def test_reasons_give_figures_that_are_true() -> None:
    cluster = machines(60)
    choice = find(8, cluster, tp=1)
    lines = reasons(choice, cluster)
    tried = len(choice.ranked) + len(choice.does_not_fit) + len(choice.pruned)
    too_large, slower = len(choice.does_not_fit), len(choice.pruned)
    counts = rf"{tried} plans tried: {too_large} too large .*{slower} slower"
    assert re.match(counts, lines[0])
    assert f"{choice.best.needed_bytes / GIB:.1f} GiB of 60.0 GiB" in lines[0]
    assert not any(line.startswith("muon: ") for line in lines)
    times = dataclasses.replace(times_of(choice.best.plan, cluster), exchange_s=0.0021)
    (muon,) = [line for line in give_reasons(choice, cluster, times) if line.startswith("muon: ")]
    assert f"2.1 ms of {1e3 * choice.best.timeline.optimizer_s:.1f} ms" in muon
    checkpointing = next(line for line in lines if line.startswith("activation_checkpoint="))
    needs = re.findall(r"(none|selective|full) does not fit [^;]*?([\d.]+) GiB of 60\.0 GiB", checkpointing)
    assert needs, checkpointing
    for mode, gib in needs:
        alike = [c for c in choice.does_not_fit if with_none(c.choices) == with_none(choice.best.choices)]
        plans = [c for c in alike if c.choices.activation_checkpoint == mode]
        assert [f"{c.needed_bytes / GIB:.1f}" for c in plans] == [gib]
