"""Activation offload: training is bitwise equal to training without it, and the activations really are in
host memory instead of device memory."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.models.llama import Llama
from meshwright.parallel.compile.stats import count_compiled_graphs
from meshwright.train.evaluation import evaluate
from meshwright.train.model.llama import loss_of_llama
from meshwright.train.step import train_step
from tests.distributed import matrix
from tests.support.launch import EAGER
from tests.support.sharded import build_sharded, random_batches
from tests.support.worlds import run_ranks

STEPS = 3

BLOCKS, KEPT_ON_DEVICE = 5, 1  # the last block's activations, which the backward needs first
SHAPE = [
    "--model.dim=64",
    f"--model.n_layers={BLOCKS}",
    "--model.n_heads=4",
    "--model.n_kv_heads=2",
    "--model.ffn_dim=192",
    "--model.vocab_size=512",
    "--train.seq_len=256",
    "--train.micro_batch_size=2",
    "--train.global_batch_size=8",
    "--optim.warmup_steps=2",
]
AOT, INDUCTOR, TP = (
    ["--parallel.compile.backend=aot_eager"],
    ["--parallel.compile.backend=inductor"],
    ["--parallel.tp=2"],
)
OFFLOAD, THREE = ["--parallel.activation_checkpoint=offload"], ["--parallel.activation_checkpoint_blocks=3"]
HIDDEN = 2 * 256 * 64 * 4  # bytes of the smallest offloaded tensor: a block's input


def train_case(arguments: Sequence[str]) -> dict[str, Any]:
    """Return losses, gradient norms and compiled graphs of every step, bytes sent to and buffered in host
    memory after every step, and the bytes allocated by another forward and backward."""
    torch._dynamo.reset()
    run = build_sharded(arguments)
    batches = random_batches(run)
    seen: dict[str, list[Any]] = {"losses": [], "norms": [], "graphs": [], "sent": [], "held": []}
    for _ in range(STEPS):
        result = train_step(run.model, run.plan.units, run.optimizer, batches, 1.0, run.group, loss_of_llama)
        offload = getattr(run.model, "activation_offload", None)
        seen["losses"].append(result.loss.item())
        seen["norms"].append(result.grad_norm.item())
        seen["graphs"].append(count_compiled_graphs())
        seen["sent"].append(offload.sent_bytes if offload else 0)
        seen["held"].append(offload.host_bytes if offload else 0)
    evaluate(run.model, batches[:1], run.group, loss_of_llama)
    assert offload is None or offload.sent_bytes == seen["sent"][-1], "an evaluation offloads nothing"
    assert count_compiled_graphs() == seen["graphs"][-1], "an evaluation compiles no graph"
    return {**seen, **measure(run.model, batches[0].tokens)}


def measure(model: Llama, ids: torch.Tensor) -> dict[str, int]:
    """Return the bytes allocated and not freed after a forward, and after its backward, without gradients."""
    gc.collect()
    totals = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
        loss = model(ids, ids)
    totals.append(allocated(forward))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
        loss.backward()
        model.zero_grad(set_to_none=True)
        del loss
        gc.collect()
    return {"after_forward": totals[0], "after_backward": totals[0] + allocated(backward)}


def allocated(profiled: profile) -> int:
    return sum(
        event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"
    )


def train_cases(cases: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Train the same model on the same tokens with each case's arguments."""
    return [train_case(case) for case in cases]


def train(*cases: Sequence[str]) -> list[dict[str, Any]]:
    """Return rank 0's results of each case, on two ranks."""
    return run_ranks(2, train_cases, [[*SHAPE, *case] for case in cases])[0]


def check(plain: dict[str, Any], offloaded: dict[str, Any], micro_batches: int) -> None:
    """Check for equal numbers, and that every step sends all activations and frees all host buffers."""
    assert (offloaded["losses"], offloaded["norms"]) == (plain["losses"], plain["norms"])
    sent = offloaded["sent"][0]
    assert sent > micro_batches * (BLOCKS - KEPT_ON_DEVICE - 2) * HIDDEN
    assert offloaded["sent"] == [sent, 2 * sent, 3 * sent], "every step must send the same bytes"
    assert offloaded["held"] == [sent // micro_batches] * 3, (
        "all host buffers must be free after a step, and reused by the next"
    )


def check_device(plain: dict[str, Any], offloaded: dict[str, Any]) -> None:
    """Check that device memory shrinks by the bytes in host memory, and that a step leaves no more allocated.
    The tolerances are of outputs of blocks and their keys, which an autograd thread may free just before or
    after a profile ends; a block that stayed on the device would be 16 such outputs."""
    assert plain["after_forward"] - offloaded["after_forward"] == pytest.approx(
        offloaded["held"][0], abs=2 * HIDDEN
    )
    assert offloaded["after_backward"] <= plain["after_backward"] + 2 * BLOCKS * HIDDEN


def test_the_same_training_with_less_on_the_device() -> None:
    eager, eager_offloaded, some_offloaded, compiled, compiled_offloaded = train(
        EAGER, [*EAGER, *OFFLOAD], [*EAGER, *OFFLOAD, *THREE], AOT, [*AOT, *OFFLOAD]
    )
    for plain, offloaded in (
        (eager, eager_offloaded),
        (eager, some_offloaded),
        (compiled, compiled_offloaded),
    ):
        check(plain, offloaded, micro_batches=2)
        check_device(plain, offloaded)
    assert some_offloaded["sent"][0] * 4 == eager_offloaded["sent"][0] * 2, (
        "the last of three offloaded blocks must stay on the device"
    )
    graphs = [result["graphs"] for result in (compiled, compiled_offloaded)]
    assert all(len(set(counts)) == 1 for counts in graphs), f"recompiled: {graphs}"


# Each test run takes one of these (matrix.py).
SLOW = matrix.sample(
    {
        "inductor": (INDUCTOR, OFFLOAD),
        "tp": ([*EAGER, *TP], OFFLOAD),
        "tp-aot": ([*AOT, *TP], OFFLOAD),
        "some": (AOT, [*OFFLOAD, *THREE]),
    },
    parts=4,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_same_by_inductor_with_split_weights_and_for_some_compiled_blocks(name: str) -> None:
    keys, offload = SLOW[name]
    plain, offloaded = train(keys, [*keys, *offload])
    check(plain, offloaded, micro_batches=4 if name.startswith("tp") else 2)
    assert len(set(offloaded["graphs"])) == 1, f"recompiled: {offloaded['graphs']}"
