"""The guard's counting, its messages and its repeated step, in one process; faults of one rank are in
test_nonfinite_mesh.py."""

import itertools
import math
import os
import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from meshwright.parallel.fsdp import local_part
from meshwright.train.checkpoint.hook import Checkpoints
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.config import CheckpointConfig
from meshwright.train.data.sequences import BatchShape, StepData
from meshwright.train.errors import NonFiniteError
from meshwright.train.fault_tolerance.nonfinite import (
    BadValue,
    NonFiniteFinding,
    NonFiniteGuard,
    all_finite,
    describe,
    first_bad_value,
)
from meshwright.train.metrics.collector import StepClock
from meshwright.train.model.trained_model import loss_of_forward
from meshwright.train.step import StepResult, train_step
from tests.support.launch import EAGER, TINY
from tests.support.sharded import sharded_alone
from tests.support.steps import make_batches, step_done


class Order:
    """Position p is sequence 100 + p of the first source if p is even, of the second if it is odd."""

    strided = False

    def describe(self, positions: NDArray[np.int64]) -> str:
        return "; ".join(f"{100 + position} of {('books', 'code')[position % 2]}" for position in positions)


@pytest.fixture
def compiled() -> Iterator[Any]:
    yield from build("--parallel.compile.backend=aot_eager")


@pytest.fixture
def eager() -> Iterator[Any]:
    yield from build(*EAGER)


def build(*arguments: str) -> Iterator[Any]:
    torch._dynamo.reset()
    with sharded_alone([*TINY, *arguments]) as run:
        yield run.model, run.sharded, run.optimizer, run.group


def open_guard(sharded: Any, max_skipped: int, lines: list[str] | None = None) -> NonFiniteGuard:
    """A guard that prints into `lines`."""
    repeated = sharded, Order(), BatchShape(2, 2, 0, 1), loss_of_forward
    return NonFiniteGuard(max_skipped, *repeated, [].append if lines is None else lines.append)  # type: ignore[arg-type]


def result_of(skipped: bool, device: str = "cpu") -> StepResult:
    zero = torch.zeros((), device=device)
    return StepResult(zero, zero, torch.tensor(float(skipped), device=device), zero)


@pytest.mark.parametrize("draw", range(4))
def test_too_many_skipped_steps_of_a_hundred_end_a_run_and_what_was_good_is_kept(eager, draw):
    """However they lie: one in a row now and then never ends a run, and each of them is reported."""
    _, sharded, _, _ = eager
    rng = random.Random(f"{os.environ['MESHWRIGHT_TESTS_SEED']} {draw}")
    allowed, share = rng.randint(0, 4), rng.choice([0.01, 0.1])
    lines, kept, data = list[str](), list[int](), StepData(make_batches(1), 0, 0.0)
    guard = open_guard(sharded, allowed, lines)
    guard.save_good = lambda position: kept.append(position.step)
    flags = [rng.random() < share for _ in range(300)] + [True] * 5
    counts = [sum(flags[max(0, step - 100) : step]) for step in range(1, len(flags) + 1)]
    end = next(
        n for n, (flag, count) in enumerate(zip(flags, counts, strict=True), 1) if flag and count > allowed
    )
    for step in range(1, end):
        guard.after_step(step_done(step, result_of(flags[step - 1]), data))
        assert len(lines) == sum(flags[:step])
    with pytest.raises(NonFiniteError, match=f"gradient of step {end} .*max_skipped_steps={allowed} "):
        guard.after_step(step_done(end, result_of(True), data))
    assert kept == [step for step in range(1, end) if not flags[step - 1]][-1:]
    guard.finish()
    assert len(lines) == sum(flags[: end - 1])


@pytest.mark.gpu
@pytest.mark.values
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")  # torch 2.11
def test_on_a_gpu_a_step_is_heard_of_when_the_next_one_is_under_way(eager):
    _, sharded, _, _ = eager
    lines, data = list[str](), StepData([], 0, 0.0)
    guard = open_guard(sharded, 5, lines)
    result = result_of(True, "cuda")  # made from a number on the host, which waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        guard.after_step(step_done(1, result, data))
        assert lines == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    guard.after_step(step_done(2, result_of(True, "cuda"), data))
    assert len(lines) == 1
    guard.finish()
    assert ["step 1 " in lines[0], "step 2 " in lines[1]] == [True, True]


# by torch, while it compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_first_bad_module_is_found_in_compiled_blocks_too_and_the_model_is_left_as_it_was(compiled):
    model, sharded, optimizer, _ = compiled
    batches = make_batches(2)
    train_step(sharded, optimizer, batches, 1.0, loss_of_forward)
    calls = [module._compiled_call_impl for module in model.modules()]
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    assert first_bad_value(sharded, batches, loss_of_forward) is None
    with torch.no_grad():
        local_part(model.layers[1].feed_forward.w1.weight)[3, 4] = math.inf
    found = first_bad_value(sharded, batches, loss_of_forward)
    assert found is not None
    assert (found.what, found.micro_batch) == ("the output of layers.1.feed_forward.w1", 0)
    assert [module._compiled_call_impl for module in model.modules()] == calls
    assert all(p.grad is None for p in model.parameters())
    added = {name: set(vars(module)) - set(before[name]) for name, module in model.named_modules()}
    assert not any(added.values())
    assert not any(
        module._forward_pre_hooks or module._forward_hooks
        for module in model.layers[1].feed_forward.modules()
    )


def test_the_micro_batch_with_the_fault_is_told_and_its_sequences_alone_are_named(eager):
    model, sharded, optimizer, _ = eager
    calls = itertools.count()
    model.layers[0].ffn_norm.register_forward_hook(lambda _m, _i, x: x * math.nan if next(calls) % 2 else x)
    guard, batches = open_guard(sharded, 0), make_batches(2)
    result = train_step(sharded, optimizer, batches, 1.0, loss_of_forward)
    with pytest.raises(NonFiniteError) as error:
        guard.after_step(step_done(1, result, StepData(batches, 0, 0.0), first_sample=40))
    finding = (
        "the output of layers.0.ffn_norm is the first value that is not finite; its sequences: 142 of "
        "books; 143 of code"
    )
    assert f"rank 0: {finding}" in str(error.value)
    assert "40 to 43" in str(error.value)


def test_a_step_that_cannot_be_repeated_for_lack_of_memory_is_not_finite_all_the_same(eager, monkeypatch):
    """Without compilation the step takes more memory."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("meshwright.train.fault_tolerance.nonfinite.first_bad_value", full)
    guard = open_guard(eager[1], 0)
    with pytest.raises(NonFiniteError, match=r"rank 0: .*memory to repeat") as error:
        guard.after_step(step_done(1, result_of(True), StepData([], 0, 0.0)))
    assert "not reproduced" not in str(error.value)
    assert "142 of books" not in str(error.value)


def test_every_step_is_known_to_be_finite_before_a_save() -> None:
    """On a GPU a step's flag is read one step late."""
    guard, saver, run = Mock(), Mock(), Mock()
    guard.finish.side_effect = NonFiniteError("step 4")
    run.config.checkpoint, run.data.start = CheckpointConfig(), TrainPosition()
    clock = StepClock(torch.device("cpu"))
    checkpoints = Checkpoints(saver, run, Mock(), guard, Mock(), clock)
    with pytest.raises(NonFiniteError):
        checkpoints.save_if_due(TrainPosition(4), last=True)
    saver.save.assert_not_called()


def test_whether_tensors_are_finite_is_told_of_every_kind():
    finite = [torch.ones(3), torch.empty(0), torch.tensor([1, 2]), torch.ones(2, dtype=torch.bfloat16)]
    assert all_finite([*finite, torch.tensor(3e38)])
    assert all_finite([])
    for bad in (math.nan, math.inf, -math.inf):
        assert not all_finite([*finite, torch.tensor([1.0, bad])])
        assert not all_finite([*finite, torch.tensor([bad, 1.0], dtype=torch.bfloat16)])


def finding(rank: int, place: int | None = None, parameters: tuple[str, ...] = ()) -> NonFiniteFinding:
    first = None if place is None else BadValue(place, f"value {place}", 0)
    return NonFiniteFinding(rank, parameters, first, f"{rank} of text")


def test_only_the_ranks_that_came_to_it_first_are_named_and_of_a_thousand_a_few():
    message = describe(7, 5, [finding(0, 12), finding(1, 3), finding(2), finding(3, 3)], "0 to 7")
    named = [line.split(":")[0] for line in message.splitlines() if line.startswith("rank")]
    assert named == ["rank 1", "rank 3"]
    assert "rank 1: value 3 is the first value that is not finite; its sequences: 1 of text" in message
    message = describe(7, 5, [finding(rank, 1, ("w",) * 100) for rank in range(1000)], "0 to 7")
    assert len(message) < 3000
    assert "992 other ranks" in message
    assert "w and 92 more" in message
