"""Activations in host memory: training with them is training without, bit by bit, and they are really there
and not here."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.models.llama import Llama
from meshwright.parallel.compile.stats import count_compiled_graphs
from meshwright.train.evaluation import evaluate
from meshwright.train.step import train_step
from tests.distributed import matrix
from tests.support.launch import EAGER
from tests.support.sharded import build_sharded, random_batches
from tests.support.worlds import run_ranks

STEPS = 3

BLOCKS, KEPT_ON_DEVICE = 5, 1  # the last block's, which the backward needs first
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
HIDDEN = 2 * 256 * 64 * 4  # bytes of the smallest tensor that is sent: what a block takes in


def train_case(arguments: Sequence[str]) -> dict[str, Any]:
    """Losses, gradient norms and compiled graphs of every step; bytes sent to host memory, and held there,
    after every step; and what one more forward, and backward, leave allocated."""
    torch._dynamo.reset()
    run = build_sharded(arguments)
    batches = random_batches(run)
    seen: dict[str, list[Any]] = {"losses": [], "norms": [], "graphs": [], "sent": [], "held": []}
    for _ in range(STEPS):
        result = train_step(run.model, run.optimizer, batches, 1.0, run.group)
        offload = getattr(run.model, "activation_offload", None)
        seen["losses"].append(result.loss.item())
        seen["norms"].append(result.grad_norm.item())
        seen["graphs"].append(count_compiled_graphs())
        seen["sent"].append(offload.sent_bytes if offload else 0)
        seen["held"].append(offload.host_bytes if offload else 0)
    evaluate(run.model, batches[:1], run.group)
    assert offload is None or offload.sent_bytes == seen["sent"][-1], "an evaluation sends nothing"
    assert count_compiled_graphs() == seen["graphs"][-1], "and needs no graph of its own"
    return {**seen, **measure(run.model, batches[0].tokens)}


def measure(model: Llama, ids: torch.Tensor) -> dict[str, int]:
    """Bytes allocated and not freed after a forward, and after its backward without the gradients that it
    leaves."""
    gc.collect()
    events = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
        loss = model(ids, ids)
    events.append(allocated(forward))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
        loss.backward()
        model.zero_grad(set_to_none=True)
        del loss
        gc.collect()
    return {"after_forward": events[0], "after_backward": events[0] + allocated(backward)}


def allocated(profiled: profile) -> int:
    return sum(
        event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"
    )


def train_cases(cases: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Of the same model on the same tokens, in several ways."""
    return [train_case(case) for case in cases]


def train(*cases: Sequence[str]) -> list[dict[str, Any]]:
    """What rank 0 of two saw of each case."""
    return run_ranks(2, train_cases, [[*SHAPE, *case] for case in cases])[0]


def check(here: dict[str, Any], there: dict[str, Any], micro_batches: int) -> None:
    """The same numbers with what was saved here and there, and all of it sent in every step and fetched."""
    assert (there["losses"], there["norms"]) == (here["losses"], here["norms"])
    sent = there["sent"][0]
    assert sent > micro_batches * (BLOCKS - KEPT_ON_DEVICE - 2) * HIDDEN
    assert there["sent"] == [sent, 2 * sent, 3 * sent], "every step sends as much"
    assert there["held"] == [sent // micro_batches] * 3, (
        "all of it is free again after a step, and taken again by the next"
    )


def check_device(here: dict[str, Any], there: dict[str, Any]) -> None:
    """As much less on the device as is in host memory, and no more left there after a step. To one block's
    output: now and then a thread of autograd's frees one a moment before or after a profile ends."""
    assert here["after_forward"] - there["after_forward"] == pytest.approx(
        there["held"][0], abs=1.25 * HIDDEN
    )
    assert there["after_backward"] == pytest.approx(here["after_backward"], abs=HIDDEN * BLOCKS)


def test_the_same_training_with_less_on_the_device() -> None:
    eager, eager_there, some_there, compiled, compiled_there = train(
        EAGER, [*EAGER, *OFFLOAD], [*EAGER, *OFFLOAD, *THREE], AOT, [*AOT, *OFFLOAD]
    )
    for here, there in ((eager, eager_there), (eager, some_there), (compiled, compiled_there)):
        check(here, there, micro_batches=2)
        check_device(here, there)
    assert some_there["sent"][0] * 4 == eager_there["sent"][0] * 2, "of three blocks the last one stays, too"
    graphs = [result["graphs"] for result in (compiled, compiled_there)]
    assert all(len(set(counts)) == 1 for counts in graphs), f"recompiled: {graphs}"


# Each run takes one of these (matrix.py).
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
    here, there = train(keys, [*keys, *offload])
    check(here, there, micro_batches=4 if name.startswith("tp") else 2)
    assert len(set(there["graphs"])) == 1, f"recompiled: {there['graphs']}"
